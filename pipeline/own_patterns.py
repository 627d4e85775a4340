"""The patterns of whoever runs this: what only they know to be personal, such as numbers of customers or patients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex

from pipeline.collect_config import CustomPattern
from pipeline.errors import Rejected
from pipeline.recognisers import Hit
from pipeline.surrogates import check_digit


@dataclass(frozen=True)
class OwnPatterns:
    """Patterns by name. A pattern that takes longer than its time on one text rejects the record."""

    patterns: Sequence[CustomPattern]
    timeout_s: float
    """Processor seconds that a pattern may take for one text."""

    @cached_property
    def _compiled(self) -> list[tuple[CustomPattern, Any]]:
        return [(own, regex.compile(own.pattern)) for own in self.patterns]

    def hits(self, text: str, label: str) -> Iterator[Hit]:
        for own, pattern in self._compiled:
            try:
                for match in pattern.finditer(text, timeout=self.timeout_s):
                    if match.end() > match.start() and (own.check == "none" or _has_check_digit(match.group())):
                        yield Hit(match.start(), match.end(), f"custom_{own.name}", match.group())
            except TimeoutError:
                raise Rejected("pattern_timeout")


def _has_check_digit(value: str) -> bool:
    digits = "".join(filter(str.isdigit, value))
    return len(digits) > 1 and check_digit(digits[:-1]) == digits[-1]
