"""The watch as it is run: logs and replicas on one side, alarms.json, metrics and a page on the other."""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jobs import watch as watch_job
from jobs import watch_look, watch_promises
from jobs.watch import take
from jobs.watch_look import Watch
from jobs.watch_promises import Promises
from pipeline.artifacts import AcceptanceReport, SpeedReport, commit, describe_file
from pipeline.errors import ConfigError
from pipeline.schemas import ACCEPTANCE
from pipeline.watch.hours import HOUR_S
from serving.monitor.gauges import NAMES, PREFIX
from tests.jobs.checkpoints import as_checkpoint
from tests.jobs.watched_logs import RATES, SETTINGS, START, config_of, fall, look, records, write_log
from tests.pipeline.measurements import rows_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "logs"


def test_a_log_becomes_an_alarm_a_trigger_metrics_and_a_page(tmp_path, folder):
    config = config_of(tmp_path / "root", sources=[folder])
    write_log(folder, records(0, 90, secret=" and a secret"))
    quiet = look(config, 89)
    assert (quiet["phase"], quiet["firing"], quiet["retrain"], quiet["version"]) == ("watching", [], False, "1")
    write_log(folder, records(90, 24, factor=fall))
    body = look(config, 113)
    assert body["retrain"] and len(body["firing"]) == 1 and body["firing"][0].startswith("accepted-202701")
    watch = tmp_path / "root" / "watch"
    assert json.loads((watch / "alarms.json").read_text()) == body
    page = (watch / "report.html").read_text()
    assert "Retrain" in page and "fell by 25% everywhere" in page and "route=mail" in page
    families = {one.name: one for one in text_string_to_metric_families((watch / "metrics.prom").read_text())}
    assert set(families) <= {PREFIX + name for name in NAMES}
    alarms = {s.labels["kind"]: s.value for s in families[f"{PREFIX}alarm"].samples}
    assert alarms == {"accepted": 1.0, "asked": 0.0, "promise": 0.0, "pays": 0.0}
    told = body["told_apart"]
    assert told["within"] == pytest.approx(told["total"], abs=0.02) and abs(told["mix"]) < 0.01
    kept = "".join(path.read_text() for path in watch.rglob("*") if path.is_file())
    assert "secret" not in kept and "subject-" not in kept


def test_looks_of_many_watches_find_what_one_look_at_the_end_finds(tmp_path, folder):
    write_log(folder, [])
    often, once = config_of(tmp_path / "often", sources=[folder]), config_of(tmp_path / "once", sources=[folder])
    made = records(0, 90) + records(90, 30, factor=fall)
    for hour in range(0, 120, 5):
        write_log(folder, [one for one in made if hour <= (one["ts"] - START) / HOUR_S < hour + 5])
        body = look(often, hour + 4)
    end = look(once, 119)
    assert end["firing"] and body["alarms"] == end["alarms"]
    assert body["slices"] == end["slices"] and body["records"] == end["records"]
    assert look(often, 119) == body


def test_a_slice_that_comes_late_is_shown_at_once_and_a_header_full_of_names_fills_no_page(tmp_path, folder):
    config = config_of(tmp_path / "root", sources=[folder])
    write_log(folder, records(0, 90))
    late = [one | {"slice": f"new-{i % 300}"} for i, one in enumerate(records(90, 24))]
    write_log(folder, [*records(90, 24), *late])
    body = look(config, 113)
    new = [name for name, one in body["slices"].items() if one.get("new")]
    assert len(new) == 10 and all(name.startswith("route=new-") or name == "route=other" for name in new)
    assert "<td>new</td>" in (config.root / "watch" / "report.html").read_text()
    other = tmp_path / "other"
    write_log(other, [one | {"slice": f"r{i}"} for i, one in enumerate(records(0, 1, conversations=500))])
    shown = look(config_of(tmp_path / "first", sources=[other]), 2)
    assert shown["phase"] == "learning" and len(shown["slices"]) <= 41


