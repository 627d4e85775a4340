import hashlib
import hmac
import multiprocessing
import stat
from collections import Counter

import pytest

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.split import SplitKey, load_key, split_of

SHARES = {"gate_share": 0.25, "validation_share": 0.1}


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.delenv("SLIPSTREAM_SPLIT_KEY", raising=False)
    return Config.model_validate({"root": tmp_path / "root", "target": {"model": tmp_path}})


def test_the_hash_is_hmac_sha256_of_purpose_and_value():
    expected = hmac.new(b"k" * 16, b"row\0hello", hashlib.sha256).hexdigest()[:32]
    assert SplitKey(b"k" * 16).hash("row", "hello") == expected


def test_half_a_character_is_hashed_like_any_value():
    key = SplitKey(b"the split key of these tests")
    assert len({key.hash("conversation", name) for name in ("subject:\ud800", "subject:\ud801", "subject:?")}) == 3


def test_the_shares_come_out_as_asked():
    key = SplitKey(b"a key of the test")
    counts = Counter(split_of(key, f"subject {n}", **SHARES) for n in range(10_000))
    # Four standard deviations of a binomial draw.
    assert abs(counts["gate"] - 2500) < 4 * (10_000 * 0.25 * 0.75) ** 0.5
    assert abs(counts["validation"] - 1000) < 4 * (10_000 * 0.1 * 0.9) ** 0.5


def test_another_key_deals_other_sets_and_the_same_key_the_same():
    subjects = [f"subject {n}" for n in range(500)]
    deal = {k: [split_of(SplitKey(k), s, **SHARES) for s in subjects] for k in (b"one key", b"two keys")}
    assert deal[b"one key"] == [split_of(SplitKey(b"one key"), s, **SHARES) for s in subjects]
    assert deal[b"one key"] != deal[b"two keys"]


def test_a_larger_gate_takes_from_train_and_leaves_validation_alone():
    key = SplitKey(b"a key of the test")
    for n in range(2000):
        before = split_of(key, str(n), gate_share=0.1, validation_share=0.1)
        after = split_of(key, str(n), gate_share=0.3, validation_share=0.1)
        assert after == before or (before, after) == ("train", "gate")


def test_shares_that_leave_nothing_to_train_on_are_refused():
    with pytest.raises(ConfigError, match="leave no training"):
        split_of(SplitKey(b"k"), "s", gate_share=0.6, validation_share=0.4)


def test_the_key_file_is_made_once_readable_by_its_owner_alone(config):
    first = load_key(config)
    path = config.root / "split.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_key(config) == first
    assert len(path.read_bytes()) == 64


def test_another_key_in_the_same_root_is_refused_with_both_check_values(config, monkeypatch):
    first = load_key(config)
    monkeypatch.setenv("SLIPSTREAM_SPLIT_KEY", "another key, long enough")
    with pytest.raises(ConfigError) as error:
        load_key(config)
    assert first.check in str(error.value)
    assert SplitKey(b"another key, long enough").check in str(error.value)


def test_a_lost_key_file_is_not_replaced_in_silence(config):
    load_key(config)
    (config.root / "split.key").unlink()
    with pytest.raises(ConfigError, match="no key"):
        load_key(config)


def test_a_key_from_the_environment_leaves_no_file_and_must_not_be_short(config, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_SPLIT_KEY", "an environment key of some length")
    assert load_key(config).secret == b"an environment key of some length"
    assert not (config.root / "split.key").exists()
    monkeypatch.setenv("SLIPSTREAM_SPLIT_KEY", "short")
    with pytest.raises(ConfigError, match="at least 16 bytes"):
        load_key(config)


def test_the_key_never_shows_in_a_repr():
    assert "secret words" not in repr(SplitKey(b"secret words of the key"))


def _key(config):
    return load_key(config).secret


def test_processes_that_start_together_agree_on_one_key(config):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert len(set(pool.map(_key, [config] * 8))) == 1
