"""Every check of a drafter that vLLM leaves out, against the configured target, before an alias or an engine has it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.artifacts import DrafterCheckpoint, find
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.fingerprint import require_present_target

if TYPE_CHECKING:
    from serving.preflight import DrafterInfo


def check(config: Config, folder: Path) -> "DrafterInfo":
    """What a drafter folder holds.

    Raises: ConfigError when it cannot serve the configured target; FingerprintError when its manifest, where there is
    one, says that it was made for another revision of it.
    """
    from serving.errors import PreflightError
    from serving.preflight import check_drafter

    path = config.target.model / "config.json"
    if not path.exists():
        raise ConfigError(f"{path}: not there; set target.model to the folder of the served target")
    try:
        info = check_drafter(folder, target_config=json.loads(path.read_text()))
    except PreflightError as error:
        raise ConfigError(f"{folder}: not a drafter that can serve {config.target.model}: {error}")
    if (made := find(folder, DrafterCheckpoint)) is not None:
        require_present_target(made.fingerprint, config.target.model, dtype=config.target.dtype, where=str(folder))
    return info
