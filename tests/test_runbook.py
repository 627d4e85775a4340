"""Whatever README, docs/ and infra/ tell people or machines to run, set or read is there, as it is written."""

import argparse
import importlib
import io
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml

from jobs import cli
from pipeline.config import Config

CHECKOUT = Path(__file__).resolve().parents[1]
INFRA = CHECKOUT / "infra"
PAGES = {path.name: path.read_text() for path in (CHECKOUT / "README.md", *(CHECKOUT / "docs").glob("*.md"))}
BEHIND = re.compile(r"(?:^|[ `/])(?:slipstream|python -m jobs\.cli) ([a-z][a-z-]+(?: [^`#\n|;]*)?)")


def commands(text):
    """Slipstream's commands in a text: in blocks, in quotes, behind a path."""
    return [found.group(1).strip() for line in text.splitlines() for found in BEHIND.finditer(line)]


def told():
    for page, text in PAGES.items():
        blocks = "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL))
        # A quoted command may go on in the next line.
        quoted = "\n".join(f"`{' '.join(code.split())}`" for code in re.findall(r"`(slipstream [^`]+)`", text))
        yield from ((command, page) for command in commands(blocks + "\n" + quoted))
    for path in [
        *INFRA.rglob("*.service"),
        INFRA / "kubernetes" / "rayjob.yaml",
        INFRA / "kubernetes" / "raycronjob.yaml",
    ]:
        lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
        yield from ((command, path.name) for command in commands("\n".join(lines)) if command.split()[0] != "set")
    for path in (INFRA / "kubernetes").glob("*.yaml"):
        for words in re.findall(r"command: \[slipstream, (.*)\]", path.read_text()):
            yield words.replace(",", ""), path.name
    for line in (INFRA / "cron" / "slipstream").read_text().splitlines():
        if found := re.search(r'"\$SLIPSTREAM" (.*?) >>', line):
            yield found.group(1), "cron"


@pytest.mark.parametrize(("command", "where"), sorted(set(told())))
def test_every_command_that_people_or_timers_are_told_to_run_exists_with_these_arguments(command, where):
    name, *arguments = shlex.split(command)
    assert name in cli.COMMANDS, f"{where}: slipstream {command}"
    known = cli.COMMANDS[name]
    if known.parses_itself:
        assert {word for word in arguments if word.startswith("--")} <= flags_of(known)
        return
    parser = argparse.ArgumentParser(exit_on_error=False)
    for common in ("--config", "--set", "--group", "--run"):
        parser.add_argument(common)
    parser.add_argument("--dry-run", action="store_true")
    if known.add_arguments:
        known.add_arguments(parser)
    example = arguments or (["x"] if name in ("adopt", "lineage") else [])  # a name in a sentence
    _, unknown = parser.parse_known_args(example)
    assert unknown == [], f"{where}: slipstream {command}"


def flags_of(command):
    """What a command that reads its own arguments says it takes."""
    told = io.StringIO()
    with redirect_stdout(told), pytest.raises(SystemExit):
        importlib.import_module(command.module).main(["--help"])
    return set(re.findall(r"--[a-z][a-z-]*", told.getvalue()))


def test_the_commands_above_are_found_at_all():
    found = {(command.split()[0], where) for command, where in told()}
    runbook = {"adopt", "due", "retrain", "retire", "rollback", "erase", "run"}
    readme = {"compare", "deploy", "rollback", "watch", "retrain", "due", "retire", "erase", "speed", "sweep"}
    assert {(one, "runbook.md") for one in runbook} | {(one, "README.md") for one in readme} <= found
    assert {("watch", "watch.md"), ("watch", "cron"), ("deploy", "cron"), ("deploy", "watch.yaml")} <= found


