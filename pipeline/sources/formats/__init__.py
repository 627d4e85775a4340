"""The formats of logs, one file each: ``fits(body)`` recognises a line's object, ``records(body)`` gives its records.

A record is what the tap writes (serving/tap.py): id, ts, model, route, slice, tenant, subject, conversation, consent,
consent_source, messages or prompt, tools, params, response, target, drafter_version, inclusion_probability; what a log
does not say is absent. ``ts`` is as the log has it. ``records`` raises Rejected for a line that holds no request that
was answered, and yields one for what only a part of the line does not.

A new format is a new file, and its name below.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Rejected
from pipeline.sources.formats import litellm, openai, otel, prompts, tap


@dataclass(frozen=True)
class Format:
    """One way to log requests."""

    fits: Callable[[dict[str, Any]], bool]
    records: Callable[[dict[str, Any]], Iterator[dict[str, Any] | Rejected]]


FORMATS: Mapping[str, Format] = {  # in the order in which they are tried
    "otel": Format(otel.fits, otel.records),
    "litellm": Format(litellm.fits, litellm.records),
    "tap": Format(tap.fits, tap.records),
    "openai": Format(openai.fits, openai.records),
    "prompts": Format(prompts.fits, prompts.records),
}

# The whole line is one prompt: what it holds is never looked at.
TEXT = "text"
NAMES = ("auto", *FORMATS, TEXT)


def records_of(body: dict[str, Any], log_format: str) -> Iterator[dict[str, Any] | Rejected]:
    """The records of a line's object. "auto" takes the first format that it fits.

    Raises: Rejected, ``unknown_format`` where it is not what was said or nothing fits.
    """
    if log_format == TEXT:
        log_format = "prompts"
    known = FORMATS.values() if log_format == "auto" else (FORMATS[log_format],)
    found = next((one for one in known if one.fits(body)), None)
    if found is None:
        raise Rejected("unknown_format")
    try:
        yield from found.records(body)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError):
        raise Rejected("malformed_record")  # a log may hold anything
