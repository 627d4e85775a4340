"""What Prometheus and Grafana are given, by their own tools: promtool, and Grafana's own model of a dashboard."""

import json
import subprocess
from pathlib import Path

INFRA = Path(__file__).resolve().parents[2] / "infra"


def promtool(*arguments):
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_prometheus_takes_the_rules_and_the_configuration():
    assert "12 rules found" in promtool("check", "rules", INFRA / "prometheus" / "slipstream.rules.yml")
    assert "SUCCESS" in promtool("check", "config", INFRA / "prometheus" / "prometheus.yml")


def test_the_rules_say_what_they_are_meant_to():
    assert "SUCCESS" in promtool("test", "rules", INFRA / "prometheus" / "slipstream.rules.test.yml")


def test_every_metric_of_a_watch_is_one_that_prometheus_reads(tmp_path):
    from serving.monitor.gauges import NAMES, Gauge, exposition

    text = exposition([Gauge(name, 1.0, {"slice": "route=a b"}) for name in NAMES])
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_knows_every_field_of_the_dashboard():
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    board = json.loads((INFRA / "grafana" / "slipstream.json").read_text())
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))
    assert lost(board, again) == []


def lost(before, after, place=""):
    """The fields that a round trip through Grafana's own classes drops or changes: it drops what it does not know."""
    if isinstance(before, dict):
        known = after if isinstance(after, dict) else {}
        return [one for name in before for one in lost(before[name], known.get(name), f"{place}/{name}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [one for i, pair in enumerate(zip(before, after, strict=True)) for one in lost(*pair, f"{place}/{i}")]
    return [] if before == after else [place]
