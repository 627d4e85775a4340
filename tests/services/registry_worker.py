"""Processes with a registry under a root of their own, as on other machines: they do what they are told, one by one."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jobs.registry import AliasMoved, Registry
from pipeline.artifacts import DrafterCheckpoint, load
from pipeline.stages import Artifact

# Forked from a process that has imported MLflow once: eight imports would take longer than all they do.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["mlflow"])


class Worker:
    """A process with its own root. ``tell`` and ``answer`` are apart, so that several can work at the same time."""

    def __init__(self, uri: str, root: Path):
        self._here, there = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(there, uri, root), daemon=True)
        self._process.start()
        there.close()

    def tell(self, do: Callable[..., Any], **given: Any) -> None:
        """Start one of the functions below in the process."""
        self._here.send((do, given))

    def answer(self) -> Any:
        """What it returned. Raises: RuntimeError with the process's traceback when it raised."""
        done, value = self._here.recv()
        if not done:
            raise RuntimeError(f"in process {self._process.pid}: {value}")
        return value

    def ask(self, do: Callable[..., Any], **given: Any) -> Any:
        """Tell it, and wait for the answer."""
        self.tell(do, **given)
        return self.answer()

    def kill(self) -> None:
        """End it as a crash does: nothing of it is run any more."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def end(self) -> None:
        """End it, whatever it does."""
        self._here.close()
        self._process.kill()
        self._process.join()


def register(registry: Registry, *, model: str, folder: Path) -> str:
    """The version of the checkpoint in that folder, let through so that it may serve."""
    version = registry.register(model, Artifact(folder, load(folder, DrafterCheckpoint)))
    registry.set_state(model, version, "passed", reason="a test says so")
    return version


def move(registry: Registry, *, model: str, alias: str, version: str, expected: str | None) -> tuple[bool, str | None]:
    """Whether the alias was moved, and where it was before, or why not."""
    try:
        return True, registry.set_alias(model, alias, version, expected=expected)
    except AliasMoved as error:
        return False, str(error)


def promote(registry: Registry, *, model: str, alias: str, version: str) -> tuple[str | None, str]:
    """The one move that was made, from where the alias was seen; what came too late looks again."""
    while True:
        seen = registry.alias(model, alias)
        if move(registry, model=model, alias=alias, version=version, expected=seen)[0]:
            return seen, version


def promote_for_ever(registry: Registry, *, model: str, alias: str, versions: tuple[str, str]) -> None:
    """Move the alias between two versions until the process is killed."""
    while True:
        for version in versions:
            promote(registry, model=model, alias=alias, version=version)


def read(registry: Registry, *, model: str, alias: str) -> tuple[list[str], str | None, list[tuple[str | None, str]]]:
    """What this process sees: the versions, where the alias is, and its moves (from, to)."""
    moves = [(one.previous, one.version) for one in registry.history(model, alias)]
    return [version.number for version in registry.versions(model)], registry.alias(model, alias), moves


def download(registry: Registry, *, model: str, version: str) -> Path:
    """The folder of a verified copy under this process's root."""
    return registry.download(model, version)


def _serve(pipe: Connection, uri: str, root: Path) -> None:
    registry = Registry(uri, root)
    while True:
        try:
            do, given = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, do(registry, **given)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
