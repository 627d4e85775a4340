"""What the engine hands out is noted for the request that asked, passed on as it is, and never for another."""

import asyncio
import copy
from array import array
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

import pytest

from serving.engine import exact_replies
from serving.engine.exact_replies import Generation, watch, watched
from serving.tap.exchange import ExactReply, Exchange, taken
from serving.tap.policy import Verdict
from serving.tap.record import with_exact


class Kind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class Out:
    index: int
    token_ids: list
    finish_reason: str | None = None
    spec_decode_metrics: object = None


@dataclass
class Output:
    outputs: list
    prompt_token_ids: list = field(default_factory=lambda: [0, 5, 6])


class Engine:
    """An engine's client whose answers are laid down; ``ended`` says how each generator was left."""

    def __init__(self, *outputs, pause=False):
        self.outputs, self.pause, self.ended = outputs, pause, []

    async def generate(self, prompt, sampling_params, request_id, *, priority=0):
        try:
            for output in self.outputs:
                if self.pause:
                    await asyncio.sleep(0)
                yield output
            self.ended.append("whole")
        except GeneratorExit:
            self.ended.append("closed")
            raise


def params(kind):
    return SimpleNamespace(output_kind=kind)


async def collect(generator):
    return [output async for output in generator]


def noted(engine, kind, request_id="r"):
    async def scenario():
        generations = []
        token = watched.set(generations)
        generator = engine.generate("p", params(kind), request_id, priority=1)
        watched.reset(token)
        return await collect(generator), generations

    return asyncio.run(scenario())


SPEC = SimpleNamespace(histogram=[1, 0, 2], num_draft_tokens=6)
DELTAS = (Output([Out(0, [7])]), Output([Out(0, [8, 9])]), Output([Out(0, [1], "stop", SPEC)]))


def test_deltas_add_up_and_the_outputs_are_the_engines_own_objects_unchanged():
    engine = Engine(*DELTAS)
    before = copy.deepcopy(DELTAS)
    assert watch(engine)
    outputs, (generation,) = noted(engine, Kind.DELTA)
    assert all(one is other for one, other in zip(outputs, DELTAS, strict=True)) and list(before) == outputs
    choice = generation.choices[0]
    assert (generation.request_id, generation.prompt_ids, choice.ids) == ("r", [0, 5, 6], [7, 8, 9, 1])
    assert choice.finish_reason == "stop"
    assert choice.acceptance == {"num_drafts": 3, "num_draft_tokens": 6, "num_accepted_tokens": 4}
    assert engine.ended == ["whole"]


@pytest.mark.parametrize("kind", [Kind.FINAL_ONLY, Kind.CUMULATIVE])
def test_whole_outputs_replace_each_other(kind):
    engine = Engine(Output([Out(0, [7, 8])]), Output([Out(0, [7, 8, 9], "length"), Out(1, [4], "stop")]))
    watch(engine)
    _, (generation,) = noted(engine, kind)
    found = {index: (choice.ids, choice.finish_reason) for index, choice in generation.choices.items()}
    assert found == {0: ([7, 8, 9], "length"), 1: ([4], "stop")}


def test_who_does_not_watch_gets_the_engines_own_generator():
    engine = Engine(*DELTAS)
    watch(engine)
    assert engine.generate("p", params(Kind.DELTA), "r").ag_code.co_name == "generate"
    assert asyncio.run(collect(engine.generate("p", params(Kind.DELTA), "r"))) == list(DELTAS)


def test_watching_twice_is_watching_once():
    engine = Engine(*DELTAS)
    assert watch(engine) and watch(engine)
    outputs, generations = noted(engine, Kind.DELTA)
    assert len(outputs) == 3 and len(generations) == 1


def test_two_clients_with_one_request_id_never_get_each_others_ids():
    """Clients choose X-Request-Id: requests are told apart by who asked, also where tasks of theirs ask."""
    engine = Engine(*(Output([Out(0, [i], "stop" if i == 49 else None)]) for i in range(50)), pause=True)
    watch(engine)

    async def client():
        generations = []
        token = watched.set(generations)
        outputs = await asyncio.create_task(collect(engine.generate("p", params(Kind.DELTA), "same")))
        watched.reset(token)
        return outputs, generations

    async def scenario():
        return await asyncio.gather(client(), client(), client())

    for outputs, generations in asyncio.run(scenario()):
        assert len(outputs) == 50 and [g.choices[0].ids for g in generations] == [list(range(50))]


def test_a_client_that_leaves_closes_the_engines_generator():
    engine = Engine(*DELTAS)
    watch(engine)

    async def scenario():
        watched.set([])
        generator = engine.generate("p", params(Kind.DELTA), "r")
        await anext(generator)
        await generator.aclose()

    asyncio.run(scenario())
    assert engine.ended == ["closed"]


def test_an_engines_error_comes_through():
    class Broken:
        async def generate(self, prompt, sampling_params, request_id):
            yield DELTAS[0]
            raise ValueError("dead")

    engine = Broken()
    watch(engine)
    with pytest.raises(ValueError, match="dead"):
        noted_broken(engine)


