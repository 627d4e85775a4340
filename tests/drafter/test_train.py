import json
import math
import shutil
from dataclasses import replace

import pytest
import tiny
import torch
import toys

from drafter import loop, measurement, resume, start, train, trainer
from drafter.checkpoint import load_drafter, save_drafter
from drafter.deal import Deal
from drafter.feed import CachedFeed
from drafter.measurement import Validation
from drafter.optim import Optimizer
from drafter.precision import compute_dtype
from drafter.step import backward
from drafter.vocabulary import Candidates
from drafter.walk import WalkCounts, walk
from pipeline.artifacts import describe_file
from pipeline.errors import ConfigError, DivergedError, FingerprintError, StageError
from pipeline.stages import Artifact


def states(root, **changes):
    rows = [("train", toys.counting_row(3 * i, 18 + i, 3)) for i in range(6)]
    rows += [("validation", toys.counting_row(5 * i + 1, 20, 4)) for i in range(3)]
    return toys.cache(root, rows, **changes)


@pytest.fixture
def site(tmp_path):
    toys.target_folder(tmp_path / "target")
    return tmp_path


def measured(manifest):
    """The curve without its clock."""
    clock = ("blocks_per_s", "tokens_per_s", "seconds", "remaining_s", "peak_memory_mb")
    return [{k: v for k, v in point.items() if k not in clock} for point in manifest.curve]


def run(root, **settings):
    return train.run(toys.config(root, **settings), states(root), start=None, role="champion")


def train_rows(model, frozen, rows, config, folder):
    """Train on these rows, and walk over them."""
    feed = CachedFeed(rows, config, block_size=model.shape.block_size)
    return loop.train_loop(model, frozen, feed, Validation(rows), config, folder)


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


@pytest.mark.parametrize("killed_after", [4, 5, 7], ids=["at a checkpoint", "between checkpoints", "near the end"])
def test_an_interrupted_run_ends_as_an_uninterrupted_one(killed_after, site, monkeypatch):
    taken, step = [], Optimizer.step

    def stepping(self, scale, number):
        step(self, scale, number)
        taken.append(scale)
        if len(taken) == killed_after + 1:
            raise Killed

    other = toys.target_folder(site / "other" / "target").parent
    straight = run(other, warmup_share=0.25, muon_turns=3)
    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", stepping)
        with pytest.raises(Killed):
            run(site, warmup_share=0.25, muon_turns=3)
        resumed = run(site, warmup_share=0.25, muon_turns=3)
    require_same(resumed, straight)
    # warm-up of 2 steps, then a cosine over 6: the rate goes on where the checkpoint was, it is not warmed up again
    scales = [0.5, 1.0] + [(1 + math.cos(math.pi * i / 6)) / 2 for i in range(6)]
    last_checkpoint = killed_after // 2 * 2
    assert taken == pytest.approx(scales[: killed_after + 1] + scales[last_checkpoint:])