def paths():
    folders = "|".join(path.name for path in CHECKOUT.iterdir() if path.is_dir() and path.name[0] != ".")
    for page, text in PAGES.items():
        named = re.findall(rf"[`(]((?:{folders})/[\w./-]*)[`)]", text)
        yield from ((page, path) for path in named if not path.startswith(("runs/", "watch/")))
        beside = CHECKOUT if page == "README.md" else CHECKOUT / "docs"
        links = re.findall(r"\]\(([^)#:]+)\)", text)
        yield from ((page, str((beside / link).relative_to(CHECKOUT))) for link in links)


@pytest.mark.parametrize(("page", "path"), sorted(set(paths())))
def test_every_file_that_a_page_names_is_there(page, path):
    assert (CHECKOUT / path).exists()


def test_the_readme_leads_to_every_page():
    linked = set(re.findall(r"\]\(docs/([^)]+)\)", PAGES["README.md"]))
    assert {page for page in PAGES if page != "README.md"} <= linked


TABLES = {
    name: field.annotation for name, field in Config.model_fields.items() if hasattr(field.annotation, "model_fields")
}


def settings():
    for page, text in PAGES.items():
        for table, key in re.findall(rf"(?<![\w./-])({'|'.join(TABLES)})\.([a-z_]+)\b(?![./(])", text):
            if key not in ("py", "md", "yaml") and not (CHECKOUT / table / key).exists():  # a file, a package
                yield page, table, key
        yield from ((page, table, None) for table in re.findall(r"`\[([a-z]+)\]`", text))


@pytest.mark.parametrize(("page", "table", "key"), sorted(set(settings()), key=str))
def test_every_setting_that_a_page_names_is_one(page, table, key):
    assert table in TABLES
    assert key is None or key in TABLES[table].model_fields