def noted_broken(engine):
    async def scenario():
        watched.set([])
        await collect(engine.generate("p", params(Kind.DELTA), "r"))

    asyncio.run(scenario())


def test_an_output_of_another_shape_is_passed_on_and_gives_no_ids():
    engine = Engine(DELTAS[0], "?", DELTAS[2])
    watch(engine)
    outputs, generations = noted(engine, Kind.DELTA)
    assert outputs == [DELTAS[0], "?", DELTAS[2]]
    assert taken(exchange(generations)).generations == ()


def test_an_unknown_vllm_or_client_is_said_and_left_alone(monkeypatch, caplog):
    engine = Engine(*DELTAS)
    monkeypatch.setattr("serving.engine.versions.metadata.version", lambda name: "0.99.0")
    with caplog.at_level("WARNING", logger="vllm.slipstream"):
        assert not watch(engine)
    assert "0.99.0 is installed, expected 0.32.0" in caplog.text and "generate" not in vars(engine)
    monkeypatch.undo()
    with caplog.at_level("WARNING", logger="vllm.slipstream"):
        assert not watch(SimpleNamespace(generate=len)) and not exact_replies.watch(SimpleNamespace())
    assert "unlike vLLM's own" in caplog.text


def exchange(generations):
    one = Exchange("chat", Verdict(None), 1.0, None, budget=SimpleNamespace(taken=0))
    one.generations.extend(generations)
    return one


def exact(request_id, *choices, prompt=(0, 5)):
    return ExactReply(request_id, array("I", prompt), tuple((array("I", ids), why, None) for ids, why in choices))


def reply(num_choices, **more):
    choices = [{"index": i, "text": "t", "finish_reason": "stop"} for i in range(num_choices)]
    return {"text": "t", "finish_reason": "stop", "usage": None, "choices": choices, **more}


def test_every_route_names_its_engine_calls_after_the_answers_id():
    for route, ids in (("chat", "chatcmpl-a"), ("completions", "cmpl-a-0"), ("responses", "resp_a_0")):
        answer = reply(1)
        reply_id = ids.removesuffix("-0").removesuffix("_0")
        assert with_exact(answer, [exact(ids, ([7, 1], "stop"))], reply_id=reply_id, route=route, n=1)
        assert answer["choices"][0]["token_ids"] == [7, 1] and answer["prompt_token_ids"] == [0, 5]
        assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
        assert not with_exact(reply(1), [exact(ids, ([7], "stop"))], reply_id="other", route=route, n=1)


def test_several_prompts_and_several_choices_are_numbered_through():
    generations = [
        exact("cmpl-a-0", ([1], "stop"), ([2], "length"), prompt=(0, 5)),
        exact("cmpl-a-1", ([3], "stop"), ([4], "stop"), prompt=(0, 6)),
    ]
    answer = reply(4, usage=None)
    assert with_exact(answer, generations, reply_id="cmpl-a", route="completions", n=2)
    assert [choice["token_ids"] for choice in answer["choices"]] == [[1], [2], [3], [4]]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[0, 5]] * 2 + [[0, 6]] * 2
    assert "prompt_token_ids" not in answer
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}


@pytest.mark.parametrize(
    ("generations", "n", "num_choices"),
    [
        ([], 1, 1),
        ([exact("c", ([7], None))], 1, 1),
        ([exact("c", ([7], "abort"))], 1, 1),
        ([exact("c", ([7], "stop"))], 2, 2),
        ([exact("c", ([7], "stop"))], 1, 2),
        ([exact("c", ([7], "stop")), exact("c", ([8], "stop"))], 1, 1),
    ],
)
def test_ids_that_are_not_all_there_are_none(generations, n, num_choices):
    answer = reply(num_choices)
    before = copy.deepcopy(answer)
    assert not with_exact(answer, generations, reply_id="c", route="chat", n=n)
    assert answer == before


def test_a_route_that_read_tool_calls_keeps_its_own_reason():
    answer = reply(1)
    answer["choices"][0]["finish_reason"] = answer["finish_reason"] = "tool_calls"
    assert with_exact(answer, [exact("c", ([7, 1], "stop"))], reply_id="c", route="chat", n=1)
    assert answer["finish_reason"] == answer["choices"][0]["finish_reason"] == "tool_calls"


def test_what_is_noted_is_bounded_by_the_exchanges_limit():
    generation = Generation("r", delta=True)
    generation.see(Output([Out(0, list(range(100)))]))
    one = exchange([generation])
    one.count_ids()
    assert one.size == one.budget.taken == 103 * 36
    one.forget("dropped_memory")
    assert one.generations == [] and one.budget.taken == 0


def test_a_beam_searchs_many_calls_are_not_all_kept():
    engine = Engine(*DELTAS)
    watch(engine)

    async def scenario():
        generations = []
        watched.set(generations)
        for step in range(exact_replies.MAX_GENERATIONS + 50):
            assert len(await collect(engine.generate("p", params(Kind.DELTA), f"r-beam-{step}"))) == 3
        return generations

    assert len(asyncio.run(scenario())) == exact_replies.MAX_GENERATIONS