def test_a_run_killed_after_its_best_step_is_kept_but_before_the_checkpoint_ends_the_same(site, monkeypatch):
    other = toys.target_folder(site / "other" / "target").parent
    straight = run(other)
    saves, save = [], loop.save

    def saving(*arguments):
        saves.append(1)
        if len(saves) == 3:
            raise Killed
        save(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save", saving)
        with pytest.raises(Killed):
            run(site)
    require_same(run(site), straight)


def test_best_weights_of_a_killed_try_never_pass_for_those_of_an_earlier_step(tmp_path, monkeypatch):
    # Step 2 is the best; a try is killed when it has kept step 4 as better, which the next one finds to be worse.
    model, frozen = toys.drafter(dtype=torch.float32), toys.frozen(dtype=torch.float32)
    rows, config = [toys.counting_row(3 * i, 18, 3) for i in range(3)], toys.config(tmp_path, steps=6).train
    lengths, weights, saves, save = iter([0, 4, 9, 3, 2]), [], [], loop.save

    def scripted(model, frozen, rows):
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return WalkCounts(1, 20, 10, next(lengths), [0, 0, 0]), {}

    def saving(*arguments):
        saves.append(1)
        if len(saves) == 2:
            raise Killed
        save(*arguments)

    monkeypatch.setattr(measurement, "walk", scripted)
    monkeypatch.setattr(loop, "save", saving)
    with pytest.raises(Killed):
        train_rows(model, frozen, rows, config, tmp_path)
    progress = train_rows(toys.drafter(dtype=torch.float32), frozen, rows, config, tmp_path)
    best = toys.drafter(seed=3, dtype=torch.float32)
    resume.load_best(tmp_path, best, progress)
    assert progress.best["step"] == 2 and all(torch.equal(p, weights[1][name]) for name, p in best.named_parameters())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(lambda folder: (folder / "resume.pt").write_bytes((folder / "resume.pt").read_bytes()[:900]), "cannot be read"),
     (lambda folder: (folder / "resume.pt").write_bytes(b""), "cannot be read"),
     (lambda folder: next(folder.glob("best-*.pt")).unlink(), r"best-\d+\.pt: missing")],
    ids=["cut", "empty", "without its best weights"],
)  # fmt: skip
def test_what_an_interrupted_run_left_and_cannot_be_used_is_named_with_the_next_step(spoil, words, tmp_path):
    model, frozen = toys.drafter(dtype=torch.float32), toys.frozen(dtype=torch.float32)
    rows, config = [toys.counting_row(3, 18, 3)], toys.config(tmp_path, steps=2).train
    train_rows(model, frozen, rows, config, tmp_path)
    spoil(tmp_path)
    with pytest.raises(StageError, match=rf"{words}.*remove .* to train anew"):
        train_rows(model, frozen, rows, config, tmp_path)


def test_no_process_goes_on_before_all_of_them_see_the_same_checkpoint(tmp_path, monkeypatch):
    frozen, rows, config = toys.frozen(dtype=torch.float32), [toys.counting_row(3, 18, 3)], toys.config(tmp_path).train

    def trained():
        return train_rows(toys.drafter(dtype=torch.float32), frozen, rows, config, tmp_path)

    others, asked = [None, 6, 8], []
    trained()
    monkeypatch.setattr(resume, "gathered", lambda mine: [others[min(len(asked), 2)], asked.append(mine) or mine])
    assert trained().step == 8 and asked == [8, 8, 8], "the other process came to see it, too"
    monkeypatch.setattr(resume, "gathered", lambda mine: [None, mine])
    monkeypatch.setattr(resume, "VISIBLE_WITHIN_S", 0.1)
    with pytest.raises(StageError, match=r"resume\.pt: .* \(by rank: none, step 8\)"):
        trained()


def test_without_the_optimisers_state_a_run_says_so_and_goes_on_at_its_step(tmp_path, monkeypatch, caplog):
    frozen, rows = toys.frozen(dtype=torch.float32), [toys.counting_row(3, 18, 3)]
    config, taken, step = toys.config(tmp_path, warmup_share=0.25).train, [], Optimizer.step

    def stepping(self, scale, number):
        step(self, scale, number)
        taken.append(scale)
        if len(taken) == 5:
            raise Killed

    monkeypatch.setattr(Optimizer, "step", stepping)
    with pytest.raises(Killed):
        train_rows(toys.drafter(dtype=torch.float32), frozen, rows, config, tmp_path)
    state = torch.load(tmp_path / "resume.pt", weights_only=True)
    del state["optimizer"]
    torch.save(state, tmp_path / "resume.pt")
    progress = train_rows(toys.drafter(dtype=torch.float32), frozen, rows, config, tmp_path)
    assert "has no state of this optimiser" in caplog.text and "learning rate go on at step 4" in caplog.text
    # of 8 steps 2 are the warm-up: the checkpoint is of step 4, a third of the way down the cosine
    assert taken[5:] == pytest.approx([(1 + math.cos(math.pi * n / 6)) / 2 for n in range(2, 6)])
    assert [point["step"] for point in progress.curve] == [0, 2, 4, 6, 8]


