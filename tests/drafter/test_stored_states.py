"""Training doesn't care where states are, and hardly in which form."""

import pytest
import torch
import toys
from safetensors.torch import load_file

from drafter import feed, train
from drafter.dataset import read_rows, staging_of
from pipeline.artifacts import commit
from pipeline.errors import ConfigError
from pipeline.stages import Artifact
from pipeline.storage import move_part, storage_of


def states(root, **changes):
    rows = [("train", toys.counting_row(3 * i, 18 + i, 3)) for i in range(6)]
    rows += [("validation", toys.counting_row(5 * i + 1, 20, 4)) for i in range(3)]
    return toys.cache(root, rows, shard_bytes=1, **changes)


def moved(root):
    """The same cache with its states on storage, which hold more than the staging budget."""
    cache = states(root)
    (root / "bucket").mkdir()
    uri = storage_of(f"file://{root}/bucket", cache.id)
    move_part(cache.folder, 0, uri)
    sizes = [shard.bytes for shard in cache.manifest.shards if shard.path.endswith(".arrow")]
    budget = 4 * max(sizes)
    assert sum(sizes) > 2 * budget
    manifest = cache.manifest.model_copy(update={"storage": uri, "config": {"staging_bytes": budget}})
    commit(cache.folder, manifest)
    return Artifact(cache.folder, manifest)


def trained(root, cache):
    toys.target_folder(root / "target")
    config = toys.config(root)
    capture = config.capture.model_copy(update=cache.manifest.config)
    artifact = train.run(config.model_copy(update={"capture": capture}), cache, start=None, role="champion")
    losses = [point["loss"] for point in artifact.manifest.curve if "loss" in point]
    return load_file(artifact.folder / "model.safetensors"), losses


def test_states_on_storage_train_the_same_drafter_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(feed, "window_rows", len)  # the budget would narrow it: another order
    weights, losses = trained(tmp_path / "disk", states(tmp_path / "disk"))
    stored_weights, stored_losses = trained(tmp_path / "storage", moved(tmp_path / "storage"))
    assert losses == stored_losses
    assert all(torch.equal(weights[name], stored_weights[name]) for name in weights)
    assert losses


def test_the_staging_budget_is_the_one_that_is_configured_now(tmp_path):
    cache = moved(tmp_path)
    toys.target_folder(tmp_path / "target")
    config = toys.config(tmp_path)
    config = config.model_copy(update={"capture": config.capture.model_copy(update={"staging_bytes": 1})})
    with pytest.raises(ConfigError, match="staging_bytes = 1: less than the largest"):
        train.run(config, cache, start=None, role="champion")


def test_the_8_bit_form_trains_a_drafter_that_is_about_as_good(tmp_path):
    _, losses = trained(tmp_path / "bf16", states(tmp_path / "bf16"))
    _, packed = trained(tmp_path / "int8", states(tmp_path / "int8", states_format="int8"))
    assert packed != losses and packed == pytest.approx(losses, rel=0.02)


def test_a_feed_has_stored_states_fetched_before_their_step(tmp_path):
    rows = read_rows(moved(tmp_path), "train")
    dealt = feed.CachedFeed(rows, toys.config(tmp_path).train, block_size=4)
    asked = []
    staging_of(rows).ahead = lambda names: asked.append(list(names))
    steps = [[deal.row.states.name for deal in dealt.rows_of(step)] for step in range(12)]
    assert asked[0] == [name for step in steps[1:9] for name in step]
    assert asked[3] == [name for step in steps[4:12] for name in step]
