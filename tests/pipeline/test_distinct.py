import random

import pyarrow as pa

from pipeline.distinct import merged, without_repeats

SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("conversation", pa.string()),
        ("record", pa.string()),
        ("identified", pa.bool_()),
        ("weight", pa.int32()),
        ("served", pa.float64()),
        ("last_seen", pa.float64()),
        ("subjects", pa.list_(pa.string())),
        ("subject_weights", pa.list_(pa.int32())),
        ("temperature", pa.float32()),
    ]
)


def record(row_id, who, says, *, ts=None, served=1.0, temperature=0.0, identified=False):
    values = (row_id, who, f"{says:03d}", identified, 1, served, ts, [who], [1], temperature)
    return dict(zip(SCHEMA.names, values, strict=True))


def table(records):
    return pa.Table.from_pylist(records, schema=SCHEMA)


def test_equal_prompts_become_the_row_of_the_smallest_conversation_and_of_what_its_record_says():
    records = [
        record("p", "tim", 1, temperature=0.5),
        record("p", "ann", 9, temperature=0.75),
        record("p", "ann", 10, temperature=0.25),
        record("q", "ann", 3),
    ]
    rows = merged([table(records)]).to_pylist()
    assert [(r["row_id"], r["conversation"], r["record"], r["temperature"]) for r in rows] == [
        ("p", "ann", "009", 0.75),
        ("q", "ann", "003", 0.0),
    ]
    assert [(r["weight"], r["subjects"], r["subject_weights"]) for r in rows] == [
        (3, ["ann", "tim"], [2, 1]),
        (1, ["ann"], [1]),
    ]


def test_what_a_sampled_log_left_out_counts_too_and_the_newest_time_stays():
    records = [record("p", "x", 1, ts=5.0, served=4.0), record("p", "y", 2, ts=9.0), record("p", "z", 3)]
    (row,) = merged([table(records)]).to_pylist()
    assert (row["weight"], row["served"], row["last_seen"]) == (3, 6.0, 9.0)


def test_a_row_without_any_time_has_none():
    assert merged([table([record("p", "x", 1), record("p", "x", 2)])]).to_pylist()[0]["last_seen"] is None


def test_any_order_and_any_parts_and_merging_twice_give_the_same():
    draw = random.Random(3)
    records = [
        record(f"p{draw.randrange(40)}", f"s{draw.randrange(9)}", n, ts=draw.choice([None, float(draw.randrange(99))]))
        for n in range(500)
    ]
    whole = merged([table(records)])
    shuffled = draw.sample(records, len(records))
    parts = [table(shuffled[:7]), table(shuffled[7:300]), table([]), table(shuffled[300:])]
    assert merged(parts).equals(whole)
    assert merged([merged(parts[:2]), merged(parts[2:])]).equals(whole)
    assert sum(whole.column("weight").to_pylist()) == 500


def test_no_records_make_no_rows():
    assert len(merged([table([]), table([])])) == 0


def test_a_record_that_was_logged_twice_counts_once_and_one_without_id_or_time_each_time():
    again = record("p", "ann", 1, ts=5.0, identified=True)
    others = [record("p", "bob", 1, ts=5.0, identified=True), record("q", "ann", 1, identified=True)]
    nameless = [record("p", "ann", 1)] * 2
    kept = without_repeats(table([again, *nameless, again, *others, again]))
    assert merged([kept]).column("weight").to_pylist() == [4, 1]
    assert len(without_repeats(table([]))) == 0
