"""What a capture will take, before its first row, and the room for it: old states go, within a budget of bytes and age.

States can be made again from the ids, so those of older caches are removed for new ones. A cache goes by rename, whole:
present still means complete. Never removed: what ``current.json`` names, the cache that is being built, and whatever
another process builds or reads at the time (it holds the folder's lock).
"""

import logging
import os
import shutil
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts import MANIFEST, HiddenStateCache, ResponseSet, find
from pipeline.config import Config
from pipeline.errors import ConfigError, SchemaError, StageError
from pipeline.schemas import STATES_FORMATS, bytes_per_state
from pipeline.stages import current_names, exclusive
from pipeline.staging import STAGED, forget
from pipeline.storage import remove_stored, require_writable, storage_of

logger = logging.getLogger("slipstream")

ROW_BYTES = 1024
"""A row's share of what is no state: its record batch's frame, its ids and names in the table."""
REMOVED = ".removed-"
QUEUE = "queue"
"""Under a root: the states that a streamed run has on their way."""
RESERVE_BYTES = 256 << 20
"""Left free on the disk in any case: other things write there too."""


@dataclass(frozen=True)
class Estimate:
    """What a capture comes to."""

    num_rows: int
    num_tokens: int
    num_bytes: int
    states_format: str
    bytes_by_format: dict[str, int]
    seconds: float | None
    """None where no earlier run tells the speed."""
    is_bound: bool
    """The replies are not there yet: no more than this."""

    def __str__(self) -> str:
        most = "at most " if self.is_bound else ""
        took = "" if self.seconds is None else f", about {_duration(self.seconds)}"
        return (
            f"{self.num_rows} rows, {most}{self.num_tokens} tokens, {most}{_size(self.num_bytes)} of states as "
            f"{self.states_format}{took}"
        )


def estimate(
    config: Config, *, num_rows: int, num_tokens: int, num_layers: int, hidden_size: int, is_bound: bool = False
) -> Estimate:
    """Bytes and seconds of capturing so many tokens, prompts and replies together.

    The seconds are those of the last ``regenerate`` under this root. ``is_bound``: the replies are still to come, and
    the tokens are the most they can be.
    """
    sizes = {
        form: num_tokens * bytes_per_state(num_layers, hidden_size, form) + num_rows * ROW_BYTES
        for form in STATES_FORMATS
    }
    form, speed = config.capture.states_format, tokens_per_s(config.root)
    seconds = num_tokens / speed if speed else None
    return Estimate(num_rows, num_tokens, sizes[form], form, sizes, seconds, is_bound)


def tokens_per_s(root: Path) -> float | None:
    """Prompt and reply tokens a second of the newest complete ResponseSet under a root; None where there is none."""
    for path in sorted(
        (Path(root) / ResponseSet.kind).glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime, reverse=True
    ):
        try:
            manifest = find(path.parent, ResponseSet)
        except SchemaError:  # of another version of Slipstream
            continue
        tokens = sum(manifest.counts.get(name, 0) for name in ("prompt_tokens", "response_tokens"))
        if manifest.seconds > 1 and tokens:
            return tokens / manifest.seconds
    return None


def make_room(config: Config, derivation: str, expected: Estimate) -> None:
    """Log what the cache of this derivation id will take, and have room for it before its first row.

    To be called once the cache's folder is known and before an engine starts; what an interrupted try has left in the
    folder counts. States that are moved to ``capture.storage`` need room for the parts in the making alone. Older
    caches are removed as ``capture.max_bytes``, ``capture.ttl_hours`` and the free disk ask for.

    Raises: StageError when there is not enough room all the same: what is needed, what is free, and what helps; or when
    that storage cannot be written.
    """
    logger.info("capture: %s", expected)
    root, limits = Path(config.root), (config.capture.max_bytes, config.capture.ttl_hours)
    root.mkdir(parents=True, exist_ok=True)
    keep = {*current_names(root).values(), derivation}
    need = max(0, _local_bytes(config, expected) - _bytes_of(root / HiddenStateCache.kind / derivation))
    caches = _caches(root, keep)
    interrupted = [cache for cache in caches if not (cache / MANIFEST).exists()]
    removable = sum(_bytes_of(cache) for cache in caches if cache not in interrupted)
    help_text = _help(expected, interrupted)
    _require_room(config, expected, need, removable, help_text)  # nothing goes for a capture that cannot be
    sweep(root, max_bytes=limits[0], ttl_hours=limits[1], need=need, keep=keep)
    _require_room(config, expected, need, 0, help_text)
    if config.capture.storage is not None and need:
        require_writable(storage_of(config.capture.storage, derivation))


def _require_room(config: Config, expected: Estimate, need: int, removable: int, help_text: str) -> None:
    root, max_bytes = Path(config.root), config.capture.max_bytes
    free = max(0, shutil.disk_usage(root).free - RESERVE_BYTES + removable)
    if need > free:
        raise StageError(
            f"capture needs {_size(need)} for {expected}; {root} has {_size(free)} for it, older states removed. "
            f"{help_text}"
        )
    kept = _bytes_of(root / HiddenStateCache.kind) - removable
    if not config.capture.stream:  # a stream's own queue is measured by what the caches leave
        kept += _bytes_of(root / QUEUE)
    if max_bytes is not None and kept + need > max_bytes:
        raise StageError(
            f"capture needs {_size(need)} for {expected}; capture.max_bytes = {max_bytes} leaves "
            f"{_size(max(0, max_bytes - kept))} beside the states that stay ({_size(kept)}). {help_text}; or a "
            "larger capture.max_bytes"
        )


