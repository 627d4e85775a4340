"""Does a swap fail nobody, pause briefly, refuse what is bad, and can nobody else order one?

python bench/serving.py                  every figure, toys unless drafters are named
python bench/serving.py --small          a quick form
python bench/serving.py --only swaps --target DIR --drafter DIR --drafter DIR
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from bench.figures import Figure, finish  # noqa: E402


@dataclass(frozen=True)
class Setting:
    """What the figures are measured on."""

    small: bool
    work: Path
    target: Path | None
    """None: toys."""
    drafters: tuple[Path, ...]

    @property
    def server(self) -> dict[str, Any]:
        """What a server of the bench serves, where it is no toy."""
        return {"target": self.target, "drafters": self.drafters} if self.target else {}


def swaps(setting: Setting) -> dict[str, Figure]:
    """100 swaps back and forth in float32 under 8 clients, streaming and not: failures, tokens, pause, memory."""
    from bench.oracles.many_swaps import many_swaps

    return many_swaps(setting.work, swaps=20 if setting.small else 100, **setting.server)


def swap_vs_restart(setting: Setting) -> dict[str, Figure]:
    """Time without an answer around a swap, over that around a restart with the same flags."""
    from bench.oracles.many_swaps import swap_against_restart

    return swap_against_restart(
        setting.work, swaps=3 if setting.small else 9, restarts=1 if setting.small else 3, **setting.server
    )


def bad_swaps(setting: Setting) -> dict[str, Figure]:
    """Drafters that must not be served: refused or put back for the right reason, with nobody disturbed."""
    from bench.oracles.bad_swaps import bad_swaps as measured

    return measured(setting.work)


def endpoint(setting: Setting) -> dict[str, Figure]:
    """Callers without the right, path tricks, replays, twenty swaps at once, clients that hang up, bodies too large."""
    from bench.oracles.endpoint_attacks import endpoint_attacks

    return endpoint_attacks(setting.work)


MEASURES: dict[str, Callable[[Setting], dict[str, Figure]]] = {
    f.__name__: f for f in (swaps, swap_vs_restart, bad_swaps, endpoint)
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MEASURES), help="one figure")
    parser.add_argument("--small", action="store_true", help="a quick form")
    parser.add_argument("--target", type=Path, help="a target's folder; without it toys")
    parser.add_argument("--drafter", type=Path, action="append", default=[], help="two of its drafters' folders")
    arguments = parser.parse_args(argv)
    if bool(arguments.target) != (len(arguments.drafter) == 2):
        parser.error("--target comes with two --drafter")
    figures: dict[str, Figure] = {}
    for name in [arguments.only] if arguments.only else MEASURES:
        with tempfile.TemporaryDirectory() as work:
            setting = Setting(arguments.small, Path(work), arguments.target, tuple(arguments.drafter))
            figures |= (found := MEASURES[name](setting))
        print("\n".join(f"{key}: {one['value']}" for key, one in found.items()), file=sys.stderr, flush=True)
    finish("serving", figures)


if __name__ == "__main__":
    main()
