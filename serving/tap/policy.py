"""Who may be written: nobody without a rule that says so, and a no outweighs every yes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

ALLOW_ALL = "allow_all"


@dataclass(frozen=True)
class Verdict:
    """What policy says of one request: ``reason`` is None where it may be written, else why it may not."""

    reason: str | None
    consent_source: str | None = None
    tenant: str | None = None
    subject: str | None = None
    slice: str | None = None
    one_request_subject: bool = False
    """Whether its record gets a subject that no other request has."""


@dataclass(frozen=True)
class Policy:
    """Headers are lower-case names; a tenant's name counts letter for letter where it allows, loosely where it denies.

    With ``zero_retention`` tenants a request without a tenant can never be written: it might be one of theirs.
    """

    allow_all: bool = False
    consent_headers: tuple[tuple[bytes, str], ...] = ()
    routes: frozenset[str] = frozenset()
    tenants: frozenset[str] = frozenset()
    opt_out: tuple[tuple[bytes, str | None], ...] = ()
    """Header and value; without a value its presence is a no."""
    zero_retention: frozenset[str] = frozenset()
    """Case-folded."""
    tenant_header: bytes | None = None
    subject_header: bytes | None = None
    slice_header: bytes | None = None
    deny_without_tenant: bool = True
    deny_without_subject: bool = True

    def decide(self, route: str, headers: Iterable[tuple[bytes, bytes]]) -> Verdict:
        """The verdict on a request to a route ("chat", "completions", "responses") with these raw headers."""
        given: dict[bytes, list[str]] = {}
        for name, value in headers:
            if name in self._names:
                given.setdefault(name, []).append(_text(value))
        if any(_says_no(given.get(name), value) for name, value in self.opt_out):
            return Verdict("denied_opt_out")
        tenants, subjects = (_distinct(given, name) for name in (self.tenant_header, self.subject_header))
        if any(part in self.zero_retention for tenant in tenants for part in _parts(tenant)):
            return Verdict("denied_zero_retention")
        if len(tenants) > 1 or len(subjects) > 1:
            return Verdict("denied_ambiguous")
        tenant, subject = (found[0] if found else None for found in (tenants, subjects))
        source = self._source(route, given, tenant)
        if source is None:
            return Verdict("denied_no_consent")
        if self.tenant_header and not tenant and self.deny_without_tenant:
            return Verdict("denied_without_tenant")
        if self.subject_header and not subject and self.deny_without_subject:
            return Verdict("denied_without_subject")
        slices = _distinct(given, self.slice_header)
        own = self.subject_header is not None and not subject
        return Verdict(None, source, tenant, subject, slices[0] if len(slices) == 1 else None, own)

    def _source(self, route: str, given: dict[bytes, list[str]], tenant: str | None) -> str | None:
        """The rule that allows a request, as records carry it; None where none does."""
        if self.allow_all:
            return ALLOW_ALL
        for name, value in self.consent_headers:
            if set(given.get(name, ())) == {value}:
                return f"header:{name.decode()}"
        if tenant in self.tenants:
            return "tenant"
        return f"route:{route}" if route in self.routes else None

    @cached_property
    def _names(self) -> frozenset[bytes]:
        """The headers that matter."""
        rules = [name for name, _ in (*self.consent_headers, *self.opt_out)]
        named = (self.tenant_header, self.subject_header, self.slice_header)
        return frozenset(rules) | {name for name in named if name}


def _text(value: bytes) -> str:
    """A header's value as people write it: UTF-8, which clients and gateways send, else Latin-1."""
    try:
        return value.decode().strip()
    except UnicodeDecodeError:
        return value.decode("latin-1").strip()


def _says_no(values: Sequence[str] | None, expected: str | None) -> bool:
    """Whether a header is there, with that value if one is asked for: alone or in a list, in any case, with parameters
    or without."""
    if values is None or expected is None:
        return values is not None
    found = {part for value in values for part in _parts(value)}
    return expected.casefold() in found | {part.partition(";")[0].strip(' "') for part in found}


def _parts(value: str) -> set[str]:
    """A value, and what it lists where a proxy has joined several headers into one; case-folded."""
    return {part.strip(' "').casefold() for part in (value, *value.split(","))}


def _distinct(given: dict[bytes, list[str]], name: bytes | None) -> list[str]:
    """The different values of a header that are not empty."""
    return sorted(set(filter(None, given.get(name, ())))) if name else []
