"""The fleet that the configuration names: where its replicas are, how they are changed, what they serve."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

from jobs.ledger import newest_first, orders, unfinished
from pipeline.artifacts import Release, artifact_dir
from pipeline.config import Config
from pipeline.errors import ConfigError, SwapError
from serving.errors import DeployError
from serving.fleet.change import ByCommand, ByEndpoint
from serving.fleet.controller import Fleet
from serving.fleet.counters import acceptance_length, counters_of
from serving.fleet.counters import since as counted_since
from serving.fleet.kubernetes import KubernetesService
from serving.fleet.replicas import Address, Discover, Seen, look_at_all, static
from serving.fleet.rollout import Policy
from serving.fleet.sample import counters_or_none
from serving.fleet.soak import SoakPolicy
from serving.monitor.counters import Counters

_STATUS_TIMEOUT_S = 5.0
_NEVER_SWAPPED = ".0"
"""How an epoch ends for as long as the drafter is the one that the replica started with."""

# Greedy, one at a time, before and after: they prove that the replica drafts and that its answers stay the same.
PROBE = tuple(
    {"messages": [{"role": "user", "content": text}], "max_tokens": 16}
    for text in (
        "Write one sentence about the sea.",
        "List the days of the week.",
        "Explain in two sentences why bread rises.",
    )
)


def are_named(config: Config) -> bool:
    """Whether there is a fleet to deploy to."""
    return bool(config.serving.replicas or config.deploy.kubernetes_service)


def discover(config: Config) -> Discover:
    """How the replicas are found. Raises: ConfigError where none are named, or in two ways."""
    deploy = config.deploy
    if deploy.kubernetes_service and config.serving.replicas:
        raise ConfigError("serving.replicas and deploy.kubernetes_service are both set; keep one of them")
    if deploy.kubernetes_service:
        return KubernetesService(deploy.kubernetes_service, deploy.kubernetes_namespace, deploy.kubernetes_port)
    if not config.serving.replicas:
        raise ConfigError(
            "serving.replicas is empty, so there is nothing to deploy to; list the base URLs of the vLLM servers, "
            "e.g. --set 'serving.replicas=[\"http://127.0.0.1:8000\"]'"
        )
    return static(config.serving.replicas)


def listed(config: Config) -> list[Address]:
    """The replicas now. Raises: ConfigError; SwapError where they can't be listed."""
    try:
        return list(discover(config)())
    except DeployError as error:
        raise SwapError(str(error))


def token(config: Config) -> str:
    """The control endpoint's token. Raises: ConfigError."""
    discover(config)
    found = os.environ.get(config.serving.token_env, "")
    if not found:
        raise ConfigError(
            f"{config.serving.token_env} is not set; export the token that the replicas were started with "
            "(their SLIPSTREAM_CONTROL_TOKEN)"
        )
    return found


def fleet(config: Config) -> Fleet:
    """The replicas, and how they are changed."""
    deploy, secret = config.deploy, token(config)
    by_endpoint = ByEndpoint(secret, PROBE, deploy.change_timeout_s)
    by_command = ByCommand(deploy.restart_command, secret, PROBE, deploy.change_timeout_s)
    return Fleet(
        discover(config),
        secret,
        PROBE,
        in_place=by_endpoint,
        restart=by_command if deploy.restart_command else by_endpoint,
        # In half precision near-ties move with the batch shape, between two plain runs too.
        allow_changed_outputs=config.target.dtype != "float32",
        probe_timeout_s=deploy.change_timeout_s,
    )


def policy(config: Config, num_replicas: int, *, reconciles: bool) -> Policy:
    """How a rollout goes about it. One that reconciles brings what has proved itself, and goes on whoever is lost."""
    deploy = config.deploy
    soak = SoakPolicy(
        deploy.soak_min_steps,
        deploy.soak_min_s,
        deploy.soak_max_s,
        deploy.soak_min_ratio,
        deploy.soak_error_rate,
        deploy.soak_undecided,
    )
    soaks = deploy.soak_min_steps > 0 and num_replicas > 1 and not reconciles
    return Policy(
        max_unavailable=deploy.max_unavailable,
        max_failed=deploy.max_failed,
        turns_back=not reconciles,
        attempts=deploy.attempts,
        dead_after_s=deploy.dead_after_s,
        tick_s=deploy.tick_s,
        soak=soak if soaks else None,
        soak_tick_s=deploy.soak_tick_s,
    )


def table(config: Config) -> list[list[str]]:
    """A row a replica: name, version, since when it serves it, its acceptance length since then, and what is wrong."""
    addresses = listed(config)
    seen = look_at_all(addresses, token(config), timeout_s=_STATUS_TIMEOUT_S)
    with ThreadPoolExecutor(min(32, max(1, len(addresses)))) as pool:
        found = pool.map(lambda one: counters_or_none(one.url) if seen[one.name].is_up else None, addresses)
        counters = {one.name: counted for one, counted in zip(addresses, found, strict=True)}
    changed = _last_changes(config, {name: one.drafter.version for name, one in seen.items() if one.drafter})
    rows = [["replica", "version", "since", "acceptance", ""]]
    for address in addresses:
        name, one = address.name, seen[address.name]
        rows.append([name, *_served(one, changed.get(name), counters[name]), one.why])
    return rows


def under_way(config: Config) -> str | None:
    """One line on the deploy under way, or None."""
    if (release := unfinished(config.root)) is None:
        return None
    found = orders(artifact_dir(config.root, Release, release.derivation_id))
    serving = sum(one["state"] == "serving" for one in release.replicas)
    asked = f", aborted by {found.aborted}" if found.aborted else ""
    asked += f", paused by {found.paused}" if found.paused else ""
    why = f": {release.why}" if release.why else ""
    return (
        f"release {release.derivation_id} ({release.reason} of version {release.version}): {release.phase}, "
        f"{serving} of {len(release.replicas)} replicas done{asked}{why}"
    )


def _last_changes(config: Config, serving: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Replica → the newest record of a change that brought it the version that it serves."""
    found: dict[str, dict[str, Any]] = {}
    for release in newest_first(config.root):
        for one in release.replicas:
            if one["since"] and serving.get(one["name"]) == one["version"]:
                found.setdefault(one["name"], one)
        if len(found) == len(serving):
            break
    return found


def _served(seen: Seen, changed: Mapping[str, Any] | None, counters: Counters | None) -> list[str]:
    """Version, since when, and the acceptance length since then; - where that cannot be told from what was before."""
    if seen.drafter is None:
        return ["-", "-", "-"]
    own = (seen.status or {}).get("since")  # the replica's own word comes first
    started = counters.started if counters else None
    counted = counted_since(counters_of(changed["counts"]), counters) if counters and changed else None
    if counted is None and counters is not None and (seen.epoch or "").endswith(_NEVER_SWAPPED):
        counted = counters  # all that it has counted
    told = changed["since"] if changed and (counted or not counters) else None
    since = _iso(own) if isinstance(own, int | float) else told or (_iso(started) if started else "-")
    length = acceptance_length(counted) if counted else None
    return [seen.drafter.version, since, "-" if length is None else f"{length:.2f}"]


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
