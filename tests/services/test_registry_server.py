"""The registry's laws on a server: PostgreSQL behind it, files in object storage, clients on machines of their own."""

import time
import uuid
from pathlib import Path

import pytest

from jobs.registry import Registry
from pipeline.artifacts import MANIFEST, DrafterCheckpoint
from pipeline.errors import SchemaError
from pipeline.stages import Artifact
from tests.jobs.checkpoints import FILES, as_checkpoint
from tests.services.registry_worker import Worker, download, move, promote, promote_for_ever, read, register
from tests.tiny import tiny_drafter, tiny_target

NUM_WORKERS = 8
SOON_S = 120


@pytest.fixture(scope="module")
def hire(mlflow_server, tmp_path_factory):
    """Starts workers; all of them are ended with the module."""
    hired = []

    def start() -> Worker:
        hired.append(Worker(mlflow_server.uri, tmp_path_factory.mktemp("worker")))
        return hired[-1]

    yield start
    for worker in hired:
        worker.end()


@pytest.fixture(scope="module")
def workers(hire):
    """Eight workers, each with its own root."""
    return [hire() for _ in range(NUM_WORKERS)]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Makes a checkpoint whose derivation id no other test uses."""
    root = tmp_path_factory.mktemp("checkpoints")
    drafter = tiny_drafter(root / "drafter", tiny_target(root / "target"), seed=1)
    return lambda: as_checkpoint(root, drafter, name=uuid.uuid4().hex[:16])


@pytest.fixture(scope="module")
def eleven(workers, make):
    """A model with eleven versions that may serve: the champions so far and two more. Tests take an alias each."""
    model = new_model()
    checkpoints = [make() for _ in range(11)]
    for checkpoint, worker in zip(checkpoints, workers * 2, strict=False):
        worker.tell(register, model=model, folder=checkpoint.folder)
    for _, worker in zip(checkpoints, workers * 2, strict=False):
        worker.answer()
    return model


@pytest.fixture
def model():
    """A model's name that no other test uses: the server is shared."""
    return new_model()