def test_what_a_kill_left_amid_a_write_is_not_in_the_finished_folder(tmp_path):
    finished = {"model.safetensors", "config.json", "trained.json"}
    left = {"resume.pt", "best-4.pt", ".best-6.pt.tmp", ".model.safetensors.77.tmp", ".workers-1f"}
    for name in finished | left:
        (tmp_path / name).touch()
    resume.remove(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == finished


EVERYTHING = {
    "anchors": "on_policy", "replay_share": 0.3, "blocks_per_step": 16, "steps": 12, "checkpoint_every": 3,
    "warmup_share": 0.25, "patience": 3, "sampled_vocabulary": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def champion(tmp_path_factory):
    root = tmp_path_factory.mktemp("champion")
    toys.target_folder(root / "target")
    return run(root, steps=25, checkpoint_every=25, learning_rate=0.05)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, champion):
    root = tmp_path_factory.mktemp("straight")
    toys.target_folder(root / "target")
    return run_with_everything(root, champion)


def run_with_everything(root, start):
    """On-policy anchors of rows that were served several times, with replay of two caches, from a champion."""
    weighed = [("train", replace(toys.counting_row(3 * i, 28 + i, 3), weight=1 + 3 * i)) for i in range(6)]
    weighed += [("validation", toys.counting_row(5 * i + 1, 20, 4)) for i in range(3)]
    earlier = [
        toys.cache(root, [(split, toys.counting_row(7 * i, 24, 3, name=f"{n}-{i}-{split}")) for i in range(2 + n)
                          for split in ("train", "validation")], derivation=f"earlier-{n}")
        for n in range(2)
    ]  # fmt: skip
    config = toys.config(root, **EVERYTHING)
    cache = toys.cache(root, weighed, derivation="traffic")
    return train.run(config, cache, start=start, role="challenger", replay=earlier)


@pytest.mark.parametrize("killed_after", [1, 5, 6, 8])
def test_an_interrupted_run_with_everything_on_ends_as_an_uninterrupted_one(
    killed_after, site, champion, straight, monkeypatch
):
    taken, step = [], Optimizer.step

    def stepping(self, scale, number):
        step(self, scale, number)
        taken.append(scale)
        if len(taken) == killed_after:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", stepping)
        with pytest.raises(Killed):
            run_with_everything(site, champion)
    require_same(run_with_everything(site, champion), straight)
    assert straight.manifest.walks.keys() == {"traffic", "earlier-0", "earlier-1"}
    assert {"walk_replay/earlier-0", "walk_replay/earlier-1", "walk_slice/a"} <= straight.manifest.curve[0].keys()


def test_twenty_steps_are_ten_and_ten_more_rate_for_rate_and_loss_for_loss(site, monkeypatch):
    settings = {"steps": 20, "checkpoint_every": 1, "warmup_share": 0.25, "patience": None}
    straight = run(toys.target_folder(site / "other" / "target").parent, **settings)
    step = Optimizer.step

    def stepping(self, scale, number):
        step(self, scale, number)
        calls.append(scale)
        if len(calls) == 11:
            raise Killed

    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "step", stepping)
        with pytest.raises(Killed):
            run(site, **settings)
    resumed = run(site, **settings)
    require_same(resumed, straight)
    rates = [point["learning_rate"] / 5e-3 for point in resumed.manifest.curve[1:]]
    warm, cosine = [(n + 1) / 5 for n in range(5)], [(1 + math.cos(math.pi * n / 15)) / 2 for n in range(15)]
    assert rates == pytest.approx(warm + cosine)


def test_a_run_stops_when_so_many_measurements_have_not_raised_the_walk(tmp_path, monkeypatch):
    lengths = iter([0, 4, 9, 3, 9, 8, 12, 1, 1, 1])
    monkeypatch.setattr(measurement, "walk", lambda *a: (WalkCounts(1, 20, 10, next(lengths), [0, 0, 0]), {}))
    model, frozen = toys.drafter(dtype=torch.float32), toys.frozen(dtype=torch.float32)
    rows = [toys.counting_row(3 * i, 18, 3) for i in range(3)]
    config = toys.config(tmp_path, steps=20, patience=3).train
    progress = train_rows(model, frozen, rows, config, tmp_path)
    assert progress.step == 10 and progress.best["step"] == 4, "3, 9 and 8 are not above the 9 of step 4"
    again = train_rows(toys.drafter(dtype=torch.float32), frozen, rows, config, tmp_path)
    assert again.step == 10 and next(lengths) == 12, "a stopped run that is resumed stays stopped"


