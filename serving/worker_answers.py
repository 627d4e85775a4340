"""What the workers' answers (serving/engine/swap.py) add up to for one replica."""

from typing import Any


def status_of(workers: list[dict[str, Any]], *, restart: bool) -> dict[str, Any]:
    """What the replica serves: "ok" when every worker says so, and the same."""
    first = workers[0]
    agreed = all(w["status"] == "ok" and identity(w) == identity(first) for w in workers)
    return {
        "status": "ok" if agreed else "failed",
        "reason": None if agreed else "; ".join(str(w["reason"] or identity(w)) for w in workers),
        **{key: first[key] for key in ("version", "folder", "sha256")},
        "epoch": epoch_of(first),
        "since": first.get("since"),
        "live_fingerprint": [w["live_fingerprint"] for w in workers],
        "swap": capability_of(workers, restart=restart),
    }


def identity(worker: dict[str, Any]) -> tuple[Any, ...]:
    """What like workers have in common."""
    whole = (worker.get("swap") or {}).get("how") is not None  # shards have weights of their own
    return (worker["version"], worker["sha256"], worker.get("num_swaps"), worker["live_fingerprint"] if whole else None)


def epoch_of(worker: dict[str, Any]) -> str:
    """Names this start of the engine and the swaps since: it never comes back, as a version does."""
    return f"{worker.get('started')}.{worker.get('num_swaps')}"


def capability_of(workers: list[dict[str, Any]], *, restart: bool) -> dict[str, Any]:
    """How the drafter can be changed here: in place, or why not; and whether a restart can be ordered."""
    each = [w.get("swap") or {"how": None, "reason": w["reason"]} for w in workers]
    odd = next((one for one in each if one["how"] is None), each[0])
    return {"in_place": odd["how"] is not None, "how": odd["how"], "reason": odd["reason"], "restart": restart}


def disagreement(workers: list[dict[str, Any]]) -> str | None:
    """Why a swap did not take on every worker, or None."""
    if bad := [w for w in workers if w["status"] != "ok"]:
        return "; ".join(f"worker {w['rank']}: {w['reason']}" for w in bad)
    if len({identity(w) for w in workers}) > 1:
        return f"workers disagree after the swap: {[identity(w) for w in workers]}"
    return None
