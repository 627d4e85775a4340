"""What acceptance is expected to be, for every slice and hour, and how far an hour may lie off.

Expected accepted drafts of a slice's hour = the drafts of each cell times the cell's own rate, so that a mix that moves
moves what is expected with it; times the slice's level; times its rhythm over day and week. How far off has three
parts, all learned (learning.py): the spread of conversations, which is new every hour; wobble, which lasts for some
hours; and what lasts for a day or longer, days that differ and doubt about what is expected: that much is tolerated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.watch.hours import HOUR_S, Cell, Hour, slices_of
from pipeline.watch_config import WatchConfig

MAX_SEPARATION = 2.0  # no hour says more than this, so that none alarms by itself
_MAX_Z = 3.0
_MAX_UNKNOWN = 0.5  # share of an hour's drafts in cells that are not known: beyond, it says nothing
_TUPLES = ("dimensions", "slices")


@dataclass(frozen=True, eq=False)
class Reference:
    """Arrays over cells, or over slices in the order of ``slices``."""

    dimensions: tuple[str, ...]
    cells: tuple[Cell, ...]
    slices: tuple[str, ...]
    rate: np.ndarray  # [cells] accepted drafts a step
    fitted: np.ndarray  # [slices, features] level (first) and rhythm, relative to the cells' rates
    doubt: np.ndarray  # [slices, features, features] covariance of those
    by_square: np.ndarray  # [slices] variance of accepted drafts, for each squared draft of a conversation
    wobble: np.ndarray  # [slices] relative variance between hours, more than each one's since it lasts for some
    excess: np.ndarray  # [slices] factor on all variance: hours vary more than any of this says
    days_apart: np.ndarray  # [slices] relative variance between days: how far one lies off for as long as it lasts
    separation: np.ndarray  # [slices] J of a typical hour (arl.py)
    threshold: np.ndarray  # [slices] of the CUSUM
    watched: np.ndarray  # [slices] bool: whether a shift shows in time
    usual: float
    """Accepted drafts a step of all traffic, in its mix of then."""
    num_hours: int
    """So many hours it was learned from."""

    @cached_property
    def member(self) -> np.ndarray:  # [slices, cells]
        """1 where a cell is in a slice."""
        index = {name: i for i, name in enumerate(self.slices)}
        member = np.zeros((len(self.slices), len(self.cells)))
        for column, cell in enumerate(self.cells):
            for name in slices_of(cell, self.dimensions):
                if name in index:
                    member[index[name], column] = 1.0
        return member

    def days_to_find(self) -> np.ndarray:  # [slices]
        """About how many days of typical traffic it takes until a shift of the configured size is found."""
        return self.threshold / np.maximum(self.separation**2 / 2, 1e-9) * HOUR_S / 86400

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> "Reference":
        """The inverse of as_dict."""
        found = {name: np.asarray(value) if isinstance(value, list) else value for name, value in body.items()}
        return cls(
            **found | {name: tuple(body[name]) for name in _TUPLES} | {"cells": tuple(map(tuple, body["cells"]))}
        )


@dataclass(frozen=True, eq=False)
class Laid:
    """Hours as arrays, over the cells and slices of one reference."""

    starts: np.ndarray  # [hours]
    requests: np.ndarray  # [hours, cells]
    drafts: np.ndarray  # [hours, cells]
    accepted: np.ndarray  # [hours, cells]
    seen: np.ndarray  # [hours, slices] drafts of all cells, known or not
    spread: np.ndarray  # [hours, slices, 4] conversations, drafts², drafts x accepted, accepted²


def lay(cells: Sequence[Cell], slices: Sequence[str], hours: Sequence[Hour]) -> Laid:
    """The hours' sums; what cells and slices do not name is left out."""
    sums = np.array([[hour.cells.get(cell, (0.0, 0.0, 0.0)) for cell in cells] for hour in hours])
    seen = [[hour.slices.get(name, (0.0, 0.0, 0.0))[1] for name in slices] for hour in hours]
    spread = [[hour.spread.get(name, (0.0, 0.0, 0.0, 0.0)) for name in slices] for hour in hours]
    starts = np.array([hour.start for hour in hours])
    return Laid(starts, *np.moveaxis(sums.reshape(len(hours), len(cells), 3), 2, 0), np.array(seen), np.array(spread))