def test_without_patience_a_run_goes_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(measurement, "walk", lambda *a: (WalkCounts(1, 20, 10, 5, [0, 0, 0]), {}))
    model, frozen = toys.drafter(dtype=torch.float32), toys.frozen(dtype=torch.float32)
    config = toys.config(tmp_path, steps=20, patience=None).train
    assert train_rows(model, frozen, [toys.counting_row(0, 18, 3)], config, tmp_path).step == 20


def test_a_step_without_a_block_is_skipped_and_counted(tmp_path):
    model, frozen = toys.drafter(dtype=torch.float32), toys.frozen(dtype=torch.float32)
    rows = [toys.counting_row(3, 18, 3), toys.row(3, 1)]
    config = toys.config(tmp_path, blocks_per_step=4).train  # a row a step
    progress = train_rows(model, frozen, rows, config, tmp_path)
    assert progress.step == 8 and progress.num_empty == 4
    assert all(math.isfinite(value) for point in progress.curve for value in point.values())


@pytest.mark.parametrize("tokens_per_pass", [8, 40, 10_000])
def test_the_reported_loss_is_the_weighted_mean_over_blocks_however_they_are_grouped(tokens_per_pass, tmp_path):
    model, frozen = toys.drafter(), toys.frozen()
    deals = [
        Deal(toys.counting_row(2, 12, 3), torch.tensor([5, 7]), 1.0),
        Deal(toys.row(90, 4), torch.arange(4, 84), 3.0),
        Deal(toys.counting_row(9, 30, 3), torch.tensor([20]), 16.0),
    ]

    def ones(cross_entropy):
        return torch.full_like(cross_entropy, 1 / 3)

    single = [backward(model, frozen, [deal], ones, normalizer=1.0, tokens_per_pass=99).loss for deal in deals]
    config = toys.config(tmp_path, tokens_per_pass=tokens_per_pass).train
    learned = loop._learn(model, frozen, deals, ones, Candidates(frozen.head, None, None), config)
    assert learned.loss == pytest.approx(sum(single) / (2 * 1 + 80 * 3 + 1 * 16), rel=1e-6)
    model.norm.weight.data.zero_()  # every logit is 0: each token's loss is ln V
    flat = loop._learn(model, frozen, deals, ones, Candidates(frozen.head, None, None), config)
    assert flat.loss == pytest.approx(math.log(32), rel=1e-6), "whatever the rows' lengths, weights and passes"


def test_states_of_replies_that_were_made_anew_under_the_same_id_are_learned_from_anew(site):
    config, cache = toys.config(site, steps=2, checkpoint_every=2), states(site)

    def trained(replies):
        manifest = cache.manifest.model_copy(update={"responses": replies})
        return train.run(config, Artifact(cache.folder, manifest), start=None, role="champion")

    first = trained("content a")
    assert trained("content a").id == first.id != trained("content b").id


def test_a_start_that_was_trained_anew_under_the_same_id_is_gone_on_from_anew(site):
    start, config = start_from(site), toys.config(site, steps=2, checkpoint_every=2)

    def trained():
        return train.run(config, states(site), start=start, role="challenger").id

    first = trained()
    assert trained() == first
    model, kept = load_drafter(start.folder)
    with torch.no_grad():
        model.norm.weight.mul_(1.01)
    save_drafter(start.folder, model, kept)
    shards = tuple(describe_file(start.folder / shard.path) for shard in start.manifest.shards)
    start = Artifact(start.folder, start.manifest.model_copy(update={"shards": shards, "walks": {}}))
    assert trained() != first


