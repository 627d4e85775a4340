"""What can go wrong on the serving side. A message says what was found, where, what was expected, the next step."""


class ServingError(Exception):
    """Root of every error that the serving side raises on purpose."""


class VersionError(ServingError):
    """The installed vLLM is not one whose internals this code was checked against."""


class PreflightError(ServingError):
    """A drafter that no engine may get; ``code`` names the check, one word for each."""

    def __init__(self, code: str, message: str):
        super().__init__(f"{code}: {message}")
        self.code = code


class TapError(ServingError):
    """The traffic tap's settings cannot be used."""


class LaunchError(ServingError):
    """A server did not come up, or died; the message ends with its last log lines."""


class DeployError(ServingError):
    """A replica did not take a drafter; the message says what serves now."""


class NoAnswerError(DeployError):
    """A replica could not be reached, or what came is no answer of ours: it may have done what it was asked to."""


class LookAgainError(DeployError):
    """A replica was not as the caller had seen it, so nothing was changed: no word on the drafter."""


class LoadError(ServingError):
    """The load generator failed, or requests of its load did."""
