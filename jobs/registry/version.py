"""A registered drafter as MLflow knows it: the tags of its version, and the states that it goes through."""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.artifacts import DrafterCheckpoint
from pipeline.fingerprint import fingerprint_id
from pipeline.stages import Artifact

PENDING, PASSED, FAILED = "pending", "passed", "failed"
RETIRED = "retired"
"""Made for a target that is served no more."""

DERIVATION = "slipstream.derivation_id"
CONTENT = "slipstream.content_id"
STATE = "slipstream.state"
WHY = "slipstream.state_reason"
ATTACHED = "slipstream.attached"
TARGET = "slipstream.target"
UNLEARN_BY, UNLEARN_WHY = "slipstream.unlearn_by", "slipstream.unlearn_why"
_PARENT = "slipstream.parent."
_DATA = "slipstream.data."


@dataclass(frozen=True)
class Version:
    """A version of ours."""

    number: str
    derivation: str
    tags: dict[str, str]

    @property
    def state(self) -> str:
        """pending, passed, failed or retired."""
        return self.tags[STATE]

    @property
    def target(self) -> str | None:
        """Fingerprint id of the target that it was made for; None where that is not on record."""
        return self.tags.get(TARGET)

    @property
    def unlearn_by(self) -> str | None:
        """When it has to be out of service, since it learned from what was erased (a date); None where it may stay."""
        return self.tags.get(UNLEARN_BY)

    @property
    def parents(self) -> dict[str, str]:
        """Role → derivation id of what the drafter was made from."""
        return _under(_PARENT, self.tags)

    @property
    def data(self) -> dict[str, str]:
        """Kind → derivation id of the data behind it: prompts, responses, states."""
        return _under(_DATA, self.tags)


def chain_of(versions: Mapping[str, Version], version: Version) -> list[Version]:
    """A version, the one that it was trained from, and so on, as far as they are registered (by derivation id)."""
    chain = [version]
    while (start := versions.get(chain[-1].parents.get("start", ""))) is not None and start not in chain:
        chain.append(start)
    return chain


def lineage_tags(checkpoint: Artifact[DrafterCheckpoint]) -> dict[str, str]:
    """The tags that say what a checkpoint is and what it was made from."""
    manifest = checkpoint.manifest
    parents = {f"{_PARENT}{role}": parent for role, parent in manifest.parents.items()}
    made_for = {TARGET: fingerprint_id(manifest.fingerprint)} if manifest.fingerprint else {}
    own = {DERIVATION: checkpoint.id, CONTENT: manifest.content_id, "slipstream.role": manifest.role}
    return {**own, **made_for, **parents}


def data_tags(data: Mapping[str, str]) -> dict[str, str]:
    """The tags that name the data behind a checkpoint: kind → derivation id."""
    return {f"{_DATA}{kind}": derivation for kind, derivation in data.items()}


def _under(prefix: str, tags: Mapping[str, str]) -> dict[str, str]:
    return {key.removeprefix(prefix): value for key, value in tags.items() if key.startswith(prefix)}