def test_once_ends_with_0_where_nothing_fires_and_taking_an_alarm_on_quiets_it(tmp_path, folder):
    config = config_of(tmp_path / "root", sources=[folder])
    write_log(folder, records(0, 90) + records(90, 24, factor=fall))
    (alarm,) = look(config, 113)["firing"]
    with pytest.raises(ConfigError, match=f"no such alarm: other .firing: {alarm}"):
        take(config, ["other"], now=START)
    assert take(config, ["all"], now=START) == [alarm]
    body = look(config, 114)
    assert (body["firing"], body["retrain"]) == ([], False)
    assert [one["taken"] for one in body["alarms"]] == ["2027-01-01 00:00"]


def test_another_watch_that_goes_on_is_asked_what_it_saw(tmp_path, folder):
    from pipeline.stages import exclusive

    config = config_of(tmp_path / "root", sources=[folder])
    write_log(folder, records(0, 2, start=int(time.time()) - 2 * HOUR_S))
    toml = tmp_path / "s.toml"
    toml.write_text(f'root = "{config.root}"\n[target]\nmodel = "/m"\n[collect]\nsources = ["{folder}"]\n')
    command = [sys.executable, "jobs/watch.py", "--config", str(toml), "--once"]
    with exclusive(config.root / "watch", "watch"):
        alone = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert alone.returncode == 1 and "another watch holds it, and looked last never" in alone.stderr
        body = Watch(config_of(config.root, sources=[folder], watch={})).look()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and json.loads(done.stdout) == body


def test_records_that_cannot_be_counted_are_told_by_reason(tmp_path, folder):
    good = records(0, 2)
    bad = [{**good[0], "consent": None}, {**good[1], "acceptance": None}, {**good[2], "ts": "yesterday"}]
    write_log(folder, [*good, *bad])
    with (folder / "traffic-host-1-1700000000000.jsonl").open("a") as file:
        file.write("{half\n")
    body = look(config_of(tmp_path / "root", sources=[folder]), 2)
    expected = {"counted": len(good), "no_consent": 1, "no_acceptance": 1, "malformed_time": 1, "not_json": 1}
    assert body["records"] == expected


def test_an_erased_subject_is_in_no_sample(tmp_path, folder):
    from datetime import UTC, datetime

    from pipeline.split import load_key
    from pipeline.tombstones import add_tombstones, subject_hashes

    config = config_of(tmp_path / "root", sources=[folder])
    write_log(folder, records(0, 30))
    look(config, 29)
    erased = subject_hashes(load_key(config), "subject-3-4")[0]
    kept = config.root / "watch" / "asked" / "2027-01-01.json"
    assert erased in kept.read_text()
    add_tombstones(config.root, [erased], now=datetime.now(UTC))
    look(config, 30)
    assert all(erased not in path.read_text() for path in (config.root / "watch").rglob("*.json"))


class Replica(BaseHTTPRequestHandler):
    counts = (0, 0)

    def do_GET(self):
        drafts, accepted = self.counts
        body = (
            "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 4\n"
            f"# TYPE vllm:spec_decode_num_drafts_total counter\nvllm:spec_decode_num_drafts_total {drafts}\n"
            "# TYPE vllm:spec_decode_num_accepted_tokens_total counter\n"
            f"vllm:spec_decode_num_accepted_tokens_total {accepted}\n"
            f"# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total {drafts + accepted}\n"
            f"# TYPE vllm:request_success_total counter\nvllm:request_success_total {drafts / 30}\n"
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def replicas():
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), type(f"R{i}", (Replica,), {})) for i in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()