@dataclass(frozen=True, eq=False)
class Compared:
    """Hours against what was expected of them, over slices; NaN where an hour says nothing."""

    starts: np.ndarray  # [hours]
    drafts: np.ndarray  # [hours, slices] of known cells
    accepted: np.ndarray  # [hours, slices]
    expected: np.ndarray  # [hours, slices] accepted drafts
    change: np.ndarray  # [hours, slices] accepted / expected - 1
    error: np.ndarray  # [hours, slices] its standard deviation while nothing changes
    lasting: np.ndarray  # [hours, slices] and for hours on end: doubt about what is expected, and days that differ


def compare(reference: Reference, laid: Laid) -> Compared:
    """What became of what was expected."""
    member, x = reference.member, features(laid.starts)
    drafts, accepted = laid.drafts @ member.T, laid.accepted @ member.T
    fitted = np.maximum(x @ reference.fitted.T, 0.05)
    expected = (laid.drafts * reference.rate) @ member.T * fitted
    says = (drafts > (1 - _MAX_UNKNOWN) * laid.seen) & (expected > 0)
    sure = np.where(says, expected, 1.0)
    change = np.where(says, accepted / sure - 1, np.nan)
    error = np.sqrt((reference.by_square * laid.spread[:, :, 1] / sure**2 + reference.wobble) * reference.excess)
    doubt = np.maximum(np.einsum("hf,sfg,hg->hs", x, reference.doubt, x), 0) / fitted**2
    lasting = np.sqrt(doubt + reference.days_apart)
    return Compared(laid.starts, drafts, accepted, expected, change, np.where(says, error, np.nan), lasting)


def step(config: WatchConfig, reference: Reference, compared: Compared, *, direction: int) -> np.ndarray:
    """What each hour adds to each CUSUM, [hours, slices]: the log-likelihood ratio of "shifted" against "off by what is
    tolerated".

    ``direction`` is -1 for falls and 1 for rises. An hour beyond three standard deviations counts as one of three.
    """
    tolerated = _tolerated(config, compared)
    room = config.shift - tolerated
    error = np.maximum(compared.error, room / MAX_SEPARATION)
    separation = room / error
    z = np.minimum((direction * compared.change - tolerated) / error, _MAX_Z)
    added = separation * (z - separation / 2)
    return np.where(np.isnan(added) | ~reference.watched, 0.0, added)


def separations(config: WatchConfig, compared: Compared) -> np.ndarray:  # [slices]
    """J of a typical hour: the root of the mean square, hours that say nothing included."""
    room = config.shift - _tolerated(config, compared)
    with np.errstate(invalid="ignore"):
        found = np.where(np.isnan(compared.error), 0.0, np.minimum(room / compared.error, MAX_SEPARATION))
    return np.sqrt((found**2).mean(0))


def _tolerated(config: WatchConfig, compared: Compared) -> np.ndarray:  # [hours, slices]
    """The change that is no alarm, however long: the configured one, or twice what hours lie off for long anyway."""
    return np.clip(2 * compared.lasting, config.tolerance, config.shift / 2)


def features(starts: np.ndarray) -> np.ndarray:  # [hours, features]
    """One, then the rhythm of the day and of the week by the middle of each hour, UTC."""
    at = (np.asarray(starts, np.float64) + HOUR_S / 2) / 86400
    day = 2 * np.pi * (at % 1)
    weekend = (np.floor(at + 3) % 7 >= 5).astype(float)  # 1 January 1970 was a Thursday
    waves = [np.sin(day), np.cos(day), np.sin(2 * day), np.cos(2 * day)]
    return np.stack([np.ones(len(at)), *waves, weekend, weekend * waves[0], weekend * waves[1]], axis=1)
