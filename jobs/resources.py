"""What a run asks of the Ray cluster at once, against what is there: Ray itself waits for it without a word."""

import logging
from collections.abc import Sequence

import ray

logger = logging.getLogger("slipstream")


def say_if_lacking(what: str, gpus: Sequence[int]) -> None:
    """Warn where processes that take so many GPUs each (on a cluster without any, a CPU each) don't all fit.

    It is no error: a cluster may grow.
    """
    unit = "GPU" if ray.cluster_resources().get("GPU", 0) > 0 else "CPU"
    asked = list(gpus) if unit == "GPU" else [1] * len(gpus)
    nodes = [int(node["Resources"].get(unit, 0)) for node in ray.nodes() if node["Alive"]]
    if sum(asked) > sum(nodes) or max(asked) > max(nodes):
        logger.warning(
            "%s: %d processes take %s %ss at the same time, and the cluster's machines have %s: what doesn't fit waits "
            "until there are more. Lower regenerate.num_engines, regenerate.tensor_parallel_size or train.num_workers",
            what,
            len(asked),
            " + ".join(map(str, asked)),
            unit,
            " + ".join(map(str, nodes)),
        )
