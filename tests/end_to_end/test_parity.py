"""The drafter that is trained is the one that vLLM serves, and serving it changes no greedy token."""

import argparse
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [folder for folder in (str(ROOT), str(ROOT / "tests" / "drafter")) if folder not in sys.path]

from bench import parity  # noqa: E402


@pytest.fixture(scope="module")
def setting():
    with parity.setting_of(argparse.Namespace(small=True, target=None, drafter=None)) as found:
        yield found


def test_our_draft_logits_are_those_of_vllms_drafter(setting):
    figures = parity.draft_logits_vs_vllm(setting)
    same, difference = figures.values()
    assert same["value"] == 1.0 and same["n"] > 100
    assert difference["value"] < 1e-3 and difference["largest_logit"] > 0.1


def test_speculation_changes_no_greedy_reply(setting):
    (figure,) = parity.losslessness(setting).values()
    assert figure["value"] == figure["n"] == 10
    assert figure["accepted_per_step"] > 0.3, "a drafter whose drafts are never accepted would prove little"