def require_same(resumed, straight):
    """Weight for weight, and all that was measured on the way."""
    for name in ("model.safetensors", "config.json"):
        assert (resumed.folder / name).read_bytes() == (straight.folder / name).read_bytes()
    assert measured(resumed.manifest) == measured(straight.manifest)
    assert resumed.manifest.walk == straight.manifest.walk
    assert sorted(p.name for p in resumed.folder.iterdir()) == sorted(p.name for p in straight.folder.iterdir())


def test_training_learns_and_a_second_run_finds_it_done(site, monkeypatch):
    settings = {"steps": 100, "checkpoint_every": 25, "learning_rate": 0.05}
    first = run(site, **settings)
    lengths = [point["walk_acceptance_length"] for point in first.manifest.curve]
    assert lengths[0] < 1.3 and lengths[-1] > 2.5, lengths
    assert first.manifest.curve[-1]["loss"] < 0.6 * first.manifest.curve[1]["loss"]
    assert first.manifest.walk["acceptance_length"] == max(lengths)
    assert first.manifest.counts == {
        "train_rows": 6,
        "validation_rows": 3,
        "steps": 100,
        "empty_steps": 0,
        "too_short": 0,
        "parameters": 1792,
    }
    monkeypatch.setattr(train, "train_in", lambda *a: pytest.fail("trained again"))
    assert run(site, **settings).id == first.id


def test_the_step_with_the_best_walk_is_kept(tmp_path, monkeypatch):
    lengths, weights = iter([0, 4, 9, 3, 9]), []

    def scripted(model, frozen, rows):
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return WalkCounts(1, 20, 10, next(lengths), [0, 0, 0]), {}

    monkeypatch.setattr(measurement, "walk", scripted)
    model, frozen = toys.drafter(dtype=torch.float32), toys.frozen(dtype=torch.float32)
    rows = [toys.counting_row(3 * i, 18, 3) for i in range(3)]
    progress = train_rows(model, frozen, rows, toys.config(tmp_path).train, tmp_path)
    assert [path.name for path in tmp_path.glob("best*")] == ["best-4.pt"], "those of earlier steps are gone"
    best = torch.load(tmp_path / "best-4.pt", weights_only=True)
    assert progress.best["step"] == 4 and progress.best["acceptance_length"] == pytest.approx(1.9)
    assert all(torch.equal(best[name], weights[2][name]) for name in best)
    assert not torch.equal(best["fc.weight"], weights[4]["fc.weight"])


def start_from(root, **settings):
    """A champion that was trained a little on these very states, with another block and another mask token."""
    config = toys.config(root, **{"steps": 30, "checkpoint_every": 30, "learning_rate": 0.05, **settings})
    drafter = config.drafter.model_copy(update={"block_size": 5, "mask_token_id": 30})
    return train.run(config.model_copy(update={"drafter": drafter}), states(root), start=None, role="champion")


def test_a_warm_start_keeps_the_drafters_own_config_and_mask_token(site):
    start = start_from(site)
    written = start.folder / "config.json"
    config = json.loads(written.read_text()) | {"release": "kept"}
    written.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    trained = train.run(toys.config(site), states(site), start=start, role="challenger")
    assert trained.manifest.mask_token_id == 30, "the checkpoint's, though the configuration says 31"
    assert (trained.folder / "config.json").read_text() == written.read_text()
    assert trained.manifest.parents == {"states": "cache", "start": start.id}
    model, _ = load_drafter(start.folder)
    dtype = compute_dtype("auto", torch.device("cpu"))
    frozen = trainer.read_frozen(site / "target", dtype=dtype)
    counts, _ = walk(model, frozen, trainer.read_rows(states(site), "validation"))
    assert trained.manifest.curve[0]["walk_acceptance_length"] == counts.acceptance_length


def test_layers_or_targets_that_differ_stop_the_run(site):
    other_layers = toys.FINGERPRINT.model_copy(update={"target_layer_ids": (0, 2, 4)})
    with pytest.raises(FingerprintError, match=r"\[0, 2, 4\].*\[1, 2, 3\]"):
        train.run(toys.config(site), states(site, fingerprint=other_layers), start=None, role="champion")
    other = states(site, fingerprint=toys.FINGERPRINT.model_copy(update={"weights": "other"}), derivation="cache-2")
    with pytest.raises(FingerprintError, match="other"):
        train.run(toys.config(site), other, start=start_from(site), role="challenger")
    with pytest.raises(FingerprintError, match="other"):
        train.run(toys.config(site), states(site), start=None, role="challenger", replay=[other])


