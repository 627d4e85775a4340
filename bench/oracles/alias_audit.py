"""The end of a race of promoters, judged by MLflow's raw entries and files, without the code that wrote them."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def audit_of(folder: Path, model: str, outcomes: Sequence[Path]) -> dict[str, Any]:
    """What MLflow in a folder holds, against what its promoters had and say (a JSON file each: approved, or told)."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{folder}/mlflow.db"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    versions = client.search_model_versions(f"name = '{model}'", order_by=["version_number ASC"])
    registered = [version.tags["slipstream.derivation_id"] for version in versions]
    expected = {"c0", *(f"d{i}" for i in range(len(outcomes)))}
    results = [json.loads(outcome.read_text()) for outcome in outcomes]
    moves, refused, faults = _replay(client, model)
    for alias in {move["alias"] for move in moves}:
        wanted = [move["version"] for move in moves if move["alias"] == alias][-1]
        if (found := str(client.get_model_version_by_alias(model, alias).version)) != wanted:
            faults.append(f"{alias} names {found}, its last move was to {wanted}")
    approved = [move["version"] for move in moves if move["alias"] == "approved"]
    champions = [move["version"] for move in moves if move["alias"] == "champion"][1:]
    tried = {move["actor"] for move in moves if move["alias"] == "challenger"}
    faults += [f"promoter-{i} left no move" for i in range(len(outcomes)) if f"promoter-{i}" not in tried]
    faults += [f"a move without {key}" for move in moves for key in ("actor", "at", "reason") if not move[key]]
    winners = {one["approved"] for one in results if "approved" in one}
    if winners != set(approved) or champions != approved:
        faults.append(f"promoters won {sorted(winners)}, the log approved {approved} and deployed {champions}")
    faults += [fault for version in versions for fault in _damage(client, version, folder)]
    return {
        "champions": len(champions),
        "approved": len(approved),
        "winner": approved[-1] if approved else None,
        "versions_expected": len(expected),
        "lost": len(expected - set(registered)),
        "duplicates": len(registered) - len(set(registered)),
        "refused_moves": refused,
        "history_complete": not faults,
        "told": [one["told"] for one in results if "told" in one],
        "faults": faults,
    }


def _replay(client: Any, model: str) -> tuple[list[dict[str, Any]], int, list[str]]:
    """The moves that count, how many do not, and what is wrong with the entries."""
    entries = client.search_model_versions(f"name = '{model}.log'", order_by=["version_number ASC"])
    numbers = [int(entry.version) for entry in entries]
    faults = [] if numbers == list(range(1, len(numbers) + 1)) else [f"the log's numbers have gaps: {numbers}"]
    state: dict[str, str] = {}
    counted = []
    for entry in entries:
        move = json.loads(entry.tags["slipstream.move"])
        if all(state.get(alias) == version for alias, version in move["expected"].items()):
            state[move["alias"]] = move["version"]
            counted.append(move)
    return counted, len(entries) - len(counted), faults


def _damage(client: Any, version: Any, folder: Path) -> list[str]:
    """What a clean download of a version lacks, against the checkpoint that its promoter has."""
    derivation = version.tags["slipstream.derivation_id"]
    own = folder if derivation == "c0" else folder / f"promoter-{derivation[1:]}"
    with tempfile.TemporaryDirectory(dir=folder) as clean:
        got = Path(client.download_artifacts(version.run_id, "drafter", clean))
        return [
            f"version {version.version}: {file.name} differs"
            for file in sorted((own / "drafters" / derivation).iterdir())
            if not (got / file.name).exists() or (got / file.name).read_bytes() != file.read_bytes()
        ]
