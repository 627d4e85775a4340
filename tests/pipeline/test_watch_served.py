import pytest

from pipeline.collect_config import CollectConfig
from pipeline.config import Config, TargetConfig
from pipeline.errors import Rejected
from pipeline.sources import Record
from pipeline.split import SplitKey
from pipeline.watch.served import BUCKETS, Reader, sketch

KEY = SplitKey(b"a key of these tests")
POLICY = CollectConfig()
TEXT = "Where is the parcel that I ordered last week?"


def body(**changed):
    return {
        "ts": 1_798_761_600.0,
        "consent": "recorded",
        "model": "m",
        "route": "chat",
        "slice": "mail",
        "tenant": "shop",
        "subject": "anna",
        "drafter_version": "3",
        "acceptance": {"num_drafts": 10, "num_draft_tokens": 70, "num_accepted_tokens": 17},
        "messages": [{"role": "user", "content": TEXT}],
        "params": {"temperature": 0.2},
        "response": {"usage": {"prompt_tokens": 200}},
    } | changed


def read(erased=frozenset(), policy=POLICY, oldest=None, **changed):
    made = {name: value for name, value in body(**changed).items() if value is not ...}
    reader = Reader(("route", "tenant", "language", "length", "temperature"), KEY, policy, erased, oldest)
    return reader.served(Record("f", 1, 0, made, ts=made.get("ts")))


def test_a_record_says_when_by_which_drafter_in_which_cell_and_how_much_was_accepted():
    one = read()
    assert (one.ts, one.version, one.cell) == (1_798_761_600.0, "3", ("mail", "shop", "en", "≤512", "≤0.5"))
    assert (one.num_drafts, one.num_accepted_tokens, one.weight) == (10, 17, 1.0)
    assert one.conversation == KEY.hash("conversation", "subject:anna")


def test_exact_ids_count_before_usage_and_what_nobody_says_is_unknown():
    assert read(response={"prompt_token_ids": [1] * 100, "usage": {"prompt_tokens": 900}}).cell[3] == "≤128"
    assert read(response=...).cell[3] == "unknown"
    assert read(params={}).cell[4] == "server's"
    assert read(drafter_version=None).version == "unknown"


def test_a_record_stands_for_as_many_requests_as_its_probability_says():
    assert read(inclusion_probability=0.25).weight == 4.0


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("no_consent", {"consent": ...}),
        ("no_consent", {"consent": "denied"}),
        ("no_time", {"ts": ...}),
        ("no_acceptance", {"acceptance": None}),
        ("no_acceptance", {"acceptance": ...}),
        ("no_step", {"acceptance": {"num_drafts": 0, "num_accepted_tokens": 0}}),
        ("malformed_acceptance", {"acceptance": {"num_drafts": -1, "num_accepted_tokens": 0}}),
        ("malformed_acceptance", {"acceptance": {"num_drafts": 3.5, "num_accepted_tokens": 0}}),
        ("malformed_acceptance", {"acceptance": {"num_drafts": 3}}),
        ("malformed_inclusion_probability", {"inclusion_probability": 0}),
    ],
)
def test_what_cannot_be_counted_is_rejected_with_its_reason(reason, changed):
    with pytest.raises(Rejected, match=reason):
        read(**changed)


def test_adapters_and_erased_subjects_are_not_counted():
    with pytest.raises(Rejected, match="unsupported_adapter"):
        read(policy=CollectConfig(served_models=("another",)))
    with pytest.raises(Rejected, match="erased_subject"):
        read(erased=frozenset({KEY.hash("conversation", "subject:anna")}))


@pytest.mark.parametrize("messages", [None, [], "text", [7], [{"role": "user", "content": [{"type": "image"}]}]])
def test_odd_messages_are_counted_all_the_same(messages):
    assert read(messages=messages).cell[2] == "unknown"


def test_consent_may_be_waived_as_for_collecting(tmp_path):
    assert read(policy=CollectConfig(consent="allow_all"), consent=...).num_drafts == 10
    config = Config(root=tmp_path, target=TargetConfig(model=tmp_path))
    reader = Reader.of(config, KEY, now=0.0)
    assert reader.policy.consent == "recorded" and reader.expires_before is None


@pytest.mark.parametrize(
    ("reason", "policy", "oldest", "changed"),
    [
        ("zero_retention", {"zero_retention": ("shop",)}, None, {}),
        ("other_tenant", {"tenants": ("bank",)}, None, {}),
        ("other_tenant", {"except_tenants": ("shop",)}, None, {}),
        ("other_tenant", {"tenants": ("shop",)}, None, {"tenant": None}),
        ("expired", {}, 1_798_761_601.0, {}),
        ("cannot_expire", {}, 1.0, {"ts": ...}),
    ],
)
def test_what_is_not_collected_is_not_watched_either(reason, policy, oldest, changed):
    with pytest.raises(Rejected, match=reason):
        read(policy=CollectConfig(**policy), oldest=oldest, **changed)


def test_a_drafter_of_a_group_is_watched_by_its_own_tenants_alone(tmp_path):
    from pipeline.config import load_config

    file = tmp_path / "s.toml"
    file.write_text('[target]\nmodel = "/m"\n[groups.retail]\ncollect.tenants = ["shop"]\n')
    inside, outside = (Reader.of(load_config(file, group=group), KEY, now=0.0) for group in ("retail", None))
    record = Record("f", 1, 0, body(), ts=1.0)
    assert inside.served(record).num_drafts == 10
    with pytest.raises(Rejected, match="other_tenant"):
        outside.served(record)


@pytest.mark.parametrize("value", ["where is my parcel, I have been waiting for it for weeks and weeks now?", "a\nb"])
def test_a_text_is_no_name_of_a_slice(value):
    assert read(slice=value).cell[0] == "other"
    assert read(slices={"tenant": value}).cell[1] == "other"


def test_sketches_of_like_words_are_alike_and_say_nothing_without_the_key():
    one, like, other = (sketch(words, seed=1) for words in (TEXT, TEXT.upper(), "def main() -> int: return 0"))
    assert one.shape == (BUCKETS,) and (one == like).all() and (one != other).any()
    assert (one != sketch(TEXT, seed=2)).any()
    assert sketch("", seed=1).sum() == 1
    assert sketch("a" * 10_000_000, seed=1).sum() == 1  # one piece, again and again
