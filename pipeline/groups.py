"""A drafter for each group of tenants, from one file: the tables of one group, and what keeps groups apart.

    [groups.retail]
    collect.tenants = ["acme", "globex"]
    serving.replicas = ["http://retail-0:8000"]

`--group retail` takes the file's settings with the block's over them. Its workload, and so its model in MLflow, its
root, its split key and its folder on object storage are its own; without --group, the tenants of all groups are left
out. Logs may be shared: records of others are dropped as they are read. Those that a block names are its own.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.errors import ConfigError

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
# Where one group's drafter would go to another's fleet, or one watch answer for two: said in the block, or not at all.
_OWN = (
    ("serving", "replicas"),
    ("deploy", "kubernetes_service"),
    ("evaluate", "server_url"),
    ("watch", "listen"),
)
_PORTS = {"http": 80, "https": 443}
_Settings = dict[str, Any]


def of_group(data: _Settings, name: str | None, *, where: str, base: Path) -> _Settings:
    """The settings of one group, or of all other tenants where ``name`` is None; ``data`` stays as it is.

    Relative paths are relative to ``base``.

    Raises: ConfigError for a group that is not there, or groups that share what has to be one group's own.
    """
    data = deepcopy(data)
    groups = data.pop("groups", {})
    if not groups:
        if name is None:
            return data
        raise ConfigError(f"{where}: no group {name!r}, since there is no [groups.{name}] table")
    if not isinstance(groups, dict) or not all(isinstance(block, dict) for block in groups.values()):
        raise ConfigError(f"{where}: groups: expected tables, such as [groups.retail]")
    theirs = {one: _group(data, one, groups[one], where) for one in groups}
    settings = {None: _rest(data, theirs.values()), **theirs}
    _require_apart(settings, where, base)
    _require_own_logs(settings, groups, where, base)
    if name not in settings:
        raise ConfigError(f"{where}: no group {name!r}; there are {', '.join(groups)}")
    return settings[name]


def _group(data: _Settings, name: str, block: Mapping[str, Any], where: str) -> _Settings:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: groups.{name}: expected a name of a-z, 0-9, - and _")
    merged = deepcopy(data)
    for table, key in _OWN:
        _table(merged, table).pop(key, None)
    if "sources" in _table(block, "collect"):
        _table(merged, "watch").pop("sources", None)
    if isinstance(storage := _table(merged, "capture").get("storage"), str):
        merged["capture"]["storage"] = f"{storage.rstrip('/')}/{name}"
    merged["workload"] = f"{data.get('workload', 'default')}-{name}"
    merged["root"] = f"{str(data.get('root', 'runs/default')).rstrip('/')}-{name}"
    merged["split_key_env"] = f"{_split_key(data)}_{name.upper().replace('-', '_')}"
    merged = _over(merged, block)
    tenants = _list(merged, "collect", "tenants")
    if not tenants or not all(isinstance(one, str) for one in tenants):
        raise ConfigError(f'{where}: groups.{name}: whose drafter is it? collect.tenants = ["..."] is missing')
    return merged


def _rest(data: _Settings, groups: Iterable[_Settings]) -> _Settings:
    """The settings of everybody who is in no group."""
    rest = deepcopy(data)
    theirs = {tenant for one in groups for tenant in one["collect"]["tenants"]}
    collect = rest.setdefault("collect", {})
    if isinstance(collect, dict):
        collect["except_tenants"] = sorted({*map(str, _list(rest, "collect", "except_tenants")), *theirs})
    return rest


def _require_apart(settings: Mapping[str | None, _Settings], where: str, base: Path) -> None:
    own: tuple[tuple[str, Callable[[_Settings], Iterable[Any]]], ...] = (
        ("the tenant", lambda one: _list(one, "collect", "tenants")),
        ("the root", lambda one: [_place(one.get("root", "runs/default"), base)]),
        ("the workload", lambda one: [one.get("workload", "default")]),
        ("the model", lambda one: [_model(one)]),
        ("the split key", lambda one: [_split_key(one)]),
        ("the replica", _replicas),
        ("the service", _services),
        ("the address", lambda one: [_table(one, "watch").get("listen")]),
        ("the storage", lambda one: [_table(one, "capture").get("storage")]),
    )
    for told, values in own:
        owner: dict[str, str] = {}
        for name, one in settings.items():
            for value in values(one):
                if value is not None and (other := owner.setdefault(str(value), _called(name))) != _called(name):
                    raise ConfigError(_shared(where, other, _called(name), f"{told} {value}"))


def _require_own_logs(
    settings: Mapping[str | None, _Settings], groups: Mapping[str, Mapping[str, Any]], where: str, base: Path
) -> None:
    """Logs that a group's own block names are read by nobody else, also not as a part of a larger folder."""
    for name in (one for one, block in groups.items() if "sources" in _table(block, "collect")):
        for other, theirs in settings.items():
            for log in _logs(settings[name], base) if other != name else ():
                for read in _logs(theirs, base):
                    if f"{read}/".startswith(f"{log}/") or f"{log}/".startswith(f"{read}/"):
                        raise ConfigError(_shared(where, _called(other), _called(name), f"the logs {log}"))


def _shared(where: str, one: str, other: str, what: str) -> str:
    return f"{where}: {one} and {other} share {what}: nothing may leak between them"


def _called(name: str | None) -> str:
    return "the settings outside the groups" if name is None else f"groups.{name}"


def _split_key(one: Mapping[str, Any]) -> str:
    return str(one.get("split_key_env", "SLIPSTREAM_SPLIT_KEY"))


def _model(one: _Settings) -> str:
    """The registered model (``Config.model_name``)."""
    return f"{Path(str(_table(one, 'target').get('model', ''))).name}--{one.get('workload', 'default')}".lower()


def _replicas(one: _Settings) -> Iterator[str]:
    """Where drafters are swapped, however a URL is written."""
    for url in (*_list(one, "serving", "replicas"), _table(one, "evaluate").get("server_url")):
        try:
            parts = urlsplit(str(url).strip())
            port = parts.port or _PORTS.get(parts.scheme, "")
        except ValueError:
            continue  # the settings' own check says what is wrong with it
        if url is not None:
            yield f"{parts.scheme}://{parts.hostname}:{port}{parts.path.rstrip('/')}"


def _services(one: _Settings) -> Iterator[str]:
    deploy = _table(one, "deploy")
    if (service := deploy.get("kubernetes_service")) is not None:
        yield f"{deploy.get('kubernetes_namespace') or ''}/{service}"


def _logs(one: _Settings, base: Path) -> Iterator[str]:
    for table in ("collect", "watch"):
        for entry in _list(one, table, "sources"):
            yield _place(entry.get("path", "") if isinstance(entry, dict) else entry, base)


def _place(path: Any, base: Path) -> str:
    """A path or a URI, however it is written."""
    return str(path).rstrip("/") if "://" in str(path) else os.path.realpath(base / str(path))


def _table(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = settings.get(name)
    return found if isinstance(found, dict) else {}


def _list(settings: Mapping[str, Any], table: str, key: str) -> list[Any]:
    found = _table(settings, table).get(key)
    return found if isinstance(found, list) else []


def _over(below: _Settings, above: Mapping[str, Any]) -> _Settings:
    """Tables merged key by key; a value takes the place of what was there."""
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        below[key] = _over(below[key], value) if both else deepcopy(value)
    return below
