"""What redaction finds of labelled records, what it does to clean ones, and what it costs."""

import time
from collections.abc import Callable, Collection

from bench.figures import Figure, at_least, at_most, shown, unknown
from bench.oracles import redaction_held_out as held_out
from bench.oracles.redaction_records import Body, clean, labelled, left_over, texts
from bench.oracles.redaction_values import KINDS
from pipeline.collect_config import RedactionConfig
from pipeline.redaction import Redactor
from pipeline.split import SplitKey
from pipeline.workloads import support_mails

_KEY = SplitKey(b"the key of a bench")
_NUM_MAILS = 2000
# Held-out kinds that no pattern is promised for: a password in a sentence, with nothing but the sentence to tell it.
_NOT_OF_PATTERNS = frozenset(("password_prose",))


def redaction_figures(*, seed: int = 0) -> dict[str, Figure]:
    """Recall by kind and over all kinds, false alarms, surroundings kept and cost of our redaction."""
    started = time.perf_counter()
    redactor = Redactor(RedactionConfig(names="not_redacted"), _KEY)
    redactor.redact({"prompt": "a@b.de, 84.12.3.4, 030 81234567"}, "")
    loaded_s = time.perf_counter() - started

    def redact(body: Body) -> Body:
        return redactor.redact(body, body["conversation"]).body

    figures = recall(redact, seed=seed) | held_out_recall(redact, regions=RedactionConfig().phone_regions)
    mails = list(support_mails.prompts(_NUM_MAILS, seed))
    started = time.process_time()
    for mail in mails:
        redactor.redact({"messages": mail["messages"], "slice": mail["slice"]}, mail["conversation"])
    cost_us = (time.process_time() - started) / len(mails) * 1e6
    return {
        **figures,
        "redaction_us_a_record": at_most(cost_us, 300, on="shop mails, one core", n=len(mails)),
        "redaction_loading_s": shown(loaded_s),
    }


def recall(redact: Callable[[Body], Body], *, seed: int = 0) -> dict[str, Figure]:
    """The figures of any ``redact(body) -> body`` but its cost."""
    hits: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    kept = []
    for record in labelled(seed=seed):
        after = redact(record.body)
        hits[record.value.kind].append(not left_over(after, record.value))
        found = "".join(texts(after))
        kept.append(all(part in found for part in record.around))
    everything = [hit for of_kind in hits.values() for hit in of_kind]
    changed = [redact(body) != body for body in clean(seed=seed)]
    return {
        **{f"recall_{kind}": shown(sum(found) / len(found), n=len(found)) for kind, found in hits.items()},
        "recall_pattern_kinds": at_least(sum(everything) / len(everything), 0.98, n=len(everything)),
        "false_alarms": at_most(sum(changed) / len(changed), 0.01, n=len(changed)),
        "surroundings_kept": shown(sum(kept) / len(kept), n=len(kept)),
        "recall_names": unknown("no model for names is installed here"),
    }


def held_out_recall(redact: Callable[[Body], Body], *, regions: Collection[str]) -> dict[str, Figure]:
    """The same of the held-out records; national phone numbers count where their region is one of ``regions``."""
    hits: dict[str, list[bool]] = {}
    for number, record in enumerate(held_out.labelled_records()):
        after = redact(record.body(f"held out {number}"))
        for value in record.values:
            hits.setdefault(value.kind, []).append(not held_out.left_over(after, value))
    unknown_regions = {kind for kind in hits if kind.startswith("phone_national_") and kind[-2:] not in regions}
    counted = [hit for kind in hits.keys() - unknown_regions - _NOT_OF_PATTERNS for hit in hits[kind]]
    bodies = [record.body(f"clean {number}") for number, record in enumerate(held_out.clean_records())]
    changed = [redact(body) != body for body in bodies]
    return {
        **{f"held_out_recall_{kind}": shown(sum(found) / len(found), n=len(found)) for kind, found in hits.items()},
        "held_out_recall_pattern_kinds": at_least(sum(counted) / len(counted), 0.98, n=len(counted)),
        "held_out_false_alarms": at_most(sum(changed) / len(changed), 0.01, n=len(changed)),
    }