def test_where_nothing_is_on_record_the_counters_are_watched(tmp_path, replicas, monkeypatch):
    from serving.monitor import scrape

    urls = [f"http://127.0.0.1:{server.server_address[1]}" for server in replicas]
    settings = SETTINGS | {"learn_days": 2}
    config = config_of(tmp_path / "root", serving={"replicas": urls}, watch=settings)
    for hour in range(74):
        now = START + (hour + 0.99) * HOUR_S
        monkeypatch.setattr(scrape.time, "time", lambda now=now: now)
        for i, server in enumerate(replicas):
            # The second restarts at hour 40, and its counters begin anew; at hour 60 both fall.
            since = hour + 1 - (40 if i and hour >= 40 else 0)
            rate = 2.0 if hour < 60 else 1.5
            drafts = 3000 * since
            full = min(hour, 60) - (40 if i and hour >= 40 else 0)
            before = 3000 * (2.0 * full + 1.5 * max(hour - 60, 0))
            server.RequestHandlerClass.counts = (drafts, before + rate * 3000)
        body = Watch(config, clock=lambda now=now: now).look()
    assert body["replicas"][urls[1]]["restarts"] == 1
    (alarm,) = body["alarms"]
    assert alarm["kind"] == "accepted" and alarm["falls"] and alarm["fires"]
    assert set(body["slices"]) == {"all", *(f"replica={url}" for url in urls)}


def test_pods_are_one_slice_under_whatever_names_and_a_release_is_told_by_the_ledger(tmp_path, replicas, monkeypatch):
    from pipeline.artifacts import Release
    from pipeline.errors import SwapError
    from serving.fleet.replicas import Address
    from serving.monitor import scrape

    config = config_of(tmp_path / "root", deploy={"kubernetes_service": "vllm"})
    url = f"http://127.0.0.1:{replicas[0].server_address[1]}"
    bodies = []
    for hour in range(6):
        now = START + (hour + 0.99) * HOUR_S
        if hour == 4:
            path = config.root / "releases" / "000001-v8"
            path.mkdir(parents=True)
            made = {
                "parents": {},
                "version": "8",
                "previous": "7",
                "reason": "deploy",
                "at": "2027-01-01T04:00:00+00:00",
            }
            commit(path, Release(derivation_id="000001-v8", **made, phase="converged", target={}))

        def listed(config, hour=hour):
            if hour == 2:
                raise SwapError("the API server does not answer")
            return [Address(f"vllm-{hour // 3}", url), Address("vllm-new", "http://127.0.0.1:9", ready=False)]

        monkeypatch.setattr(watch_look, "listed", listed)
        monkeypatch.setattr(scrape.time, "time", lambda now=now: now)
        replicas[0].RequestHandlerClass.counts = (3000 * hour, 6000 * hour)
        bodies.append(Watch(config, clock=lambda now=now: now).look())
    assert bodies[1]["replicas"]["vllm-0"]["acceptance_length"] == 3.0
    assert "does not answer" in bodies[2]["replicas"]["vllm-0"]["down"]
    assert set(bodies[5]["replicas"]) == {"vllm-1", "vllm-new"} and bodies[5]["replicas"]["vllm-new"]["down"]
    assert set(bodies[5]["slices"]) == {"all", "replica=any"} and bodies[5]["version"] == "8"


def test_an_address_that_cannot_be_had_is_told_before_anything_is_watched(tmp_path, folder):
    import socket

    from pydantic import ValidationError

    write_log(folder, [])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for address in (f"127.0.0.1:{taken.getsockname()[1]}", "127.0.0.1:99999"):
            config = config_of(tmp_path / "root", sources=[folder], watch=SETTINGS | {"listen": address})
            with pytest.raises(ConfigError, match=r"watch\.listen = 127.*give a free host:port"):
                watch_job._go_on(config)
    for address in ("9464", "http://127.0.0.1:9464", "::1:9464", "a b:1"):
        with pytest.raises(ValidationError, match="listen"):
            config_of(tmp_path / "root", sources=[folder], watch={"listen": address})


