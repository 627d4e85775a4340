"""The one vocabulary of failure. A message says what was found, where, what was expected, and the next step."""


class SlipstreamError(Exception):
    """Root of every error that Slipstream raises on purpose."""


class ConfigError(SlipstreamError):
    """The configuration, or something it names, cannot work."""


class SchemaError(SlipstreamError):
    """A file is not what its manifest or its schema says."""


class FingerprintError(SlipstreamError):
    """Two things that must come from the same target, template or settings do not."""


class StageError(SlipstreamError):
    """A stage cannot finish: too many rejects, a failed check, an empty result."""


class Declined(StageError):
    """An answer, and no failure: there is nothing to do, or the gate did not let a challenger through.

    The command's exit status is 3.
    """


class DivergedError(StageError):
    """Training came to a gradient that is not finite."""


class SwapError(SlipstreamError):
    """A drafter was refused or a swap did not take; the old drafter serves."""


class Rejected(Exception):
    """A record that cannot become a prompt; the message is the reason, counted and never quoting text."""
