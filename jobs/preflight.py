"""Every check of a drafter that vLLM leaves out, against the configured target, before an alias or an engine has it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from serving.preflight import DrafterInfo


def check(config: Config, folder: Path) -> "DrafterInfo":
    """What a drafter folder holds. Raises: ConfigError when it cannot serve the configured target."""
    from serving.errors import PreflightError
    from serving.preflight import check_drafter

    path = config.target.model / "config.json"
    if not path.exists():
        raise ConfigError(f"{path}: not there; set target.model to the folder of the served target")
    try:
        return check_drafter(folder, target_config=json.loads(path.read_text()))
    except PreflightError as error:
        raise ConfigError(f"{folder}: not a drafter that can serve {config.target.model}: {error}")
