"""The Arrow schemas of every table that a stage writes. Fixed types, whatever the rows hold."""

import pyarrow as pa

from pipeline.errors import SchemaError
from pipeline.quantize import GROUP_SIZE, num_groups

STATES_FORMATS = ("bf16", "int8")
SPLITS = ("train", "validation", "gate")

PROMPTS = pa.schema(
    [
        ("row_id", pa.string()),  # hash of the canonical request; names the row in every later artifact
        ("conversation", pa.string()),  # keyed hash: decides the split, clusters the bootstrap
        ("split", pa.string()),  # train, validation or gate
        ("slice", pa.string()),  # a group of requests reported apart, e.g. the route
        ("slices", pa.string()),  # every group it is in, as canonical JSON: dimension → value (pipeline/slices.py)
        ("weight", pa.int32()),  # how many served requests this row stands for: duplicates and near ones
        ("inclusion_probability", pa.float64()),  # weight / this: requests served, over all rows without bias
        ("last_seen", pa.float64()),  # when the newest of them was served, seconds since 1970; null where not on record
        ("subjects", pa.list_(pa.string())),  # keyed hashes of all whose requests they are, and
        ("subject_weights", pa.list_(pa.int32())),  # how many of each
        ("messages", pa.string()),  # JSON in the request's own order, which templates may write out
        ("tools", pa.string()),  # the same, or null
        ("template_args", pa.string()),  # canonical JSON of chat_template_kwargs, "{}" where none
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("max_tokens", pa.int32()),
        ("sampling", pa.string()),  # the request's other sampling settings as JSON (pipeline/sampling.py)
        ("served_prompt_ids", pa.list_(pa.int32())),  # the served reply's exact ids, null where not on record
        ("served_ids", pa.list_(pa.int32())),
        ("served_finish_reason", pa.string()),
        ("served_by", pa.string()),  # fingerprint id of the target that served it (pipeline/fingerprint.py)
    ]
)

# A record that was read, and rows of equal records (pipeline/distinct.py): what PROMPTS are made of.
COLLECTED = pa.schema(
    [
        ("rank", pa.string()),  # keyed hash: the order in which rows are sampled and written
        ("record", pa.string()),  # keyed hash of what the record says beside the prompt: its id, time, sampling, reply
        ("identified", pa.bool_()),  # it has an id and a time: a record like it is the same one, logged again
        ("served", pa.float64()),  # sum of 1 / the tap's own probability of writing each record
        ("person", pa.string()),  # conversation, where it is a subject that the record names; else null
        ("accepted_per_step", pa.float64()),  # of the served reply, where on record
        *(field for field in PROMPTS if field.name not in ("split", "inclusion_probability")),
    ]
)

RESPONSES = pa.schema(
    [
        ("row_id", pa.string()),
        ("conversation", pa.string()),
        ("split", pa.string()),
        ("slice", pa.string()),
        ("slices", pa.string()),
        ("weight", pa.int32()),
        ("inclusion_probability", pa.float64()),
        ("prompt_ids", pa.list_(pa.int32())),  # what the engine really saw
        ("response_ids", pa.list_(pa.int32())),  # what it emitted; the end-of-turn token is kept on "stop"
        ("finish_reason", pa.string()),  # stop or length
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("max_tokens", pa.int32()),  # the budget used
        ("clamped", pa.bool_()),  # the asked budget did not fit the context
        ("sampling", pa.string()),  # further settings it was drawn with, canonical JSON
        ("origin", pa.string()),  # target: answered here; served: a served reply, by its exact ids
        ("accepted_per_step", pa.list_(pa.int32())),  # where a drafter speculated, else null
    ]
)

CACHE = pa.schema(
    [
        ("row_id", pa.string()),
        ("conversation", pa.string()),
        ("split", pa.string()),
        ("slice", pa.string()),
        ("weight", pa.int32()),
        ("ids", pa.list_(pa.int32())),  # prompt + response
        ("num_prompt_tokens", pa.int32()),
        ("num_states", pa.int32()),  # len(ids) - 1: the last token is never an input
        ("states_file", pa.string()),  # states shard beside this table, or in the manifest's storage
        ("states_batch", pa.int32()),  # its record batch; one row a position
        ("digest", pa.string()),  # of the last position's states: two inputs never share one
    ]
)

ACCEPTANCE = pa.schema(
    [
        ("role", pa.string()),  # champion, challenger or control
        ("prompt_set", pa.string()),  # gate, or general: the guard against narrowing
        ("row_id", pa.string()),
        ("conversation", pa.string()),
        ("slices", pa.string()),  # canonical JSON: dimension → value
        ("weight", pa.float64()),  # how many served requests this row stands for, those that were not drawn included
        ("block", pa.int32()),  # which sitting of the alternation this request was in
        ("num_tokens", pa.int32()),  # emitted, the prefill's own token included
        ("num_drafts", pa.int32()),  # verification steps
        ("num_accepted_tokens", pa.int32()),  # the engine's own count
        ("accepted_per_pos", pa.list_(pa.int32())),  # drafts whose position k was accepted
        ("latency_s", pa.float64()),
        ("ttft_s", pa.float64()),  # to the first token; null where the reply came whole
        ("itl_s", pa.list_(pa.float32())),  # gaps between the arrivals after it, a step's tokens together
        ("finish_reason", pa.string()),
        ("flag", pa.string()),  # null, or why this reply's counts are not used
    ]
)


def states_schema(num_layers: int, hidden_size: int, states_format: str = "bf16") -> pa.Schema:
    """One row a position, layer after layer, as bytes of one width: no offsets to overflow.

    bf16: the raw 16-bit words. int8: codes, and the bf16 words of the scales (pipeline/quantize.py).
    """
    metadata = {"format": states_format, "dtype": "bfloat16", "shape": f"[{num_layers}, {hidden_size}]"}
    if states_format == "bf16":
        return pa.schema([("states", pa.binary(num_layers * hidden_size * 2))], metadata=metadata)
    if states_format == "int8":
        columns = [
            ("codes", pa.binary(num_layers * hidden_size)),
            ("scales", pa.binary(num_layers * num_groups(hidden_size) * 2)),
        ]
        return pa.schema(columns, metadata={**metadata, "group_size": str(GROUP_SIZE)})
    raise SchemaError(f"states of the format {states_format!r}: this Slipstream knows {', '.join(STATES_FORMATS)}")


def bytes_per_state(num_layers: int, hidden_size: int, states_format: str = "bf16") -> int:
    """Bytes that one position takes in a states file."""
    return sum(field.type.byte_width for field in states_schema(num_layers, hidden_size, states_format))