@pytest.fixture
def registry(mlflow_server, tmp_path, monkeypatch):
    """This process's registry on the server; it has no keys of the storage."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "MLFLOW_S3_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    return Registry(mlflow_server.uri, tmp_path / "root")


def new_model() -> str:
    return f"toy--{uuid.uuid4().hex[:8]}"


def same_files(folder: Path, checkpoint: Artifact[DrafterCheckpoint]) -> bool:
    names = sorted((*FILES, MANIFEST))
    return sorted(path.name for path in folder.iterdir()) == names and all(
        (folder / name).read_bytes() == (checkpoint.folder / name).read_bytes() for name in names
    )


def test_a_version_comes_back_byte_for_byte_and_its_files_lie_in_the_bucket(
    registry, make, model, object_storage, mlflow_server
):
    checkpoint, before = make(), set(object_storage.objects(mlflow_server.bucket))
    version = registry.register(model, checkpoint)
    assert registry.register(model, checkpoint) == version == "1"
    keys = set(object_storage.objects(mlflow_server.bucket)) - before
    stored = {Path(key).name: object_storage.read(mlflow_server.bucket, key) for key in keys}
    assert len({Path(key).parent for key in keys}) == 1
    assert stored == {name: (checkpoint.folder / name).read_bytes() for name in (*FILES, MANIFEST)}
    folder = registry.download(model, version)
    assert folder.is_relative_to(registry.root) and same_files(folder, checkpoint)


@pytest.mark.parametrize("damage", ["lost", "changed"])
def test_case_34_a_version_whose_object_was_damaged_in_the_bucket_does_not_come_back(
    registry, make, model, object_storage, mlflow_server, damage
):
    before = set(object_storage.objects(mlflow_server.bucket))
    version = registry.register(model, make())
    (weights,) = (
        key for key in set(object_storage.objects(mlflow_server.bucket)) - before if key.endswith("/model.safetensors")
    )
    if damage == "lost":
        object_storage.client().delete_object(Bucket=mlflow_server.bucket, Key=weights)
    else:
        body = bytearray(object_storage.read(mlflow_server.bucket, weights))
        body[-1] ^= 1
        object_storage.client().put_object(Bucket=mlflow_server.bucket, Key=weights, Body=bytes(body))
    with pytest.raises(SchemaError):
        registry.download(model, version)


def test_a_process_with_another_root_sees_the_same_versions_aliases_and_history(registry, make, model, workers):
    checkpoints = [make(), make()]
    for checkpoint in checkpoints:
        register(registry, model=model, folder=checkpoint.folder)
    registry.set_alias(model, "champion", "1", expected=None)
    registry.set_alias(model, "champion", "2", expected="1")
    other = workers[0]
    assert other.ask(read, model=model, alias="champion") == (["1", "2"], "2", [(None, "1"), ("1", "2")])
    folder = other.ask(download, model=model, version="2")
    assert not folder.is_relative_to(registry.root) and same_files(folder, checkpoints[1])
    assert other.ask(move, model=model, alias="champion", version="1", expected="2") == (True, "2")
    assert registry.alias(model, "champion") == "1"


def test_case_82_eight_that_register_at_once_get_eight_versions_and_one_for_what_they_share(
    workers, registry, make, model
):
    own, shared = [make() for _ in workers], make()
    for checkpoints in (own, [shared] * NUM_WORKERS):
        for worker, checkpoint in zip(workers, checkpoints, strict=True):
            worker.tell(register, model=model, folder=checkpoint.folder)
        versions = [worker.answer() for worker in workers]
        assert [registry.derivation(model, v) for v in versions] == [checkpoint.id for checkpoint in checkpoints]
    assert len(set(versions)) == 1  # they agree on the number of what they share
    assert len(registry.versions(model)) == NUM_WORKERS + 1


def test_of_eight_who_move_an_alias_from_the_same_place_one_wins_and_the_others_are_told(workers, registry, eleven):
    alias, ours = "approved", [str(number) for number in range(2, NUM_WORKERS + 2)]
    registry.set_alias(eleven, alias, "1", expected=None)
    for worker, version in zip(workers, ours, strict=True):
        worker.tell(move, model=eleven, alias=alias, version=version, expected="1")
    answers = {version: worker.answer() for worker, version in zip(workers, ours, strict=True)}
    (winner,) = (version for version, (moved, _) in answers.items() if moved)
    assert answers[winner] == (True, "1")
    assert all("someone moved it" in said for version, (_, said) in answers.items() if version != winner)
    assert registry.alias(eleven, alias) == winner
    assert [(m.previous, m.version) for m in registry.history(eleven, alias)] == [(None, "1"), ("1", winner)]


def test_a_process_killed_while_it_uploads_leaves_a_registration_that_another_finishes_once(
    hire, workers, registry, make, model, object_storage, mlflow_server
):
    checkpoint, victim = make(), hire()
    victim.ask(read, model=model, alias="champion")  # it is up
    before = set(object_storage.objects(mlflow_server.bucket))
    victim.tell(register, model=model, folder=checkpoint.folder)
    deadline = time.monotonic() + SOON_S
    while set(object_storage.objects(mlflow_server.bucket)) == before:
        assert time.monotonic() < deadline
    victim.kill()
    assert workers[0].ask(register, model=model, folder=checkpoint.folder) == "1"
    assert [version.derivation for version in registry.versions(model)] == [checkpoint.id]
    assert same_files(registry.download(model, "1"), checkpoint)


def test_eight_promoters_and_one_that_is_killed_leave_one_champion_and_a_whole_history(hire, workers, registry, eleven):
    alias, victim, ours = "champion", hire(), [str(number) for number in range(1, NUM_WORKERS + 1)]
    victim.tell(promote_for_ever, model=eleven, alias=alias, versions=("10", "11"))
    deadline = time.monotonic() + SOON_S
    while len(registry.history(eleven, alias)) < 2:
        assert time.monotonic() < deadline
    for worker, version in zip(workers, ours, strict=True):
        worker.tell(promote, model=eleven, alias=alias, version=version)
    first = workers[0].answer()
    victim.kill()  # wherever it is: between writing a move down and setting the alias, too
    made = {first, *(worker.answer() for worker in workers[1:])}
    moves = [(move.previous, move.version) for move in registry.history(eleven, alias)]
    assert [previous for previous, _ in moves] == [None, *(version for _, version in moves[:-1])]
    assert sorted(one for one in moves if one[1] in ours) == sorted(made) and len(made) == NUM_WORKERS
    # What the killed one left open is finished by whoever moves next.
    last = moves[-1][1]
    registry.set_alias(eleven, alias, "9", expected=last)
    assert registry.history(eleven, alias)[-1].version == registry.alias(eleven, alias) == "9"
