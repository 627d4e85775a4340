import argparse
import importlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import cli

ROOT = Path(__file__).resolve().parents[2]


def slipstream(*arguments, **more):
    command = [sys.executable, "-m", "jobs.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **more)


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "slipstream.toml"
    path.write_text(f'root = "{tmp_path}/root"\n[target]\nmodel = "{tmp_path}/model"\n')
    return path


def test_help_comes_within_half_a_second_of_processor_time_and_names_every_command():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = slipstream("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.5
    expected = "collect regenerate capture train evaluate promote deploy rollback adopt init-drafter run status demo"
    assert {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")} >= set(expected.split())


@pytest.mark.parametrize("name", [n for n, c in cli.COMMANDS.items() if not c.parses_itself])
def test_every_commands_help_shows_an_example_and_imports_nothing_heavy(name):
    code = (
        "import sys\nfrom jobs import cli\n"
        f"try: cli.main([{name!r}, '--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'ray', 'torch', 'vllm', 'mlflow', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert f"example: slipstream {name}" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]", done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_job_behind_it(name):
    assert (ROOT / (cli.COMMANDS[name].module.replace(".", "/") + ".py")).exists()


def taken_by(add_arguments, name):
    parser = argparse.ArgumentParser()
    if add_arguments is not None:
        add_arguments(parser)
    return set(vars(parser.parse_args(["one"] if name in ("adopt", "lineage") else [])))


@pytest.mark.parametrize("name", [n for n, c in cli.COMMANDS.items() if not c.parses_itself])
def test_a_command_takes_what_its_job_takes_and_starts_ray_where_the_job_does(name):
    command = cli.COMMANDS[name]
    job = importlib.import_module(command.module)
    starts_ray = "needs_ray=False" not in Path(job.__file__).read_text()
    assert command.needs_ray is starts_ray
    assert taken_by(command.add_arguments, name) == taken_by(getattr(job, "add_arguments", None), name)


def test_a_dry_run_prints_what_resolves_and_leaves_nothing_behind(toml, tmp_path):
    done = slipstream("train", "--config", toml, "--set", "train.steps=7", "--dry-run")
    assert '"steps": 7' in done.stdout
    assert not (tmp_path / "root").exists()


def test_a_wrong_setting_is_one_error_with_no_traceback_and_exit_status_1(toml):
    done = slipstream("train", "--config", toml, "--set", "train.stepz=7")
    assert done.returncode == 1
    assert "train.stepz" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_command_names_the_nearest_one():
    done = slipstream("collcet")
    assert done.returncode == 2
    assert "did you mean collect?" in done.stderr


def test_status_of_an_empty_root_says_what_begins_and_makes_nothing(toml, tmp_path):
    done = slipstream("status", "--config", toml)
    assert done.returncode == 0, done.stderr
    assert "nothing registered yet" in done.stdout
    assert not (tmp_path / "root").exists()


def test_collect_runs_from_the_command_line_and_status_shows_its_rows(toml, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "a", "consent": "recorded"}\n{"prompt": "b", "consent": "recorded"}\nbroken\n')
    settings = [f'collect.sources=["{log}"]', "collect.redaction=none", "collect.max_reject_share=0.5"]
    arguments = ["--config", toml, *(part for setting in settings for part in ("--set", setting))]
    refused = slipstream("collect", "--config", toml, "--set", settings[0], env={**os.environ, "RAY_ADDRESS": ""})
    assert refused.returncode == 1
    assert refused.stderr.strip().splitlines()[-1].startswith("ConfigError: collect.redaction")
    assert "Traceback" not in refused.stderr
    done = slipstream("collect", *arguments)
    assert done.returncode == 0, done.stderr
    assert "2 rows, 1 rejected" in slipstream("status", "--config", toml).stdout
