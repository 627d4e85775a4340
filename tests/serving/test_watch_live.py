"""The watch beside a real server: what it says is what the server's own counters and the tap's records say."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import tiny_drafter, tiny_target

from jobs.watch_look import Watch
from pipeline.config import load_config
from pipeline.watch.promise import promise_of
from serving.launch import VllmServer
from serving.monitor.counters import read_counters

ROOT = Path(__file__).resolve().parents[2]
SECRET, SUBJECT = "the parcel of Anna", "anna-4711"
ROUTES = {"mail": ("/v1/chat/completions", 40), "code": ("/v1/completions", 20)}
AT_A_TIME, EACH = 4, 8
_COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens)_total\{[^}]*\} (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Two looks at a server by the command, with all requests between them."""
    root = tmp_path_factory.mktemp("watched")
    target = tiny_target(root / "target", favourite=433)
    server = VllmServer(
        model=target,
        drafter=tiny_drafter(root / "7", target, proposes=433),
        version="7",
        log=root / "server.log",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        served_name="m",
        tap_dir=root / "traffic",
        tap_consent="header:X-Consent=yes",
        tap_subject_header="X-Subject",
        tap_slice_header="X-Slice",
        env={"OMP_NUM_THREADS": "1", "SLIPSTREAM_TAP_TENANT_HEADER": "X-Tenant"},
    )
    toml = root / "slipstream.toml"
    toml.write_text(
        f'root = "runs"\nworkload = "mails"\n[target]\nmodel = "{target}"\n[serving]\n'
        f'replicas = ["{server.base_url}"]\n'
        '[collect]\nsources = ["traffic"]\n[watch]\ndimensions = ["route", "tenant"]\nlate_minutes = 0\n'
    )
    try:
        server.start(timeout_s=400)
        first, before = once(toml), counters(server)
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            replies = list(pool.map(lambda one: ask(server, *one), requests()))
        wait_for_records(root / "traffic", 2 * EACH, server)
        after, second = counters(server), once(toml)
        shown = exposed(server)
    finally:
        server.stop()
    counted = [b - a for a, b in zip(before, after, strict=True)]
    looks = {"first": first, "second": second}
    return SimpleNamespace(toml=toml, root=root, **looks, counted=counted, replies=replies, shown=shown)


def requests():
    """(Route, whether it consents, number) of every request."""
    return [(route, consents, i) for i in range(EACH) for route in ROUTES for consents in (True, False)]


def ask(server, route, consents, number):
    """What the server itself says of a reply, in its answer: (route, consents, drafts, accepted)."""
    path, tokens = ROUTES[route]
    words = f"{SECRET} {number}"
    asked = {"messages": [{"role": "user", "content": words}]} if "chat" in path else {"prompt": words}
    body = {"model": "m", "temperature": 0, "max_tokens": tokens, "ignore_eos": True, **asked}
    headers = {"Content-Type": "application/json", "X-Tenant": "acme", "X-Subject": SUBJECT, "X-Slice": route}
    headers |= {"X-Consent": "yes"} if consents else {}
    request = urllib.request.Request(server.base_url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        spec = json.load(answer)["metrics"]["speculative_decoding"]
    return route, consents, spec["num_spec_steps"], spec["num_accepted_draft_tokens"]


def exposed(server):
    """The server's /metrics."""
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=30) as answer:
        return answer.read().decode()


def counters(server):
    """Drafts and accepted drafts by the server's own counters."""
    found = dict(_COUNTER.findall(exposed(server)))
    return float(found["drafts"]), float(found["accepted_tokens"])


def wait_for_records(folder, count, server):
    deadline = time.monotonic() + 60
    while sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl")) < count:
        assert time.monotonic() < deadline, server.log_tail()
        time.sleep(0.1)


def once(toml):
    """The body of one look by the command."""
    command = [sys.executable, "jobs/watch.py", "--config", str(toml), "--once"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def length_of(replies):
    """1 + accepted / drafts."""
    return 1 + sum(accepted for *_, accepted in replies) / sum(drafts for _, _, drafts, _ in replies)


def test_a_replicas_acceptance_length_is_that_of_its_own_counters_and_of_its_replies(watched):
    drafts, accepted = watched.counted
    assert drafts == sum(one[2] for one in watched.replies) > 100
    assert accepted == sum(one[3] for one in watched.replies) > 20
    (before,), (after,) = (body["replicas"].values() for body in (watched.first, watched.second))
    assert (before["acceptance_length"], before["down"]) == (None, None)
    assert after["acceptance_length"] == pytest.approx(1 + accepted / drafts, rel=1e-12)
    assert (after["restarts"], after["down"]) == (0, None)
    assert 1 < after["running"] <= AT_A_TIME  # the time in which nobody asked is no part of it


def test_every_counter_that_is_read_is_one_that_the_server_has(watched):
    found = read_counters(watched.shown, at=1.0)
    counted = {name: value for name, value in found.as_dict().items() if name not in ("running", "waiting")}
    assert all(counted.values()) and len(found.accepted_per_pos) == 3, counted
    # A reply's first token is the prefill's; every step gives one more than it accepts, the last one cut at its limit.
    assert found.num_requests == len(watched.replies) and found.num_tokens > found.num_drafts
    assert sum(found.accepted_per_pos) == found.num_accepted_tokens


def test_records_and_counters_are_in_the_same_units_and_only_consent_is_on_record(watched):
    consented = [one for one in watched.replies if one[1]]
    assert watched.first["records"] == {} and watched.second["records"] == {"counted": 2 * EACH}
    assert watched.second["slices"] == {}  # the hour is not over
    body = Watch(load_config(watched.toml), clock=lambda: time.time() + 7200).look()
    slices = body["slices"]
    for name in ("all", "route=mail", "route=code"):
        own = [one for one in consented if name in ("all", f"route={one[0]}")]
        assert slices[name]["requests"] == len(own)
        assert slices[name]["acceptance_length"] == pytest.approx(length_of(own), rel=1e-12)
    assert set(slices) == {"all", "route=mail", "route=code", "tenant=acme"}
    assert (body["version"], body["phase"], body["firing"]) == ("7", "learning", [])


def test_what_the_gate_would_promise_of_the_same_replies_is_what_is_served(watched):
    rows = [
        {
            "role": "challenger",
            "prompt_set": "gate",
            "row_id": str(i),
            "conversation": str(i),
            "slices": json.dumps({"route": route}),
            "weight": 1,
            "block": 0,
            "num_drafts": drafts,
            "num_accepted_tokens": accepted,
            "flag": None,
        }
        for i, (route, consents, drafts, accepted) in enumerate(watched.replies)
        if consents
    ]
    made = promise_of("7", "r", rows, "challenger", settings={})
    served = Watch(load_config(watched.toml), clock=lambda: time.time() + 7200).look()["slices"]
    for name in ("all", "route=mail", "route=code"):
        assert made.slices[name].acceptance_length == pytest.approx(served[name]["acceptance_length"], rel=1e-12)


def test_nobodys_words_or_name_are_in_what_the_watch_keeps_or_shows(watched):
    kept = {path: path.read_text() for path in (watched.root / "runs" / "watch").rglob("*") if path.is_file()}
    assert {"alarms.json", "report.html", "metrics.prom"} <= {path.name for path in kept}
    for text in (*kept.values(), json.dumps(watched.second)):
        assert "parcel" not in text and "nna" not in text and "4711" not in text
