"""What a comparison serves: exact ids, a budget that fits, the sampling asked for, and nothing lost silently."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import collect, gate_prompts
from pipeline.artifacts import PromptSet, ResponseSet, TargetFingerprint, describe_file
from pipeline.collect_config import CollectConfig
from pipeline.config import Config
from pipeline.errors import ConfigError, StageError
from pipeline.plan import plan
from pipeline.schemas import PROMPTS, RESPONSES
from pipeline.shards import read_tables
from pipeline.stages import Artifact, open_artifact
from tests.tiny import SPECIAL, _tokenizer

TARGET = TargetFingerprint(
    config="c", tokenizer="t", chat_template="a", weights="w", dtype="float32", target_layer_ids=()
)


@pytest.fixture
def config(tmp_path):
    _tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return Config(
        root=tmp_path / "root",
        target={"model": tmp_path, "max_model_len": 256},
        evaluate={"max_tokens": 32, "general_prompts": 0},
    )


def with_evaluate(config, **changes):
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update=changes)})


def prompts_of(config, tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return gate_prompts.from_files(config, [path], fingerprint=TARGET, block_size=4)


def said(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def test_a_file_of_prompts_is_rendered_by_the_targets_template_and_repeats_are_counted(config, tmp_path):
    found = prompts_of(config, tmp_path, said("hello"), {"prompt": "hello"}, said("other", temperature=0.7))
    assert sorted(row["weight"] for row in found.gate) == [1, 2]
    bos, user = SPECIAL.index("<|bos|>"), SPECIAL.index("<|user|>")
    assert all(row["prompt_ids"][:2] == [bos, user] for row in found.gate)
    assert all(row["sampling"] == {"temperature": 0.0} for row in found.gate)


def test_lines_that_cannot_be_served_are_counted_by_reason(config, tmp_path):
    found = prompts_of(config, tmp_path, said("fine"), "{broken\n", said("n", n=3), said("x" * 400), said("fine too"))
    assert len(found.gate) == 2
    assert sum(found.rejects.values()) == 3
    assert found.rejects["prompt_too_long"] == found.rejects["unsupported_n"] == 1


def test_a_file_without_a_usable_line_is_an_error_that_says_what_is_expected(config, tmp_path):
    with pytest.raises(StageError, match='expected JSON lines with "messages" or "prompt"'):
        prompts_of(config, tmp_path, "{broken\n")
    with pytest.raises(ConfigError, match=r"absent\.jsonl"):
        gate_prompts.from_files(config, [tmp_path / "absent.jsonl"], fingerprint=TARGET, block_size=4)


def test_the_traffics_sampling_is_used_where_it_is_asked_for_with_a_seed_of_its_own(config, tmp_path):
    lines = [said(f"prompt {i}", temperature=0.7, top_p=0.9) for i in range(3)] + [said("greedy", temperature=0)]
    rows = prompts_of(with_evaluate(config, sampling="traffic"), tmp_path, *lines).gate
    sampled = [row["sampling"] for row in rows if row["sampling"]["temperature"] > 0]
    assert len({sampling["seed"] for sampling in sampled}) == len(sampled) == 3
    assert all((s["temperature"], s["top_p"]) == (0.7, 0.9) for s in sampled)
    assert sum(row["sampling"] == {"temperature": 0.0} for row in rows) == 1
    again = prompts_of(with_evaluate(config, sampling="traffic"), tmp_path, *lines).gate
    assert [row["sampling"] for row in again] == [row["sampling"] for row in rows]
    other = prompts_of(with_evaluate(config, sampling="traffic", seed=1), tmp_path, *lines).gate
    assert [row["sampling"] for row in other] != [row["sampling"] for row in rows]


def test_a_limit_takes_the_same_prompts_whatever_their_order(config, tmp_path):
    few = with_evaluate(config, max_prompts=3)
    lines = [said(f"prompt {i}") for i in range(9)]
    one = prompts_of(few, tmp_path, *lines).gate
    other = prompts_of(few, tmp_path, *reversed(lines)).gate
    assert [row["row_id"] for row in one] == [row["row_id"] for row in other]
    assert len(one) == 3


def test_the_general_prompts_are_those_that_ship_or_a_files(config, tmp_path):
    shipped, _ = gate_prompts.general_rows(with_evaluate(config, general_prompts=5), block_size=4)
    assert 0 < len(shipped) <= 5
    path = tmp_path / "public.jsonl"
    path.write_text("\n".join(json.dumps(said(f"public {i}")) for i in range(9)))
    rows, rejects = gate_prompts.general_rows(
        with_evaluate(config, general_prompts=4, general_sources=(path,)), block_size=4
    )
    assert (len(rows), rejects) == (4, {})
    assert gate_prompts.general_rows(config, block_size=4) == ([], {})


def test_case_9_another_thinking_mode_is_another_setting_by_name(config, tmp_path):
    on = prompts_of(config, tmp_path, said("a", chat_template_kwargs={"enable_thinking": True})).settings()
    off = prompts_of(config, tmp_path, said("a", chat_template_kwargs={"enable_thinking": False})).settings()
    assert (on["thinking"], off["thinking"]) == ({"on": 1}, {"off": 1})


def test_warming_up_leaves_no_whole_prompt_in_a_cache(config, tmp_path):
    found = prompts_of(config, tmp_path, *(said("a longer prompt than the opening " * 2 + str(i)) for i in range(6)))
    assert found.warm_up
    assert all(len(row["prompt_ids"]) <= 8 for row in found.warm_up)


def answered(config, tmp_path, *records, gate_share=0.98):
    """Responses to collected records, all of them gate rows that the target answered greedily."""
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"consent": "recorded", **record}) + "\n" for record in records))
    prompts = collect.run(
        config.model_copy(
            update={
                "collect": CollectConfig(sources=(log,), redaction="none", gate_share=gate_share, validation_share=0.01)
            }
        )
    )
    rows = []
    for row in read_tables(prompts.folder, prompts.manifest.shards, PROMPTS).to_pylist():
        asked = plan(config, {**row, "split": "gate"}, [0, 5, 6], target_id="").request
        drawn = {"temperature": asked.temperature, "sampling": asked.sampling, "max_tokens": asked.max_tokens}
        rows.append({**row, **drawn, "split": "gate", "prompt_ids": [0, 5, 6], "response_ids": [7, 8, 1]})
    folder = tmp_path / "responses"
    folder.mkdir()
    table = pa.Table.from_pylist(rows, schema=RESPONSES)
    pq.write_table(table, folder / "responses.parquet")
    shards = (describe_file(folder / "responses.parquet", rows=len(rows)),)
    parents = {"prompts": prompts.id}
    return Artifact(folder, ResponseSet(derivation_id="r", parents=parents, shards=shards, fingerprint=TARGET))


def test_the_traffics_own_sampling_of_a_gate_row_is_not_lost_to_its_greedy_answer(config, tmp_path):
    records = [said("warm", temperature=0.5, top_k=7, stop=["x"]), said("cold", temperature=0), said("silent")]
    responses = answered(config, tmp_path, *records)
    traffic = gate_prompts.from_responses(with_evaluate(config, sampling="traffic"), responses, block_size=4)
    found = [{k: v for k, v in row["sampling"].items() if k != "seed"} for row in traffic.gate]
    assert sorted(found, key=str) == [{"temperature": 0.0}, {"temperature": 0.5, "top_k": 7}, {}]
    assert sum("seed" in row["sampling"] for row in traffic.gate) == 2
    greedy = gate_prompts.from_responses(config, responses, block_size=4)
    assert [row["sampling"] for row in greedy.gate] == [{"temperature": 0.0}] * 3


def test_a_sampled_gate_row_weighs_as_many_served_requests_as_it_stands_for(config, tmp_path):
    records = [said("seldom written", inclusion_probability=0.25), said("always"), said("always")]
    responses = answered(config, tmp_path, *records)
    found = gate_prompts.from_responses(config, responses, block_size=4)
    assert sorted(row["weight"] for row in found.gate) == [2.0, 4.0]


def test_a_row_that_earlier_prompts_trained_on_judges_nothing(config, tmp_path):
    responses = answered(config, tmp_path, *(said(f"number {n}", subject=f"s{n}") for n in range(40)), gate_share=0.4)
    prompts = open_artifact(config.root, PromptSet, responses.manifest.parents["prompts"])
    rows = read_tables(prompts.folder, prompts.manifest.shards, PROMPTS).to_pylist()
    trained = {row["row_id"] for row in rows if row["split"] == "train"}
    found = gate_prompts.from_responses(config, responses, block_size=4)  # in these responses all are gate rows
    assert {row["row_id"] for row in found.gate} == {row["row_id"] for row in rows} - trained != set()
    assert found.rejects == {"trained_before": len(trained)}


def test_a_constraint_is_served_and_prompts_that_differ_in_it_alone_are_two(config, tmp_path):
    constrained = said("pick", structured_outputs={"choice": ["yes", "no"]}, presence_penalty=0.5, stop="x")
    found = prompts_of(config, tmp_path, said("pick"), constrained)
    assert sorted((row["sampling"] for row in found.gate), key=len) == [
        {"temperature": 0.0},
        {"temperature": 0.0, "presence_penalty": 0.5, "structured_outputs": {"choice": ["yes", "no"]}},
    ]
