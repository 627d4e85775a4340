"""Callers that share an engine: turns in the order they were asked for, and no call that waits for ever."""

import threading
from types import SimpleNamespace

import pytest

from jobs.engine_calls import Asked, FairLock, SharedEngine
from pipeline.errors import StageError


def test_a_lock_goes_to_whoever_waited_longest():
    lock, order, waiting = FairLock(), [], []

    def take(name):
        with lock:
            order.append(name)

    with lock:
        for name in "abcd":
            thread = threading.Thread(target=take, args=(name,))
            waiting.append(thread)
            thread.start()
            while len(lock._queue) < len(waiting) + 1:
                pass
    for thread in waiting:
        thread.join()
    assert order == ["a", "b", "c", "d"]


def test_requests_that_an_engine_lost_stop_their_caller():
    engine = SimpleNamespace(
        add_request=lambda *args: None, has_unfinished_requests=lambda: False, abort_request=lambda keys: None
    )
    shared = SharedEngine(SimpleNamespace(llm_engine=engine))
    with pytest.raises(StageError, match="lost 1 requests"), shared.call() as call:
        call.add([Asked("a", (1,), None)])
        list(call.results())


def test_a_result_is_there_before_its_request_counts_as_done():
    """A caller looks whether anything is left without the lock, while another one delivers."""

    class Watched(set):
        def discard(self, key):
            seen.append(bool(call.finished))
            super().discard(key)

    seen = []
    output = SimpleNamespace(request_id="a", finished=True, prompt_token_ids=[1], outputs=["completion"])
    engine = SimpleNamespace(
        add_request=lambda *args: None, has_unfinished_requests=lambda: True, step=lambda: [output]
    )
    shared = SharedEngine(SimpleNamespace(llm_engine=engine))
    with shared.call() as call:
        call.running = Watched()
        call.add([Asked("a", (1,), None)])
        assert [done.completion for done in call.results()] == ["completion"]
    assert seen == [True]
