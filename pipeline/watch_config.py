"""The [watch] table: what is watched, what counts as a shift, and how often an alarm may be false."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from pipeline.artifacts import Frozen
from pipeline.collect_config import SourceEntry

Dimension = Literal["route", "tenant", "language", "length", "temperature", "thinking"]


class WatchConfig(Frozen):
    """Live counters and the tap's records → alarms."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    sources: tuple[SourceEntry, ...] = ()
    """Folders or files of the tap's records; empty takes those of [collect]."""
    every_s: float = Field(30, gt=0)
    """Seconds between two looks at the replicas and the logs."""
    scrape_timeout_s: float = Field(5, gt=0)
    dimensions: tuple[Dimension, ...] = ("route", "tenant", "language", "length")
    """What slices are made of: each value is one, and what is expected follows the mix of all of them together."""
    max_slices: int = Field(40, gt=0)
    """The slices with the most traffic that are watched beside the whole."""
    shift: float = Field(0.1, gt=0, lt=1)
    """The relative change of accepted drafts a step (acceptance length less one) that must be found."""
    tolerance: float = Field(0.02, ge=0)
    """Changes up to this are no alarm, for how long they last. A reference that is known less well raises it."""
    false_alarm_days: float = Field(180, gt=0)
    """Mean days between two false alarms of *accepted*, of all slices and both directions together: at the least, for
    traffic that lies off by all that is tolerated for good, and rarer otherwise. tests/pipeline/test_watch_false_alarms
    simulates it."""
    max_days_to_find: float = Field(7, gt=0)
    """A slice too small to show such a shift in so many days is reported as too small, and not watched."""
    learn_days: int = Field(7, ge=2)
    """Days from which levels and rhythm of day and week are learned before anything is watched."""
    reference_days: int = Field(28, ge=2)
    """The reference is learned again, day by day, from at most so many days since the last change."""
    settle_hours: int = Field(24, ge=2)
    """After an alarm or a release: the hours from which new levels are learned; what else moves then is one event."""
    late_minutes: float = Field(20, ge=0)
    """How long after its end an hour waits for records: as long as a request and a log's writer may take."""
    promise_gap: float = Field(0.1, gt=0)
    """Accepted drafts a step of a slice, shown to be under the gate's own figure by more than this share: an alarm.
    Shown at a level of 0.001 for all slices together, looked at once a day."""
    pays_hours: int = Field(6, gt=0)
    """Speculation that costs time over so many hours together is an alarm."""
    asked_sample: int = Field(250, ge=50)
    """Conversations a day that drift in what is asked is told from."""
    asked_false_alarm_days: float = Field(180, gt=0)
    """Mean days between two false alarms of *asked*, of all dimensions together, as far as a calibration on so few
    reference days can say."""
    asked_min_psi: float = Field(0.1, gt=0)
    """A smaller population stability index is no drift, however sure."""
    keep_days: int = Field(60, gt=0)
    """Days of hourly sums that are kept, for the page."""
    listen: str | None = Field(None, pattern=r"^([\w.-]*|\[[0-9A-Fa-f:.]+\]):\d{1,5}$")
    """host:port where the watch's own metrics are served to whoever asks; None writes watch/metrics.prom alone."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if 2 * self.tolerance > self.shift:
            raise ValueError(f"tolerance = {self.tolerance} is more than half of shift = {self.shift}: nothing is left")
        if self.reference_days < self.learn_days or self.keep_days < self.reference_days + 2:
            raise ValueError("expected learn_days <= reference_days <= keep_days - 2")
        return self
