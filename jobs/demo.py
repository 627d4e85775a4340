"""Demo: the whole loop on one machine, from generated traffic to a swapped drafter that serves faster.

python jobs/demo.py                     (or `make demo`); the same command again goes on where it stopped
"""

import argparse
import json
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import deploy, init_drafter, loop, promote
from jobs.fetch_target import fetch_target
from jobs.registry import Registry
from jobs.session import ray_session, start_logging
from pipeline.artifacts import AcceptanceReport, GateDecision, Release, write_durably
from pipeline.config import Config, load_config
from pipeline.criteria import walk_gap
from pipeline.errors import SlipstreamError, StageError
from pipeline.stages import Artifact
from pipeline.workloads import support_mails
from serving.errors import LaunchError
from serving.launch import VllmServer
from serving.load import Driver, Reply, drive_sync

logger = logging.getLogger("slipstream")

ROOT = Path(__file__).resolve().parents[1]
NUM_MAILS = 140
CLIENTS = 16
SWAP_CLIENTS, SWAP_MAILS = 4, 6
TRAFFIC_DONE = "traffic.done"
COMMIT_S = 6.0  # how old a traffic file grows
CONSENT = ("x-gateway-consent", "training")
SUBJECT, SLICE = "x-gateway-subject", "x-gateway-topic"


