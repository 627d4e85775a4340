"""Where the replicas of a fleet are, and what each of them serves now."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPException
from typing import Any, Self

from serving import deploy
from serving.errors import DeployError, NoAnswerError

# A status waits for the engine's running step, and for a swap that is under way.
LOOK_TIMEOUT_S = 30.0
_LOOKS_AT_ONCE = 32


@dataclass(frozen=True)
class Address:
    """A replica as its list names it."""

    name: str
    """The same for as long as it is the same process: the URL of a static list, a pod's name."""
    url: str
    ready: bool = True
    """False: it is known to be starting, so it isn't asked."""


Discover = Callable[[], Sequence[Address]]


@dataclass(frozen=True)
class Drafter:
    """A version of the drafter, in a folder that the replicas can read."""

    version: str
    folder: str
    sha256: str

    def same_as(self, other: Self | None) -> bool:
        """Whether both are the same version with the same bytes, wherever they lie."""
        return other is not None and (self.version, self.sha256) == (other.version, other.sha256)

    def as_dict(self) -> dict[str, str]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Seen:
    """What a look at a replica found."""

    drafter: Drafter | None
    """What it serves; None where it doesn't serve."""
    why: str = ""
    """Why it doesn't."""
    in_place: bool = True
    """False: this replica takes another drafter by a restart alone."""
    status: Mapping[str, Any] | None = None

    @property
    def is_up(self) -> bool:
        """Whether it serves."""
        return self.drafter is not None

    @property
    def live(self) -> str | None:
        """The fingerprint of the weights that it drafts with."""
        return self.status["live_fingerprint"][0] if self.status else None

    @property
    def epoch(self) -> str | None:
        """What names this start of it, and the swaps since; None where it doesn't say."""
        return (self.status or {}).get("epoch")


def static(urls: Sequence[str]) -> Discover:
    """The replicas of a fixed list of base URLs."""
    addresses = tuple(Address(url.rstrip("/"), url.rstrip("/")) for url in urls)
    addresses = tuple(dict.fromkeys(addresses))  # one that is listed twice is still one
    return lambda: addresses


def look(address: Address, token: str, *, timeout_s: float = LOOK_TIMEOUT_S) -> Seen:
    """What a replica serves, by its own word."""
    if not address.ready:
        return Seen(None, f"{address.name}: not ready")
    try:
        with understood(address.url):
            return _seen(address, deploy.status(address.url, token, timeout_s=timeout_s))
    except DeployError as error:
        return Seen(None, str(error))


@contextmanager
def understood(url: str) -> Iterator[None]:
    """Raises: NoAnswerError for an answer that breaks off (its replica was killed), or lacks what every one has."""
    try:
        yield
    except (HTTPException, OSError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise NoAnswerError(f"{url}: its answer breaks off or lacks something ({type(error).__name__}: {error})")


def _seen(address: Address, now: Mapping[str, Any]) -> Seen:
    can = now.get("swap")
    in_place = not isinstance(can, Mapping) or can.get("how") is not None
    if now["paused"]:
        return Seen(None, f"{address.url}: the engine is paused", in_place, now)
    if now.get("swapping") or now.get("door", "open") != "open":
        # Also before its engine is paused: what it serves in a moment is not what it serves now.
        return Seen(None, f"{address.url}: a swap is running there, or it is about to start anew", in_place, now)
    if len(set(now["live_fingerprint"])) != 1 and deploy.are_whole(now):
        return Seen(None, f"{address.url}: its workers have different live weights", in_place, now)
    drafter = Drafter(now["version"], now["folder"], now["sha256"])
    if not all(isinstance(told, str) for told in (drafter.version, drafter.folder, drafter.sha256)):
        raise TypeError(f"version, folder and sha256 must be texts, not {drafter.as_dict()}")
    return Seen(drafter, "", in_place, now)


def look_at_all(addresses: Sequence[Address], token: str, *, timeout_s: float = LOOK_TIMEOUT_S) -> dict[str, Seen]:
    """Name → what a look found, all asked at the same time."""
    if not addresses:
        return {}
    with ThreadPoolExecutor(min(_LOOKS_AT_ONCE, len(addresses))) as pool:
        found = pool.map(lambda address: look(address, token, timeout_s=timeout_s), addresses)
    return {address.name: seen for address, seen in zip(addresses, found, strict=True)}