def test_step_0_of_a_warm_start_reproduces_the_recorded_walk_of_the_file_on_disk(site, caplog):
    start = start_from(site)
    caplog.set_level("INFO", logger="slipstream")
    model, _ = load_drafter(start.folder)
    frozen = trainer.read_frozen(site / "target", dtype=compute_dtype("auto", torch.device("cpu")))
    counts, _ = walk(model, frozen, trainer.read_rows(states(site), "validation"))
    recorded = counts.as_dict() | {"compute": str(frozen.head.dtype).removeprefix("torch.")}
    assert start.manifest.walks == {"cache": recorded}, "of the weights as they were rounded and read again"
    train.run(toys.config(site), states(site), start=start, role="control")
    assert "step 0 reproduces the recorded walk on cache" in caplog.text


@pytest.mark.parametrize(
    ("walks", "outcome"),
    [
        (lambda one: {"cache": one | {"num_accepted_tokens": 2 * one["num_accepted_tokens"] + 2}}, "stops"),
        (lambda one: {"another": one | {"num_accepted_tokens": 99}}, "no walk on record"),
        (lambda one: {"cache": one | {"num_accepted_tokens": 99, "num_replies": 99}}, "no walk on record"),
        (lambda one: {}, "no walk on record"),
    ],
    ids=["another walk", "of other states", "of other rows", "adopted"],
)
def test_a_warm_start_that_walks_otherwise_than_on_record_stops(walks, outcome, site, caplog):
    start = start_from(site)
    manifest = start.manifest.model_copy(update={"walks": walks(start.manifest.walks["cache"])})
    start = Artifact(start.folder, manifest)
    caplog.set_level("INFO", logger="slipstream")
    if outcome == "stops":
        with pytest.raises(StageError, match=r"accepted drafts a step.*on record.*train\.compute.*target layers.*rope"):
            train.run(toys.config(site), states(site), start=start, role="challenger")
    else:
        train.run(toys.config(site), states(site), start=start, role="challenger")
        assert outcome in caplog.text


def test_a_warm_start_that_knows_less_than_nothing_stops(site):
    start = start_from(site)
    model, config = load_drafter(start.folder)
    with torch.no_grad():
        model.norm.weight.mul_(-30)  # sure, and wrong
    save_drafter(start.folder, model, config)
    start = Artifact(start.folder, start.manifest.model_copy(update={"walks": {}}))
    with pytest.raises(StageError, match=r"cross-entropy is .* 3\.466 \(ln 32\)"):
        train.run(toys.config(site), states(site), start=start, role="challenger")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([("validation", toys.row(20, 3))], "no train row"),
        ([("train", toys.row(20, 18)), ("validation", toys.row(20, 3))], "no train row"),
        ([("train", toys.row(20, 3)), ("gate", toys.row(20, 3, seed=1))], "no validation rows"),
    ],
    ids=["none", "none long enough", "nothing to measure on"],
)
def test_a_run_with_nothing_to_learn_never_starts(rows, words, site, monkeypatch):
    monkeypatch.setattr(trainer, "train_loop", lambda *a: pytest.fail("started"))
    with pytest.raises(StageError, match=words):
        train.run(toys.config(site), toys.cache(site, rows), start=None, role="champion")


def test_a_drafter_with_a_high_loss_whose_walk_is_the_recorded_one_is_gone_on_from(site, monkeypatch):
    start = train.run(toys.config(site), states(site), start=None, role="champion")
    monkeypatch.setattr(trainer, "doubt_of", lambda *a, **named: "worse than a uniform guess")
    trained = train.run(toys.config(site), states(site), start=start, role="challenger")
    assert trained.manifest.counts["steps"] == 8
    shutil.rmtree(site / "states" / "cache")
    with pytest.raises(StageError, match="worse than a uniform guess"):
        train.run(toys.config(site), states(site, derivation="other"), start=start, role="challenger")


