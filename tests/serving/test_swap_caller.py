"""A deploy's side of one swap: answers that are lost, break off or are none, and engines whose workers hold shards."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from serving.deploy import swap_replica
from serving.errors import DeployError, LookAgainError, NoAnswerError
from serving.fleet.replicas import Address, look
from serving.replica import MAX_ANSWER_BYTES, call

WHOLE = {"in_place": True, "how": "replace", "reason": None, "restart": False}
SHARDS = {"in_place": False, "how": None, "reason": "this engine shards its model", "restart": True}


class Replicas:
    """A server that answers status, swap and probes as it is told."""

    def __init__(self):
        self.version, self.epoch, self.door, self.swapping = "1", 0, "open", 0
        self.can, self.live, self.refuses = WHOLE, ["a", "a"], ()
        self.answers = "whole"
        self.orders = []
        replica = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(replica.status())

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.answer(replica.swap(body), lost=replica.answers)

            def answer(self, body, lost="whole"):
                data = json.dumps(body).encode()
                if lost == "nothing":
                    self.close_connection = True
                    return
                if lost == "no HTTP":
                    self.wfile.write(b"\xff\xfe\n\n")
                    self.close_connection = True
                    return
                self.send_response(200 if body["status"] == "ok" else 409)
                self.send_header("content-length", str(len(data) + (100 if lost == "half" else 0)))
                self.end_headers()
                self.wfile.write(data)
                self.close_connection = True

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def status(self):
        self.swapping = max(0, self.swapping - 1)
        return {
            "status": "ok",
            "reason": None,
            "version": self.version,
            "folder": f"/v/{self.version}",
            "sha256": self.version * 64,
            "epoch": f"aa.{self.epoch}",
            "live_fingerprint": [f"{rank}{self.version}" for rank in self.live],
            "swap": self.can,
            "door": self.door,
            "swapping": self.swapping > 0,
            "paused": False,
        }

    def swap(self, order):
        self.orders.append(order)
        if order["version"] in self.refuses:
            return {"status": "refused", "reason": "not this one"}
        if order["expected_version"] != self.version or order.get("expected_epoch") != f"aa.{self.epoch}":
            return {"status": "refused", "reason": "another version serves"}
        self.version, self.epoch = order["version"], self.epoch + 1
        return {"status": "ok", "reason": None, "pause_s": 0.1, "how": "in_place"}


@pytest.fixture
def replica():
    one = Replicas()
    yield one
    one.server.shutdown()
    one.server.server_close()


def there(replica, version="2"):
    settings = {"folder": f"/v/{version}", "version": version, "sha256": version * 64, "expected_version": "1"}
    return swap_replica(replica.url, "t", probe=[], timeout_s=30.0, **settings)


@pytest.mark.parametrize("lost", ["nothing", "no HTTP", "half"])
def test_an_answer_that_is_lost_is_found_out_about(replica, lost):
    replica.answers, replica.swapping = lost, 4
    outcome = there(replica)
    assert (outcome.version, outcome.previous, replica.version) == ("2", "1", "2")
    replica.refuses = ("3",)
    with pytest.raises(DeployError, match="version 2 serves there"):
        swap_replica(
            replica.url,
            "t",
            folder="/v/3",
            version="3",
            sha256="3" * 64,
            expected_version="2",
            probe=[],
            timeout_s=30.0,
        )


def test_an_answer_without_end_is_not_read(replica, monkeypatch):
    monkeypatch.setattr("serving.replica.MAX_ANSWER_BYTES", 100)
    with pytest.raises(DeployError, match="its answer has more than"):
        call(replica.url, "t", "status", None, 30.0)
    assert MAX_ANSWER_BYTES >= 2**20


def test_nobody_there_is_told_apart_from_a_refusal(replica):
    replica.server.shutdown()
    replica.server.server_close()
    with pytest.raises(NoAnswerError, match="not reachable"):
        call(replica.url, "t", "status", None, 5.0)


def test_shards_have_live_weights_of_their_own(replica):
    replica.can, replica.live = SHARDS, ["a", "b"]
    assert there(replica).live_fingerprint == "a2"
    assert look(Address("r", replica.url), "t").is_up


def test_like_workers_with_other_live_weights_are_put_back(replica):
    replica.live = ["a", "b"]
    with pytest.raises(DeployError, match=r"different live weights.*version 1 serves there again"):
        there(replica)
    assert not look(Address("r", replica.url), "t").is_up


def test_nothing_that_the_new_drafter_did_to_the_probes_stands_in_the_way_back(replica):
    replica.live = ["a", "b"]
    with pytest.raises(DeployError):
        there(replica)
    back = replica.orders[-1]
    assert (back["version"], back["probe"], back["allow_changed_outputs"]) == ("1", [], True)
    assert back["expected_epoch"] == "aa.1", "taken once, and not again"


@pytest.mark.parametrize(
    ("code", "kind"), [("shut", LookAgainError), ("paused", LookAgainError), ("sha256", DeployError)]
)
def test_a_replica_that_is_starting_again_has_not_refused(replica, code, kind):
    replica.refuses = ("2",)
    swap = replica.swap
    replica.swap = lambda order: swap(order) | {"code": code}
    with pytest.raises(DeployError, match="not this one") as caught:
        there(replica)
    assert type(caught.value) is kind
