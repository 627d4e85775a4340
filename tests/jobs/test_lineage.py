"""Both directions of the lineage, under the root that has the data and under one that has MLflow alone."""

import json
import shutil

import pytest

from jobs import lineage, promote
from jobs.adopt import first_champion
from jobs.registry import Registry
from pipeline.config import Config
from pipeline.errors import StageError
from tests.jobs.checkpoints import as_checkpoint
from tests.jobs.verdicts import SECRET, make_data, make_decision


@pytest.fixture(scope="module")
def built(tmp_path_factory, empty_database, tiny):
    """Version 1 from general prompts; version 2 from it and some mails, approved and champion; version 3 from 2."""
    root = tmp_path_factory.mktemp("lineage")
    shutil.copy(empty_database, root / "mlflow.db")
    config = Config.model_validate({"workload": "mails", "root": root, "target": {"model": tiny[0]}})
    general = make_data(root, "general", {"g1": "train", "g2": "train", "g3": "gate"})
    first = as_checkpoint(root, tiny[1][0], name="c0", role="champion", parents={"states": general["states"]})
    first_champion(config, first)
    splits = {"m1": "train", "m2": "gate", "m3": "train", "m4": "validation", "m5": "train"}
    mails = make_data(root, "mails", splits)
    second = as_checkpoint(root, tiny[1][1], name="d1", parents={"states": mails["states"], "start": "c0"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_ACTOR", "ada")
        promote.run(config, make_decision(root), second)
    registry = Registry(None, root)
    registry.set_alias(config.model_name, "champion", "2", expected="1", reason="deploy")
    newer = make_data(root, "newer", {"n1": "train", "n2": "train"})
    third = as_checkpoint(root, tiny[1][2], name="d2", parents={"states": newer["states"], "start": "d1"})
    with pytest.raises(StageError):
        promote.run(config, make_decision(root, "hold", champion="d1", challenger="d2"), third)
    return config


@pytest.fixture
def elsewhere(built, tmp_path):
    """The same MLflow, seen from a root without any data."""
    uri = f"sqlite:///{built.root}/mlflow.db"
    return built.model_copy(
        update={"root": tmp_path / "elsewhere", "promote": built.promote.model_copy(update={"tracking_uri": uri})}
    )


@pytest.mark.parametrize("name", ["2", "d1"])
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_version_tells_its_target_parent_data_verdict_and_promoter(built, elsewhere, where, name):
    text = "\n".join(lineage.run(built if where == "here" else elsewhere, name))
    for told in (
        "version 2",
        "d1 (challenger)",
        "passed: decision g-d1-c0-promote is promote",
        "champion, approved",
        "weights w1, dtype float32",
        "version 1 (c0)",
        "mails-states  rows 4, states 7, rejected as norm 1",
        "mails-responses",
        "mails-prompts  rows 5",
        "from /logs/traffic",
        "r-d1-c0  emitted tokens a step: champion 2.000, challenger 2.400",
        "promote, lift 1.200 (interval 1.100 to 1.300)",
        "speed is fine",
        "approved - → 2, by ada: gate passed (decision g-d1-c0-promote)",
        "champion 1 → 2",
    ):
        assert told in text, text
    assert SECRET not in text


def test_the_chain_of_parents_goes_back_to_the_first(built):
    (parent,) = [line for line in lineage.run(built, "3") if line.strip().startswith("parent")]
    assert parent.split(maxsplit=1)[1] == "version 2 (d1) ← version 1 (c0)"
    assert "FAILED 2 conversations, 30 are needed" in "\n".join(lineage.run(built, "3"))


def test_the_rows_that_a_version_learned_from_are_its_train_rows_that_reached_the_states(built):
    lines = lineage.run(built, "2", prompts=True)
    at = next(i for i, line in enumerate(lines) if line.startswith("learned from"))
    assert lines[at] == "learned from 2 rows (train rows of states mails-states):"
    assert lines[at + 1 :] == ["m1", "m3"]


def test_row_ids_that_are_not_here_are_said_to_be_absent(elsewhere):
    assert "MLflow holds no row ids; run this where the data is" in lineage.run(elsewhere, "2", prompts=True)[-1]
    with pytest.raises(StageError, match="MLflow holds no row ids"):
        lineage.run(elsewhere, "m1")


@pytest.mark.parametrize("kind", ["prompts", "responses", "states"])
def test_data_tells_who_learned_from_it_itself_or_through_a_parent(built, elsewhere, kind):
    for config in (built, elsewhere):
        head, *learners = lineage.run(config, f"mails-{kind}")
        assert head == f"mails-{kind}: learned from by"
        assert [line.split()[1] for line in learners] == ["2", "3"]
        assert "itself" in learners[0] and "through version 2" in learners[1]
    assert [line.split()[1] for line in lineage.run(built, f"general-{kind}")[1:]] == ["1", "2", "3"]


def test_a_row_tells_where_it_is_and_who_learned_from_it(built):
    text = lineage.run(built, "m1")
    assert any("mails-states  train set" in line for line in text)
    assert [line.split()[1] for line in text[text.index("learned from by") + 1 :]] == ["2", "3"]


@pytest.mark.parametrize(("row_id", "why"), [("m2", "gate"), ("m4", "validation"), ("m5", "lost before training")])
def test_nobody_learned_from_a_row_that_was_held_out_or_lost_on_the_way(built, row_id, why):
    assert lineage.run(built, row_id)[-1] == "  no registered version", why


def test_a_row_is_found_in_the_responses_where_the_states_were_removed(built, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(built.root, copy)
    shutil.rmtree(copy / "states")
    config = built.model_copy(update={"root": copy})
    assert "train rows of responses mails-responses" in "\n".join(lineage.run(config, "2", prompts=True))


def test_of_a_streamed_run_the_rows_are_found_in_the_responses_that_it_read(built, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(built.root, copy)
    path = copy / "states" / "mails-states" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "splits": ["validation", "gate"]}))
    lines = lineage.run(built.model_copy(update={"root": copy}), "2", prompts=True)
    assert "learned from 3 rows (train rows of responses mails-responses):" in lines and lines[-3:] == [
        "m1",
        "m3",
        "m5",
    ]


def test_what_is_not_known_says_what_was_looked_for(built, tmp_path):
    with pytest.raises(StageError, match=r"no version 9 \(versions: 1, 2, 3\)"):
        lineage.run(built, "9")
    with pytest.raises(StageError, match="nobody: no version, drafter, prompts"):
        lineage.run(built, "nobody")
    with pytest.raises(StageError, match="nothing registered yet"):
        lineage.run(built.model_copy(update={"root": tmp_path / "empty"}), "1")
