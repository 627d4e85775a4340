"""What Ray Train workers do in a test; a module of its own, for workers import it by name."""

import time

import ray.train

from pipeline.errors import StageError


def ends_with_an_error_of_its_own(settings):
    """The second worker finds that the run cannot go on; the first waits for it, as in a collective."""
    folder = settings["arguments"][0]
    rank = ray.train.get_context().get_world_rank()
    with open(folder / f"tries-{rank}", "a") as file:
        file.write("x")
    if rank == 1:
        raise StageError("the gradient is not finite")
    time.sleep(600)
