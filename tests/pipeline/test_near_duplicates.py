import itertools
import json
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.buckets import BandedSketches, Buckets, bands_for
from pipeline.errors import SchemaError
from pipeline.near_duplicates import FATES, near_duplicates, near_pairs
from pipeline.shingles import Boilerplate, find_boilerplate, prompt_shingles, prompt_texts, sampled_prompts, shingles
from pipeline.sketches import (
    NUM_PERM,
    Sketches,
    Sketching,
    jaccard,
    rank_of,
    shingle_seed,
    signatures,
    sketch,
    sketch_batch,
    thread_of,
    write_sketches,
)
from pipeline.split import SplitKey

KEY = SplitKey(b"the split key of these tests")
PLAIN = Sketching(KEY, Boilerplate())


def chat(*texts, system=None):
    turns = [{"role": role, "content": text} for role, text in zip(itertools.cycle(("user", "assistant")), texts)]
    return json.dumps([{"role": "system", "content": system}, *turns] if system else turns)


def row(row_id, text, *, split="train", conversation=None, group=""):
    messages = text if text.startswith("[{") else chat(text)
    return {
        "row_id": row_id,
        "conversation": conversation or f"conversation of {row_id}",
        "split": split,
        "group": group,
        "messages": messages,
    }


def sentence(seed, words=40):
    dice = random.Random(seed)
    return " ".join("".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(3, 9))) for _ in range(words))


TEMPLATE = sentence("the template", words=500)


@pytest.fixture
def search(tmp_path):
    """What becomes of rows: row_id → (fate, row_id of the one that stands for it)."""
    tries = iter(range(1000))

    def found(rows, *, per_file=1000, similarity=0.8, sketching=PLAIN):
        folder = tmp_path / str(next(tries))
        folder.mkdir()
        paths = []
        for first in range(0, len(rows), per_file):
            paths.append(folder / f"{first}.arrow")
            write_sketches(paths[-1], sketch(rows[first : first + per_file], sketching))
        sketches = Sketches(paths)
        result = near_duplicates(sketches, similarity=similarity, scratch=folder)
        names = sketches.row_ids.to_pylist()
        told = {
            name: (FATES[fate], names[leader] if leader >= 0 else None)
            for name, fate, leader in zip(names, result.fates, result.leaders, strict=True)
        }
        return told, result, names

    return found


def made(tmp_path, sets, *, splits=None, ranks=None, threads=None):
    """Sketches of these very sets of pieces."""
    count = len(sets)
    columns = {
        "row_id": [str(n) for n in range(count)],
        "rank": ranks if ranks is not None else list(range(count)),
        "thread": threads if threads is not None else list(range(count)),
        "split": splits if splits is not None else [0] * count,
    }
    pieces = [np.array(sorted(one), np.uint32) for one in sets]
    write_sketches(tmp_path / "made.arrow", sketch_batch(columns, signatures(pieces), pieces))
    return Sketches([tmp_path / "made.arrow"])


def fates(sketches, tmp_path, similarity=0.8):
    return near_duplicates(sketches, similarity=similarity, scratch=tmp_path)


# -- pieces ---------------------------------------------------------------------------------------------------------


def test_pieces_are_five_characters_whatever_case_width_or_white_space():
    assert len(shingles("abcdefg", seed=1)) == 3
    assert np.array_equal(shingles("Hello  World\n", seed=1), shingles("hello world", seed=1))
    assert np.array_equal(shingles("ＡＢＣ１２３", seed=1), shingles("abc123", seed=1))
    assert len(np.intersect1d(shingles("hello", seed=1), shingles("hello", seed=2))) == 0
    pieces = shingles(sentence(1), seed=1)
    assert pieces.dtype == np.uint32 and (np.diff(pieces.astype(np.int64)) > 0).all()


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_different_pieces_have_different_hashes_whatever_the_seed(seed):
    text = sentence(5, words=20_000)
    expected = len({text[start : start + 5] for start in range(len(text) - 4)})
    assert expected - 40 < len(shingles(text, seed=seed)) <= expected  # some 8 collisions of 32 bits are expected


@pytest.mark.parametrize("text", ["", " ", "a", "好", "ok", "👍", "\ud800"])
def test_the_shortest_texts_have_one_piece_and_differ_from_each_other(text):
    assert len(shingles(text, seed=1)) == 1
    assert text.strip() == "" or not np.array_equal(shingles(text, seed=1), shingles("no", seed=1))


