"""Nothing that a supervised command started outlives the process that asked for it."""

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from serving.kept_drafter import Kept, KeptDrafter, read_kept, write_kept
from serving.supervise import _Supervisor, with_drafter

SUPERVISOR = Path(__file__).resolve().parents[2] / "serving" / "supervise.py"
# Starts a child that ignores SIGTERM, says both pids, then sleeps.
COMMAND = """
import os, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end while it is looked at
        return False


def gone(pids, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and any(alive(pid) for pid in pids):
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def first_line(process, timeout_s=60):
    """What it says first. Raises: AssertionError when that does not come."""
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    assert ready, "waited in vain"
    return process.stdout.readline()


def start(seconds="600"):
    process = subprocess.Popen(
        [sys.executable, "-S", str(SUPERVISOR), sys.executable, "-c", COMMAND, seconds],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    return process, [int(pid) for pid in first_line(process).split()]


@pytest.mark.parametrize("how", ["pipe closes", "terminated", "command ends", "command is killed"])
def test_the_whole_group_ends(how):
    process, pids = start("0.5" if how == "command ends" else "600")
    if how == "pipe closes":
        process.stdin.close()
    elif how == "terminated":
        process.terminate()
    elif how == "command is killed":
        os.kill(pids[0], 9)
    assert gone(pids) and process.wait(60) == (0 if how == "command ends" else 1)


def test_the_group_ends_when_the_asking_process_is_killed():
    asker = subprocess.Popen(
        [sys.executable, "-c", ASKER, str(SUPERVISOR), COMMAND], stdout=subprocess.PIPE, start_new_session=True
    )
    pids = [int(pid) for pid in first_line(asker).split()]
    assert all(alive(pid) for pid in pids)
    asker.kill()
    asker.wait(60)
    assert gone(pids)


def test_the_command_ends_when_the_supervisor_itself_is_killed_outright():
    process, (command, deaf) = start()
    try:
        process.kill()
        assert gone([command])
    finally:
        os.kill(deaf, 9)  # what the command started is the command's to end


ASKER = """
import subprocess, sys, time
process = subprocess.Popen([sys.executable, "-S", sys.argv[1], sys.executable, "-c", sys.argv[2], "600"],
                           stdin=subprocess.PIPE, start_new_session=True)
time.sleep(600)
"""


# A server as far as the supervisor knows one: it writes down each start, and answers /health unless its drafter is bad.
SERVER = """
import http.server, json, os, signal, sys
options = dict(zip(sys.argv, sys.argv[1:]))
drafter = json.loads(options["--speculative-config"])["model"]
with open(options["--starts"], "a") as starts:
    start = [os.path.basename(drafter), os.environ.get("SLIPSTREAM_DRAFTER_VERSION"), os.getpid()]
    print(json.dumps(start), file=starts)
if "bad" in drafter:
    sys.exit(3)
with open(options["--starts"] + ".proves", "a") as proves:
    print(os.environ["SLIPSTREAM_PROVE"] == "1", file=proves)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if "silent" in drafter else 200)
        self.end_headers()
    def log_message(self, *_):
        pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
"""


class Keeping:
    """A supervised server that is started again, and what it wrote at each start."""

    def __init__(self, folder):
        self.folder, self.keep, self.starts_file = folder, folder / "kept.json", folder / "starts"
        self.drafters = {}
        self.environment = {}
        for name in ("one", "two", "bad", "silent"):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text("{}")
            (folder / name / "model.safetensors").write_text(name)
            sha256 = hashlib.sha256(name.encode()).hexdigest()
            self.drafters[name] = KeptDrafter(str(folder / name), f"v-{name}", sha256)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def __enter__(self):
        speculation = json.dumps({"method": "dflash", "model": str(self.folder / "one")})
        options = ["--port", str(self.port), "--starts", str(self.starts_file), "--speculative-config", speculation]
        command = [sys.executable, "-c", SERVER, *options]
        self.process = subprocess.Popen(
            [sys.executable, "-S", str(SUPERVISOR), "--keep", str(self.keep), *command],
            env={**os.environ, "SLIPSTREAM_DRAFTER_VERSION": "first", **self.environment},
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(60)
        assert not alive(self.starts()[-1][2])

    def starts(self):
        text = self.starts_file.read_text() if self.starts_file.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def healthy(self, count):
        """The starts, once there are so many and the last one answers."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1).close()
                if len(self.starts()) >= count:
                    return [start[:2] for start in self.starts()]
            time.sleep(0.05)
        raise AssertionError(f"waited in vain: {self.starts()}")

    def started(self, count):
        """The starts, once there are so many."""
        deadline = time.monotonic() + 60
        while len(self.starts()) < count:
            assert time.monotonic() < deadline, f"waited in vain: {self.starts()}"
            time.sleep(0.05)
        return [start[:2] for start in self.starts()]

    def settled(self):
        """What is kept, once the supervisor has seen that it came up."""
        deadline = time.monotonic() + 60
        while read_kept(self.keep).previous is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        return read_kept(self.keep)


