"""What is read from vLLM's Prometheus exposition. The text is as vLLM 0.32 writes it."""

import pytest

from serving.errors import DeployError
from serving.fleet.counters import Counts, NoCountersError, parse, scrape

EXPOSITION = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76e+09
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="toy"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="toy"} 20.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="toy"} 1.76e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="toy"} 700.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="toy"} 140.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="toy"} 150.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="toy"} 30.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="toy",position="0"} 90.0
"""


def test_the_engines_of_one_replica_are_added_up_and_the_bonus_token_counts():
    counts = parse(EXPOSITION, where="here")
    assert counts == Counts(120, 840, 180, 1.76e9)
    assert counts.acceptance_length == 2.5
    assert Counts().acceptance_length is None


def test_what_grew_is_told_and_a_replica_that_started_anew_has_grown_by_nothing_known():
    before = Counts(100, 700, 150, 1.0)
    assert Counts(120, 840, 180, 1.0).since(before) == Counts(20, 140, 30, 1.0)
    assert Counts(90, 630, 100, 1.0).since(before) is None
    assert Counts(500, 3500, 900, 2.0).since(before) is None  # it counts higher, in another process
    assert Counts(5, 35, 9).since(None) is None


def test_a_replica_without_the_counters_is_told_from_one_that_cannot_be_reached():
    with pytest.raises(NoCountersError, match=r"no vllm:spec_decode_num_drafts_total.*--disable-log-stats"):
        parse("# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n", where="here")
    with pytest.raises(DeployError, match="could not be read") as failure:
        scrape("http://127.0.0.1:9", timeout_s=1)
    assert not isinstance(failure.value, NoCountersError)
