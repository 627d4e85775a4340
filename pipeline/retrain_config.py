"""The table [retrain]: when the loop begins by itself, and what a run may cost."""

from pydantic import Field

from pipeline.artifacts import Frozen


class RetrainConfig(Frozen):
    """What makes a retraining due (`slipstream due`), and how one is run (`slipstream retrain`)."""

    every_days: float | None = Field(7, gt=0)
    """So long after the last one that came to a verdict; None: never by time alone."""
    min_new_requests: int | None = Field(None, gt=0)
    """So many requests that the last one has not seen, about: their number is told from the logs' bytes."""
    on_alarm: bool = True
    """An alarm of `slipstream watch` that no run has answered."""
    alarm_kinds: tuple[str, ...] = ()
    """Which kinds of alarm; empty takes each."""
    min_hours_between: float = Field(6, ge=0)
    """After a run began, whatever came of it: alarms that come in a flock begin one run. One that was killed is gone on
    with at once, `tries` times in all."""
    tries: int = Field(2, ge=1)
    """Of `slipstream retrain`: a run that failed goes on from what is complete. Schedulers have their own."""
    timeout_hours: float = Field(24, gt=0)
    """Of one try of `slipstream retrain`: then it is ended."""
    lease_minutes: float = Field(60, gt=0)
    """Where a scheduler runs the stages one by one: so long may it leave a run alone between two of them."""
