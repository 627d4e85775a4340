"""Which of the allowed requests are written, and with what probability: its inverse is what a record stands for."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sampling:
    """A request is drawn twice, independently: when it comes, by tenant, and when its acceptance is known.

    The product of the two probabilities is on its record, so that sums over records, each divided by its
    probability, have the expectation of the sums over all requests.
    """

    rate: float = 1.0
    tenants: Mapping[str, float] = field(default_factory=dict)
    """Tenants with a rate of their own."""
    accepted_factor: float = 1.0
    """The second probability where every draft was accepted, in (0, 1]."""

    def of_request(self, tenant: str | None) -> float:
        """The probability that a request of this tenant is taken."""
        return self.tenants.get(tenant, self.rate)

    def of_reply(self, acceptance: Mapping[str, int] | None) -> float:
        """The probability that an answered request is kept: 1 with no draft accepted, ``accepted_factor`` with all.

        One without counts, or without a draft, is always kept. Never 0, so that no request is beyond weighting.
        """
        if not acceptance or not acceptance["num_draft_tokens"]:
            return 1.0
        accepted = min(1.0, acceptance["num_accepted_tokens"] / acceptance["num_draft_tokens"])
        return 1.0 - (1.0 - self.accepted_factor) * accepted