def test_every_variable_that_a_page_or_infra_names_is_read_somewhere():
    code = "\n".join(
        path.read_text() for folder in ("pipeline", "jobs", "serving") for path in (CHECKOUT / folder).rglob("*.py")
    )
    code += (INFRA / "airflow" / "slipstream_dag.py").read_text()
    files = [path for path in INFRA.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    text = "\n".join([*PAGES.values(), *(path.read_text() for path in files)])
    named = set(re.findall(r"\bSLIPSTREAM_[A-Z_]*[A-Z]\b", text)) - {"SLIPSTREAM_SPLIT_KEY_RETAIL"}  # a group's own
    assert named - set(re.findall(r"\bSLIPSTREAM_[A-Z_]*[A-Z]\b", code)) == set()


def test_every_target_of_make_that_a_page_names_is_one():
    targets = set(re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", "\n".join(PAGES.values()), re.MULTILINE))
    assert {"demo", "test", "test-services", "install"} <= named <= targets


def pins(name):
    lines = (CHECKOUT / "constraints" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_the_versions_in_infra_are_the_ones_that_are_installed():
    gpu = pins("gpu.txt")
    assert f"FROM vllm/vllm-openai:v{gpu['vllm']}\n" in (INFRA / "containers" / "Containerfile.serving").read_text()
    for path in (INFRA / "kubernetes").glob("ray*.yaml"):
        versions = re.findall(r"rayVersion: \"(.*)\"", path.read_text())
        assert set(versions) == {gpu["ray"]}, path


@pytest.mark.parametrize("path", sorted(INFRA.glob("containers/*")), ids=lambda path: path.name)
def test_a_container_is_pinned_and_copies_what_there_is(path):
    lines = path.read_text().splitlines()
    bases = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert bases and all(re.search(r":v?\d+\.\d+\.\d+", base) for base in bases)
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    assert all((CHECKOUT / name).exists() for names in copied for name in names)
    if path.suffix == ".serving":
        assert copied == [["serving/"]]


def test_a_build_is_sent_what_it_copies_and_no_run_root_or_environment():
    sent = (CHECKOUT / ".dockerignore").read_text().splitlines()
    assert sent[1] == "*"
    files = [path.read_text().splitlines() for path in INFRA.glob("containers/*")]
    copied = {name for lines in files for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    assert {line[1:] for line in sent if line.startswith("!")} == copied


def pods(body):
    """Every pod's specification in a manifest."""
    if isinstance(body, dict):
        if "containers" in body:
            yield body
        for value in body.values():
            yield from pods(value)
    elif isinstance(body, list):
        for value in body:
            yield from pods(value)


def test_all_pods_that_share_the_storage_run_as_one_user_since_logs_are_their_owners_alone():
    bodies = [body for path in (INFRA / "kubernetes").glob("*.yaml") for body in yaml.safe_load_all(path.read_text())]
    sharing = [pod for pod in pods(bodies) if any("persistentVolumeClaim" in one for one in pod.get("volumes", ()))]
    users = {(pod["securityContext"]["runAsUser"], pod["securityContext"]["fsGroup"]) for pod in sharing}
    assert len(sharing) == 9 and users == {(1000, 1000)}
    for path in (INFRA / "containers" / f"Containerfile.{name}" for name in ("cpu", "gpu")):
        assert "--uid 1000 slipstream" in path.read_text()


def test_nothing_is_named_twice_in_a_pod():
    for path in (INFRA / "kubernetes").glob("*.yaml"):
        for pod in pods(list(yaml.safe_load_all(path.read_text()))):
            for named in (pod.get("volumes", []), *(one.get("env", []) for one in pod["containers"])):
                names = [one["name"] for one in named]
                assert len(names) == len(set(names)), path
            mounted = {mount["name"] for one in pod["containers"] for mount in one.get("volumeMounts", ())}
            assert mounted == {volume["name"] for volume in pod.get("volumes", ())}, path


def test_whoever_reaches_a_ray_cluster_needs_its_token():
    bodies = [body for path in (INFRA / "kubernetes").glob("*.yaml") for body in yaml.safe_load_all(path.read_text())]
    secrets = {body["metadata"]["name"]: body["stringData"] for body in bodies if body["kind"] == "Secret"}
    clusters = list(found("rayVersion", bodies))
    assert len(clusters) == 3
    for cluster in clusters:
        assert cluster["authOptions"]["mode"] == "token"
        assert "auth_token" in secrets[cluster["authOptions"]["secretName"]]
    submitting = [pod for pod in pods(bodies) if "submit" in pod["containers"][0].get("command", ())]
    for pod in submitting:
        assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= {one["name"] for one in pod["containers"][0]["env"]}
    assert len(submitting) == 2


def found(key, body):
    """Every mapping with this key, however deep."""
    if isinstance(body, dict):
        if key in body:
            yield body
        body = list(body.values())
    for value in body if isinstance(body, list) else ():
        yield from found(key, value)


def test_images_and_claims_are_the_same_wherever_they_are_named():
    images = set(re.findall(r"image: (\S+)", "\n".join(p.read_text() for p in (INFRA / "kubernetes").glob("*.yaml"))))
    version = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    assert images == {f"registry.example/slipstream-{name}:{version}" for name in ("cpu", "gpu", "serving")}


def test_the_settings_in_the_config_map_are_settings():
    for body in yaml.safe_load_all((INFRA / "kubernetes" / "shared.yaml").read_text()):
        if body["kind"] == "ConfigMap":
            config = Config.model_validate(tomllib.loads(body["data"]["slipstream.toml"]))
    assert config.model_name == "target--support"


def test_the_ray_cluster_of_machines_is_one_that_ray_takes():
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(yaml.safe_load((INFRA / "ray" / "cluster.yaml").read_text())))


def test_the_servers_script_takes_no_argument_that_mlflow_does_not_know():
    # Asked in a process of its own: vLLM looks at all that is imported, and Flask's names want an application.
    script = "from mlflow.cli import server; print(*(option for one in server.params for option in one.opts))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    known = set(done.stdout.split())
    asked = set(re.findall(r"--[a-z-]+", (INFRA / "mlflow" / "serve").read_text()))
    assert asked <= known