def test_a_replica_that_is_missing_is_told_and_stops_nothing(tmp_path, folder):
    config = config_of(tmp_path / "root", sources=[folder], serving={"replicas": ["http://127.0.0.1:9"]})
    write_log(folder, records(0, 3))
    body = look(config, 3)
    assert "refused" in body["replicas"]["http://127.0.0.1:9"]["down"] and body["records"]["counted"] == 60
    assert f'{PREFIX}replica_up{{replica="http://127.0.0.1:9"}} 0.0' in (config.root / "watch/metrics.prom").read_text()


def test_there_has_to_be_something_to_watch(tmp_path):
    with pytest.raises(ConfigError, match=r"collect\.sources.*serving\.replicas"):
        Watch(config_of(tmp_path / "root"))


def promised(registry, tiny, root, *, length):
    """Version 1 is a drafter that the gate measured at this acceptance length, and at what load it pays."""
    _, drafters = tiny
    drafter = as_checkpoint(root, drafters[0], name="d1")
    version = registry.register("toy--mails", drafter)
    rows = [row for route in RATES for row in rows_of({"challenger": length}, route=route)]
    path = root / "reports" / "r1" / "acceptance.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=ACCEPTANCE), path)
    shards = (describe_file(path, rows=len(rows)),)
    settings = {"sampling": {"temperature": 0.0}, "max_tokens": 128}
    commit(
        path.parent,
        AcceptanceReport(derivation_id="r1", parents={"challenger": "d1"}, shards=shards, settings=settings),
    )
    points = [
        {"num_speculative_tokens": 0, "concurrency": 4, "tokens_per_s": 100.0},
        {"num_speculative_tokens": 3, "concurrency": 4, "tokens_per_s": 100.0, "acceptance_length": 4.0},
    ]
    commit(root / "speeds" / "s1", SpeedReport(derivation_id="s1", parents={"drafter": "d1"}, points=points))
    return version


def test_the_gates_promise_stands_beside_what_is_served_and_is_held_against_it(
    registry, tiny, mlflow_root, folder, monkeypatch
):
    config = config_of(mlflow_root, sources=[folder])
    clock, promises = iter((0.0, 1.0, 601.0)), Promises(config)
    monkeypatch.setattr(watch_promises.time, "monotonic", lambda: next(clock))
    assert promises.points("1") == []
    version = promised(registry, tiny, mlflow_root, length=4.2)
    assert version == "1" and promises.points("1") == []  # asked a moment ago
    assert len(promises.points("1")) == 1  # what was measured since counts without a restart
    monkeypatch.undo()
    # mail is served at 3.0 and code at 4.0, as one half each: 3.5.
    write_log(folder, records(0, 48, version=version))
    body = look(config, 47)
    assert body["slices"]["all"]["promised"] == pytest.approx(4.2, abs=0.01)
    (alarm,) = body["alarms"]
    assert alarm["kind"] == "promise" and "instead of 4.20" in alarm["message"]
    assert "greedy, at most 128 tokens (report r1)" in body["how_promised"]


def test_a_load_at_which_the_drafter_does_not_pay_is_an_alarm_of_its_own(
    registry, tiny, mlflow_root, folder, replicas, monkeypatch
):
    from serving.monitor import scrape

    version = promised(registry, tiny, mlflow_root, length=3.5)
    url = f"http://127.0.0.1:{replicas[0].server_address[1]}"
    config = config_of(mlflow_root, sources=[folder], serving={"replicas": [url]})
    write_log(folder, records(0, 10, version=version))
    for hour in range(10):
        now = START + (hour + 1.5) * HOUR_S
        monkeypatch.setattr(scrape.time, "time", lambda now=now: now)
        replicas[0].RequestHandlerClass.counts = (3000 * hour, 7500 * hour)
        body = Watch(config, clock=lambda now=now: now).look()
    # Acceptance length 3.5 at four requests at a time, where 4.0 breaks even.
    assert body["pays"]["speedup"] == pytest.approx(3.5 / 4.0, abs=0.01)
    assert [one["kind"] for one in body["alarms"]] == ["pays"] and not body["retrain"] and body["firing"]
