"""Nobody touches it: a drift alarm, a real scheduler, a real engine, and in the end a new champion that serves."""

import pytest

from bench.oracles.scheduled_cycle import scheduled_cycle


@pytest.mark.timeout(1500)  # ten stages, each a process with a Ray, an engine or MLflow of its own
def test_a_drift_alarm_ends_with_a_new_champion_and_no_hands(tmp_path):
    cycle = scheduled_cycle(tmp_path, timeout_s=1200)
    assert (cycle.champion_before, cycle.champion_after, cycle.serves) == ("1", "2", "2")
    assert [reason.split(":")[0] for reason in cycle.reasons] == ["alarm"]
    assert (cycle.began_by, cycle.state, cycle.outcome) == ("asset_triggered", "success", "deployed")
    assert set(cycle.tasks.values()) == {"success"} and len(cycle.tasks) == 9
