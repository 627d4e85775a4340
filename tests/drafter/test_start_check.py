"""How near a warm start's walk must come to the one on record."""

import pytest
import toys

from drafter.measurement import Walks
from drafter.start_check import recorded_walk_check
from drafter.walk import WalkCounts
from pipeline.errors import StageError


def counts(accepted, drafts):
    return WalkCounts(16, 5000, drafts, accepted, [accepted, 0, 0, 0, 0, 0, 0])


def check(tmp_path, recorded, found, *, cache="own", doubt=None):
    config = toys.config(tmp_path, compute="float32", warm_start_tolerance=0.03).train
    record = recorded.as_dict() | {"compute": "bfloat16"}
    recorded_walk_check({cache: record}, "own", config, where="drafter c0", doubt=doubt)(Walks(found, {}, {}))


@pytest.mark.parametrize(
    ("recorded", "found"),
    [((0, 4000), (1, 3999)), ((25, 4000), (26, 3999)), ((25, 4000), (20, 4005)), ((5000, 3300), (4930, 3330))],
    ids=["one more than none", "one more than few", "a few fewer than few", "within the tolerance of many"],
)
def test_a_walk_that_near_ties_explain_is_the_recorded_one(recorded, found, tmp_path):
    check(tmp_path, counts(*recorded), counts(*found))


@pytest.mark.parametrize(
    ("recorded", "found"),
    [((25, 4000), (0, 4025)), ((0, 4000), (60, 3940)), ((5000, 3300), (4600, 3500)), ((5000, 3300), (5500, 3100))],
    ids=["none for few", "many for none", "a twelfth fewer", "a tenth more"],
)
def test_a_walk_that_near_ties_do_not_explain_stops_the_run_and_tells_both_precisions(recorded, found, tmp_path):
    with pytest.raises(StageError, match=r"here, computed in float32.*on record, computed in bfloat16.*train\.compute"):
        check(tmp_path, counts(*recorded), counts(*found))


def test_a_high_loss_stops_a_start_only_where_no_walk_shows_that_it_is_wired_as_it_was(tmp_path):
    check(tmp_path, counts(25, 4000), counts(25, 4000), doubt="worse than a uniform guess")
    with pytest.raises(StageError, match="worse than a uniform guess"):
        check(tmp_path, counts(25, 4000), counts(25, 4000), cache="another", doubt="worse than a uniform guess")
