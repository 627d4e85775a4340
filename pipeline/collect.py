"""Traffic log → PromptSet: consent, redaction, one canonical form, duplicates counted, split for good, sampled.

Files are read in pieces and rows are merged in groups (pipeline/collected.py, pipeline/chosen.py), each a part that is
committed whole; what is in between lies in the artifact's ``work`` folder, and goes when the rows are there.
"""

import hashlib
import json
import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline import collect_report, stages
from pipeline.artifacts import HiddenStateCache, PromptSet, ResponseSet, describe_file, package_versions, write_durably
from pipeline.chosen import Choosing, groups_for
from pipeline.collected import BY_POLICY, Reading
from pipeline.config import Config
from pipeline.disk import QUEUE
from pipeline.errors import StageError
from pipeline.redaction import Redactor
from pipeline.schemas import SPLITS
from pipeline.shards import REJECTS, PartWriter, part_path, read_part
from pipeline.sources import Source, find_sources, pieces
from pipeline.sources.stores import is_open
from pipeline.split import SplitKey, load_key, split_of
from pipeline.tally import Tally, total
from pipeline.tombstones import read_tombstones
from pipeline.windows import Pinned, Window, close_window, open_window
from pipeline.workers import Alone, Workers

STAGE, VERSION = "collect", 7
WORK = "work"
"""Folder of an artifact in the making: texts as they were read, and what prompts are compared by."""
_EXECUTION = ("sources", "window", "redaction", "max_reject_share", "piece_bytes")

logger = logging.getLogger("slipstream")


def run(
    config: Config, *, key: SplitKey | None = None, workers: Workers | None = None, now: datetime | None = None
) -> stages.Artifact[PromptSet]:
    """The prompts of the configured sources and window. The same records give the same rows, in whatever order they
    lie, and however they are cut.

    Raises: ConfigError for settings that cannot work, such as names to redact and no model; StageError when too many
    records are rejected, or too few people's are left.
    """
    settings = config.collect
    _close_folders(config.root)
    key = key or load_key(config)
    split_of(key, "", gate_share=settings.gate_share, validation_share=settings.validation_share)
    redaction = "none" if settings.redaction == "none" else Redactor(settings.redaction, key).meaning
    erased = sorted(one.subject for one in read_tombstones(config.root))
    sources = find_sources(settings.sources)
    of = _names(settings.sources)
    pins = [_pin(source) for source in sources]
    now, ttl_days = now or datetime.now(UTC), config.retention.ttl_days
    window = open_window(config.root, settings.window, pins, now=now, of=of)
    oldest = None if ttl_days is None else (now - timedelta(days=ttl_days)).timestamp()

    def build(folder: Path, derivation: str) -> PromptSet:
        work = folder / WORK / "read"
        reading = Reading(settings, key, window, frozenset(erased), work, pieces=(), expires_before=oldest)
        return _Build(reading, _as_pinned(sources, window), workers or Alone(), folder, derivation).run()

    artifact = stages.complete(
        config.root,
        PromptSet,
        stage=STAGE,
        version=VERSION,
        parents={},
        meaning={
            "sources": [pin.meaning for pin in window.sources],
            "window": [window.start, window.end, sorted(window.seen.items())],
            "split_key": key.check,
            # Not who is erased, nor what expired: what was made before has lost such rows, and is what the same work
            # would give.
            "redaction": redaction,
            **settings.model_dump(mode="json", exclude=set(_EXECUTION)),
        },
        build=build,
    )
    shutil.rmtree(artifact.folder / WORK, ignore_errors=True)
    close_window(config.root, settings.window, window, of=of, prompts=artifact.id)
    return artifact


def _close_folders(root: Path) -> None:
    """What holds people's words is for its owner alone; folders that are there already stay as somebody set them."""
    root.mkdir(parents=True, exist_ok=True)
    for kind in (PromptSet.kind, ResponseSet.kind, HiddenStateCache.kind, QUEUE):
        (root / kind).mkdir(mode=0o700, exist_ok=True)


