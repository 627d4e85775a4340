"""The watch's page, complete: every part has something to show."""

from pipeline.watch import view
from pipeline.watch.asked import Drift
from pipeline.watch.hours import HOUR_S
from pipeline.watch.page import page
from pipeline.watch.pays import Load, Point
from pipeline.watch.promise import Promise, Promised
from pipeline.watch.state import Seen, State, fold
from pipeline.watch_config import WatchConfig
from tests.pipeline.watched import START, hours

CONFIG = WatchConfig(dimensions=("route", "language"))
REPLICAS = {
    "http://10.0.0.1:8000": {"acceptance_length": 2.6, "running": 9.5, "down": None, "restarts": 0},
    "http://10.0.0.2:8000": {"acceptance_length": None, "running": None, "down": "refused", "restarts": 1},
}


def sample(num_hours=12 * 24, *, falls_at=10 * 24):
    """(Body of alarms.json, page) of a fortnight in which the code route falls by a sixth."""
    made = hours(min(falls_at, num_hours))
    made += hours(num_hours - len(made), first=len(made), factor=lambda cell: 0.84 if cell[0] == "code" else 1.0)
    promise = Promise("1", "3f2a", "greedy, at most 128 tokens", {"all": Promised(200, 2.3, 0.02)})
    until = START + num_hours * HOUR_S
    loads = [Load("http://10.0.0.1:8000", until - HOUR_S, 9.5, 5e4, 9e4, 1.4e5)]
    seen = Seen({}, loads, [Point(1, 1.3, 0.05), Point(16, 2.0, 0.2)], {"1": promise})
    state = fold(CONFIG, State(), made, seen, until=until)
    drifts = (Drift("route", 0.02, 0.1, 1.0), Drift("words", 0.4, 0.1, 0.002))
    state = State(state.accepted, START, until, drifts if num_hours > 24 else (), state.paid)
    body = view.as_json(CONFIG, state, made, seen, now=until + 600.0) | {"replicas": REPLICAS, "records": {}}
    return body, page(body, state, made, seen, title="qwen3-8b--support")
