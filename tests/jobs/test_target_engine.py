"""The target's engine: one pass for replies and states, several callers at once, sampling, and a drafter that helps."""

import json
import threading

import numpy as np
import pytest
from tiny import TARGET_LAYER_IDS, HeldStates, tiny_drafter, tiny_target

from jobs.engine_calls import Asked
from jobs.engine_rows import capture_args
from jobs.engine_sampling import reply_params
from jobs.target_engine import TargetEngine
from pipeline.capture_check import judge
from pipeline.engines import CaptureRequest, GenerateRequest
from pipeline.errors import StageError
from pipeline.quantize import as_float32
from pipeline.render import Renderer

FAVOURITE = 433  # the target says it often, the drafter always proposes it
EOS = '{"ignore_eos":true}'

pytestmark = pytest.mark.usefixtures("restored_environment")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"), favourite=FAVOURITE)


@pytest.fixture(scope="module")
def start(target):
    """A function that starts an engine; all of them end together, as vLLM wants it."""
    engines = []

    def start(**settings):
        common = {"dtype": "float32", "max_model_len": 512, "kv_cache_gib": 0.125, "max_num_seqs": 4}
        engines.append(TargetEngine(target, target_layer_ids=TARGET_LAYER_IDS, **common, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def engine(start):
    """An engine that answers four requests at a time, so that more of them wait."""
    return start(max_num_batched_tokens=512)


@pytest.fixture(scope="module")
def speculating(start, target, tmp_path_factory):
    """The same target, and a drafter that is right often."""
    return start(drafter=tiny_drafter(tmp_path_factory.mktemp("drafter"), target, proposes=FAVOURITE))


def ids_of(seed, length):
    return tuple(np.random.default_rng(seed).integers(6, 512, length).tolist())


def ask(row_id, seed, length=20, max_tokens=9, temperature=0.0, sampling=EOS):
    return GenerateRequest(row_id, ids_of(seed, length), max_tokens, temperature, None, seed, sampling)


def prefilled(engine, request, reply):  # uint16 [n, L, H]
    """The states of the same ids, read afresh."""
    sink = HeldStates()
    (found,) = engine.prefill([CaptureRequest("again", (*request.prompt_ids, *reply.ids))], states=sink)
    assert found.reason is None
    return sink.words["again"]


def assert_close(words, expected):
    """Equal but for rounding to bf16."""
    assert words.shape == expected.shape
    np.testing.assert_allclose(as_float32(words), as_float32(expected), rtol=2**-7, atol=2e-5)


def test_replies_and_their_states_come_in_one_pass_found_by_id(engine):
    asked = [ask(f"row-{n}", n, length=10 + 7 * n, max_tokens=12 - n) for n in range(8)]
    sink = HeldStates()
    replies, captured = engine.generate(asked, states=sink)
    assert [reply.row_id for reply in replies] == [found.row_id for found in captured] == [row.row_id for row in asked]
    for request, reply in zip(asked, replies, strict=True):
        assert len(reply.ids) == request.max_tokens and reply.finish_reason == "length"
        assert reply.accepted_per_step is None
        assert_close(sink.words[request.row_id], prefilled(engine, request, reply))
    assert list(sink.words) != [row.row_id for row in asked]  # handed over as they finished, the shorter ones first


def test_without_a_sink_nothing_is_kept(engine):
    replies, captured = engine.generate([ask("row", 1)])
    assert captured == [] and len(replies[0].ids) == 9 and engine._shared.ask_worker("drop_states") == 0


def test_two_callers_at_once_get_their_own_replies_and_states(engine):
    parts = [[ask(f"{part}-{n}", 100 * part + n, length=15 + n, max_tokens=6 + n) for n in range(6)] for part in (1, 2)]
    alone = [[engine.generate([request])[0][0].ids for request in part] for part in parts]
    sinks, replies, failed = [HeldStates(), HeldStates()], [None, None], []

    def answer(number):
        try:
            replies[number], _ = engine.generate(parts[number], states=sinks[number])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=answer, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not failed
    for number, part in enumerate(parts):
        assert [reply.ids for reply in replies[number]] == alone[number]
        assert set(sinks[number].words) == {request.row_id for request in part}
        for request, reply in zip(part, replies[number], strict=True):
            assert_close(sinks[number].words[request.row_id], prefilled(engine, request, reply))


def test_a_sink_that_fails_ends_its_own_call_and_leaves_nothing_in_the_engine(engine):
    class FullDisk(HeldStates):
        def add(self, row_id, words, *, num_states):
            raise StageError("no space left")

    with pytest.raises(StageError, match="no space"):
        engine.generate([ask(f"row-{n}", n, max_tokens=5 + 20 * n) for n in range(6)], states=FullDisk())
    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert engine._shared.ask_worker("drop_states") == 0
    assert len(engine.generate([ask("row", 1)])[0][0].ids) == 9


def losing(engine, monkeypatch, *, times):
    """Make the worker lose the first rows that it is asked for; the list of all that it was asked for."""
    asked, real = [], engine._shared._ask_worker

    def take(method, *args):
        found = real(method, *args)
        if method == "take_states":
            asked.append(args)
            if len(asked) <= times:
                return {"states": None, "holes": [3], "error": "1 of 9 positions never computed"}
        return found

    monkeypatch.setattr(engine._shared, "_ask_worker", take)
    return asked


def test_an_answered_row_with_holes_is_read_again_at_once(engine, monkeypatch):
    asked, sink, request = losing(engine, monkeypatch, times=1), HeldStates(), ask("row", 5)
    (reply,), (found,) = engine.generate([request], states=sink)
    assert found.reason is None and len(asked) == 2
    assert asked[0][0] != asked[1][0] and asked[0][1] == asked[1][1] == len(sink.words["row"]) == 20 + 9 - 1
    assert_close(sink.words["row"], prefilled(engine, request, reply))


def test_a_row_whose_holes_stay_is_given_up_with_its_reason(engine, monkeypatch):
    losing(engine, monkeypatch, times=9)
    (reply,), (found,) = engine.generate([ask("row", 5)], states=HeldStates())
    assert reply.error is None and len(reply.ids) == 9  # the reply stands
    assert found.reason == "holes" and found.detail["positions"] == [3]


def test_a_row_that_cannot_be_run_is_refused_alone(engine):
    requests = [
        CaptureRequest("short", (7,)),
        CaptureRequest("foreign", (7, 9999, 8)),
        CaptureRequest("long", ids_of(50, 600)),
        CaptureRequest("good", ids_of(51, 10)),
    ]
    results = engine.prefill(requests, states=HeldStates())
    assert [found.reason for found in results] == ["too_short", "refused", "refused", None]


def test_a_setting_that_vllm_refuses_costs_its_own_row_alone(engine):
    asked = [
        ask("unknown", 1, sampling='{"voice":"high"}'),
        ask("out of range", 1, sampling='{"min_p":7}'),
        ask("broken grammar", 1, sampling='{"structured_outputs":{"regex":"[ab"}}'),
        GenerateRequest("foreign", (7, 9999), 4, 0.0, None, 1),
        GenerateRequest("empty", (), 4, 0.0, None, 1),
        ask("good", 1),
    ]
    sink = HeldStates()
    replies, captured = engine.generate(asked, states=sink)
    assert [reply.row_id for reply in replies if reply.error is None] == ["good"] == [row.row_id for row in captured]
    errors = {reply.row_id: reply.error for reply in replies}
    assert "voice" in errors["unknown"] and "min_p" in errors["out of range"] and "9999" in errors["foreign"]


def test_replies_keep_to_a_structure_while_their_states_are_kept(engine):
    request = ask("row", 3, max_tokens=12, sampling='{"structured_outputs":{"regex":"(ab|ba){3}"}}')
    sink = HeldStates()
    (reply,), _ = engine.generate([request], states=sink)
    text = bytes(engine._llm.get_tokenizer().decode(reply.ids[:6]), "ascii")
    assert len(text) == 6 and {text[i : i + 2] for i in (0, 2, 4)} <= {b"ab", b"ba"}
    assert reply.finish_reason == "stop" and reply.ids[6:] == (1,)  # the end-of-turn token is part of the reply
    assert_close(sink.words["row"], prefilled(engine, request, reply))


def test_a_stop_string_ends_the_ids_at_the_token_that_completes_it(engine):
    free = engine.generate([ask("free", 11, max_tokens=24)])[0][0].ids
    decode = engine._llm.get_tokenizer().decode
    stop = decode(free[9:11])
    end = next(n for n in range(1, 25) if stop in decode(free[:n]))
    request = ask("row", 11, max_tokens=24, sampling=json.dumps({"ignore_eos": True, "stop": [stop]}))
    sink = HeldStates()
    (reply,), _ = engine.generate([request], states=sink)
    assert reply.ids == free[:end] and reply.finish_reason == "stop" and end < 24
    assert_close(sink.words["row"], prefilled(engine, request, reply))


def test_seeded_replies_need_no_generator_to_be_set_back(engine):
    # Three prompts do not fit one step together: in chunks, vLLM's CPU runner would stop here.
    asked = [ask(f"seeded-{n}", 60 + n, length=300, max_tokens=5, temperature=0.7) for n in range(3)]
    first, again = (engine.generate(asked)[0] for _ in range(2))
    assert [len(reply.ids) for reply in first] == [5, 5, 5] and [r.ids for r in first] == [r.ids for r in again]


def test_the_servers_own_rendering_is_the_renderers(engine, target):
    chat = [
        {"role": "user", "content": "héllo"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    assert engine.rendered_ids(json.dumps(chat), tools=None, template_args="{}") == Renderer(target).prompt_ids(chat)


@pytest.mark.parametrize(
    ("messages", "args"), [('[{"role":"user"}]', '{"chat_template": 3}'), ("[]", "{}"), ("{}", "{}")]
)
def test_a_conversation_that_the_server_refuses_is_said_to_be_so(engine, messages, args):
    with pytest.raises(StageError, match="chat route refuses"):
        engine.rendered_ids(messages, tools=None, template_args=args)


def test_the_capture_check_by_reference_sees_the_engines_own_precision(engine):
    check = engine.check_capture(ids_of(60, 40), [ids_of(61, 100), ids_of(62, 30)])
    judge(check, layer_ids=TARGET_LAYER_IDS, max_error=1e-4)  # words rounded to bf16 would be off by 4e-3
    assert all(check[f"layer_{layer}_nearest"] == layer for layer in TARGET_LAYER_IDS)


def test_the_capture_check_by_head_gives_the_engines_next_tokens_back(engine, monkeypatch):
    monkeypatch.setattr(engine, "_check", "head")
    check = engine.check_capture(ids_of(60, 40), [ids_of(61, 100), ids_of(62, 30)])
    judge(check, layer_ids=TARGET_LAYER_IDS, max_error=1e-3)
    assert check["head_top1"] == 1 and check["head_error"] < 1e-3


def test_a_drafter_changes_no_reply_and_states_are_those_of_accepted_tokens_alone(engine, speculating):
    asked = [ask(f"row-{n}", 200 + n, length=12 + n, max_tokens=5 + n) for n in range(12)]
    plain, _ = engine.generate(asked)
    sink = HeldStates()
    replies, captured = speculating.generate(asked, states=sink)
    assert [reply.ids for reply in replies] == [reply.ids for reply in plain]
    assert all(found.reason is None for found in captured)
    cut_short = rejected = 0
    for request, reply in zip(asked, replies, strict=True):
        steps = reply.accepted_per_step
        assert 0 <= sum(accepted + 1 for accepted in steps) - (len(reply.ids) - 1) <= 3
        cut_short += sum(accepted + 1 for accepted in steps) > len(reply.ids) - 1
        rejected += sum(3 - accepted for accepted in steps)
        assert_close(sink.words[request.row_id], prefilled(engine, request, reply))
    assert cut_short and rejected  # replies that end inside an accepted run, and drafts that were written over


def test_at_a_temperature_a_speculating_engine_keeps_the_states_of_what_it_drew(engine, speculating):
    asked = [ask(f"row-{n}", 300 + n, max_tokens=10, temperature=0.8) for n in range(6)]
    sink = HeldStates()
    replies, _ = speculating.generate(asked, states=sink)
    assert len({reply.ids for reply in replies}) == 6
    for request, reply in zip(asked, replies, strict=True):
        assert reply.error is None and len(reply.accepted_per_step) > 0
        assert_close(sink.words[request.row_id], prefilled(engine, request, reply))


@pytest.mark.parametrize("check", ["reference", "head"])
def test_both_checks_run_while_a_drafter_reads_its_own_layers(speculating, monkeypatch, check):
    monkeypatch.setattr(speculating, "_check", check)
    found = speculating.check_capture(ids_of(60, 40), [ids_of(61, 100)])
    judge(found, layer_ids=TARGET_LAYER_IDS, max_error=1e-3)


def test_of_two_tensor_ranks_one_keeps_states(target):
    from vllm import SamplingParams

    engine = TargetEngine(
        target,
        dtype="float32",
        max_model_len=256,
        target_layer_ids=TARGET_LAYER_IDS,
        check="head",
        tensor_parallel_size=2,
        kv_cache_gib=0.125,
        num_threads=1,
    )
    try:
        with engine._shared.call() as call:
            key = call.new_key()
            params = reply_params(ask("row", 1), SamplingParams(), capture=capture_args(key))
            call.add([Asked(key, ids_of(1, 20), params)])  # not as a captured one, so that nobody takes the states
            assert len(list(call.results())) == 1
        assert engine._llm.collective_rpc("drop_states") == [1, 0]
        judge(engine.check_capture(ids_of(60, 40), []), layer_ids=TARGET_LAYER_IDS, max_error=1e-3)
    finally:
        engine.close()