class _Build:
    """The passes of one run, each over parts that workers commit."""

    def __init__(self, reading: Reading, sources: Sequence[Source], workers: Workers, folder: Path, derivation: str):
        self.settings, self.workers = reading.settings, workers
        self.folder, self.derivation = folder, derivation
        self.reading = replace(reading, pieces=tuple(pieces(sources, self.settings.piece_bytes)))
        self.window = reading.window

    def run(self) -> PromptSet:
        """The manifest of the rows, which are all written."""
        tally, rejects = self._read()
        self._require_few_rejects(tally, [reject for reject in rejects if reject["reason"] not in BY_POLICY])
        choosing = Choosing(
            self.settings,
            self.reading.key,
            read=self.reading.folder,
            num_pieces=len(self.reading.pieces),
            num_groups=groups_for(tally.kept),
            work=self.folder / WORK,
            folder=self.folder,
        )
        groups = range(choosing.num_groups)
        distinct = sum(self.workers.run(choosing.merge, groups))
        logger.info("collect: %d records kept, %d distinct prompts", tally.kept, distinct)
        choosing.find_common()
        if self.settings.near_similarity != "off":
            for _ in self.workers.run(choosing.sketch, groups):
                pass
        chosen = choosing.choose()
        chosen["counts"]["repeated_records"] = tally.kept - chosen["counts"].pop("served")
        for _ in self.workers.run(choosing.write, groups):
            pass
        return self._manifest(tally, rejects, chosen, distinct, choosing.num_groups)

    def _read(self) -> tuple[Tally, list[dict[str, Any]]]:
        """Read every piece; what became of all records, and the rejects in the order of files and lines."""
        folder, num = self.reading.folder, len(self.reading.pieces)
        PartWriter(folder)
        todo = [index for index in range(num) if not part_path(folder, index).exists()]
        records = 0
        for number, done in enumerate(self.workers.run(self.reading.read, todo), start=1):
            records += done
            logger.info("collect: %d of %d pieces read, %d records", num - len(todo) + number, num, records)
        tally = total((folder / f"tally-{index:05d}.json").read_bytes() for index in range(num))
        rejects = [reject for index in range(num) for reject in read_part(part_path(folder, index)).rejects]
        order = lambda reject: (reject["file"], reject["line"], reject.get("part", 0))  # noqa: E731
        return tally, sorted(rejects, key=order)

    def _require_few_rejects(self, tally: Tally, damaged: Sequence[dict[str, Any]]) -> None:
        reasons, limit = tally.dropped, self.settings.max_reject_share
        meant = tally.kept + len(damaged)  # what policy leaves out is no measure of a log's health
        if len(damaged) > limit * meant:
            most = Counter(reject["reason"] for reject in damaged).most_common(1)[0][0]
            worst = next(reject for reject in damaged if reject["reason"] == most)
            raise StageError(
                f"collect: {len(damaged)} of {meant} records rejected ({_listed(reasons)}), more than "
                f"collect.max_reject_share = {limit}; the first {worst['reason']} is {worst['file']}:{worst['line']}. "
                f"{HINTS.get(worst['reason'], 'Repair the log, or raise the limit')}"
            )
        if not tally.kept:
            helps = 'records need consent = "recorded", or collect.consent = "allow_all" typed out'
            if reasons["before_window"] + reasons["after_window"] == tally.records:
                helps = f"none was served from {self.window}; the next window takes what comes"
            raise StageError(
                f"collect: none of {tally.records} records can be used ({_listed(reasons) or 'no records'}); {helps}"
            )

    def _manifest(
        self, tally: Tally, rejects: Sequence[dict[str, Any]], chosen: dict[str, Any], distinct: int, num_groups: int
    ) -> PromptSet:
        writer = PartWriter(self.folder)
        shards, _, _ = writer.finish(num_groups)
        report = collect_report.as_json(tally, chosen, window=str(self.window))
        bodies = {
            REJECTS: "".join(json.dumps(reject, sort_keys=True) + "\n" for reject in rejects),
            collect_report.JSON: json.dumps(report, indent=1, sort_keys=True, ensure_ascii=False) + "\n",
            collect_report.PAGE: collect_report.page(report, title=self.derivation),
        }
        for name, body in bodies.items():
            write_durably(self.folder / name, body.encode())
        rows = [shard for shard in shards if shard.path.endswith(".parquet")]
        splits, with_ids = Counter(), 0
        for shard in rows:
            table = pq.read_table(self.folder / shard.path, columns=["split", "served_finish_reason"])
            splits.update(table["split"].to_pylist())
            with_ids += len(table) - table["served_finish_reason"].null_count
        counts = {
            "records": tally.records,
            "kept_records": tally.kept,
            "distinct_prompts": distinct,
            "prompts": sum(shard.rows for shard in rows),
            **{split: splits[split] for split in SPLITS},
            "with_served_ids": with_ids,
            **{name: count for name, count in chosen["counts"].items() if name not in ("distinct", "kept")},
            **{f"redacted_{kind}": count for kind, count in tally.redacted.items()},
        }
        logger.info("collect: %s; rejected: %s", _listed(counts), _listed(tally.dropped) or "none")
        if dropped := tally.dropped["no_consent"]:
            logger.warning("collect: %d records carry no consent. %s", dropped, _CONSENT)
        logger.info("collect: %s", self.folder / collect_report.PAGE)
        files = [describe_file(self.folder / name, rows=len(rejects) * (name == REJECTS)) for name in bodies]
        return PromptSet(
            derivation_id=self.derivation,
            parents={},
            shards=(*rows, *files),
            config=self.settings.model_dump(mode="json"),
            versions=package_versions(),
            counts=counts,
            rejects=dict(tally.dropped),
        )


