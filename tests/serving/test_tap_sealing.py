"""The sealed form: its bytes to the letter, and a reader and a writer that agree on nothing else."""

import base64
import os

import pytest
from tapped import sealed_lines

from pipeline.errors import ConfigError, SchemaError
from pipeline.sources.sealed import keys_of_environment
from pipeline.sources.stores import is_open
from serving.tap.sealing import Key, Seal

SECRET = bytes(range(32))
SALT = bytes(range(100, 116))
LINES = b'{"a": 1}\n', '{"b": "ü"}\n'.encode()
# Made once from the table in serving/tap/sealing.py: HKDF by two HMACs, AES-GCM by the cryptography package.
SEALED = bytes.fromhex(
    "534c495054415001026b316465666768696a6b6c6d6e6f707172730000001935beea8cb995a5308e7dc9b7082c5e4a6a"
    "934f2536048022350000001c111ce7aacce945ee358b4f8eeea13e017b95804ace938a1b9096ec4f000000102704376b"
    "4b8441770e5b8efc89398bfc"
)


def sealed(*chunks, key="k1", end=True):
    seal = Seal(Key(key, SECRET), salt=SALT)
    return seal.head + b"".join(seal.chunk(chunk) for chunk in chunks) + (seal.chunk(b"") if end else b"")


def read(path, keys=None):
    return list(sealed_lines(path, {"k1": SECRET} if keys is None else keys))


@pytest.fixture
def write(tmp_path):
    def write(data, name="traffic-h-1-1700000000000.sealed"):
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


def test_the_bytes_are_those_of_the_table(write):
    assert sealed(*LINES) == SEALED
    assert read(write(SEALED)) == list(LINES)


def test_a_head_names_its_key_and_no_two_files_share_a_salt():
    one, other = Seal(Key("2024-06", SECRET)).head, Seal(Key("2024-06", SECRET)).head
    assert one[:16] == b"SLIPTAP\x01\x072024-06" and len(one) == 32 and one != other


def test_several_lines_of_a_chunk_come_one_by_one(write):
    assert read(write(sealed(b"1\n2\n3\r\n"))) == [b"1\n", b"2\n", b"3\r\n"]


def test_a_torn_end_loses_only_itself_wherever_it_is_torn(write):
    whole = sealed(*LINES, end=False)
    first = len(sealed(LINES[0], end=False))
    for cut in range(len(whole)):
        path = write(whole[:cut], "traffic-h-1-1700000000000.open.sealed")
        assert is_open(str(path)) and read(path) == ([LINES[0]] if cut >= first else [])
    assert read(write(whole + bytes(4096), "traffic-h-1-1700000000000.open.sealed")) == list(LINES)


def test_a_committed_file_that_was_cut_says_so_after_its_last_whole_line(write):
    for cut in (1, 20, 60, len(SEALED) - 1, len(SEALED) - 20):
        lines, path = [], write(SEALED[:cut])
        with pytest.raises(EOFError, match="traffic-h-1-1700000000000"):
            for line in sealed_lines(path, {"k1": SECRET}):
                lines.append(line)
        assert lines == list(LINES)[: len(lines)]


def test_no_chunk_can_be_changed_moved_doubled_or_left_out_unseen(write):
    seal = Seal(Key("k1", SECRET), salt=SALT)
    head, one, two, end = seal.head, *(seal.chunk(chunk) for chunk in (*LINES, b""))
    other = sealed(*LINES)[: len(head) - 16] + bytes(16)
    for data in (
        head + one[:-1] + bytes([one[-1] ^ 1]) + two + end,
        head + two + one + end,
        head + one + one + two + end,
        head + two + end,
        head + one + end,
        other + one + two + end,
        head.replace(b"k1", b"k2") + one + two + end,
    ):
        with pytest.raises(SchemaError, match="is not what was sealed there"):
            read(write(data), {"k1": SECRET, "k2": SECRET})
    with pytest.raises(SchemaError, match="bytes after its end mark"):
        read(write(head + one + two + end + b"\0"))


def test_an_old_key_reads_its_files_and_a_missing_one_is_named(write):
    keys = {"new": os.urandom(32), "k1": SECRET}
    assert read(write(SEALED), keys) == list(LINES)
    with pytest.raises(ConfigError, match="was sealed with key 'k1'; known are new"):
        read(write(SEALED), {"new": keys["new"]})
    with pytest.raises(SchemaError, match="is not what was sealed there"):
        read(write(SEALED), {"k1": keys["new"]})


def test_what_is_no_sealed_log_or_one_of_another_version_is_refused(write):
    for data in (b'{"a": 1}\n', b"SLIPTAP\x02" + SEALED[8:]):
        with pytest.raises(SchemaError, match="expected a sealed traffic log of version 1"):
            read(write(data))


def test_keys_come_from_the_environment_and_no_message_quotes_one(tmp_path):
    new, path = base64.b64encode(bytes(32)).decode(), tmp_path / "keys"
    path.write_text(f"k1:{base64.b64encode(SECRET).decode()}\n")
    found = keys_of_environment({"SLIPSTREAM_TAP_KEY": f"new:{new}", "SLIPSTREAM_TAP_KEY_FILE": str(path)})
    assert found == {"new": bytes(32), "k1": SECRET} and keys_of_environment({}) == {}
    path.write_text("k1:c2VjcmV0\n")
    for environment in ({"SLIPSTREAM_TAP_KEY_FILE": str(path)}, {"SLIPSTREAM_TAP_KEY_FILE": str(tmp_path / "none")}):
        with pytest.raises(ConfigError) as caught:
            keys_of_environment(environment)
        assert "c2VjcmV0" not in str(caught.value)
