"""Hours in which nothing changed → the reference that later hours are compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipeline.watch.arl import threshold_for
from pipeline.watch.hours import ALL, HOUR_S, Cell, Hour, slices_of
from pipeline.watch.reference import Compared, Laid, Reference, compare, features, lay, separations
from pipeline.watch_config import WatchConfig

_SHRINK = 200.0  # drafts of the overall rate that a cell's own rate is blended with
_PRIOR_REQUESTS = 30.0  # of a cell, against which its own count
_MIN_CELL = 20.0  # drafts: of a cell seen less nothing is expected, and it is left out on both sides
_RIDGE_SD = 0.1  # how far rhythm moves a rate, at most about
_MIN_CONVERSATIONS = 5  # in an hour that the spread is told from
_MIN_HOURS = 24  # a slice seen in fewer has no rhythm, and a level that nobody trusts
_NO_DOUBT = 0.5  # standard error of such a level
_PRIOR_DAYS, _PRIOR_DAYS_APART = 3, 0.01  # days differ by about a hundredth, until more are seen
_MAX_Z, _MAX_SERIAL = 4.0, 0.75


def learn(config: WatchConfig, hours: Sequence[Hour]) -> Reference:
    """The reference of hours in which nothing changed."""
    totals: dict[Cell, np.ndarray] = {}
    for hour in hours:
        for cell, sums in hour.cells.items():
            totals[cell] = totals.get(cell, 0) + np.asarray(sums)
    dimensions = hours[0].dimensions
    cells = tuple(cell for cell, sums in totals.items() if sums[1] >= _MIN_CELL)
    slices = _slices(config, cells, totals, dimensions)
    overall = sum(s[2] for s in totals.values()) / max(sum(s[1] for s in totals.values()), 1e-9)
    num_features, zero = features(np.zeros(1)).shape[1], np.zeros(len(slices))
    plain = Reference(
        dimensions=dimensions,
        cells=cells,
        slices=slices,
        rate=np.array([(totals[c][2] + _SHRINK * overall) / (totals[c][1] + _SHRINK) for c in cells]),
        fitted=np.eye(1, num_features).repeat(len(slices), 0),
        doubt=np.zeros((len(slices), num_features, num_features)),
        by_square=zero,
        wobble=zero,
        excess=zero + 1,
        days_apart=zero,
        separation=zero + 1,
        threshold=zero + 1,
        watched=zero == 0,
        usual=overall,
        num_hours=len(hours),
    )
    laid = lay(cells, slices, hours)
    known = _fitted(replace(plain, by_square=_by_square(plain, laid)), laid)
    before = compare(known, laid)
    known = _lasting_wobble(known, before)
    wider = np.nanmean(np.square(compare(known, laid).error / before.error), axis=0)
    known = replace(known, doubt=known.doubt * np.nan_to_num(wider, nan=1.0)[:, None, None])
    known = replace(known, days_apart=_days_apart(compare(known, laid)))
    return _calibrated(config, known, separations(config, compare(known, laid)))


def relevel(
    config: WatchConfig, reference: Reference, hours: Sequence[Hour]
) -> tuple[Reference, np.ndarray, np.ndarray]:
    """The reference with the levels of these hours, all else as it was; the change of each slice, and its error.

    Cells move too, as far as they have requests to tell by: what changed in one slice alone would otherwise look like a
    change in every other one whose mix moves.
    """
    laid = lay(reference.cells, reference.slices, hours)
    moved, error = _moved(compare(reference, laid))
    requests, accepted = laid.requests.sum(0), laid.accepted.sum(0)
    expected = laid.drafts.sum(0) * reference.rate
    ratio = np.where(expected > 0, accepted / np.maximum(expected, 1e-9), 1.0)
    told = requests / (requests + _PRIOR_REQUESTS)
    again = replace(reference, rate=reference.rate * (told * ratio + (1 - told) * (1 + moved[0])))
    rest, error = _moved(compare(again, laid))
    fitted = reference.fitted * (1 + rest)[:, None]
    doubt = reference.doubt.copy()  # of the rhythm, which is as it was
    doubt[:, 0, :] = doubt[:, :, 0] = 0.0
    days = len(np.unique(laid.starts // 86400))
    usual = accepted.sum() / drafts.sum() if (drafts := laid.drafts).sum() else reference.usual
    doubt[:, 0, 0] = np.minimum(error**2 + reference.days_apart / days, _NO_DOUBT**2) * fitted[:, 0] ** 2
    again = replace(again, fitted=fitted, doubt=doubt, usual=float(usual), num_hours=len(hours))
    return _calibrated(config, again, reference.separation), moved, error


def _moved(compared: Compared) -> tuple[np.ndarray, np.ndarray]:  # [slices] each
    """The change of all hours together, and its standard error."""
    weight = np.where(np.isnan(compared.change), 0.0, 1 / np.maximum(compared.error, 1e-6) ** 2)
    total = weight.sum(0)
    moved = np.maximum((weight * np.nan_to_num(compared.change)).sum(0) / np.maximum(total, 1e-12), -0.9)
    return moved, np.where(total > 0, 1 / np.sqrt(np.maximum(total, 1e-12)), _NO_DOUBT)


def _slices(
    config: WatchConfig, cells: Sequence[Cell], totals: Mapping[Cell, np.ndarray], dimensions: Sequence[str]
) -> tuple[str, ...]:
    drafts: dict[str, float] = {}
    for cell in cells:
        for name in slices_of(cell, dimensions):
            drafts[name] = drafts.get(name, 0.0) + totals[cell][1]
    whole = drafts.pop(ALL, 0.0)
    # A dimension of one value says nothing that the whole does not.
    partial = sorted((name for name, n in drafts.items() if n < 0.98 * whole), key=lambda name: (-drafts[name], name))
    return (ALL, *partial[: config.max_slices])


def _by_square(plain: Reference, laid: Laid) -> np.ndarray:  # [slices]
    """Variance of accepted drafts for each squared draft of a conversation: that of an hour in the middle.

    Not the mean: one subject that sends thousands of requests would decide it. And no part for each draft beside it:
    conversations of one size cannot tell the two apart, and such a subject would then be taken for many.
    """
    conversations, dd, da, aa = np.moveaxis(laid.spread, 2, 0)
    member = plain.member
    rate = (laid.accepted @ member.T) / np.maximum(laid.drafts @ member.T, 1e-9)
    usable = (conversations >= _MIN_CONVERSATIONS) & (dd > 0)
    squared = np.maximum(aa - 2 * rate * da + rate**2 * dd, 0) * conversations / np.maximum(conversations - 1, 1)
    ratio = np.where(usable, squared / np.where(usable, dd, 1), np.nan)
    some = usable.any(0)
    ratio[:, ~some] = plain.rate.mean() ** 2  # a slice of few: conversations as unlike as they can be
    return np.nanmedian(ratio, axis=0)


def _fitted(reference: Reference, laid: Laid) -> Reference:
    """Level and rhythm by weighted least squares, twice: the second time with the wobble that the first one leaves."""
    x, compared = features(laid.starts), compare(reference, laid)
    ridge = np.diag([0.0, *[1 / _RIDGE_SD**2] * (x.shape[1] - 1)])
    fitted, doubt, wobble = reference.fitted.copy(), reference.doubt.copy(), reference.wobble.copy()
    doubt[:, 0, 0] = _NO_DOUBT**2
    for i in range(len(reference.slices)):
        usable = ~np.isnan(compared.change[:, i])
        if usable.sum() < _MIN_HOURS:
            continue
        own, y, sampling = x[usable], compared.change[usable, i] + 1, compared.error[usable, i] ** 2
        for _ in range(2):
            weight = 1 / np.maximum(sampling + wobble[i], 1e-8)
            doubt[i] = np.linalg.inv((own * weight[:, None]).T @ own + ridge)
            fitted[i] = doubt[i] @ ((own * weight[:, None]).T @ y)
            wobble[i] = _left_over(y - own @ fitted[i], sampling, free=len(y) - own.shape[1])
    return replace(reference, fitted=fitted, doubt=doubt, wobble=wobble)


def _left_over(rest: np.ndarray, sampling: np.ndarray, *, free: int) -> float:
    """The variance between hours that sampling does not explain. Source: DerSimonian and Laird (1986), by moments."""
    plain = 1 / np.maximum(sampling, 1e-8)
    return max(0.0, float(((plain * rest**2).sum() * len(rest) / max(free, 1) - len(rest)) / plain.sum()))


def _lasting_wobble(reference: Reference, compared: Compared) -> Reference:
    """The reference with its wobble as sums of hours have it: what one hour shares with the next adds up, while what
    sampling does is new every hour."""
    z = np.clip(compared.change / compared.error, -_MAX_Z, _MAX_Z)
    rest = np.nan_to_num(z * compared.error)
    known = ~np.isnan(z)
    both = known[1:] & known[:-1] & (np.diff(compared.starts) == HOUR_S)[:, None]
    weight = np.where(both, 1 / np.maximum(np.nan_to_num(compared.error[1:] * compared.error[:-1]), 1e-8), 0.0)
    shared = (weight * rest[1:] * rest[:-1]).sum(0) / np.maximum(weight.sum(0), 1e-9)
    # The part that lasts may be more than the moments of single hours found: it is known more exactly.
    wobble = np.maximum(reference.wobble, shared)
    serial = np.clip(shared / np.maximum(wobble, 1e-9), 0.0, _MAX_SERIAL)
    excess = np.maximum((np.nan_to_num(z) ** 2).sum(0) / np.maximum(known.sum(0), 1), 1.0)
    return replace(reference, wobble=wobble * (1 + serial) / (1 - serial), excess=excess)


def _days_apart(compared: Compared) -> np.ndarray:  # [slices]
    """The variance between days beyond that of their hours. Few days tell little, so half of it is all slices' own."""
    found = np.zeros(compared.change.shape[1])
    weight = np.where(np.isnan(compared.change), 0.0, 1 / np.maximum(compared.error, 1e-6) ** 2)
    days = [compared.starts // 86400 == day for day in np.unique(compared.starts // 86400)]
    total = np.stack([weight[day].sum(0) for day in days])
    means = np.stack([(weight[day] * np.nan_to_num(compared.change[day])).sum(0) for day in days]) / (total + 1e-12)
    for i in range(len(found)):
        some = total[:, i] > 0
        # Level and weekend are fitted to these very days: two of them are not free.
        found[i] = _left_over(means[some, i], 1 / total[some, i], free=int(some.sum()) - 2)
    found = (len(days) * found + _PRIOR_DAYS * _PRIOR_DAYS_APART**2) / (len(days) + _PRIOR_DAYS)
    return (found + found.mean()) / 2


def _calibrated(config: WatchConfig, reference: Reference, separation: np.ndarray) -> Reference:
    """Thresholds by which all watched slices, in both directions, alarm falsely as rarely as configured."""
    watched = np.ones(len(reference.slices), bool)
    for _ in range(3):  # fewer slices leave each a larger share of the false alarms
        run_length = config.false_alarm_days * 24 * 2 * max(int(watched.sum()), 1)
        threshold = np.array([threshold_for(run_length, max(float(one), 0.02)) for one in separation])
        reference = replace(reference, separation=separation, threshold=threshold, watched=watched)
        found = reference.days_to_find() <= config.max_days_to_find
        if (found == watched).all():
            break
        watched = found
    return replace(reference, watched=watched)
