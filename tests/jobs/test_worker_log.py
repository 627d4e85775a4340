import logging
import os

from jobs import worker_log


def test_what_a_worker_logs_is_printed_here_once_and_in_order(capfd):
    with worker_log.relayed():
        handler = worker_log.ProgressHandler()  # as a worker, which finds the file's name in its environment
        for text in ("first", "second"):
            handler.handle(logging.makeLogRecord({"msg": text}))
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["first", "second"]
    assert worker_log.WORKER_LOG not in os.environ


def test_without_a_relay_progress_goes_to_standard_error(capfd):
    worker_log.ProgressHandler().handle(logging.makeLogRecord({"msg": "alone"}))
    assert capfd.readouterr().err.rstrip().endswith("alone")