_CONSENT = (
    "Where all users of a source agreed, say so for that source: "
    'collect.sources = [{path = ..., consent = "all_users_agreed"}]'
)
# What helps where more records of a reason are rejected than the limit allows.
HINTS = {
    "not_json": "Repair the log, or name its format: collect.sources = [{path = ..., format = ...}]",
    "malformed_messages": "If these are no chat requests, name the log's format: collect.sources = [{path, format}]",
    "no_time": 'Windows need times: repair the log, or set collect.window.kind = "all"',
    "malformed_time": 'Windows need times: repair the log, or set collect.window.kind = "all"',
    "truncated_at_source": "A proxy shortens what it logs: raise its limit (LiteLLM: MAX_STRING_LENGTH_PROMPT_IN_DB)",
    "pattern_timeout": "A custom pattern takes too long: simplify it, or raise collect.redaction.pattern_timeout_s",
}


def _pin(source: Source) -> Pinned:
    name, sha256, *how = source.meaning
    told = how[0] if how else {}
    return Pinned(
        name=name,
        size_bytes=source.size_bytes,
        sha256=sha256,
        how=told,
        is_packed=source.is_compressed,
        is_open=is_open(source.location),
    )


def _as_pinned(sources: Sequence[Source], window: Window) -> list[Source]:
    """The sources as far as they had come when the window was opened.

    Raises: StageError when one is gone, or no longer begins as it did.
    """
    found = {source.name: source for source in sources}
    cut = []
    for pin in window.sources:
        source = found.get(pin.name)
        if source is None or source.size_bytes < pin.size_bytes:
            what = "is gone" if source is None else f"has {source.size_bytes} bytes, and had {pin.size_bytes}"
            raise StageError(
                f"collect: {pin.name} {what} since the window {window} was opened, and its rows were never finished. "
                "Restore it, or remove the window's file under windows/ to open it anew with what is there"
            )
        cut.append(source if source.sha256 == pin.sha256 else source.cut(pin.size_bytes))
        if cut[-1].sha256 != pin.sha256:
            raise StageError(
                f"collect: the first {pin.size_bytes} bytes of {pin.name} are others than when the window {window} was "
                "opened; logs may grow, not change. Remove the window's file under windows/ to open it anew"
            )
    return cut


def _names(entries: Sequence[Any]) -> str:
    """Tells apart what windows are of: 8 hex digits of the sources as they are configured."""
    told = [entry.model_dump(mode="json") if hasattr(entry, "model_dump") else str(entry) for entry in entries]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
