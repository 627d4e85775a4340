"""Which distinct prompts become rows, known once all of them are: near-duplicates, subjects, and the sample.

Passes over groups of buckets and steps between them, each committed, so that a killed run goes on with the next:

    distinct-07.arrow      (a task a group)  equal records merged into rows, with their split
    common.json            (one step)        what prompts of a route and tenant share; tenants that are left out
    sketches-07.arrow      (a task a group)  signature and pieces of every row, for near-duplicates
    chosen.arrow, .json    (one step)        the rows that stay, and what each stands for
    prompts-00007.parquet  (a task a group)  those rows, whole
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.artifacts import write_durably
from pipeline.collect_config import CollectConfig
from pipeline.collected import NUM_BUCKETS, read_bucket
from pipeline.distinct import merged, without_repeats
from pipeline.near_duplicates import NearDuplicates, near_duplicates
from pipeline.sample import Sample, bottom, draw, estimated_tokens, inclusion_probability, stratum_of
from pipeline.schemas import COLLECTED, PROMPTS
from pipeline.shards import commit_part, part_path, write_table
from pipeline.shingles import Boilerplate, find_boilerplate, sampled_prompts
from pipeline.sketches import Sketches, Sketching, rank_of, sketch, thread_of, write_sketches
from pipeline.split import SplitKey, split_of, strongest
from pipeline.subjects import Subjects, require_subjects

DISTINCT = pa.schema(
    [*COLLECTED, ("split", pa.string()), ("tenant", pa.string()), ("group", pa.string()), ("num_tokens", pa.int64())]
)
_CHOSEN = ("weight", "inclusion_probability", "last_seen", "subjects", "subject_weights")
FEW_SUBJECTS = "few_subjects"
_SMALL = (
    "row_id", "rank", "split", "tenant", "person", "slices", "num_tokens", "accepted_per_step", "weight", "served",
    "last_seen", "subjects", "subject_weights",
)  # fmt: skip
_ROWS_PER_GROUP = 20_000
_LENGTHS = (64, 256, 1024, 4096, 16384)  # prompt tokens: upper ends of the histogram's bars


@dataclass(frozen=True)
class Choosing:
    """What groups of buckets are worked on by. Every method does one part, and nothing where it is done."""

    settings: CollectConfig
    key: SplitKey
    read: Path
    """Folder of the pieces that were read."""
    num_pieces: int
    num_groups: int
    work: Path
    folder: Path
    """The artifact's own, where the rows go."""

    def merge(self, group: int) -> int:
        """Equal records of a group become rows; their number."""
        path = self._distinct(group)
        if not path.exists():
            first, end = (NUM_BUCKETS * g // self.num_groups for g in (group, group + 1))
            pieces = range(self.num_pieces)
            read = [one for bucket in range(first, end) for one in read_bucket(self.read, pieces, bucket)]
            table = merged([without_repeats(pa.concat_tables(read))])
            _write(path, self._described(table))
        return _num_rows(path)

    def find_common(self) -> None:
        """What the prompts of each route and tenant share, and which tenants have too few subjects."""
        if (path := self.work / "common.json").exists():
            return
        subjects = Subjects()
        groups, threads, ranks = [], [], []
        for table in self._groups(["row_id", "conversation", "messages", "tenant", "person", "group"]):
            for row in table.to_pylist():
                subjects.add(row["tenant"], row["person"])
                groups.append(row["group"])
                threads.append(thread_of(self.key, row["conversation"], row["messages"]))
                ranks.append(rank_of(self.key, row["row_id"]))
        names, codes = np.unique(np.array(groups, str), return_inverse=True)
        picked = sampled_prompts(codes, np.array(threads, np.uint64), np.array(ranks, np.uint64))
        messages = self._picked(picked)
        samples: dict[str, list[str]] = {}
        for place in picked.tolist():
            samples.setdefault(str(names[codes[place]]), []).append(messages[place])
        found = find_boilerplate(samples, seed=Sketching(self.key, Boilerplate()).seed)
        left_out = subjects.too_small(min_subjects=self.settings.min_subjects)
        body = {
            "pieces": found.pieces.tolist(),
            "groups": sorted(found.groups),
            "left_out": sorted(left_out),
            "is_shared": subjects.is_shared,
        }
        write_durably(path, json.dumps(body).encode())

    def sketch(self, group: int) -> int:
        """Signatures of the rows of a group that may stay; the group."""
        path = self.work / f"sketches-{group:02d}.arrow"
        if not path.exists():
            names = ["row_id", "conversation", "split", "messages", "group", "tenant"]
            table = self._read(group, names)
            rows = table.filter(pc.invert(pc.is_in(table["tenant"], self._left_out))).to_pylist()
            common = Boilerplate(np.array(self._common["pieces"], np.uint32), frozenset(self._common["groups"]))
            write_sketches(path, sketch(rows, Sketching(self.key, common)))
        return group

    def choose(self) -> dict[str, Any]:
        """Decide which rows stay: counts by what became of all rows, and rows by stratum, for the report.

        Raises: StageError where too few people's prompts, or mostly one's, are left; or no prompt fits the budget.
        """
        told = self.work / "chosen.json"
        if not told.exists():
            rows, counts = self._leaders()
            sample = self._drawn(rows)
            kept = rows.take(pa.array(sample.rows))
            self._require_subjects(kept)  # a small budget may leave few of many
            probabilities = [
                inclusion_probability(weight, served, sampled)
                for weight, served, sampled in zip(
                    kept["weight"].to_pylist(), kept["served"].to_pylist(), sample.probabilities.tolist(), strict=True
                )
            ]
            kept = kept.append_column("inclusion_probability", pa.array(probabilities, pa.float64()))
            _write(self.work / "chosen.arrow", kept.select(["row_id", *_CHOSEN]))
            counts |= {"not_sampled": len(rows) - len(kept), "kept": len(kept)}
            by = self.settings.sample_by[: sample.num_dimensions]
            strata = [{"stratum": list(key), "rows": of, "kept": n} for key, (of, n) in sorted(sample.strata.items())]
            told_of = {"counts": counts, "sampled_by": ["split", *by], "prompt_tokens": sample.num_tokens}
            lengths = histogram(kept["num_tokens"].to_pylist())
            write_durably(told, json.dumps({**told_of, "strata": strata, "lengths": lengths}).encode())
        return json.loads(told.read_text())

    def write(self, group: int) -> int:
        """The rows of a group that were chosen, in the order of their ranks, as a part of the artifact."""
        if part_path(self.folder, group).exists():
            return 0
        chosen = _read(self.work / "chosen.arrow")
        ids = chosen["row_id"].combine_chunks()
        rows = self._read(group)
        rows = rows.filter(pc.is_in(rows["row_id"], ids)).sort_by("rank")
        found = chosen.take(pc.index_in(rows["row_id"].combine_chunks(), ids))
        columns = [(found if name in _CHOSEN else rows)[name] for name in PROMPTS.names]
        table = pa.table(columns, schema=PROMPTS)
        commit_part(self.folder, group, {f"prompts-{group:05d}.parquet": (len(table), write_table(table))})
        return len(table)

    def _leaders(self) -> tuple[pa.Table, Counter[str]]:
        """The rows that stand for themselves and for those near them, and counts by what became of all."""
        near = self._near()  # before the rows: both at once would be the most memory of the run
        counts, tables = Counter(), []
        for table in self._groups(_SMALL):
            counts["distinct"] += len(table)
            counts["served"] += pc.sum(table["weight"]).as_py() or 0
            tables.append(table.filter(pc.invert(pc.is_in(table["tenant"], self._left_out))))
        rows = pa.concat_tables(tables)
        del tables
        counts[FEW_SUBJECTS] = counts["distinct"] - len(rows)
        if near is None:
            return rows.combine_chunks(), counts
        counts.update(near.counts())
        sizes = np.bincount(near.leaders[near.leaders >= 0], minlength=len(rows))
        alone = (near.leaders >= 0) & (sizes[near.leaders] == 1)
        clusters = (near.leaders >= 0) & ~alone
        columns = {"leader": pa.array(near.leaders[clusters]), "fate": pa.array(near.fates[clusters])}
        several = rows.filter(pa.array(clusters))
        for name, column in columns.items():
            several = several.append_column(name, column)
        several = merged([several], order=("leader", "fate")).drop(list(columns))
        return pa.concat_tables([rows.filter(pa.array(alone)), several]).combine_chunks(), counts

    def _near(self) -> NearDuplicates | None:
        if self.settings.near_similarity == "off":
            return None
        sketches = Sketches([self.work / f"sketches-{group:02d}.arrow" for group in range(self.num_groups)])
        return near_duplicates(sketches, similarity=self.settings.near_similarity, scratch=self.work)

    def _require_subjects(self, rows: pa.Table) -> None:
        train = Subjects()
        of_train = rows.filter(pc.equal(rows["split"], "train"))
        for tenant, person in zip(of_train["tenant"].to_pylist(), of_train["person"].to_pylist(), strict=True):
            train.add(tenant, person)
        settings = self.settings
        require_subjects(
            train,
            min_subjects=settings.min_subjects,
            max_subject_share=settings.max_subject_share,
            is_shared=self._common["is_shared"],
        )

    def _drawn(self, rows: pa.Table) -> Sample:
        """The rows that the budgets keep, by their places."""
        settings = self.settings
        gate, validation = settings.gate_share, settings.validation_share
        names = ("split", "slices", "num_tokens", "accepted_per_step")
        keys = [
            stratum_of(split, slices, num_tokens=tokens, accepted_per_step=accepted, by=settings.sample_by)
            for split, slices, tokens, accepted in zip(*(rows[name].to_pylist() for name in names), strict=True)
        ]
        ranks = np.array([int(rank[:16], 16) for rank in rows["rank"].to_pylist()], np.uint64)
        tokens = rows["num_tokens"].to_numpy()
        strata = bottom(keys, ranks, np.arange(len(rows)), tokens, limit=settings.max_prompts)
        return draw(
            strata,
            shares={"gate": gate, "validation": validation, "train": 1 - gate - validation},
            allocation=settings.allocation,
            max_prompts=settings.max_prompts,
            max_prompt_tokens=settings.max_prompt_tokens,
        )

    @cached_property
    def _common(self) -> dict[str, Any]:
        return json.loads((self.work / "common.json").read_text())

    @cached_property
    def _left_out(self) -> pa.Array:
        return pa.array(self._common["left_out"], pa.string())

    def _picked(self, places: np.ndarray) -> dict[int, str]:
        """Place among all rows → its messages."""
        wanted, found, first = set(places.tolist()), {}, 0
        for table in self._groups(["messages"]):
            here = [place for place in range(first, first + len(table)) if place in wanted]
            texts = table["messages"].take(pa.array([place - first for place in here], pa.int64())).to_pylist()
            found.update(zip(here, texts, strict=True))
            first += len(table)
        return found

    def _described(self, table: pa.Table) -> pa.Table:
        """With each row's split, tenant, group (tenant and route) and prompt tokens."""
        shares = {"gate_share": self.settings.gate_share, "validation_share": self.settings.validation_share}
        slices = [json.loads(one) for one in table["slices"].to_pylist()]
        prompts = zip(*(table[n].to_pylist() for n in ("served_prompt_ids", "messages", "tools")), strict=True)
        columns = [
            [strongest(split_of(self.key, one, **shares) for one in asked) for asked in table["subjects"].to_pylist()],
            [one.get("tenant", "") for one in slices],
            [f"{one.get('tenant', '')}\0{one.get('route', '')}" for one in slices],
            [len(ids) if ids else estimated_tokens(messages, tools) for ids, messages, tools in prompts],
        ]
        kinds = (DISTINCT.field(name).type for name in ("split", "tenant", "group", "num_tokens"))
        return pa.table(
            [*table.columns, *(pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True))],
            schema=DISTINCT,
        )

    def _groups(self, names: Sequence[str]) -> Iterator[pa.Table]:
        for group in range(self.num_groups):
            yield self._read(group, names)

    def _read(self, group: int, names: Sequence[str] | None = None) -> pa.Table:
        return _read(self._distinct(group), names)

    def _distinct(self, group: int) -> Path:
        return self.work / f"distinct-{group:02d}.arrow"


def histogram(num_tokens: Sequence[int]) -> dict[str, int]:
    """Rows by the tokens of their prompts."""
    names = [*(f"≤{end}" for end in _LENGTHS), f">{_LENGTHS[-1]}"]
    found = dict.fromkeys(names, 0)
    for tokens in num_tokens:
        found[names[bisect_left(_LENGTHS, tokens)]] += 1
    return found


def groups_for(num_records: int) -> int:
    """Into how many groups so many records are dealt: by their number alone, so that no cutting of files matters."""
    groups = 1
    while groups < NUM_BUCKETS and num_records > groups * _ROWS_PER_GROUP:
        groups *= 2
    return groups


def _write(path: Path, table: pa.Table) -> None:
    """Write a table as an Arrow file, whole or not at all."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    write_durably(path, sink.getvalue())


def _read(path: Path, names: Sequence[str] | None = None) -> pa.Table:
    schema = _schema(path)
    options = pa.ipc.IpcReadOptions(included_fields=None if names is None else [schema.names.index(n) for n in names])
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file, options=options).read_all()
    return table if names is None else table.select(names)


def _schema(path: Path) -> pa.Schema:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).schema


def _num_rows(path: Path) -> int:
    return len(_read(path, ["row_id"]))
