"""The watch as it is run: logs and replicas on one side, alarms.json, metrics and a page on the other."""

import json
import os
import random
import signal
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

from jobs.watch import FIRING, take
from jobs.watch_look import Watch
from pipeline.artifacts import AcceptanceReport, SpeedReport, commit, describe_file
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.schemas import ACCEPTANCE
from pipeline.watch.hours import HOUR_S
from serving.monitor.gauges import NAMES, PREFIX
from tests.jobs.checkpoints import as_checkpoint
from tests.pipeline.measurements import rows_of

ROOT = Path(__file__).resolve().parents[2]
START = 1_798_761_600  # Friday, 1 January 2027, 00:00 UTC
RATES = {"mail": 2.0, "code": 3.0}
SETTINGS = {"learn_days": 3, "reference_days": 5, "keep_days": 9, "settle_hours": 6, "dimensions": ["route"]}


def records(first, count, *, start=START, factor=lambda route: 1.0, version="1", conversations=10, secret=""):
    """So many hours of records: a request a conversation, half of them a third over their route's rate, half under."""
    found = []
    for number in range(first, first + count):
        for route, rate in RATES.items():
            for i in range(conversations):
                accepted = 30 * rate * factor(route) * (1.3 if i % 2 else 0.7)
                found.append(
                    {
                        "id": f"{number}-{route}-{i}",
                        "ts": start + number * HOUR_S + 60 * i,
                        "consent": "recorded",
                        "slice": route,
                        "subject": f"subject-{number}-{i}",
                        "drafter_version": version,
                        "acceptance": {
                            "num_drafts": 30,
                            "num_draft_tokens": 210,
                            "num_accepted_tokens": round(accepted),
                        },
                        "messages": [{"role": "user", "content": f"{route} {i % 3}{secret}"}],
                        "params": {},
                        "response": {"usage": {"prompt_tokens": 20}},
                    }
                )
    return found


def write_log(folder, some, name="traffic-host-1-1700000000000.jsonl"):
    folder.mkdir(exist_ok=True)
    with (folder / name).open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in some)


def config_of(root, *, sources=(), **more):
    body = {"root": root, "target": {"model": "/models/toy"}, "workload": "mails", "watch": SETTINGS}
    body["collect"] = {"sources": [str(one) for one in sources]}
    return Config.model_validate({**body, **more})


def look(config, hour, *, start=START):
    """One look by a watch that was started for it, half an hour after the end of an hour."""
    return Watch(config, clock=lambda: start + (hour + 1.5) * HOUR_S).look()


def fall(route):
    return 0.75


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


def test_a_watch_that_is_killed_at_any_moment_ends_where_one_that_is_not_does(tmp_path, folder):
    begin = int(time.time() // HOUR_S - 110) * HOUR_S
    whole = records(0, 80, start=begin) + records(80, 26, start=begin, factor=fall)
    write_log(folder, whole)
    rng, roots = random.Random(5), (tmp_path / "killed", tmp_path / "straight")
    commands = []
    for root in roots:
        toml = tmp_path / f"{root.name}.toml"
        watch = ", ".join(f"{name} = {json.dumps(value)}" for name, value in SETTINGS.items())
        toml.write_text(
            f'root = "{root}"\nworkload = "mails"\nwatch = {{{watch}}}\n[target]\nmodel = "/models/toy"\n'
            f'[collect]\nsources = ["{folder}"]\n'
        )
        commands.append([sys.executable, "jobs/watch.py", "--config", str(toml), "--once"])
    for _ in range(8):
        process = subprocess.Popen(commands[0], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.5, 4.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True) for command in commands]
    assert [one.returncode for one in done] == [FIRING, FIRING], done[0].stderr
    killed, straight = (json.loads(one.stdout) for one in done)
    assert killed["firing"] == straight["firing"] and killed["slices"] == straight["slices"]
    assert killed["records"] == straight["records"]
    for name in ("hours", "asked"):
        kept = [{path.name: path.read_text() for path in (root / "watch" / name).glob("[!.]*")} for root in roots]
        assert kept[0] == kept[1] and (name == "asked" or len(kept[0]) == 106)


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
        alone = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert alone.returncode == 1 and "another watch holds it, and looked last never" in alone.stderr
        body = Watch(config_of(config.root, sources=[folder], watch={})).look()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and json.loads(done.stdout) == body


def test_a_part_that_cannot_be_read_is_read_by_the_next_look_and_counts_once(tmp_path, folder, monkeypatch):
    from pipeline.errors import StageError
    from pipeline.watch import logs

    config = config_of(tmp_path / "root", sources=[folder])
    write_log(folder, records(0, 3))
    read = logs.read

    def breaks(new, *, max_line_bytes):
        for number, record in enumerate(read(new, max_line_bytes=max_line_bytes)):
            if number == 17:
                raise StageError("the storage is gone")
            yield record

    monkeypatch.setattr(logs, "read", breaks)
    assert look(config, 1)["records"] == {}
    monkeypatch.setattr(logs, "read", read)
    monkeypatch.setattr(logs, "PART_BYTES", 5000)
    assert look(config, 1)["records"] == {"counted": 60}


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
    config = config_of(tmp_path / "root", serving={"replicas": urls})
    body = None
    for hour in range(110):
        now = START + (hour + 0.99) * HOUR_S
        monkeypatch.setattr(scrape.time, "time", lambda now=now: now)
        for i, server in enumerate(replicas):
            # The second restarts at hour 40, and its counters begin anew.
            since = hour + 1 - (40 if i and hour >= 40 else 0)
            rate = 2.0 if hour < 90 else 1.5
            drafts = 3000 * since
            full = min(hour, 90) - (40 if i and hour >= 40 else 0)
            before = 3000 * (2.0 * full + 1.5 * max(hour - 90, 0))
            server.RequestHandlerClass.counts = (drafts, before + rate * 3000)
        body = Watch(config, clock=lambda now=now: now).look()
    assert body["replicas"][urls[1]]["restarts"] == 1
    (alarm,) = body["alarms"]
    assert alarm["kind"] == "accepted" and alarm["falls"] and alarm["fires"]
    assert set(body["slices"]) == {"all", *(f"replica={url}" for url in urls)}


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


def test_the_gates_promise_stands_beside_what_is_served_and_is_held_against_it(registry, tiny, mlflow_root, folder):
    version = promised(registry, tiny, mlflow_root, length=4.2)
    config = config_of(mlflow_root, sources=[folder])
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


def test_a_damaged_state_stops_with_what_to_do(tmp_path, folder):
    config = config_of(tmp_path / "root", sources=[folder])
    write_log(folder, records(0, 3))
    look(config, 3)
    (tmp_path / "root/watch/state.json").write_text("{")
    from pipeline.errors import SchemaError

    with pytest.raises(SchemaError, match=r"state\.json.*remove it to learn anew"):
        look(config, 4)
    os.remove(tmp_path / "root/watch/state.json")
    assert look(config, 4)["records"]["counted"] == 60
