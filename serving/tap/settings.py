"""The tap's settings, read from the environment once, at start."""

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serving.errors import TapError
from serving.tap.policy import ALLOW_ALL, Policy
from serving.tap.sampling import Sampling
from serving.tap.sealing import Key, parse_keys

PREFIX = "SLIPSTREAM_TAP_"
ROUTES = ("chat", "completions", "responses")
NAMES = (
    "DIR", "CONSENT", "OPT_OUT", "ZERO_RETENTION", "TENANT_HEADER", "SUBJECT_HEADER", "SLICE_HEADER", "WITHOUT_TENANT",
    "WITHOUT_SUBJECT", "RATE", "ACCEPTED_FACTOR", "TARGET", "KEY", "KEY_FILE", "TTL_HOURS", "FILE_MIB", "FILE_MINUTES",
    "MEMORY_MIB",
)  # fmt: skip
MIB = 1024 * 1024
_CONSENT = "allow_all, or rules like header:NAME=VALUE; route:chat,completions,responses; tenant:NAME,NAME"


@dataclass(frozen=True)
class LogSettings:
    """Where the log lies, and how long a file grows and lives."""

    folder: Path
    file_bytes: int = 64 * MIB
    file_s: float = 15 * 60.0
    ttl_s: float = 168 * 3600.0
    key: Key | None = None


@dataclass(frozen=True)
class TapSettings:
    """Everything that the tap is told. It is off, and writes nothing, where ``policy`` is None."""

    policy: Policy | None
    sampling: Sampling
    log: LogSettings | None
    target: str | None
    memory_bytes: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "TapSettings":
        """The settings. Raises: TapError naming the variable, what it holds and what was expected."""
        given = {name: environment.get(PREFIX + name, "").strip() for name in NAMES}
        _require_known(environment)
        policy, sampling, log = _policy(given), _sampling(given), _log(given)
        if policy is not None and log is None:
            raise TapError(f"{PREFIX}CONSENT is set and {PREFIX}DIR is not; expected the folder to write to")
        memory = _number(given, "MEMORY_MIB", default=256, low=1, high=1 << 20)
        return cls(policy, sampling, log, given["TARGET"] or None, int(memory * MIB))

    @property
    def summary(self) -> str:
        """One line for the server's log: whether it writes, where, and how."""
        if self.policy is None:
            return "off, since SLIPSTREAM_TAP_CONSENT is not set"
        sealed = f"sealed with key {self.log.key.id}" if self.log.key else "not sealed"
        return f"writes to {self.log.folder}, {sealed}; files live {self.log.ttl_s / 3600:g} h; {self.sampling}"


def _require_known(environment: Mapping[str, str]) -> None:
    """A misspelt rule must not become no rule."""
    known = [PREFIX + name for name in NAMES]
    for name in environment:
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise TapError(f"{name} is no setting of the tap; " + (f"did you mean {close[0]}?" if close else ""))


def _policy(given: Mapping[str, str]) -> Policy | None:
    allow_all, headers, allowed = _consent(given["CONSENT"])
    zero = frozenset(tenant.casefold() for tenant in _names("ZERO_RETENTION", given["ZERO_RETENTION"], separator=","))
    tenant_header, subject_header, slice_header = (
        _header(name, given[name]) if given[name] else None
        for name in ("TENANT_HEADER", "SUBJECT_HEADER", "SLICE_HEADER")
    )
    deny_without_tenant = _choice(given, "WITHOUT_TENANT", "deny", "write") == "deny"
    deny_without_subject = _choice(given, "WITHOUT_SUBJECT", "deny", "one_request") == "deny"
    opt_out = tuple(_opt_out(rule) for rule in _names("OPT_OUT", given["OPT_OUT"], separator=";"))
    if (zero or allowed["tenant"]) and tenant_header is None:
        raise TapError(f"a rule of the tap names tenants; expected {PREFIX}TENANT_HEADER, the header that names them")
    if zero and not deny_without_tenant:
        raise TapError(
            f"{PREFIX}WITHOUT_TENANT is write and {PREFIX}ZERO_RETENTION names tenants: a request without a tenant "
            "might be one of theirs; expected deny"
        )
    if not given["CONSENT"]:
        return None
    return Policy(
        allow_all=allow_all,
        consent_headers=tuple(headers),
        routes=frozenset(allowed["route"]),
        tenants=frozenset(allowed["tenant"]),
        opt_out=opt_out,
        zero_retention=zero,
        tenant_header=tenant_header,
        subject_header=subject_header,
        slice_header=slice_header,
        deny_without_tenant=deny_without_tenant,
        deny_without_subject=deny_without_subject,
    )