def sweep(
    root: Path, *, max_bytes: int | None, ttl_hours: float | None, need: int = 0, keep: Iterable[str] = ()
) -> list[str]:
    """Remove states that are too old, and the oldest caches until ``need`` more bytes fit; the ids of what went."""
    root = Path(root)
    for leftover in (root / HiddenStateCache.kind).glob(f"{REMOVED}*"):
        cache = leftover.name.removeprefix(REMOVED).rsplit("-", 1)[0]
        remove_cache(leftover.with_name(cache), "a removal that was interrupted", leftover)
    gone = []
    for cache in _caches(root, keep):
        age_hours = (time.time() - _last_change(cache)) / 3600
        if ttl_hours is not None and age_hours > ttl_hours:
            why = f"{age_hours:.1f} h old, capture.ttl_hours = {ttl_hours:g}"
        elif (cache / MANIFEST).exists() and (lacking := _lacking(root, need, max_bytes)) > 0:
            why = f"the oldest, and {_size(lacking)} more are needed"
        else:
            continue
        if remove_cache(cache, why):
            gone.append(cache.name)
    return gone


def _lacking(root: Path, need: int, max_bytes: int | None) -> int:
    """Bytes that must go before ``need`` more fit."""
    lacking = need + RESERVE_BYTES - shutil.disk_usage(root).free if need else 0
    if max_bytes is not None:
        lacking = max(lacking, _bytes_of(root / HiddenStateCache.kind) + need - max_bytes)
    return lacking


def remove_cache(cache: Path, why: str, leftover: Path | None = None) -> bool:
    """Remove a cache, here and on storage, or what is left of one; whether it could be."""
    try:
        with exclusive(cache, "sweep"):
            if leftover is None:
                leftover = cache.with_name(f"{REMOVED}{cache.name}-{time.time_ns()}")
                cache.rename(leftover)
            size = _bytes_of(leftover)
            if not cache.exists():  # else it was made again, and what is on storage is its own
                for uri in remove_stored(leftover):
                    forget(uri, cache.parents[1] / STAGED)
            shutil.rmtree(leftover)
    except StageError:
        logger.info("states %s are in use and stay (%s)", cache.name, why)
        return False
    except (OSError, ValueError, ConfigError) as error:
        logger.warning("states %s: could not be removed (%s); the next sweep tries again", cache.name, error)
        return False
    logger.info("states %s: removed %s (%s)", cache.name, _size(size), why)
    return True


def _local_bytes(config: Config, expected: Estimate) -> int:
    """What is on the local disk at a time."""
    if config.capture.storage is None:
        return expected.num_bytes
    in_the_making = 2 * config.regenerate.num_engines * config.regenerate.rows_per_part
    return int(expected.num_bytes * min(1.0, in_the_making / max(1, expected.num_rows)))


def _help(expected: Estimate, interrupted: Iterable[Path]) -> str:
    helps = [
        f"capture.states_format = {form!r} ({_size(size)})".replace("'", '"')
        for form, size in expected.bytes_by_format.items()
        if size < expected.num_bytes
    ]
    helps.append("capture.stream = true (never more than capture.max_bytes at a time, each row trained on once)")
    helps.append("capture.storage = an object storage, more disk, or fewer prompts (collect.max_prompts)")
    if expected.is_bound:
        helps.append("a lower regenerate.max_tokens, since replies may be that long")
        helps.append("capture.in_pass = false, which counts the replies before it makes room, for a second pass")
    if left := [f"{cache} ({_size(_bytes_of(cache))})" for cache in interrupted]:
        helps.append(f"removing what interrupted runs have left, if they are not to go on: {', '.join(left)}")
    return "What helps: " + "; ".join(helps)


def _caches(root: Path, keep: Iterable[str]) -> list[Path]:
    """The folders of all caches but those to keep, whole and interrupted ones, the oldest first."""
    kept = set(keep)
    folders = (path for path in (root / HiddenStateCache.kind).glob("*") if path.is_dir())
    return sorted((path for path in folders if path.name not in kept and path.name[0] != "."), key=_last_change)


def _bytes_of(folder: Path) -> int:
    return sum(found.st_size for path in folder.rglob("*") if (found := _stat(path)) and stat.S_ISREG(found.st_mode))


def _last_change(cache: Path) -> float:
    """When a cache was completed; when an interrupted one was last written to."""
    if found := _stat(cache / MANIFEST):
        return found.st_mtime
    return max((found.st_mtime for path in (cache, *cache.glob("*")) if (found := _stat(path))), default=0.0)


def _stat(path: Path) -> os.stat_result | None:
    """None for what another process has removed meanwhile."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _size(num_bytes: int) -> str:
    amount = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
