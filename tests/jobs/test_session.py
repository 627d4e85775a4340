"""How jobs begin: as a script, with a Ray of their own, with errors that fit in a line."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import session
from jobs.session import ray_session
from pipeline.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[2]
OURS = {"jobs", "pipeline", "drafter", "serving"}


def run_script(name, tmp_path, *arguments):
    config = tmp_path / "slipstream.toml"
    config.write_text(f'root = "{tmp_path / "run"}"\n[target]\nmodel = "{tmp_path / "model"}"\n')
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") and k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(CHECKOUT / "jobs" / name), "--config", str(config), *arguments],
        cwd=tmp_path,
        env={**environment, "HOME": str(tmp_path), "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("path", sorted((CHECKOUT / "jobs").glob("*.py")), ids=lambda path: path.name)
def test_a_script_looks_for_imports_in_the_checkout_and_not_beside_itself(path):
    body = ast.parse(path.read_text()).body
    guards = [i for i, node in enumerate(body) if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
    if not guards:
        return
    names = [
        (i, name.split(".")[0])
        for i, node in enumerate(body)
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None)])
        if name
    ]
    first = min((i for i, name in names if name not in sys.stdlib_module_names), default=len(body))
    if any(name in OURS for _, name in names):
        assert guards[0] < first, f"{path.name} imports before it has set sys.path"
        assert "sys.path[0]" in ast.unparse(body[guards[0]])


def test_a_dry_run_prints_what_resolves_from_any_folder_and_starts_nothing(tmp_path):
    done = run_script("promote.py", tmp_path, "--dry-run", "--set", "gate.min_lift=1.25")
    assert done.returncode == 0, done.stderr
    assert '"min_lift": 1.25' in done.stdout
    assert not (tmp_path / "run").exists()


def test_an_error_raised_in_a_ray_task_is_one_line_and_no_token_is_left_in_the_home_folder(tmp_path):
    done = run_script("collect.py", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ConfigError: collect.redaction"), done.stderr
    assert "Traceback" not in done.stderr and "RayTaskError" not in done.stderr
    assert not (tmp_path / ".ray").exists()


def test_an_address_for_submitting_jobs_is_not_taken_for_a_cluster(monkeypatch):
    import ray

    if ray.is_initialized():
        pytest.skip("another test's Ray is running in this process")
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(ConfigError, match="RAY_API_SERVER_ADDRESS"), ray_session():
        pass


def test_a_root_is_one_workloads_whoever_names_it(tmp_path, capsys):
    (tmp_path / "s.toml").write_text(f'workload = "mails"\nroot = "{tmp_path}/root"\ntarget.model = "m"\n')
    ran = []

    def job(*more):
        argv = ["--config", str(tmp_path / "s.toml"), *more]
        session.job_main("a job", lambda config, _: ran.append(config.workload), argv=argv, needs_ray=False)

    job("--set", "workload=code")  # there is no root yet, and none is made
    (tmp_path / "root").mkdir()
    job()
    job()
    with pytest.raises(SystemExit):
        job("--set", "workload=code")
    assert ran == ["code", "mails", "mails"]
    assert "the root of workload mails, not of code" in capsys.readouterr().err
    job("--set", "workload=code", "--set", f"root={tmp_path}/other")