@pytest.mark.parametrize("changed", [{"derivation": "other"}, {}], ids=["new states", "fewer rows"])
def test_a_start_is_compared_on_the_states_that_it_was_measured_on_where_they_are_still_there(changed, site, caplog):
    start = start_from(site)
    caplog.set_level("INFO", logger="slipstream")
    config = toys.config(site, walk_rows=4 if changed else 2)
    train.run(config, states(site, **changed), start=start, role="challenger")
    assert "step 0 reproduces the recorded walk on cache" in caplog.text
    walk = start.manifest.walks["cache"]
    walks = {"cache": walk | {"num_accepted_tokens": 3 * walk["num_accepted_tokens"]}}
    other = Artifact(start.folder, start.manifest.model_copy(update={"walks": walks, "shards": ()}))
    with pytest.raises(StageError, match="over the validation rows of states cache"):
        train.run(config, states(site, **changed), start=other, role="challenger")


def test_states_elsewhere_that_cannot_be_read_any_more_stop_no_run(site, caplog, monkeypatch):
    def expired(*arguments):
        raise StageError("the object has expired")

    start = start_from(site)
    monkeypatch.setattr(trainer, "walk", expired)
    train.run(toys.config(site), states(site, derivation="other"), start=start, role="challenger")
    assert "not compared on cache: the object has expired" in caplog.text and "no walk on record" in caplog.text


def test_what_the_first_process_finds_of_a_start_counts_for_all(site, monkeypatch):
    start, config = start_from(site), toys.config(site, compute="float32")
    walk = start.manifest.walks["cache"]
    recorded = WalkCounts(**{name: walk[name] for name in vars(WalkCounts())})
    monkeypatch.setattr(trainer, "doubt_of", lambda *a, **named: None)
    monkeypatch.setattr(trainer, "walk_again", lambda *a: pytest.fail("the second process walked alone"))
    monkeypatch.setattr(trainer, "rank_and_world", lambda: (1, 2))

    def check(found):
        said = iter(["worse than a uniform guess", found])
        monkeypatch.setattr(trainer, "agreed", lambda mine: next(said))
        other, frozen = states(site, derivation="other"), toys.frozen()
        walks = measurement.Walks(recorded, {}, {})
        trainer._start_check(config, other, start, toys.drafter(), frozen, Validation([]))(walks)

    check({"cache": recorded})
    with pytest.raises(StageError, match="worse than a uniform guess"):
        check({})


def test_workers_without_a_row_are_told_of(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trainer, "rank_and_world", lambda: (0, 4))
    trainer._warn(toys.config(tmp_path, blocks_per_step=64, anchors_per_row=32).train)
    assert "4 workers share 2 rows" in caplog.text and "blocks_per_step to 128" in caplog.text


def test_rows_without_room_for_a_block_are_left_out_and_counted(site):
    rows = [("train", toys.counting_row(3 * i, 18, 3)) for i in range(3)] + [("train", toys.row(20, 18, seed=7))]
    cache = toys.cache(site, [*rows, ("validation", toys.counting_row(1, 20, 4))])
    trained = train.run(toys.config(site), cache, start=None, role="champion").manifest
    assert (trained.counts["train_rows"], trained.counts["too_short"], trained.counts["empty_steps"]) == (3, 1, 0)


def test_how_a_run_is_executed_does_not_change_what_it_is_and_what_it_computes_in_does(site):
    cache, ids = states(site), []
    for settings in ({}, {"tokens_per_pass": 999, "num_workers": 2, "parallel": "fsdp", "compile": True},
                     {"activation_checkpointing": True, "control": True}, {"replay_share": 0.7},
                     {"decay_gamma": 5.0}, {"uniform_share": 0.5},
                     {"compute": str(compute_dtype("auto", torch.device("cpu"))).removeprefix("torch.")},
                     {"muon_turns": 2}, {"optimizer": "adamw"}, {"optimizer": "adamw", "muon_turns": 2},
                     {"anchors": "on_policy"}, {"max_row_weight": 1}, {"patience": None}):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "complete", lambda *a, **named: ids.append((named["parents"], named["meaning"])))
            config = toys.config(site, **{"anchors": "uniform"} | settings)
            train.run(config, cache, start=None, role="champion")
    assert all(one == ids[0] for one in ids[:7]), "with nothing to replay, its share means nothing"
    assert all(one != ids[0] for one in ids[7:])
    assert ids[8] == ids[9], "AdamW has no turns"


