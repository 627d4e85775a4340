"""The speed report that a verdict may read: of the challenger itself, where `slipstream speed` has measured it."""

from pipeline import stages
from pipeline.artifacts import DrafterCheckpoint, SpeedReport
from pipeline.config import Config
from pipeline.stages import Artifact


def speed_of(config: Config, challenger: Artifact[DrafterCheckpoint]) -> Artifact[SpeedReport] | None:
    """The current speed report, or None where there is none or it is another drafter's."""
    if "speed" not in stages.current_names(config.root):
        return None
    found = stages.current(config.root, "speed", SpeedReport)
    return found if found.manifest.parents.get("drafter") == challenger.id else None
