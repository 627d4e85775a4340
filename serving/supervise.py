"""Run a command so that nothing of it outlives the process that asked for it.

``python serving/supervise.py [--keep FILE] COMMAND ...``: when standard input is a pipe and closes (the asker ended,
however it ended), on SIGTERM, or when the command itself ends, the whole process group is ended. A vLLM server whose
front end is killed would otherwise leave its engine behind.

With ``--keep`` the command, a vLLM server, is started again whenever it ends unasked (with status 0 too: that is how
vLLM ends when its engine was killed), and on SIGUSR1, with the drafter that FILE names in place of its command line's
(serving/kept_drafter.py). A drafter that does not come up makes way for the one
before it.
"""

import ctypes
import itertools
import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from serving.kept_drafter import KEEP_ENV, SUPERVISOR_ENV, VERSION_ENV, Kept, KeptDrafter, read_kept, write_kept

GRACE_S = 15.0
START_S = 900.0  # a large target loads for minutes
MAX_RESTARTS, WITHIN_S = 5, 600.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SPECULATION = "--speculative-config"


def main(arguments: list[str]) -> int:
    """The command's exit status. The caller has made this process the leader of a process group of its own."""
    keep, command = None, arguments
    if arguments[:1] == ["--keep"]:
        keep, command = Path(arguments[1]), arguments[2:]
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)  # what is ended before a restart is this group
    supervisor = _Supervisor(command, keep)
    status = supervisor.run()
    if os.getpgrp() == os.getpid():
        # The exit status must survive, so it is told before the group, this process included, is ended.
        _say(f"the command ended with status {status}")
        _end_others()
    return status if status is not None and status >= 0 else 1


class _Supervisor:
    """The command, started as often as it takes."""

    def __init__(self, command: list[str], keep: Path | None):
        self._command, self._keep = command, keep
        self._end = self._restart = self._was_up = False
        self._restarts: list[float] = []
        self._watches_input = stat.S_ISFIFO(os.fstat(0).st_mode)  # in a container it is /dev/null
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked_to_end)
        if keep is not None:
            signal.signal(signal.SIGUSR1, self._asked_to_restart)

    def run(self) -> int | None:
        """The exit status of the last start."""
        while True:
            self._restart = False
            kept = self._kept()
            child = self._start(kept.serve if kept else None)
            came_up = self._watch(child, kept)
            status = _end(child)
            self._was_up |= came_up
            if self._end or self._keep is None:
                return status
            if not came_up and kept is not None and kept.previous is not None:
                _say(f"drafter {kept.serve.version} did not come up; drafter {kept.previous.version} again")
                write_kept(self._keep, Kept(kept.previous))
            elif not self._restart and not (self._was_up and self._may_restart()):
                _say(f"not started again: never up, or {MAX_RESTARTS} times in {WITHIN_S:.0f} s already")
                return status
            _end_others()
            _say("starting again" if self._restart else f"the command ended with status {status}; starting again")

    def _kept(self) -> Kept | None:
        """What is kept and still as it was; None: what the command line says."""
        kept = read_kept(self._keep) if self._keep is not None else None
        if kept is None or kept.serve.is_whole():
            return kept
        _say(f"{kept.serve.folder}: missing, or not the weights that were served")
        return Kept(kept.previous) if kept.previous is not None and kept.previous.is_whole() else None

    def _start(self, drafter: KeptDrafter | None) -> subprocess.Popen[bytes]:
        ours = {} if self._keep is None else {KEEP_ENV: str(self._keep), SUPERVISOR_ENV: str(os.getpid())}
        command = self._command
        if drafter is not None:
            command, ours = with_drafter(command, drafter), {**ours, VERSION_ENV: drafter.version}
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env={**os.environ, **ours}, preexec_fn=_end_with_the_supervisor
        )

    def _watch(self, child: subprocess.Popen[bytes], kept: Kept | None) -> bool:
        """Whether it came up; returns when the command has ended or has to."""
        came_up, deadline = False, time.monotonic() + START_S
        while child.poll() is None and not self._end and not self._restart:
            if self._watches_input:
                readable, _, _ = select.select([sys.stdin.buffer.raw], [], [], 0.2)
                if readable and not os.read(sys.stdin.fileno(), 1024):
                    self._end = True
            else:
                time.sleep(0.2)
            if self._keep is None or came_up:
                continue
            came_up = _is_healthy(self._command)
            if came_up and kept is not None and kept.previous is not None:
                write_kept(self._keep, Kept(kept.serve))  # nothing to go back to any more
            if not came_up and time.monotonic() > deadline:
                _say(f"not healthy after {START_S:.0f} s")
                return False
        return came_up

    def _may_restart(self) -> bool:
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < WITHIN_S] + [now]
        return len(self._restarts) <= MAX_RESTARTS

    def _asked_to_end(self, *_: object) -> None:
        self._end = True

    def _asked_to_restart(self, *_: object) -> None:
        self._restart = True


def with_drafter(command: list[str], drafter: KeptDrafter) -> list[str]:
    """The command with this drafter's folder in its speculative configuration; as it is without one."""
    changed = list(command)
    for i, part in enumerate(command):
        name, equals, value = part.partition("=")
        if name == _SPECULATION and (equals or i + 1 < len(command)):
            settings = json.dumps(json.loads(value if equals else command[i + 1]) | {"model": drafter.folder})
            changed[i if equals else i + 1] = f"{name}={settings}" if equals else settings
    return changed


def _is_healthy(command: list[str]) -> bool:
    options = dict(itertools.pairwise(command))
    options |= dict(part.split("=", 1) for part in command if part.startswith("--") and "=" in part)
    host = options.get("--host", "127.0.0.1")
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    try:
        with urllib.request.urlopen(f"http://{host}:{options.get('--port', '8000')}/health", timeout=1) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _end(child: subprocess.Popen[bytes]) -> int | None:
    """Its exit status; None where it outlived being asked to end."""
    if child.poll() is None:
        child.terminate()
        deadline = time.monotonic() + GRACE_S
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    return child.poll()


def _end_others() -> None:
    """End every process of this group but this one."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    time.sleep(0.2)
    _kill_others()
    signal.signal(signal.SIGTERM, before)


def _end_with_the_supervisor() -> None:
    """Have the kernel end the command where this process is killed outright, and so cannot do it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill_others() -> None:
    group = os.getpgrp()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(name) != os.getpid() and os.getpgid(int(name)) == group:
                os.kill(int(name), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _say(text: str) -> None:
    print(f"supervise: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