def test_how_much_is_staged_changes_a_run_only_where_states_are_on_storage(site, monkeypatch):
    cache, meanings = states(site), []
    monkeypatch.setattr(train, "complete", lambda *a, **named: meanings.append(named["meaning"]))
    for storage in (None, "s3://bucket/states"):
        stored = Artifact(cache.folder, cache.manifest.model_copy(update={"storage": storage}))
        for staging_bytes in (1 << 30, 2 << 30):
            config = toys.config(site)
            config = config.model_copy(
                update={"capture": config.capture.model_copy(update={"staging_bytes": staging_bytes})}
            )
            train.run(config, stored, start=None, role="champion")
    assert meanings[0] == meanings[1] != meanings[2] != meanings[3], "its order follows from what can be mixed"


def test_a_replayed_cache_without_a_row_to_train_on_is_left_out_and_the_run_goes_on(site, caplog):
    short = toys.cache(
        site, [("train", toys.row(20, 18, seed=1)), ("validation", toys.row(20, 3))], derivation="too-short"
    )
    held_out = toys.cache(site, [("validation", toys.row(20, 3))], derivation="held-out")
    held_out = Artifact(held_out.folder, held_out.manifest.model_copy(update={"splits": ("validation", "gate")}))
    trained = train.run(toys.config(site), states(site), start=None, role="champion", replay=[short, held_out])
    assert trained.manifest.counts["train_rows"] == 6 and trained.manifest.counts["empty_steps"] == 0
    assert trained.manifest.parents == {"states": "cache"} and trained.manifest.walks.keys() == {"cache"}
    assert trained.manifest.config["replay_share"] == 0
    assert "not replayed: " in caplog.text and "too-short" in caplog.text and "held-out" in caplog.text


def test_replayed_states_of_another_width_are_refused_before_anything_is_read(site):
    other = toys.cache(site, [("train", toys.row(20, 3, width=36))], derivation="wide")
    with pytest.raises(FingerprintError, match=r"12 channels.* have 10"):
        train.run(toys.config(site), states(site), start=None, role="champion", replay=[other])


def test_a_cache_of_the_held_out_rows_alone_says_that_it_is_one(site):
    cache = states(site)
    held_out = cache.manifest.model_copy(update={"splits": ("validation", "gate")})
    with pytest.raises(StageError, match=r"validation, gate rows alone.*slipstream stream"):
        train.run(toys.config(site), Artifact(cache.folder, held_out), start=None, role="champion")


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path):
    model, frozen = toys.drafter(dtype=torch.float32), toys.frozen(dtype=torch.float32)
    frozen.head[0, 0] = float("inf")
    rows = [toys.counting_row(3, 18, 3)]
    with pytest.raises(DivergedError, match="not finite"):
        train_rows(model, frozen, rows, toys.config(tmp_path).train, tmp_path)


def test_the_configured_mask_token_wins_then_the_tokenizers_and_padding_never(site, caplog):
    config = toys.config(site)
    caplog.set_level("INFO", logger="slipstream")
    assert start.resolve_mask_token(config) == 31
    assert "31 from drafter.mask_token_id" in caplog.text
    unset = config.model_copy(update={"drafter": config.drafter.model_copy(update={"mask_token_id": None})})
    tiny._tokenizer(site / "target")
    assert start.resolve_mask_token(unset) == tiny.MASK_TOKEN_ID
    path = site / "target" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["mask_token"]
    path.write_text(json.dumps({**settings, "pad_token": settings["eos_token"]}))
    with pytest.raises(ConfigError, match=r"set drafter\.mask_token_id"):
        start.resolve_mask_token(unset)
