"""A real MLflow on SQLite for every test that wants one."""

import shutil

import pytest


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
