"""Sittings that are over, kept until the report is written: an interrupted evaluation goes on with the next block.

A block is kept when every drafter has answered it, so that no pair of sittings straddles an interruption. The files
hold the replies' token ids, which are compared at the end; they are removed with the report's last step.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.artifacts import write_durably

if TYPE_CHECKING:
    from pipeline.sittings import Course, Reply, Sitting, Sittings


@dataclass(frozen=True)
class KeptReply:
    """A reply as far as it is counted; implements pipeline.sittings.Reply."""

    token_ids: list[int]
    finish_reason: str | None
    latency_s: float
    ttft_s: float | None
    itl_s: list[float]
    spec: dict[str, Any] | None
    error: str | None


@dataclass(frozen=True)
class KeptSittings:
    """The files of one evaluation, under its report's folder."""

    folder: Path

    def load(self, name: str, course: "Course") -> "Sittings | None":
        """The sittings kept under a name, or None where there are none; settings and prompts as they were."""
        from pipeline.sittings import Sitting

        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        found: Sittings = {}
        for one in json.loads(path.read_text()):
            gate, general = course.part(one["block"])
            replies, others = ([KeptReply(**reply) for reply in one[k]] for k in ("replies", "general_replies"))
            found[one["block"], one["role"]] = Sitting(gate, replies, one["wall_s"], one["settings"], general, others)
        return found

    def save(self, name: str, sittings: "Mapping[tuple[int, str], Sitting]") -> None:
        """Keep these sittings under a name."""
        body = [
            {
                "block": block,
                "role": role,
                "wall_s": one.wall_s,
                "settings": one.settings,
                "replies": [asdict(_kept(reply)) for reply in one.replies],
                "general_replies": [asdict(_kept(reply)) for reply in one.general_replies],
            }
            for (block, role), one in sittings.items()
        ]
        write_durably(self.folder / f"{name}.json", json.dumps(body).encode())

    def remove(self) -> None:
        """Forget them all: the report is written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _kept(reply: "Reply") -> KeptReply:
    return KeptReply(
        token_ids=list(reply.token_ids or ()),
        finish_reason=reply.finish_reason,
        latency_s=reply.latency_s,
        ttft_s=reply.ttft_s,
        itl_s=list(reply.itl_s),
        spec=dict(reply.spec) if reply.spec is not None else None,
        error=reply.error,
    )
