"""A drafter for each group of tenants, from one file: the tables of one group, and what keeps groups apart.

    [groups.retail]
    collect.tenants = ["acme", "globex"]
    serving.replicas = ["http://retail-0:8000"]

`--group retail` takes the file's settings with the block's over them. Its workload, and so its model in MLflow, and its
root are its own; without --group, the tenants of all groups are left out.
"""

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from pipeline.errors import ConfigError

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
# Where one group's drafter would go to another's fleet: said in the block, or not at all.
_OWN = (("serving", "replicas"), ("evaluate", "server_url"))


def of_group(data: dict[str, Any], name: str | None, *, where: str) -> dict[str, Any]:
    """The settings of one group, or of all other tenants where ``name`` is None; ``data`` stays as it is.

    Raises: ConfigError for a group that is not there, or groups that share a tenant, a root, a workload or a replica.
    """
    data = deepcopy(data)
    groups = data.pop("groups", {})
    if not groups:
        if name is None:
            return data
        raise ConfigError(f"{where}: no group {name!r}, since there is no [groups.{name}] table")
    if not isinstance(groups, dict) or not all(isinstance(block, dict) for block in groups.values()):
        raise ConfigError(f"{where}: groups: expected tables, such as [groups.retail]")
    settings = {None: _rest(data, groups, where), **{one: _group(data, one, groups[one], where) for one in groups}}
    _require_apart(settings, where)
    if name not in settings:
        raise ConfigError(f"{where}: no group {name!r}; there are {', '.join(groups)}")
    return settings[name]


def _group(data: Mapping[str, Any], name: str, block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: groups.{name}: expected a name of a-z, 0-9, - and _")
    merged = deepcopy(dict(data))
    for table, key in _OWN:
        if isinstance(merged.get(table), dict):
            merged[table].pop(key, None)
    merged["workload"] = f"{data.get('workload', 'default')}-{name}"
    merged["root"] = f"{str(data.get('root', 'runs/default')).rstrip('/')}-{name}"
    merged = _over(merged, block)
    tenants = merged.get("collect", {}).get("tenants")
    if not isinstance(tenants, list) or not tenants:
        raise ConfigError(f'{where}: groups.{name}: whose drafter is it? collect.tenants = ["..."] is missing')
    return merged


def _rest(data: Mapping[str, Any], groups: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of everybody who is in no group."""
    rest = deepcopy(dict(data))
    theirs = {t for name, block in groups.items() for t in _group(data, name, block, where)["collect"]["tenants"]}
    collect = rest.setdefault("collect", {})
    if isinstance(collect, dict):
        collect["except_tenants"] = sorted({*collect.get("except_tenants", ()), *theirs}, key=str)
    return rest


def _require_apart(settings: Mapping[str | None, Mapping[str, Any]], where: str) -> None:
    for told, values in (
        ("the tenant", lambda one: one.get("collect", {}).get("tenants", ())),
        ("the root", lambda one: (str(one.get("root", "runs/default")).rstrip("/"),)),
        ("the workload", lambda one: (one.get("workload", "default"),)),
        ("the replica", lambda one: one.get("serving", {}).get("replicas", ())),
    ):
        owner: dict[str, str] = {}
        for name, one in settings.items():
            group = "the settings outside the groups" if name is None else f"groups.{name}"
            for value in values(one):
                if (other := owner.setdefault(str(value), group)) != group:
                    raise ConfigError(
                        f"{where}: {other} and {group} share {told} {value}: nothing may leak between them"
                    )


def _over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merged key by key; a value takes the place of what was there."""
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        below[key] = _over(below[key], value) if both else deepcopy(value)
    return below
