"""The [deploy] table: where the replicas are found, and how a drafter gets onto all of them."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from pipeline.artifacts import Frozen


class DeployConfig(Frozen):
    """An approved version → every replica, verified or put back."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kubernetes_service: str | None = None
    """A service whose pods are the replicas, in the place of serving.replicas; deploy runs in the cluster then."""
    kubernetes_namespace: str | None = None
    """None: the one that deploy itself runs in."""
    kubernetes_port: str | None = None
    """Name of the service's port; None where it has one."""
    max_unavailable: int = Field(1, gt=0)
    """Replicas that may be out of service at a time, down or being changed: the size of a wave."""
    max_failed: int = Field(0, ge=0)
    """Replicas that may refuse, or stay down, before all are put back."""
    attempts: int = Field(1, gt=0)
    """Tries before a replica counts as refusing."""
    dead_after_s: float = Field(60, gt=0)
    """Nobody waits longer for a replica that is down."""
    tick_s: float = Field(2, gt=0)
    """Seconds between two looks at the replicas; an order (`--pause`, `--abort`) waits for that, or for the change of
    a replica to end."""
    change_timeout_s: float = Field(600, gt=0)
    """Of one replica's swap or restart."""
    reconcile_every_s: float = Field(30, gt=0)
    """How often `slipstream watch --reconcile` looks for replicas that came up with another drafter."""
    retry_after_s: float = Field(900, ge=0)
    """A replica that refused the champion is asked again after so long."""
    restart_command: tuple[str, ...] = ()
    """Restarts a replica that cannot be swapped in place: words in which {url}, {version}, {folder} and {sha256} are
    replaced. Empty: the replica's own supervisor does it."""
    soak_min_steps: int = Field(2000, ge=0)
    """Verification steps that the canary replica counts before it is judged; 0: no soak. A fleet of one has none."""
    soak_min_s: float = Field(300, gt=0)
    soak_max_s: float = Field(3600, gt=0)
    soak_tick_s: float = Field(10, gt=0)
    """Seconds between two readings of the counters."""
    soak_min_ratio: float = Field(0.95, gt=0)
    """Acceptance length of the canary replica over the other replicas', or over what the gate measured where they
    count nothing: shown to be at least this, the others follow; shown to be less, it is put back."""
    soak_error_rate: float = Field(0.05, gt=0, lt=0.5)
    """Of both verdicts, all looks together."""
    soak_undecided: Literal["abort", "go_on"] = "abort"
    """What soak_max_s without a verdict means."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.soak_max_s < self.soak_min_s:
            raise ValueError(f"soak_max_s = {self.soak_max_s:g} is less than soak_min_s = {self.soak_min_s:g}")
        return self