@dataclass
class Stopwatch:
    """Seconds of each step, kept across interruptions."""

    path: Path
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step; one that was skipped keeps the seconds that it once took."""
        logger.info("demo: %s", name)
        started = time.monotonic()
        yield
        spent = round(time.monotonic() - started, 1)
        self.seconds[name] = max(spent, self.seconds.get(name, 0.0))
        write_durably(self.path, json.dumps(self.seconds, indent=1).encode())


def run(config: Config) -> dict[str, Any]:
    """The summary, which is also in ``summary.json``: before, after, the verdict and the swap.

    Raises: StageError when the gate does not let the challenger through; the page says why.
    """
    config.root.mkdir(parents=True, exist_ok=True)
    path = config.root / "seconds.json"
    watch = Stopwatch(path, json.loads(path.read_text()) if path.exists() else {})
    with watch.step("fetch_target"):
        fetch_target(config.target.model)
    os.environ[config.serving.token_env] = token = secrets.token_hex(16)
    # Made-up customers need no secret: with a fixed key every run of the demo deals the same mails to the same sets.
    os.environ.setdefault(config.split_key_env, "the split key of the demo")
    registry = Registry(config.promote.tracking_uri, config.root)
    with ExitStack() as stack:
        with watch.step("start_ray"):
            stack.enter_context(ray_session())
        with watch.step("init_drafter"):
            champion = init_drafter.run(config)
        server = _server(config, registry, token)
        config = config.model_copy(
            update={
                "evaluate": config.evaluate.model_copy(update={"server_url": server.base_url}),
                "serving": config.serving.model_copy(update={"replicas": (server.base_url,)}),
            }
        )
        if not (config.root / TRAFFIC_DONE).exists():
            shutil.rmtree(config.root / "traffic", ignore_errors=True)  # an interrupted day is served anew
        with watch.step("start_server"):
            stack.enter_context(server)
        with watch.step("serve_traffic"):
            _serve_traffic(config, server)
        with watch.step("collect_to_train"):
            learned = loop.learn(config, champion=champion)
        with watch.step("evaluate"):
            report, decision = loop.judge(config, learned)
        _write_summary(config, learned, report, decision, watch, swap=None)
        with watch.step("promote"):
            version = promote.run(config, decision, learned.drafters["challenger"])
        with watch.step("deploy_rollback_deploy"):
            swap = _deploy_under_load(config, server, version)
    return _write_summary(config, learned, report, decision, watch, swap=swap)


def _write_summary(
    config: Config,
    learned: loop.Learned,
    report: Artifact[AcceptanceReport],
    decision: Artifact[GateDecision],
    watch: Stopwatch,
    *,
    swap: dict[str, Any] | None,
) -> dict[str, Any]:
    """The summary, written: also where the gate does not promote, and so nothing is swapped."""
    artifacts = {"collect": learned.prompts, "regenerate": learned.responses, "capture": learned.states}
    artifacts |= {f"train_{role}": learned.drafters[role] for role in ("challenger", "control")}
    steps = {name: spent for name, spent in watch.seconds.items() if name != "collect_to_train"}
    summary = {
        **{role: _measured(report.manifest.measured[role]) for role in learned.drafters},
        "target": {
            "model": config.target.model.name,
            "dtype": config.target.dtype,
            "fingerprint": report.manifest.settings["target"],
        },
        "gate": {
            name: getattr(decision.manifest, name) for name in ("decision", "reasons", "lift", "ci_low", "ci_high")
        },
        "swap": swap,
        "report": str(decision.folder / "report.html"),
        "stage_seconds": steps | {name: artifact.manifest.seconds for name, artifact in artifacts.items()},
        "seconds": round(sum(watch.seconds.values()), 1),
    }
    write_durably(config.root / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
    return summary


def _server(config: Config, registry: Registry, token: str) -> VllmServer:
    """One vLLM with the present champion, our tap and our worker side."""
    version = registry.alias(config.model_name, "champion")
    if version is None:
        raise StageError(f"{config.model_name}: no champion in {config.root}; remove the folder and start anew")
    return VllmServer(
        model=config.target.model,
        drafter=registry.download(config.model_name, version),
        version=version,
        host=config.serving.host,
        port=config.serving.port,
        log=config.root / "logs" / "server.log",
        dtype=config.target.dtype,
        max_model_len=config.target.max_model_len,
        max_num_seqs=config.serving.max_num_seqs,
        kv_cache_gib=config.serving.kv_cache_gib,
        tap_dir=config.root / "traffic",
        tap_consent=f"header:{CONSENT[0]}={CONSENT[1]}",
        tap_subject_header=SUBJECT,
        tap_slice_header=SLICE,
        env={"SLIPSTREAM_TAP_FILE_MINUTES": f"{COMMIT_S / 60:g}"},
        drafter_roots=[config.root / "versions", config.root / "drafters"],
        token=token,
        prefix_caching=False,
    )


def _serve_traffic(config: Config, server: VllmServer) -> None:
    """Send the shop's mails as a gateway would."""
    done = config.root / TRAFFIC_DONE
    if done.exists():
        logger.info("demo: the traffic was served already, skipped")
        return
    mails = list(islice(support_mails.prompts(NUM_MAILS, seed=1), NUM_MAILS))
    requests = [
        {"model": server.served_name, **{name: mail[name] for name in ("messages", "max_tokens", "temperature")}}
        for mail in mails
    ]
    headers = [{CONSENT[0]: CONSENT[1], SUBJECT: mail["conversation"], SLICE: mail["slice"]} for mail in mails]
    started, replies = time.monotonic(), []

    def progress(reply: Reply) -> None:
        replies.append(reply)
        if len(replies) % 60 == 0:
            rate = len(replies) / (time.monotonic() - started)
            logger.info(
                "demo: %d of %d mails answered, %.0f s left", len(replies), NUM_MAILS, (NUM_MAILS - len(replies)) / rate
            )

    drive_sync(server.base_url, requests, concurrency=CLIENTS, headers=headers, on_reply=progress)
    if failed := [reply.error for reply in replies if not reply.ok]:
        raise StageError(f"{len(failed)} of {NUM_MAILS} requests failed ({failed[0]}); see {server.log}")
    _wait_for_log(config.root / "traffic")
    write_durably(done, b"")


