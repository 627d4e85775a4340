"""Who may import what. The rules keep each part usable where the others are not installed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = {"pipeline", "drafter", "jobs", "serving"}
SERVING_BRINGS = {
    "vllm", "torch", "transformers", "safetensors", "numpy", "aiohttp", "httpx", "starlette", "fastapi", "pydantic",
    "prometheus_client", "uvicorn", "cryptography",
}  # fmt: skip


def imports(path):
    """(top-level package, whether it runs when the module is imported) of every import in a file."""
    found = []

    def walk(node, *, at_import):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                found.append((child.module or "", at_import))
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            walk(child, at_import=at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    walk(ast.parse(path.read_text()), at_import=True)
    return [(name.split(".")[0], at_import) for name, at_import in found]


def modules(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def ids(path):
    return str(path.relative_to(ROOT))


def test_there_is_something_to_check():
    assert all(len(modules(folder)) > 3 for folder in OURS)


@pytest.mark.parametrize("path", modules("pipeline"), ids=ids)
def test_pipeline_never_needs_ray_mlflow_or_torch_to_be_imported_and_nothing_above_it(path):
    names = imports(path)
    assert not {name for name, _ in names} & {"ray", "mlflow", "jobs", "serving"}
    assert not {name for name, at_import in names if at_import} & {"torch", "vllm", "transformers", "drafter"}


@pytest.mark.parametrize("path", modules("drafter"), ids=ids)
def test_drafter_knows_torch_arrow_and_the_artifacts_alone(path):
    names = imports(path)
    assert not {name for name, _ in names} & {"ray", "mlflow", "vllm", "jobs", "serving"}
    assert "transformers" not in {name for name, at_import in names if at_import}  # a tokenizer's word, when asked for


@pytest.mark.parametrize("path", modules("serving"), ids=ids)
def test_serving_needs_vllm_and_what_vllm_brings_and_nothing_of_ours(path):
    allowed = {"serving"} | SERVING_BRINGS | set(sys.stdlib_module_names)
    assert {name for name, _ in imports(path)} <= allowed


@pytest.mark.parametrize("path", modules("jobs"), ids=ids)
def test_mlflow_enters_in_the_registry_alone(path):
    assert path.parent.name == "registry" or "mlflow" not in {name for name, _ in imports(path)}


def test_every_module_of_pipeline_is_imported_without_ray_mlflow_or_torch():
    names = [str(p.relative_to(ROOT))[:-3].replace("/", ".").removesuffix(".__init__") for p in modules("pipeline")]
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        "print(sorted({'ray', 'mlflow', 'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
