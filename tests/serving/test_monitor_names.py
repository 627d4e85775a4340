"""The rules and the dashboard ask for metrics that are there."""

import json
import re
from pathlib import Path

import pytest
import yaml

from serving.monitor.gauges import NAMES, PREFIX
from serving.tap import metrics as tap

ROOT = Path(__file__).resolve().parents[2]
RULES = yaml.safe_load((ROOT / "infra" / "prometheus" / "slipstream.rules.yml").read_text())
BOARD = json.loads((ROOT / "infra" / "grafana" / "slipstream.json").read_text())


def expressions():
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    found = [rule["expr"] for rule in rules]
    found += [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    return found + [one["query"] for one in BOARD["templating"]["list"] if one["type"] == "query"]


def asked_for(pattern):
    return sorted({name for one in expressions() for name in re.findall(pattern, one)})


def test_the_watchs_own_metrics_are_those_that_it_has():
    found = asked_for(r"slipstream_watch_\w+")
    assert found and {name.removeprefix(PREFIX) for name in found} <= set(NAMES)


def test_the_taps_metrics_are_those_that_it_has():
    assert asked_for(r"slipstream_tap_\w+") == [f"{tap.PREFIX}_requests_total"]
    outcomes = {name for one in expressions() for name in re.findall(r"dropped_\w+|failed", one)}
    assert {name for name in outcomes if not name.endswith("_")} <= set(tap.OUTCOMES)


def test_recorded_series_are_recorded():
    recorded = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}
    assert set(asked_for(r"slipstream:[\w:]+")) == recorded


@pytest.mark.parametrize("name", asked_for(r"vllm:\w+"))
def test_vllms_metrics_are_in_its_source(name):
    import importlib.util

    folder = Path(importlib.util.find_spec("vllm").submodule_search_locations[0], "v1")
    sources = "".join((folder / path).read_text() for path in ("spec_decode/metrics.py", "metrics/loggers.py"))
    assert f'"{re.sub("_(total|sum|count|bucket)$", "", name)}"' in sources


def test_every_alert_says_what_happened_and_what_to_do():
    alerts = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
    assert len(alerts) == 9
    for alert in alerts:
        assert set(alert["annotations"]) == {"summary", "action"} and alert["labels"]["severity"]


def test_panels_do_not_lie_on_each_other_and_have_their_own_numbers():
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    taken = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        taken |= cells
