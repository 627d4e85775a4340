"""A stream's events are put together whatever pieces they came in, with the times when their tokens came."""

import json

import pytest

from serving.load import _from_events


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def tokens(*ids, **more):
    return event(choices=[{"text": "x" * len(ids), "token_ids": list(ids), **more}])


END = [event(choices=[], usage={"completion_tokens": 5}), b"data: [DONE]\n\n"]


def test_times_are_those_of_the_tokens_and_a_step_arrives_at_once():
    parts = [tokens(1), tokens(2, 3), tokens(4, 5, finish_reason="length"), *END]
    found = _from_events(parts, [0.5, 0.75, 1.75, 1.8, 1.9])
    assert (found["token_ids"], found["finish_reason"]) == ([1, 2, 3, 4, 5], "length")
    assert (found["ttft_s"], found["itl_s"]) == (0.5, [0.25, 1.0])
    assert found["usage"] == {"completion_tokens": 5}


def test_events_that_are_cut_anywhere_count_when_their_last_byte_came():
    stream = b"".join([tokens(1), tokens(2, 3), *END])
    for cut in range(1, len(stream)):
        found = _from_events([stream[:cut], stream[cut:]], [1.0, 2.0])
        assert found["token_ids"] == [1, 2, 3]
        assert found["ttft_s"] == (1.0 if cut >= len(tokens(1)) - 1 else 2.0)


def test_a_stream_that_breaks_off_or_ends_in_an_error_is_no_reply():
    with pytest.raises(ValueError, match="cut short"):
        _from_events([tokens(1)], [1.0])
    with pytest.raises(ValueError, match="out of memory"):
        _from_events([tokens(1), event(error={"message": "out of memory"}), *END], [1.0, 2.0, 3.0, 4.0])