def _consent(text: str) -> tuple[bool, list[tuple[bytes, str]], dict[str, list[str]]]:
    """Whether all is allowed; headers with their values; routes and tenants."""
    headers: list[tuple[bytes, str]] = []
    allowed: dict[str, list[str]] = {"route": [], "tenant": []}
    if text == ALLOW_ALL:
        return True, headers, allowed
    for rule in text.split(";") if text else ():
        kind, _, value = (part.strip() for part in rule.partition(":"))
        name, equals, wanted = (part.strip() for part in value.partition("="))
        values = [part.strip() for part in value.split(",")]
        if kind == "header" and equals and name and wanted:
            headers.append((_header("CONSENT", name), wanted))
        elif kind in allowed and all(values) and (kind == "tenant" or set(values) <= set(ROUTES)):
            allowed[kind] += values
        else:
            raise TapError(f"{PREFIX}CONSENT holds {rule.strip()!r}; expected {_CONSENT}")
    return False, headers, allowed


def _opt_out(rule: str) -> tuple[bytes, str | None]:
    name, equals, value = (part.strip() for part in rule.partition("="))
    if equals and not value:
        raise TapError(f"{PREFIX}OPT_OUT holds {rule!r}; expected NAME or NAME=VALUE, several with ; between")
    return _header("OPT_OUT", name), value or None


def _sampling(given: Mapping[str, str]) -> Sampling:
    rate, tenants = 1.0, {}
    for part in _names("RATE", given["RATE"], separator=";"):
        name, equals, value = (piece.strip() for piece in part.rpartition("="))
        number = _to_number("RATE", value, low=0, high=1)
        if equals and name:
            tenants[name] = number
        elif not equals:
            rate = number
        else:
            raise TapError(f"{PREFIX}RATE holds {part!r}; expected like 0.1; acme=1")
    if tenants and not given["TENANT_HEADER"]:
        raise TapError(f"{PREFIX}RATE names tenants; expected {PREFIX}TENANT_HEADER, the header that names them")
    factor = _number(given, "ACCEPTED_FACTOR", default=1, low=0, high=1)
    if factor == 0:
        raise TapError(f"{PREFIX}ACCEPTED_FACTOR is 0; expected more: no weight could stand for what is never written")
    return Sampling(rate, tenants, factor)


def _log(given: Mapping[str, str]) -> LogSettings | None:
    hours = _number(given, "TTL_HOURS", default=168, low=1 / 3600, high=24 * 3650)
    minutes = _number(given, "FILE_MINUTES", default=15, low=1 / 60, high=24 * 60)
    size = _number(given, "FILE_MIB", default=64, low=1 / 1024, high=1 << 16)
    if minutes > hours * 60:
        raise TapError(f"{PREFIX}FILE_MINUTES is {minutes:g}; expected at most the {hours:g} hours a file lives")
    key = _key(given)
    if not given["DIR"]:
        return None
    return LogSettings(Path(given["DIR"]), int(size * MIB), minutes * 60, hours * 3600, key)


def _key(given: Mapping[str, str]) -> Key | None:
    if given["KEY"] and given["KEY_FILE"]:
        raise TapError(f"both {PREFIX}KEY and {PREFIX}KEY_FILE are set; expected one of them")
    text, where = given["KEY"], PREFIX + "KEY"
    if given["KEY_FILE"]:
        where = f"{PREFIX}KEY_FILE {given['KEY_FILE']}"
        try:
            text = Path(given["KEY_FILE"]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise TapError(f"{where}: {type(error).__name__}; expected a readable file of keys, ID:BASE64 a line")
    keys = parse_keys(text, where=where)
    if where != PREFIX + "KEY" and not keys:
        raise TapError(f"{where} holds no key; expected ID:BASE64 of 32 bytes")
    return keys[0] if keys else None


def _header(variable: str, name: str) -> bytes:
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise TapError(f"{PREFIX}{variable} holds {name!r}; expected the name of a header")
    return name.lower().encode()


def _names(variable: str, text: str, *, separator: str) -> list[str]:
    parts = [part.strip() for part in text.split(separator)] if text else []
    if not all(parts):
        raise TapError(f"{PREFIX}{variable} is {text!r}; expected entries with {separator} between, none of them empty")
    return parts


def _choice(given: Mapping[str, str], variable: str, *choices: str) -> str:
    value = given[variable] or choices[0]
    if value not in choices:
        raise TapError(f"{PREFIX}{variable} is {value!r}; expected {' or '.join(choices)}")
    return value


def _number(given: Mapping[str, str], variable: str, *, default: float, low: float, high: float) -> float:
    return _to_number(variable, given[variable], low=low, high=high) if given[variable] else float(default)


def _to_number(variable: str, text: str, *, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise TapError(f"{PREFIX}{variable} holds {text!r}; expected a number from {low:g} to {high:g}")
    return value
