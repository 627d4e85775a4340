"""A PostgreSQL server of the tests' own: a new cluster in a temporary folder, on a loopback port."""

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg2
import pytest

from tests.services.processes import free_ports, running

USER = "slipstream"
DEBIAN = Path("/usr/lib/postgresql")  # Debian keeps the server's programs here, one folder a version
NOT_ROOT = "postgres"  # the server refuses to run as root; the package brings this user


@dataclass(frozen=True)
class Postgres:
    """Where the server listens, and who may do everything there."""

    port: int
    password: str

    def create(self, database: str) -> str:
        """The SQLAlchemy address of a new, empty database."""
        connection = self.connect()
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(f'CREATE DATABASE "{database}"')
        connection.close()
        return f"postgresql+psycopg2://{USER}:{self.password}@127.0.0.1:{self.port}/{database}"

    def connect(self, database: str = "postgres") -> "psycopg2.extensions.connection":
        """An open connection. Raises: psycopg2.OperationalError when the server does not answer."""
        return psycopg2.connect(
            host="127.0.0.1", port=self.port, user=USER, password=self.password, dbname=database, connect_timeout=5
        )

    def ready(self) -> bool:
        """Whether the server takes connections."""
        try:
            self.connect().close()
        except psycopg2.OperationalError:
            return False
        return True


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A running server. Data are lost with the folder, so nothing waits for a disk."""
    # Not pytest's folder: that one is closed to every user but root.
    folder = Path(tempfile.mkdtemp(prefix="slipstream-postgres-"))
    server = Postgres(free_ports(1)[0], secrets.token_hex(16))
    try:
        _make_cluster(folder, server.password)
        command = [*_as_user(), _program("postgres"), "-D", str(folder / "data"), "-p", str(server.port)]
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        command += [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with running(command, server.ready, log=folder / "log"):
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_cluster(folder: Path, password: str) -> None:
    secret = folder / "password"
    secret.write_text(password)
    if os.getuid() == 0:
        for path in (folder, secret):
            shutil.chown(path, NOT_ROOT)
    options = ["-A", "scram-sha-256", "-U", USER, "--pwfile", str(secret), "-E", "UTF8", "--locale=C", "--no-sync"]
    subprocess.run(
        [*_as_user(), _program("initdb"), "-D", str(folder / "data"), *options],
        check=True,
        cwd=folder,
        stdout=subprocess.DEVNULL,
    )


def _as_user() -> list[str]:
    if os.getuid() != 0:
        return []
    group = str(pwd.getpwnam(NOT_ROOT).pw_gid)
    return ["setpriv", f"--reuid={NOT_ROOT}", f"--regid={group}", "--clear-groups", "--"]


def _program(name: str) -> str:
    """The newest version's program. Raises: RuntimeError when PostgreSQL is not installed."""
    found = sorted(DEBIAN.glob(f"*/bin/{name}"), key=lambda path: float(path.parts[-3]))
    if program := str(found[-1]) if found else shutil.which(name):
        return program
    raise RuntimeError(f"no {name} under {DEBIAN} nor on PATH: install PostgreSQL, or run make test-services as root")