@pytest.fixture
def keeping(tmp_path):
    with Keeping(tmp_path) as server:
        assert server.healthy(1) == [["one", "first"]]
        time.sleep(1.5)  # until the supervisor, which asks now and then, has seen it up
        yield server


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_ends_unasked_comes_up_with_the_drafter_it_served_last(keeping, number):
    write_kept(keeping.keep, Kept(keeping.drafters["two"]))
    os.kill(keeping.starts()[-1][2], number)  # on SIGTERM it ends with status 0, as vLLM does when its engine dies
    assert keeping.healthy(2)[1:] == [["two", "v-two"]]


def test_a_restart_that_is_ordered_serves_the_new_drafter_and_forgets_the_old_once_it_is_up(keeping):
    write_kept(keeping.keep, Kept(keeping.drafters["two"], keeping.drafters["one"]))
    keeping.process.send_signal(signal.SIGUSR1)
    assert keeping.healthy(2)[1:] == [["two", "v-two"]]
    assert keeping.settled() == Kept(keeping.drafters["two"])


def test_a_drafter_that_does_not_come_up_makes_way_for_the_one_before(keeping):
    write_kept(keeping.keep, Kept(keeping.drafters["bad"], keeping.drafters["two"]))
    keeping.process.send_signal(signal.SIGUSR1)
    assert keeping.healthy(3)[1:] == [["bad", "v-bad"], ["two", "v-two"]]
    assert read_kept(keeping.keep) == Kept(keeping.drafters["two"])


def test_a_kept_folder_that_is_no_longer_what_was_served_is_not_started_with(keeping):
    write_kept(keeping.keep, Kept(keeping.drafters["two"]))
    (keeping.folder / "two" / "model.safetensors").write_text("other weights")
    os.kill(keeping.starts()[-1][2], 9)
    assert keeping.healthy(2)[1:] == [["one", "first"]]


def test_a_new_drafter_is_told_to_prove_itself_and_one_that_served_is_not(keeping):
    write_kept(keeping.keep, Kept(keeping.drafters["two"], keeping.drafters["one"]))
    keeping.process.send_signal(signal.SIGUSR1)
    keeping.healthy(2)
    keeping.settled()
    os.kill(keeping.starts()[-1][2], 9)
    keeping.healthy(3)
    assert (keeping.folder / "starts.proves").read_text().split() == ["False", "True", "False"]


def test_a_full_disk_ends_no_server(keeping):
    write_kept(keeping.keep, Kept(keeping.drafters["bad"], keeping.drafters["two"]))
    (keeping.folder / f".kept.json.{keeping.process.pid}.tmp").mkdir()  # nothing can be written any more
    keeping.process.send_signal(signal.SIGUSR1)
    assert keeping.healthy(3)[1:] == [["bad", "v-bad"], ["two", "v-two"]]
    os.kill(keeping.starts()[-1][2], 9)
    assert keeping.healthy(4)[3:] == [["two", "v-two"]]


def test_a_server_behind_a_proxys_environment_is_seen_up(tmp_path):
    server = Keeping(tmp_path)
    server.environment = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "all_proxy")}
    write_kept(server.keep, Kept(server.drafters["two"], server.drafters["one"]))
    with server:
        assert server.started(1) == [["two", "v-two"]]
        assert server.settled() == Kept(server.drafters["two"])


