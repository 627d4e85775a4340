"""The 8-bit form against bf16: its bytes, and what the same training makes of the same states in either form."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from drafter.checkpoint import load_drafter
from drafter.dataset import read_rows
from drafter.frozen import read_frozen
from drafter.train import run
from drafter.walk import walk
from pipeline import stages
from pipeline.artifacts import DrafterCheckpoint, HiddenStateCache
from pipeline.config import Config
from pipeline.schemas import CACHE
from pipeline.shards import PartWriter, write_table
from pipeline.stages import Artifact
from pipeline.states import StatesFile, StateShards


def rewritten(config: Config, cache: Artifact[HiddenStateCache], states_format: str) -> Artifact[HiddenStateCache]:
    """The same rows with their bf16 states in another form."""
    manifest = cache.manifest

    def build(folder: Path, derivation: str) -> HiddenStateCache:
        writer = PartWriter(folder)
        tables = [shard for shard in manifest.shards if shard.path.endswith(".parquet")]
        for index, shard in enumerate(tables):
            rows = pq.read_table(cache.folder / shard.path).to_pylist()
            shape = {"num_layers": _num_layers(cache), "hidden_size": manifest.hidden_size}
            with StateShards(folder, index, **shape, states_format=states_format) as states:
                for row in rows:
                    words = StatesFile(cache.folder / row["states_file"]).words(row["states_batch"])
                    kept = states.add(row["row_id"], words, num_states=row["num_states"])
                    row |= {"states_file": kept.states_file, "states_batch": kept.states_batch, "digest": kept.digest}
                table = pa.Table.from_pylist(rows, schema=CACHE)
                writer.commit(index, {**states.files(), shard.path: (len(rows), write_table(table))})
        shards, _, _ = writer.finish(len(tables))
        update = {"derivation_id": derivation, "shards": shards, "states_format": states_format}
        return manifest.model_copy(update=update)

    meaning = {"states_format": states_format}
    parents = {"states": cache.id}
    return stages.complete(
        config.root, HiddenStateCache, stage="rewrite", version=1, parents=parents, meaning=meaning, build=build
    )


def states_bytes(cache: Artifact[HiddenStateCache]) -> int:
    """Bytes of a cache's states files."""
    return sum(shard.bytes for shard in cache.manifest.shards if shard.path.endswith(".arrow"))


def trained(
    config: Config, states: Artifact[HiddenStateCache], *, start: Artifact[DrafterCheckpoint] | None, seed: int
) -> Artifact[DrafterCheckpoint]:
    """A drafter trained on these states; the seed decides the order of the rows and the anchors."""
    settings = config.model_copy(update={"train": config.train.model_copy(update={"seed": seed})})
    return run(settings, states, start=start, role="challenger")


def walked(config: Config, drafter: Artifact[DrafterCheckpoint], states: Artifact[HiddenStateCache]) -> float:
    """Accepted drafts a step over the gate rows of a cache; of the same one for all, the forms differ in training."""
    counts, _ = walk(load_drafter(drafter.folder)[0], read_frozen(config.target.model), read_rows(states, "gate"))
    return counts.num_accepted_tokens / counts.num_drafts


def _num_layers(cache: Artifact[HiddenStateCache]) -> int:
    return len(cache.manifest.fingerprint.target_layer_ids)
