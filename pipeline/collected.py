"""One piece of a source as rows, before anything is known of the others: consent, window, redaction, canonical form.

    collected-00003.arrow   rows of schemas.COLLECTED; record batch k holds those of bucket k (of NUM_BUCKETS)
    tally-00003.json        what became of the piece's records

A bucket is a range of the keyed order in which rows are sampled and written: each is merged by itself.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.canonical import CanonicalRequest, canonical_request, named_subject
from pipeline.collect_config import CollectConfig, RedactionConfig
from pipeline.errors import Rejected
from pipeline.on_record import ServedReply, inclusion_probability, served_reply
from pipeline.redaction import Redacted, Redactor, conversation_of
from pipeline.schemas import COLLECTED
from pipeline.shards import commit_part, part_path
from pipeline.sources import BY_POLICY as NOT_ABOUT_THE_TARGET
from pipeline.sources import Piece, Record, Unreadable, read_piece
from pipeline.split import SplitKey
from pipeline.tally import Tally
from pipeline.windows import Window

NUM_BUCKETS = 64
# Whole logs may be dropped for these: counted, and not listed one by one.
_UNLISTED = frozenset(
    {
        *("no_consent", "zero_retention", "other_tenant", "erased_subject"),
        *("expired", "cannot_expire", "before_window", "after_window"),
    }
)
# Policy at work, not damage: no part of collect.max_reject_share.
BY_POLICY = _UNLISTED | {"unsupported_adapter", *NOT_ABOUT_THE_TARGET}
_AN_ID = re.compile(r"[\w.:#/+=-]{1,200}", re.ASCII)
_PLACES = {"earlier": "before_window", "later": "after_window"}


@dataclass(frozen=True)
class Reading:
    """What every piece is read by."""

    settings: CollectConfig
    key: SplitKey
    window: Window
    erased: frozenset[str]
    """Keyed hashes of erased subjects."""
    folder: Path
    pieces: tuple[Piece, ...]
    expires_before: float | None = None
    """Records from before this time are not taken: what expired must not come back from a log. Nor are those without a
    time, which would never expire."""

    def read(self, index: int) -> int:
        """Read a piece, and commit it as the part of its number; the records it holds."""
        if part_path(self.folder, index).exists():
            return 0
        rows: dict[int, list[dict[str, Any]]] = defaultdict(list)
        rejects: list[dict[str, Any]] = []
        tally = Tally()
        for record in read_piece(self.pieces[index], max_line_bytes=self.settings.max_line_bytes):
            source = tally.of(record.file)
            source.records += 1
            source.saw(record.ts if isinstance(record, Record) else None)
            try:
                row, redacted = self._row(record)
            except Rejected as error:
                source.dropped[str(error)] += 1
                if str(error) not in _UNLISTED:
                    rejects.append(self._reject(record, str(error)))
                continue
            source.kept += 1
            tally.redacted.update(redacted.found)
            rows[bucket_of(row["rank"])].append(row)
        files = {
            f"collected-{index:05d}.arrow": (sum(map(len, rows.values())), _buckets(rows)),
            f"tally-{index:05d}.json": (0, _json(tally.as_json())),
        }
        commit_part(self.folder, index, files, rejects=rejects)
        return tally.records

    def _row(self, record: Record | Unreadable) -> tuple[dict[str, Any], Redacted]:
        """The row of a record, and what was redacted in it. Raises: Rejected."""
        if isinstance(record, Unreadable):
            raise Rejected(record.reason)
        self._require_allowed(record)
        try:
            redacted = self._redacted(record.body)
            request = canonical_request(redacted.body)
            served = None if redacted.changed else served_reply(redacted.body)
            # Whose it was is hashed and not redacted: a subject has to be the same one in every record.
            subject = self.key.hash("conversation", named_subject(record.body) or request.subject)
            if subject in self.erased:
                raise Rejected("erased_subject")
            row = self._as_row(record, request, served, subject)
            "".join(value for value in row.values() if isinstance(value, str)).encode()
            return row, redacted
        except Rejected:
            raise
        except UnicodeEncodeError:
            raise Rejected("not_unicode")
        except Exception as error:  # a record that nobody thought of must not end the run; its text is not told
            raise Rejected(f"unexpected_{type(error).__name__}")

    def _redacted(self, body: Mapping[str, Any]) -> Redacted:
        settings = self.settings.redaction
        if settings == "none":
            return Redacted(dict(body))
        return _redactor(settings, self.key).redact(body, conversation_of(body))

    def _require_allowed(self, record: Record) -> None:
        require_allowed(record, self.settings, expires_before=self.expires_before)
        ts = None if self.window.is_open_ended else record.time()
        place = self.window.place(ts, source=record.file, offset=record.offset)
        if place != "in":
            raise Rejected(_PLACES[place])
        if (named := named_subject(record.body)) and self.key.hash("conversation", named) in self.erased:
            raise Rejected("erased_subject")

    def _reject(self, record: Record | Unreadable, reason: str) -> dict[str, Any]:
        """Where a record lies and why it was dropped, never its text.

        Its own id is told where it is no text, names nobody, and the record says whose it is: else no erasure finds it.
        """
        told: dict[str, Any] = {"file": record.file, "line": record.line, "offset": record.offset, "reason": reason}
        if record.part:
            told["part"] = record.part
        if isinstance(record, Unreadable):
            return {**told, "error": record.error}
        own_id = record.body.get("id")
        if isinstance(own_id, str) and _AN_ID.fullmatch(own_id) and not self._is_personal(own_id):
            told["id"] = own_id
        if named := named_subject(record.body):
            told["subject"] = self.key.hash("conversation", named)  # an erasure takes this line, too
        return told

    def _is_personal(self, text: str) -> bool:
        settings = self.settings.redaction
        return settings != "none" and bool(_redactor(settings, self.key).hits(text))

    def _as_row(
        self, record: Record, request: CanonicalRequest, served: ServedReply | None, subject: str
    ) -> dict[str, Any]:
        row_id = self.key.hash("row", request.prompt)
        return {
            "row_id": row_id,
            "rank": self.key.hash("sample", row_id),
            "record": self.key.hash("record", _told(record, request, served)),
            "identified": isinstance(record.body.get("id"), str) and record.ts is not None,
            "conversation": subject,
            "weight": 1,
            "served": 1 / inclusion_probability(record.body),
            "last_seen": record.ts,
            "person": subject if _names_somebody(record.body) else None,
            "subjects": [subject],
            "subject_weights": [1],
            "accepted_per_step": _accepted(record.body),
            "slice": request.slice,
            "slices": request.slices,
            "messages": request.messages,
            "tools": request.tools,
            "template_args": request.template_args,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens,
            "sampling": request.sampling,
            "served_prompt_ids": served and served.prompt_ids,
            "served_ids": served and served.ids,
            "served_finish_reason": served and served.finish_reason,
            "served_by": served and served.target,
        }


def require_allowed(record: Record, settings: CollectConfig, *, expires_before: float | None) -> None:
    """Raises: Rejected for a record that policy leaves out, whatever is asked in it."""
    body = record.body
    if settings.consent == "recorded" and body.get("consent") != "recorded":
        raise Rejected("no_consent")
    if (reason := settings.left_out(body.get("tenant"))) is not None:
        raise Rejected(reason)
    if expires_before is not None:
        if record.ts is None:
            raise Rejected("cannot_expire")
        if record.ts < expires_before:
            raise Rejected("expired")
    if settings.served_models and body.get("model") not in settings.served_models:
        raise Rejected("unsupported_adapter")


def bucket_of(rank: str) -> int:
    """The bucket of a row by its keyed rank (hex): buckets follow each other as ranks do."""
    return int(rank[:4], 16) * NUM_BUCKETS >> 16


def read_bucket(folder: Path, parts: Iterable[int], bucket: int) -> list[pa.Table]:
    """The rows of one bucket, piece by piece."""
    tables = []
    for index in parts:
        with pa.OSFile(str(folder / f"collected-{index:05d}.arrow")) as file:
            tables.append(pa.Table.from_batches([pa.ipc.open_file(file).get_batch(bucket)], COLLECTED))
    return tables


@lru_cache(maxsize=1)
def _redactor(settings: RedactionConfig, key: SplitKey) -> Redactor:
    """One a process: it remembers what it found in texts that come again."""
    return Redactor(settings, key)


def _names_somebody(body: Mapping[str, Any]) -> bool:
    """Whether it says whose it was: not where the tap gave a request without a subject one of its own."""
    return bool(body.get("subject")) and not str(body["subject"]).startswith("request:")


def _told(record: Record, request: CanonicalRequest, served: ServedReply | None) -> str:
    """What a record says beside its prompt and subject, wherever it lies: two that say the same differ in nothing."""
    drawn = [request.temperature, request.top_p, request.max_tokens, request.sampling, request.slices]
    reply = served and [served.prompt_ids, served.ids, served.finish_reason, served.target]
    return json.dumps([str(record.body.get("id")), record.ts, drawn, reply, _accepted(record.body)])


def _accepted(body: Mapping[str, Any]) -> float | None:
    """Accepted drafts a step of the served reply, where the tap has its counts."""
    counts = body.get("acceptance")
    if not isinstance(counts, Mapping):
        return None
    drafts, accepted = counts.get("num_drafts"), counts.get("num_accepted_tokens")
    if not isinstance(drafts, int) or not isinstance(accepted, int) or drafts <= 0 or accepted < 0:
        return None
    return accepted / drafts


def _buckets(rows: Mapping[int, list[dict[str, Any]]]) -> Callable[[Path], None]:
    """A function that writes the rows, one record batch a bucket."""

    def write(path: Path) -> None:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, COLLECTED, options=options) as writer:
            for bucket in range(NUM_BUCKETS):
                writer.write_batch(pa.RecordBatch.from_pylist(rows.get(bucket, []), COLLECTED))

    return write


def _json(body: Any) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps(body, sort_keys=True)) and None