def _wait_for_log(folder: Path) -> None:
    """Wait until the tap has committed what it wrote: a run that is resumed must find the same files.

    Raises: StageError.
    """
    deadline = time.monotonic() + 10 * COMMIT_S
    while not list(folder.glob("*.jsonl")) or list(folder.glob("*.open.*")):
        if time.monotonic() > deadline:
            raise StageError(f"{folder}: no committed traffic after {10 * COMMIT_S:g} s; GET /slipstream/tap/metrics")
        time.sleep(0.1)


def _deploy_under_load(config: Config, server: VllmServer, version: str) -> dict[str, Any]:
    """Deploy, roll back, deploy again while clients go on; what they noticed."""
    path = config.root / "swap.json"
    if path.exists():
        return json.loads(path.read_text())
    requests = [
        {
            "model": server.served_name,
            "messages": mail["messages"],
            "max_tokens": 24,
            "temperature": 0.0,
            "return_token_ids": True,
        }
        for mail in islice(support_mails.prompts(SWAP_MAILS, seed=2), SWAP_MAILS)
    ]
    releases: list[Release] = []
    with Driver(server.base_url, requests, concurrency=SWAP_CLIENTS) as driver:
        driver.wait_for(len(requests))
        for move in (
            lambda: deploy.run(config, version),
            lambda: deploy.rollback(config),
            lambda: deploy.run(config, version),
        ):
            releases.append(move())
            logger.info("demo: version %s serves (%s)", releases[-1].version, releases[-1].reason)
            driver.wait_for(len(driver.replies) + len(requests))
    first: dict[int, list[int]] = {}
    changed = 0
    for reply in driver.replies:
        changed += reply.ok and first.setdefault(reply.index, reply.token_ids) != reply.token_ids
    swap = {
        "pause_s": max(replica["change"]["pause_s"] for release in releases for replica in release.replicas),
        "failed_requests": sum(not reply.ok for reply in driver.replies),
        "changed_outputs": changed,
        "num_requests": len(driver.replies),
        "versions": [release.version for release in releases],
    }
    write_durably(path, json.dumps(swap, indent=1).encode())
    return swap


def _measured(measured: dict[str, Any]) -> dict[str, Any]:
    walk = measured["walk"] or {}
    names = (
        "served_acceptance_length",
        "emitted_tokens_per_step",
        "num_drafts",
        "num_accepted_tokens",
        "num_accepted_tokens_per_pos",
        "num_accepted_and_emitted",
        "tokens_per_s",
    )
    return {
        **{name: measured[name] for name in names},
        "walk_acceptance_length": walk.get("acceptance_length"),
        # Counted to the ends of the replies on both sides: a walk cannot know what comes after one.
        "walk_gap": walk_gap(measured),
    }


def table(summary: dict[str, Any]) -> str:
    """The summary as a short table for people."""
    lines = [f"{'':12}{'served':>8}{'walk':>8}{'tokens/s':>10}"]
    for role in ("champion", "control", "challenger"):
        if role in summary:
            m = summary[role]
            walk = m["walk_acceptance_length"]
            lines.append(
                f"{role:12}{m['served_acceptance_length']:8.3f}{walk if walk else float('nan'):8.3f}"
                f"{m['tokens_per_s']:10.1f}"
            )
    gate, swap = summary["gate"], summary["swap"]
    lines += [
        f"gate: {gate['decision']}, lift {gate['lift']:.2f} ({gate['ci_low']:.2f} to {gate['ci_high']:.2f})",
        f"swap: pause {swap['pause_s']:.2f} s, {swap['failed_requests']} failed requests, "
        f"{swap['changed_outputs']} changed outputs of {swap['num_requests']}",
        f"time: {summary['seconds']:.0f} s in all",
        f"page: {summary['report']}",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Run the demo and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "infra" / "demo.toml", help="the demo's configuration")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="TABLE.KEY=VALUE")
    arguments = parser.parse_args(argv)
    start_logging()
    try:
        print(table(run(load_config(arguments.config, arguments.overrides))))
    except (SlipstreamError, LaunchError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        raise SystemExit(130)


if __name__ == "__main__":
    main()
