"""The tap's own process: ``python -m serving.tap.writer``, started by serving/tap/feeder.py.

Standard input brings frames, 8 bytes of length before each: the settings, then exchanges. Standard output answers each
exchange with its outcome, one line, and tells events in lines that begin with a +. The end of the input is the end of
the server, however it came: what had arrived is written, and the file is committed.
"""

import json
import os
import pickle
import random
import select
import signal
import sys
from contextlib import suppress
from typing import Any

from serving.tap.exchange import Taken
from serving.tap.log_files import TrafficLog
from serving.tap.record import NotWritten, build_record
from serving.tap.settings import TapSettings

TICK_S = 0.5
LAST_WORDS_S = 30  # for what had arrived when the server ended; a hung disk must not keep this process for ever


def main() -> None:
    """Serve one server process until it closes the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a whole group is told to end; the pipe says when it is time
    with suppress(OSError):
        os.nice(10)
    first = _frame()
    if first is None:
        return
    settings: TapSettings = pickle.loads(first)
    log = TrafficLog(settings.log, on_event=lambda name: _say(f"+{name}"))
    draw = random.Random().random
    parent = os.getppid()
    while True:
        ready, _, _ = select.select([0], [], [], TICK_S)
        log.tick()
        if not ready:
            if os.getppid() != parent:  # it died, and a process that it forked holds the pipe open
                break
            continue
        frame = _frame()
        if frame is None:
            break
        _say(write_one(pickle.loads(frame), settings=settings, log=log, draw=draw))
    signal.alarm(LAST_WORDS_S)
    log.close()


def write_one(exchange: Taken, *, settings: TapSettings, log: TrafficLog, draw: Any) -> str:
    """The outcome of one exchange (metrics.OUTCOMES). No error of one exchange ends the log."""
    try:
        record, event = build_record(exchange, target=settings.target)
        probability = settings.sampling.of_reply(record["acceptance"])
        if draw() >= probability:
            return "not_sampled_accepted"
        record["inclusion_probability"] = exchange.probability * probability
        line = _line(record)
    except NotWritten as error:
        return str(error)
    except Exception as error:  # one odd exchange; its words stay out of the server's log
        at = error.__traceback__.tb_frame.f_lineno if error.__traceback__ else 0
        print(f"tap: {type(error).__name__} near line {at} of the writer", file=sys.stderr, flush=True)
        return "failed"
    outcome = log.write(line)
    if outcome == "written":
        _say(f"+{event}")
    return outcome


def _line(record: dict[str, Any]) -> bytes:
    """A record's line. Raises: NotWritten for a value that JSON has no word for."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair: written as the escape it came as
        return json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except ValueError:
        raise NotWritten("malformed_request")


def _frame() -> bytes | None:
    length = _exactly(8)
    return None if length is None else _exactly(int.from_bytes(length, "big"))


def _exactly(count: int) -> bytes | None:
    """So many bytes of the input, None where it ends before them."""
    pieces = []
    while count:
        piece = os.read(0, min(count, 1 << 20))
        if not piece:
            return None
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _say(line: str) -> None:
    with suppress(OSError):  # the server has ended, and nobody listens
        os.write(1, line.encode() + b"\n")


if __name__ == "__main__":
    main()
