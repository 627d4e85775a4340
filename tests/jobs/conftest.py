"""A real MLflow on SQLite for every test that wants one."""

import shutil

import pytest

from tests.tiny import tiny_drafter, tiny_target


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory):
    """An initialised MLflow database: migrations take seconds, so they run once and are copied."""
    from jobs.registry import Registry

    root = tmp_path_factory.mktemp("mlflow")
    Registry(None, root)
    return root / "mlflow.db"


@pytest.fixture
def mlflow_root(tmp_path, empty_database):
    """A run root whose MLflow is initialised and empty."""
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture
def registry(mlflow_root):
    """A registry under the test's own root."""
    from jobs.registry import Registry

    return Registry(None, mlflow_root)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny target's folder, and three drafters of it."""
    root = tmp_path_factory.mktemp("tiny")
    target = tiny_target(root / "target")
    return target, [tiny_drafter(root / f"d{seed}", target, seed=seed) for seed in (1, 2, 3)]