def test_texts_without_spaces_are_told_apart_and_found_alike():
    text = "我们需要在明天之前完成这份报告，请帮我检查一下其中的数据是否正确，并把结果发给财务部的同事，谢谢。"
    near, far = text.replace("明天", "周五"), "昨天下午的会议改到了下周三上午十点，请大家提前准备好各自的材料。"
    a, b, c = (shingles(one, seed=1) for one in (text, near, far))
    assert jaccard(a, b) == pytest.approx((len(text) - 4 - 6) / (len(text) - 4 + 6))
    assert jaccard(a, c) == 0


def test_the_jaccard_similarity_is_that_of_plain_sets():
    dice = random.Random(0)
    for _ in range(200):
        a, b = ({dice.randrange(60) for _ in range(dice.randint(1, 50))} for _ in range(2))
        mine = jaccard(*(np.array(sorted(one), np.uint32) for one in (a, b)))
        assert mine == len(a & b) / len(a | b)


def test_all_that_was_said_counts_and_the_system_prompt_is_told_apart():
    messages = [
        {"role": "system", "content": "the frame"},
        {"role": "user", "content": [{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}]},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "thoughts",
            "tool_calls": [{"function": {"name": "look", "arguments": '{"a":1}'}}],
        },
        {"role": "tool", "content": "result"},
    ]
    frame, words = prompt_texts(json.dumps(messages))
    assert frame == "the frame"
    assert words == 'part one\npart two\nthoughts\nlook\n{"a":1}\nresult'


def test_requests_of_one_long_system_prompt_are_not_near_each_other(search):
    rows = [row(f"r{n}", chat(sentence(n), system=TEMPLATE)) for n in range(5)]
    assert set(search(rows)[0].values()) == {("kept", f"r{n}") for n in range(5)}


# -- boilerplate ----------------------------------------------------------------------------------------------------


def sketching_of(rows):
    groups = np.array([one["group"] for one in rows])
    threads = np.array([thread_of(KEY, one["conversation"], one["messages"]) for one in rows], np.uint64)
    ranks = np.array([rank_of(KEY, one["row_id"]) for one in rows], np.uint64)
    samples = {}
    for index in sampled_prompts(groups, threads, ranks).tolist():
        samples.setdefault(rows[index]["group"], []).append(rows[index]["messages"])
    return Sketching(KEY, find_boilerplate(samples, seed=shingle_seed(KEY)))


def test_what_a_routes_users_all_paste_makes_no_duplicates_of_them(search):
    rows = [row(f"r{n}", f"{TEMPLATE} {sentence(n)}", group="mails") for n in range(60)]
    rows += [row("copy", f"{TEMPLATE} {sentence(7)} please", group="mails")]
    without, _, _ = search(rows)
    told, _, _ = search(rows, sketching=sketching_of(rows))
    assert sum(fate == "kept" for fate, _ in without.values()) < 20
    assert sum(fate == "kept" for fate, _ in told.values()) == 60
    assert {"near_duplicate"} == {told[name][0] for name in ("copy", "r7")} - {"kept"}


def test_what_stands_in_the_system_prompt_counts_where_routes_are_large_enough_to_tell_it_from_the_frame(search):
    """The button "Summarise": the same words from all users, and the document in the system prompt."""
    rows = [
        row(f"r{n}", chat("Summarise this document.", system=f"{TEMPLATE}\n{sentence(n)}"), group="summaries")
        for n in range(30)
    ]
    for one in rows:
        one["conversation"] = one["row_id"]
    assert {fate for fate, _ in search(rows, sketching=sketching_of(rows))[0].values()} == {"kept"}


def test_requests_that_say_nothing_but_their_boilerplate_are_near_each_other(search):
    rows = [row(f"r{n}", chat(f"{TEMPLATE} ping {n}"), group="health") for n in range(40)]
    told, result, _ = search(rows, sketching=sketching_of(rows))
    assert sum(fate == "kept" for fate, _ in told.values()) == 1
    assert result.counts()["largest_cluster"] == 40


def test_a_group_of_few_conversations_has_no_boilerplate_of_its_own():
    few = {"small": [chat(f"{TEMPLATE} {n}") for n in range(19)]}
    assert not len(find_boilerplate(few, seed=1).pieces) and not find_boilerplate(few, seed=1).groups
    enough = {"large": [chat(f"{TEMPLATE} {n}") for n in range(20)]}
    found = find_boilerplate(enough, seed=1)
    assert found.groups == {"large"}
    assert set(shingles(TEMPLATE, seed=1).tolist()) <= set(found.pieces.tolist())
    assert len(prompt_shingles(chat("hello"), "large", boilerplate=found, seed=1)) == 1


