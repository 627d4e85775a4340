"""S3-compatible object storage: a SeaweedFS of the tests' own, one process with all its parts.

SeaweedFS is a storage server that people run in production, not a mock: it checks signatures, keeps objects in
volumes on disk and honours conditional puts. It is not Amazon's S3, and one machine says nothing of replication.
"""

import json
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from pipeline import storage as storage_module
from tests.services.processes import free_ports, running

PARTS = ("master", "volume", "filer", "s3")
REGION = "us-east-1"


@dataclass(frozen=True)
class ObjectStorage:
    """The address of the storage and the one identity that may use it."""

    endpoint: str
    access_key: str = "slipstream"
    secret_key: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to store here, MLflow's own name for the address included."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",  # no look for keys outside this machine
            "MLFLOW_S3_ENDPOINT_URL": self.endpoint,
        }

    def client(self, *, secret_key: str | None = None) -> Any:
        """A boto3 client; with another secret key the storage refuses it."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=secret_key or self.secret_key,
            region_name=REGION,
            config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )

    def objects(self, bucket: str) -> dict[str, int]:
        """The keys of a bucket and their sizes in bytes."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return {one["Key"]: one["Size"] for page in pages for one in page.get("Contents", [])}

    def read(self, bucket: str, key: str) -> bytes:
        """The body of an object."""
        return self.client().get_object(Bucket=bucket, Key=key)["Body"].read()

    def ready(self) -> bool:
        """Whether a bucket can be made and an object stored: the parts find each other one after the other."""
        client = self.client()
        try:
            if "ready" not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
                client.create_bucket(Bucket="ready")
            client.put_object(Bucket="ready", Key="ready", Body=b"ready")
        except (ClientError, BotoCoreError):
            return False
        return True


@pytest.fixture(scope="session")
def object_storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStorage]:
    """A running, empty storage."""
    folder = tmp_path_factory.mktemp("object_storage")
    ports = dict(zip([*PARTS, *(f"{part}.grpc" for part in PARTS)], free_ports(2 * len(PARTS)), strict=True))
    storage = ObjectStorage(f"http://127.0.0.1:{ports['s3']}")
    try:
        with running(_command(folder, storage, ports), storage.ready, log=folder / "log", kill=True):
            yield storage
    finally:
        for part in PARTS:  # the only things it puts outside its folder
            Path(f"/tmp/seaweedfs-{part}-grpc-{ports[f'{part}.grpc']}.sock").unlink(missing_ok=True)


def _command(folder: Path, storage: ObjectStorage, ports: dict[str, int]) -> list[str]:
    identity = {
        "name": storage.access_key,
        "credentials": [{"accessKey": storage.access_key, "secretKey": storage.secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    settings = {
        "dir": folder / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "filer": "true",
        "filer.localSocket": folder / "filer.sock",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64,
        "volume.max": 100,
        "s3": "true",
        "s3.config": folder / "s3.json",
        "s3.iam": "false",
        "s3.localSocket": folder / "s3.sock",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        **{
            f"{name.split('.')[0]}.port{'.grpc' if name.endswith('.grpc') else ''}": port
            for name, port in ports.items()
        },
    }
    weed = Path(sys.executable).with_name("weed")
    return [str(weed), "-logdir", str(folder), "server", *(f"-{name}={value}" for name, value in settings.items())]


@pytest.fixture
def s3(object_storage: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> ObjectStorage:
    """The storage as a process finds it, its address and keys in the environment, with buckets for logs and states."""
    for name, value in object_storage.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_storage.endpoint)
    monkeypatch.setattr(storage_module, "RETRY_WAIT_S", 0.0)
    client = object_storage.client()
    for name in {"logs", "states"} - {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
        client.create_bucket(Bucket=name)
    return object_storage
