"""An MLflow tracking server as a team runs it: PostgreSQL behind it, artifacts through it into object storage."""

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.services.object_storage import ObjectStorage
from tests.services.postgres import Postgres
from tests.services.processes import free_ports, running

BUCKET = "mlflow-artifacts"
WORKERS = 2  # more than one process on the database, as in production


@dataclass(frozen=True)
class MlflowServer:
    """The server's address and the bucket in which its artifacts lie."""

    uri: str
    bucket: str

    def ready(self) -> bool:
        """Whether the server says that it is healthy."""
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture(scope="session")
def mlflow_server(
    postgres: Postgres, object_storage: ObjectStorage, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MlflowServer]:
    """A running server. Clients talk to it alone: they have no keys of the storage."""
    folder = tmp_path_factory.mktemp("mlflow_server")
    object_storage.client().create_bucket(Bucket=BUCKET)
    (port,) = free_ports(1)
    server = MlflowServer(f"http://127.0.0.1:{port}", BUCKET)
    options = {
        "host": "127.0.0.1",
        "port": port,
        "workers": WORKERS,
        "backend-store-uri": postgres.create("mlflow"),
        "artifacts-destination": f"s3://{BUCKET}/versions",
    }
    command = [sys.executable, "-m", "mlflow", "server", "--serve-artifacts"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    env = {
        **object_storage.environment,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # eight processes fewer
    }
    with running(command, server.ready, log=folder / "log", env=env):
        yield server