def test_one_whose_health_nobody_sees_is_ended_only_where_there_is_another_to_go_back_to(tmp_path):
    server = Keeping(tmp_path)
    server.environment = {"SLIPSTREAM_START_S": "2"}
    write_kept(server.keep, Kept(server.drafters["silent"]))
    with server:
        assert server.started(1) == [["silent", "v-silent"]]
        time.sleep(4)
        assert len(server.starts()) == 1
        write_kept(server.keep, Kept(server.drafters["silent"], server.drafters["two"]))
        server.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 60
        while server.starts()[-1][:2] != ["two", "v-two"]:  # on busy cores it may be ended before it writes its start
            assert time.monotonic() < deadline, server.starts()
            time.sleep(0.05)
        assert server.settled() == Kept(server.drafters["two"])


def test_the_servers_own_word_that_it_is_up_is_enough(tmp_path):
    server = Keeping(tmp_path)
    write_kept(server.keep, Kept(server.drafters["silent"], server.drafters["one"]))
    with server:
        assert server.started(1) == [["silent", "v-silent"]]
        server.process.send_signal(signal.SIGUSR2)
        assert server.settled() == Kept(server.drafters["silent"])
        os.kill(server.starts()[-1][2], 9)
        assert server.started(2)[1:] == [["silent", "v-silent"]]


def test_what_a_swap_has_kept_meanwhile_is_not_forgotten(tmp_path):
    one, two, three = (KeptDrafter(f"/v/{n}", n, n) for n in "123")
    supervisor = SimpleNamespace(_keep=tmp_path / "kept.json", _gave_up=set())
    write_kept(supervisor._keep, Kept(three))
    _Supervisor._forget(supervisor, Kept(two, one), Kept(two))
    assert read_kept(supervisor._keep) == Kept(three)


def test_a_command_without_a_speculative_configuration_is_started_as_it_is(tmp_path):
    write_kept(tmp_path / "kept.json", Kept(KeptDrafter("/v/2", "2", "ab")))
    tell = "import os; print(os.environ.get('SLIPSTREAM_KEEP'), os.environ.get('SLIPSTREAM_DRAFTER_VERSION'))"
    for extra in ([], ["--speculative-config", "not JSON"], ["--speculative-config.model", "/v/1"]):
        command = [sys.executable, "-S", str(SUPERVISOR), "--keep", str(tmp_path / "kept.json")]
        done = subprocess.run(
            [*command, sys.executable, "-c", tell, *extra],
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if not name.startswith("SLIPSTREAM_")},
            capture_output=True,
            start_new_session=True,
            timeout=60,
        )
        assert b"every start is with the drafter of the command line" in done.stdout
        assert b"None None" in done.stdout, "a version that the command line does not serve is not claimed"


def test_a_command_that_never_came_up_is_not_started_for_ever(tmp_path):
    keep = tmp_path / "kept.json"
    command = [sys.executable, "-S", str(SUPERVISOR), "--keep", str(keep), sys.executable, "-c", "raise SystemExit(7)"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True, timeout=60)
    assert done.returncode == 7 and b"never up" in done.stdout


def test_what_is_kept_is_replaced_whole(tmp_path):
    one = Kept(KeptDrafter("/v/1", "1", "ab"))
    path = tmp_path / "deep" / "kept.json"
    write_kept(path, one)
    assert read_kept(path) == one and os.listdir(path.parent) == ["kept.json"]
    path.write_text('{"serve": {"folder": "/v/1"')  # torn by something else
    assert read_kept(path) is None and read_kept(tmp_path / "none") is None


def test_the_drafter_goes_into_the_speculative_configuration_and_nowhere_else():
    drafter = KeptDrafter("/v/2", "2", "ab")
    command = ["python", "--model", "/m", "--speculative-config", '{"model": "/v/1", "num_speculative_tokens": 3}']
    new = '{"model": "/v/2", "num_speculative_tokens": 3}'
    assert with_drafter(command, drafter) == [*command[:4], new]
    assert with_drafter([f"{command[3]}={command[4]}"], drafter) == [f"--speculative-config={new}"]
    assert with_drafter(command[:3], drafter) == command[:3]
