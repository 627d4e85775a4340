"""What a speed measurement covers: which servers in which order, which concurrencies, which prompts."""

from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from pipeline.config import Config
from pipeline.errors import ConfigError, StageError
from pipeline.gate_prompts import GatePrompts


@dataclass(frozen=True)
class Plan:
    """What is measured, in which order."""

    numbers: tuple[int, ...]
    """Speculated tokens, ascending, 0 first."""
    concurrencies: tuple[int, ...]
    repeats: int
    requests_per_slot: int
    max_tokens: int
    rows: list[dict[str, Any]]
    """The prompts, dealt out in turn."""
    warm_up: list[dict[str, Any]]
    lossless: list[dict[str, Any]]

    @property
    def visits(self) -> list[int]:
        """The number of speculated tokens of every visit."""
        orders = (self.numbers if repeat % 2 == 0 else self.numbers[::-1] for repeat in range(self.repeats))
        return [number for order in orders for number in order]

    @property
    def requests_per_visit(self) -> int:
        """Requests of the load in one visit."""
        return self.requests_per_slot * sum(self.concurrencies)

    def prompts(self, concurrency: int, repeat: int) -> list[list[int]]:
        """A point's prompts: the same for every number of speculated tokens, others in every repeat where there are."""
        count = self.requests_per_slot * concurrency
        rows = islice(cycle(self.rows), repeat * count, (repeat + 1) * count)
        return [list(row["prompt_ids"]) for row in rows]


def plan_of(config: Config, prompts: GatePrompts, *, block_size: int) -> Plan:
    """What to measure for a drafter of this block size.

    Raises: ConfigError for a number of speculated tokens over a block; StageError when no prompt has room.
    """
    wanted = set(config.speed.num_speculative_tokens) or {block_size - 1}
    if unfit := sorted(number for number in wanted if not 0 <= number < block_size):
        raise ConfigError(
            f"speed.num_speculative_tokens has {unfit}: a block of {block_size} holds 1 to {block_size - 1} draft "
            "tokens (0 is the target alone); vLLM itself would draft more, from slots that were never trained"
        )
    max_tokens = config.evaluate.max_tokens
    room = config.target.max_model_len - max_tokens - block_size
    rows = [row for row in prompts.gate if len(row["prompt_ids"]) <= room]
    if not rows:
        raise StageError(
            f"speed: none of {len(prompts.gate)} gate prompts leaves room for {max_tokens} tokens in "
            f"{config.target.max_model_len}; lower evaluate.max_tokens"
        )
    return Plan(
        numbers=tuple(sorted({0, *wanted})),
        concurrencies=tuple(sorted({config.evaluate.concurrency, *config.speed.concurrencies})),
        repeats=config.speed.repeats,
        requests_per_slot=config.speed.requests_per_slot,
        max_tokens=max_tokens,
        rows=rows,
        warm_up=prompts.warm_up or rows,
        lossless=rows[: config.speed.lossless_prompts],
    )
