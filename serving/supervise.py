"""Run a command so that nothing of it outlives the process that asked for it.

``python serving/supervise.py [--keep FILE] COMMAND ...``: when standard input is a pipe and closes (the asker ended,
however it ended), on SIGTERM, or when the command itself ends, the whole process group is ended. A vLLM server whose
front end is killed would otherwise leave its engine behind.

With ``--keep`` the command, a vLLM server, is started again whenever it ends unasked (with status 0 too: that is how
vLLM ends when its engine was killed), and on SIGUSR1, with the drafter that FILE names in place of its command line's
(serving/kept_drafter.py). It has come up when its health route answers, or its control endpoint sends SIGUSR2. One that
does not, within ``SLIPSTREAM_START_S`` seconds (900), makes way for the drafter before it.
"""

import contextlib
import functools
import itertools
import json
import os
import select
import signal
import ssl
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from serving.kept_drafter import (
    KEEP_ENV,
    PROVE_ENV,
    SUPERVISOR_ENV,
    VERSION_ENV,
    Kept,
    KeptDrafter,
    read_kept,
    write_kept,
)
from serving.process_group import end_others, end_with_the_parent, ended

START_ENV, START_S = "SLIPSTREAM_START_S", 900.0  # a large target loads for minutes
MAX_RESTARTS, WITHIN_S = 5, 600.0
_SPECULATION = ("--speculative-config", "--speculative_config", "-sc")


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
        end_others()
    return status if status is not None and status >= 0 else 1


class _Supervisor:
    """The command, started as often as it takes."""

    def __init__(self, command: list[str], keep: Path | None):
        self._command, self._keep = command, keep
        self._end = self._restart = self._came_up = self._was_up = False
        self._may_name_drafter = keep is not None and _names_drafter(command)
        if keep is not None and not self._may_name_drafter:
            _say(f"no {_SPECULATION[0]} in JSON: every start is with the drafter of the command line")
        self._restarts: list[float] = []
        self._gave_up: set[KeptDrafter] = set()
        self._watches_input = stat.S_ISFIFO(os.fstat(0).st_mode)  # in a container it is /dev/null
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked_to_end)
        if keep is not None:
            signal.signal(signal.SIGUSR1, self._asked_to_restart)
            signal.signal(signal.SIGUSR2, self._told_it_is_up)

    def run(self) -> int | None:
        """The exit status of the last start."""
        while True:
            self._restart = self._came_up = False
            kept = self._kept()
            child = self._start(kept)
            came_up = self._watch(child, kept)
            status = ended(child)
            self._was_up |= came_up
            if self._end or self._keep is None:
                return status
            if not came_up and kept is not None and kept.previous is not None:
                _say(f"drafter {kept.serve.version} did not come up; drafter {kept.previous.version} again")
                self._forget(kept, Kept(kept.previous))
            elif not self._restart and not (self._was_up and self._may_restart()):
                _say(f"not started again: never up, or {MAX_RESTARTS} times in {WITHIN_S:.0f} s already")
                return status
            end_others()
            _say("starting again" if self._restart else f"the command ended with status {status}; starting again")

    def _kept(self) -> Kept | None:
        """What is kept and still as it was; None: what the command line says."""
        kept = read_kept(self._keep) if self._may_name_drafter else None
        if kept is None:
            return None
        if kept.serve not in self._gave_up and kept.serve.is_whole():
            return kept
        _say(f"{kept.serve.folder}: missing, not the weights that were served, or did not come up")
        return Kept(kept.previous) if kept.previous is not None and kept.previous.is_whole() else None

    def _start(self, kept: Kept | None) -> subprocess.Popen[bytes]:
        command, environment = self._command, {**os.environ, PROVE_ENV: ""}
        if self._may_name_drafter:  # the server may ask for a restart with another one
            environment |= {KEEP_ENV: str(self._keep), SUPERVISOR_ENV: str(os.getpid())}
        if kept is not None:
            command, environment[VERSION_ENV] = with_drafter(command, kept.serve), kept.serve.version
            if kept.previous is not None:
                environment[PROVE_ENV] = "1"
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, preexec_fn=end_with_the_parent)

    def _forget(self, kept: Kept, instead: Kept) -> None:
        """Keep this instead of what was read, unless somebody has written since; a full disk ends no server."""
        try:
            if read_kept(self._keep) == kept:
                write_kept(self._keep, instead)
        except OSError as error:
            self._gave_up |= {kept.serve} - {instead.serve}
            _say(f"{self._keep} cannot be written ({error})")

    def _watch(self, child: subprocess.Popen[bytes], kept: Kept | None) -> bool:
        """Whether it came up; returns when the command has ended or has to."""
        has_other = kept is not None and kept.previous is not None
        deadline, seen = time.monotonic() + _start_s(os.environ), False
        while child.poll() is None and not self._end and not self._restart:
            self._wait()
            if self._keep is None or seen:
                continue
            seen = self._came_up or _is_healthy(self._command)
            if seen and has_other:
                self._forget(kept, Kept(kept.serve))  # nothing to go back to any more
            if not seen and has_other and time.monotonic() > deadline:
                _say(f"not up after {_start_s(os.environ):.0f} s")
                return False
        return seen

    def _wait(self) -> None:
        if not self._watches_input:
            time.sleep(0.2)
            return
        readable, _, _ = select.select([sys.stdin.buffer.raw], [], [], 0.2)
        if readable and not os.read(sys.stdin.fileno(), 1024):
            self._end = True

    def _may_restart(self) -> bool:
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if now - at < WITHIN_S] + [now]
        return len(self._restarts) <= MAX_RESTARTS

    def _asked_to_end(self, *_: object) -> None:
        self._end = True

    def _asked_to_restart(self, *_: object) -> None:
        self._restart = True

    def _told_it_is_up(self, *_: object) -> None:
        self._came_up = True


def with_drafter(command: list[str], drafter: KeptDrafter) -> list[str]:
    """The command with this drafter's folder in its speculative configuration; as it is without one."""
    changed = list(command)
    for i, part in enumerate(command):
        name, equals, value = part.partition("=")
        if name in _SPECULATION and (equals or i + 1 < len(command)):
            settings = json.dumps(json.loads(value if equals else command[i + 1]) | {"model": drafter.folder})
            changed[i if equals else i + 1] = f"{name}={settings}" if equals else settings
    return changed


def _names_drafter(command: list[str]) -> bool:
    try:
        return with_drafter(command, KeptDrafter("/", "", "")) != command
    except (ValueError, TypeError):  # no JSON, or no object
        return False


def _start_s(environment: Mapping[str, str]) -> float:
    with contextlib.suppress(ValueError):
        return float(environment.get(START_ENV) or START_S)
    return START_S


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    # For its own child on this machine: no proxy knows it, and its certificate names another host.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))


def _is_healthy(command: list[str]) -> bool:
    options = dict(itertools.pairwise(command))
    options |= dict(part.split("=", 1) for part in command if part.startswith("--") and "=" in part)
    host = options.get("--host", "127.0.0.1")
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    scheme = "https" if "--ssl-certfile" in options else "http"
    try:
        with _opener().open(f"{scheme}://{host}:{options.get('--port', '8000')}/health", timeout=1) as answer:
            return answer.status == 200
    except (OSError, ValueError, HTTPException):
        return False


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads the log any more
        print(f"supervise: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
