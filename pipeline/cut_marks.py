"""The marks that proxies leave where they cut a text before they store it."""

import re
from collections.abc import Iterable

# As "... (truncated 800 chars) ...", "... (litellm_truncated skipped 165 chars. Why and how) ...", "[base64 image/png
# truncated]", "[base64_data truncated: 3.8KB]", "...[truncated 12,000 bytes]" and, at its end, "...[truncated]".
_COUNT = r"[\d,]+ (?:chars|characters|bytes|tokens)\b"
_MARK = re.compile(
    rf"(?:\.\.\.|…)\s*[(\[<](?:\w*truncated\w*)(?: skipped)? {_COUNT}[^)\]>]{{0,300}}[)\]>]"
    rf"|(?:\.\.\.|…)\s*<{_COUNT}, truncated>"
    r"|\[base64[^\]\n]{0,200}truncated[^\]\n]{0,80}\]"
    r"|(?:\.\.\.|…)\s*[(\[<]truncated[)\]>]\s*$",
    re.IGNORECASE,
)


def is_cut(texts: Iterable[str]) -> bool:
    """Whether one of these texts was cut at its source. A text that only speaks of truncation was not."""
    return any("truncated" in text.lower() and _MARK.search(text) for text in texts)