def test_boilerplate_is_sampled_by_conversations_not_by_turns_and_in_no_order():
    groups = np.array(["a"] * 500 + ["b"] * 3)
    threads = np.array([n // 2 for n in range(500)] + [900, 900, 901])
    ranks = np.random.default_rng(0).permutation(503)
    found = sampled_prompts(groups, threads, ranks)
    assert len(found) == 200 + 2
    assert len(set(threads[found].tolist())) == 202
    lowest = sorted(min(ranks[2 * n], ranks[2 * n + 1]) for n in range(250))[:200]
    assert sorted(ranks[found[groups[found] == "a"]].tolist()) == lowest
    again = np.random.default_rng(1).permutation(503)
    assert {ranks[again][n] for n in sampled_prompts(groups[again], threads[again], ranks[again])} == {
        ranks[n] for n in found
    }
    assert len(sampled_prompts(np.array([]), np.array([]), np.array([]))) == 0


# -- signatures -----------------------------------------------------------------------------------------------------


def test_signatures_agree_as_often_as_their_sets_are_alike():
    dice = np.random.default_rng(0)
    for size in (20, 500):
        for similarity in (0.5, 0.8, 0.95):
            both = round(2 * size * similarity / (1 + similarity))
            true, agreed = both / (2 * size - both), []
            for _ in range(300):
                values = dice.choice(2**32, 2 * size - both, replace=False).astype(np.uint32)
                a, b = signatures([np.sort(values[:size]), np.sort(values[size - both :])])
                agreed.append((a == b).mean())
            spread = (true * (1 - true) / NUM_PERM / len(agreed)) ** 0.5
            assert abs(np.mean(agreed) - true) < 4 * spread


def test_signatures_are_the_same_in_every_process_and_alone_or_in_a_batch(tmp_path):
    sets = [np.arange(1, 2 + n, dtype=np.uint32) * np.uint32(2654435761) for n in (0, 3, 50, 3000)]
    sets = [np.unique(one) for one in sets]
    whole = signatures(sets)
    assert all(np.array_equal(signatures([one])[0], line) for one, line in zip(sets, whole, strict=True))
    code = (
        "import numpy as np\nfrom pipeline.sketches import signatures\n"
        "sets = [np.unique(np.arange(1, 2 + n, dtype=np.uint32) * np.uint32(2654435761)) for n in (0, 3, 50, 3000)]\n"
        "print(signatures(sets)[:, :3].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert json.loads(done.stdout) == whole[:, :3].tolist(), done.stderr
    assert signatures([]).shape == (0, NUM_PERM)
    # Another version of rensa may have other ones. They decide which pairs are compared, so it is then another stage
    # version.
    assert whole[:, :3].tolist() == [
        [4290055845, 4151402901, 3298806760],
        [3562244623, 3355158830, 3298806760],
        [644004198, 1261215980, 1958336192],
        [4395265, 20194534, 91902079],
    ]


def test_bands_are_chosen_to_find_what_is_near():
    bands = bands_for(0.8)
    assert (bands.num_bands, bands.num_places) == (21, 6)
    assert bands.recall == pytest.approx(1 - (1 - 0.8**6) ** 21)
    for similarity in (0.5, 0.7, 0.9, 0.95):
        assert bands_for(similarity).recall >= 0.99
        assert bands_for(similarity).num_bands * bands_for(similarity).num_places <= NUM_PERM
    assert bands_for(1.0).num_bands == 1


# -- the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("similarity", [0.6, 0.8, 0.9])
def test_every_near_pair_is_found_and_no_other(tmp_path, similarity):
    dice = random.Random(3)
    sets = []
    for _ in range(120):
        first = dice.sample(range(2**32), dice.randint(5, 120))
        for _ in range(5):
            left_out = dice.random() * (1 - similarity)
            kept = [value for value in first if dice.random() > left_out]
            sets.append(set(kept + dice.sample(range(2**32), dice.randint(0, 2))) or {1})
    expected = {
        (i, j)
        for i, j in itertools.combinations(range(len(sets)), 2)
        if len(sets[i] & sets[j]) >= similarity * len(sets[i] | sets[j])
    }
    sketches = made(tmp_path, sets)
    found = {tuple(sorted(pair)) for pair in near_pairs(sketches, similarity=similarity, scratch=tmp_path)}
    assert found <= expected
    assert len(found) >= 0.99 * len(expected) > 200


def steps(count, size=100, step=8):
    """Sets of which each is near the next (92 of 108 in common) and none near the one after that (84 of 116)."""
    return [set(range(1000 + n * step, 1000 + n * step + size)) for n in range(count)]


def test_a_chain_of_near_rows_does_not_join_what_differs(tmp_path):
    found = fates(made(tmp_path, steps(9)), tmp_path)
    assert found.leaders.tolist() == [0, 0, 2, 2, 4, 4, 6, 6, 8]
    found = fates(made(tmp_path, steps(9), ranks=[5, 0, 6, 1, 7, 2, 8, 3, 9]), tmp_path)
    # By rank 1, 3, 5, 7 are kept first; 0 is near 1; 2 is near 1, the first kept of 1 and 3; and so on.
    assert found.leaders.tolist() == [1, 1, 1, 3, 3, 5, 5, 7, 7]


def test_the_weights_of_a_cluster_add_up_at_the_row_that_stands_for_it(tmp_path):
    found = fates(made(tmp_path, steps(5)), tmp_path)
    assert found.cluster_sums(np.array([1, 10, 100, 1000, 10_000])).tolist() == [11, 0, 1100, 0, 10_000]
    assert found.cluster_sums(np.array([0.5, 0.25, 1.0, 1.0, 2.0])).tolist() == [0.75, 0, 2, 0, 2]


def test_turns_of_one_conversation_are_no_duplicates_of_each_other(search):
    turns = [sentence(n, words=60 // (n + 1)) for n in range(5)]
    first, second = chat(*turns[:1]), chat(*turns[:3])
    longer = chat(*turns[:5])
    rows = [row(f"turn {n}", text, conversation="c") for n, text in enumerate((first, second, longer))]
    assert jaccard(*(shingles("\n".join(prompt_texts(text)), seed=1) for text in (second, longer))) > 0.8
    assert {fate for fate, _ in search(rows)[0].values()} == {"kept"}
    # The same in another's conversation is.
    copied = [*rows, row("other", longer, conversation="d")]
    told, _, _ = search(copied)
    assert sum(fate == "kept" for fate, _ in told.values()) == 3


def test_one_subject_that_asks_the_same_again_and_again_is_merged(search):
    rows = [row(f"r{n}", f"{sentence(1)} item {n}", conversation="a batch job") for n in range(10)]
    assert sum(fate == "kept" for fate, _ in search(rows)[0].values()) == 1


def test_gate_wins_over_validation_and_validation_over_train(tmp_path):
    alike = [set(range(100)), set(range(1, 101)), set(range(2, 102)), set(range(500, 600)), set(range(501, 601))]
    splits = [0, 1, 2, 0, 1]  # train, validation, gate
    found = fates(made(tmp_path, alike, splits=splits), tmp_path)
    assert [FATES[fate] for fate in found.fates] == ["near_gate", "near_gate", "kept", "near_validation", "kept"]
    assert found.leaders.tolist() == [-1, -1, 2, -1, 4]
    assert found.counts() == {
        "kept": 2,
        "near_duplicate": 0,
        "near_gate": 2,
        "near_validation": 1,
        "largest_cluster": 1,
        "left_out_comparisons": 0,
    }


def test_a_train_row_near_a_merged_gate_row_is_dropped_though_it_is_far_from_the_kept_one(tmp_path):
    kept, merged, train = steps(3)
    found = fates(made(tmp_path, [train, kept, merged], splits=[0, 2, 2], ranks=[0, 1, 2]), tmp_path)
    assert [FATES[fate] for fate in found.fates] == ["near_gate", "kept", "near_duplicate"]
    assert found.leaders.tolist() == [-1, 1, 1]


def test_a_train_row_whose_near_neighbour_was_dropped_stays(tmp_path):
    gate, near_gate, far = steps(3)
    found = fates(made(tmp_path, [near_gate, far, gate], splits=[0, 0, 2]), tmp_path)
    assert [FATES[fate] for fate in found.fates] == ["near_gate", "kept", "kept"]


def test_a_validation_row_that_was_dropped_drops_no_train_row(tmp_path):
    gate, validation, train = steps(3)
    found = fates(made(tmp_path, [train, validation, gate], splits=[0, 1, 2]), tmp_path)
    assert [FATES[fate] for fate in found.fates] == ["kept", "near_gate", "kept"]


def test_gate_weights_are_the_same_whatever_trains(tmp_path):
    gate = steps(4)
    trains = [*gate, *steps(3, size=90), {1, 2, 3}]
    alone = fates(made(tmp_path, gate, splits=[2] * 4), tmp_path)
    both = fates(made(tmp_path, gate + trains, splits=[2] * 4 + [0] * len(trains)), tmp_path)
    ones = np.ones(4 + len(trains), np.int64)
    assert both.cluster_sums(ones)[:4].tolist() == alone.cluster_sums(ones[:4]).tolist()


def test_files_their_order_and_their_number_change_nothing(search):
    dice = random.Random(7)
    rows = []
    for n in range(150):
        text = sentence(n % 60)
        rows.append(row(f"r{n}", f"{text} {dice.randrange(100)}", split=dice.choice(["train", "validation", "gate"])))
    first, _, _ = search(rows)
    shuffled = dice.sample(rows, len(rows))
    assert search(shuffled, per_file=7)[0] == first
    assert search(rows[::-1], per_file=1)[0] == first
    assert {fate for fate, _ in first.values()} == set(FATES)


def test_a_template_of_very_many_rows_is_looked_through_in_bounded_steps(tmp_path):
    """3,000 rows of which every two share 77%: 4.5 million pairs, none near; and two near pairs among them."""
    shared = set(range(10_000, 10_400))
    dice = random.Random(0)
    sets = [shared | set(dice.sample(range(2**31), 60)) for _ in range(3000)]
    sets[2999] = (sets[17] - set(dice.sample(sorted(sets[17]), 3))) | {1, 2}
    found = fates(made(tmp_path, sets), tmp_path)
    assert found.counts()["left_out_comparisons"] > 100_000
    assert found.leaders[2999] == 17
    assert found.counts()["kept"] == 2999


def test_of_a_full_bucket_64_rows_are_found_and_of_those_the_16_that_agree_most_are_compared(tmp_path):
    sketches = made(tmp_path, [set(range(100))] * 200)
    buckets = Buckets(BandedSketches(sketches, 0.8, tmp_path), np.arange(200), enterable=200, sought=0)
    for place in buckets.places():
        buckets.enter(place)
    assert buckets.left_out == (200 - 64) * 21
    assert list(buckets.near(150)) == list(range(16))
    assert buckets.left_out == (200 - 64) * 21 + 64 - 16


def test_very_many_copies_are_one_cluster(tmp_path):
    sets = [set(range(n % 3, 200 + n % 5)) for n in range(4000)]
    found = fates(made(tmp_path, sets), tmp_path)
    assert found.counts()["kept"] == 1
    assert found.counts()["largest_cluster"] == 4000


def test_empty_texts_are_near_each_other_and_no_rows_are_nothing(search, tmp_path):
    told, _, _ = search([row("a", ""), row("b", "  "), row("c", "x")])
    assert sorted(fate for fate, _ in told.values()) == ["kept", "kept", "near_duplicate"]
    assert search([])[0] == {}


def test_a_file_that_is_cut_or_another_names_itself(tmp_path):
    made(tmp_path, [{1}, {2}])
    whole = (tmp_path / "made.arrow").read_bytes()
    for body in (b"", whole[: len(whole) // 2], b"something else entirely"):
        (tmp_path / "cut.arrow").write_bytes(body)
        with pytest.raises(SchemaError, match=r"cut\.arrow"):
            Sketches([tmp_path / "cut.arrow"])


def test_scratch_leaves_nothing_behind(tmp_path, search):
    sketches = made(tmp_path, steps(4))
    (tmp_path / "scratch").mkdir()
    near_duplicates(sketches, similarity=0.8, scratch=tmp_path / "scratch")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_how_prompts_are_sketched_can_be_sent_to_workers_and_shows_no_key():
    told = repr(PLAIN)
    assert "split key of these tests" not in told
    rows = [row(f"r{n}", sentence(n)) for n in range(3)]
    assert sketch(rows, pickle.loads(pickle.dumps(PLAIN))).equals(sketch(rows, PLAIN))


def test_the_seed_of_pieces_is_the_run_roots_own():
    assert shingle_seed(KEY) != shingle_seed(SplitKey(b"another key, long enough"))
    assert shingle_seed(KEY) == int(KEY.hash("shingles", "")[:16], 16)
