"""Presidio's pattern recognisers, without its engine, its models, torch or the network."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# Domains that no registry gives out, and that companies use inside.
_INSIDE = frozenset("local localdomain internal intranet lan corp home private".split())

# Countries whose accounts Presidio's forms end too early: characters by ISO 13616's registry.
_CUT_SHORT = {"MU": 30, "PT": 25, "QA": 29}


@cache
def recognisers() -> dict[str, Any]:
    """Presidio's recognisers for email, card, iban and ip, loaded when they are first needed (about a second)."""
    # What Presidio logs may quote the text that it looked at.
    logging.getLogger("presidio-analyzer").setLevel(logging.CRITICAL + 1)
    with _without_torch():
        import tldextract
        from presidio_analyzer import Pattern
        from presidio_analyzer.predefined_recognizers import (
            CreditCardRecognizer,
            EmailRecognizer,
            IbanRecognizer,
            IpRecognizer,
        )

    suffixes = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)  # Presidio's own would fetch the list

    class OfflineEmailRecognizer(EmailRecognizer):
        def validate_result(self, pattern_text: str) -> bool:
            domain = pattern_text.rpartition("@")[2].lower()
            return bool(suffixes(domain).suffix) or domain.rpartition(".")[2] in _INSIDE

    begun = IbanRecognizer()

    class WholeIbanRecognizer(IbanRecognizer):
        """A country's form and no more: where it may go on, one length in 97 has fitting digits by chance."""

        def validate_result(self, pattern_text: str) -> bool | None:
            number = "".join(filter(str.isalnum, pattern_text)).upper()
            length = _CUT_SHORT.get(number[:2])
            if length is None:
                return super().validate_result(pattern_text)
            return len(number) == length and begun.validate_result(number)

    # Mastercard's second series and cards of 19 digits, which Presidio leaves out.
    more_cards = [
        Pattern("second series", r"\b2[2-7]\d{2}[- ]?\d{4}[- ]?\d{4}[- ]?\d{4}\b", 0.3),
        Pattern("nineteen digits", r"\b[3-6]\d{3}[- ]?\d{4}[- ]?\d{4}[- ]?\d{4}[- ]?\d{3}\b", 0.3),
    ]
    return {
        "email": OfflineEmailRecognizer(),
        "card": CreditCardRecognizer(patterns=[*CreditCardRecognizer.PATTERNS, *more_cards]),
        "iban": WholeIbanRecognizer(exact_match=True),
        "ip": IpRecognizer(),
    }


def matches(kind: str, text: str) -> list[tuple[int, int]]:
    """Start and end of what Presidio takes for this kind in a text, in order."""
    return sorted((found.start, found.end) for found in recognisers()[kind].analyze(text, []))


@contextmanager
def _without_torch() -> Iterator[None]:
    """Presidio imports what its models would need; its patterns need none of it: 6 of 7 s, 430 of 530 MB."""
    kept_out = [name for name in ("torch", "transformers") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(kept_out))
    try:
        yield
    finally:
        for name in kept_out:
            del sys.modules[name]
