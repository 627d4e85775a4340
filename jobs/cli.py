"""``slipstream``: every stage by its name. Nothing heavy is imported before the command and its settings are known."""

import argparse
import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.config import Config


@dataclass(frozen=True)
class Command:
    """One command: the job behind it, what its help says, and what it needs."""

    module: str
    summary: str
    example: str
    more: str = ""
    needs_ray: bool = True
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None
    parses_itself: bool = False
    """The job reads its own arguments: ``main(argv)`` instead of ``main(config, arguments)``."""


def _adopt_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=_path, help="config.json and model.safetensors in the z-lab layout")


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--role", choices=("challenger", "control"), default="challenger", help="what to train")
    _replay_arguments(parser)


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    about = "also replay rows of these earlier states: an id, or a name in current.json"
    parser.add_argument("--replay", action="append", default=[], metavar="STATES", help=about)


def _promote_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instead-of", metavar="N", help="give up version N, which is approved and not deployed")


def _history_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--alias", help="only this one: champion, approved or challenger")
    parser.add_argument("--refused", action="store_true", help="also the moves that came too late")


def _lineage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", help="a version's number, a drafter's, data's or a row's id")
    parser.add_argument("--prompts", action="store_true", help="also the row ids that a version learned from")


def _speed_arguments(parser: argparse.ArgumentParser) -> None:
    roles = ("champion", "challenger", "control")
    parser.add_argument("--role", choices=roles, help="whose drafter; by default the challenger's, else the champion's")


def _deploy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("version", nargs="?", help="version number; without it, the approved one")
    parser.add_argument("--reconcile", action="store_true", help="the champion, onto replicas that serve another")
    parser.add_argument("--pause", action="store_true", help="the deploy under way begins no further step")
    parser.add_argument("--resume", action="store_true", help="it goes on; here, where its process is gone")
    parser.add_argument("--abort", action="store_true", help="every replica is put back; here, where it is gone")
    parser.set_defaults(rollback=False)


def _rollback_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(rollback=True, version=None, reconcile=False, pause=False, resume=False, abort=False)


def _due_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--begin", metavar="RUN", help="if it is due, begin this run: others wait until it ends")
    parser.add_argument("--end", metavar="RUN", help="this run is over")


def _retrain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--now", action="store_true", help="although nothing asks for it")


def _retire_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="only say what would be retired")


def _erase_arguments(parser: argparse.ArgumentParser) -> None:
    about = "as the requests named them: the subject header, or the conversation"
    parser.add_argument("--subject", action="append", default=[], metavar="NAME", help=about)
    kept = "a file with one a line, - for the standard input: keeps names out of the shell's history"
    parser.add_argument("--subjects-file", type=_path, metavar="FILE", help=kept)


def _watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="one look: JSON, and exit status 3 while an alarm fires")
    about = "say that these alarms (ids, or all) are being seen to: they fire no more"
    parser.add_argument("--take", action="append", default=[], metavar="ALARM", help=about)
    about = "also see to it that replicas which come up later get the champion, and end a deploy whose process died"
    parser.add_argument("--reconcile", action="store_true", help=about)


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    about = "while a deploy is under way: what every replica serves, again whenever it changes"
    parser.add_argument("--follow", action="store_true", help=about)


def _path(text: str) -> Any:
    from pathlib import Path

    return Path(text)


COMMANDS: dict[str, Command] = {
    "demo": Command(
        "jobs.demo",
        "the whole loop on this machine, on a small real target and generated traffic",
        "slipstream demo",
        parses_itself=True,
    ),
    "fetch-target": Command(
        "jobs.fetch_target",
        "fetch the demo's small target and keep it as safetensors",
        "slipstream fetch-target --out runs/targets/SmolLM2-135M-Instruct",
        parses_itself=True,
    ),
    "init-drafter": Command(
        "jobs.init_drafter",
        "cold-start a drafter on general prompts; it becomes version 1",
        "slipstream init-drafter --set init.steps=400",
    ),
    "adopt": Command(
        "jobs.adopt",
        "take over a drafter that already serves, as version 1",
        "slipstream adopt /models/drafter",
        needs_ray=False,
        add_arguments=_adopt_arguments,
    ),
    "run": Command(
        "jobs.loop",
        "collect to promote, one after the other; what is complete is skipped",
        "slipstream run --set workload=support",
    ),
    "due": Command(
        "jobs.due",
        "is a retraining due, and why: by time, by new traffic, by an alarm",
        "slipstream due",
        more="One line of JSON; exit status 0 when it is due, 3 when not. Between --begin and --end a scheduler runs\n"
        "the stages with --run RUN; without it they refuse.",
        needs_ray=False,
        add_arguments=_due_arguments,
    ),
    "retrain": Command(
        "jobs.retrain",
        "the whole loop, if it is due: one at a time, with tries and a timeout; for cron and timers",
        "slipstream retrain --set retrain.every_days=3",
        needs_ray=False,
        add_arguments=_retrain_arguments,
    ),
    "collect": Command(
        "jobs.collect",
        "served requests → prompts: consent, duplicates counted, split for good",
        "slipstream collect --set 'collect.sources=[\"/logs/traffic\"]' --set collect.redaction.names=not_redacted",
        more="Reads .jsonl, plain, .gz and .zst, and sealed logs, here and on object storage: the tap's records,\n"
        "LiteLLM's payloads, OpenTelemetry's GenAI events, OpenAI-style logs, or lines with messages or prompt.\n"
        "Rejected lines are listed in rejects.jsonl with file, line and reason, never with text.",
    ),
    "regenerate": Command(
        "jobs.regenerate",
        "prompts → the target's own answers, as exact token ids, and their hidden states in the same pass",
        "slipstream regenerate --set regenerate.max_tokens=512 --set regenerate.num_engines=4",
    ),
    "capture": Command(
        "jobs.capture",
        "what has no hidden states yet → states, checked against a reference",
        "slipstream capture --set capture.states_format=int8",
    ),
    "train": Command(
        "jobs.train",
        "hidden states + champion → challenger",
        "slipstream train --set train.steps=800 --set train.learning_rate=1e-3",
        add_arguments=_train_arguments,
    ),
    "sweep": Command(
        "jobs.sweep",
        "short runs from the champion at several learning rates → the one to set",
        "slipstream sweep --set sweep.learning_rates=[5e-4,1e-3,2e-3] --set sweep.steps=100",
        more="Judged by walk acceptance on validation rows. Every run is kept: a sweep that was killed goes on.",
        add_arguments=_replay_arguments,
    ),
    "stream": Command(
        "jobs.stream",
        "capture and train at the same time: answers + champion → challenger, each row once",
        "slipstream stream --set capture.max_bytes=100000000000",
        more="For states that do not fit on the disk: never more than capture.max_bytes of them are there.\n"
        "`slipstream run` does it where capture.stream = true. Such a run sees no row again: no second epoch,\n"
        "no second setting on the same states. One that was killed goes on where its checkpoint is.",
        add_arguments=_replay_arguments,
    ),
    "evaluate": Command(
        "jobs.evaluate",
        "champion and challenger serve the same held-out prompts, in turn on one engine",
        "slipstream evaluate --set evaluate.concurrency=16",
    ),
    "compare": Command(
        "jobs.compare",
        "two drafters (or one and none) and a file of prompts → a verdict, with a page",
        "slipstream compare drafter-a drafter-b --target TARGET --prompts prompts.jsonl",
        parses_itself=True,
    ),
    "speed": Command(
        "jobs.speed",
        "tokens/s and latencies against concurrency, with and without speculation; what to speculate where",
        "slipstream speed --set speed.concurrencies=[1,4,16] --set speed.num_speculative_tokens=[3,7]",
        add_arguments=_speed_arguments,
    ),
    "promote": Command(
        "jobs.promote",
        "judge the report; on a pass, register the challenger as approved",
        "slipstream promote --set gate.min_lift=1.05",
        needs_ray=False,
        add_arguments=_promote_arguments,
    ),
    "deploy": Command(
        "jobs.deploy",
        "swap the approved version, or the one named, into every replica; or put the old one back",
        "slipstream deploy 2",
        more="Canary replica first, with a soak judged by live counters, then waves of deploy.max_unavailable; a line\n"
        "for every replica and phase. Any failure puts every replica back. Where its process was killed, the same\n"
        "command goes on, and so does `slipstream watch --reconcile`. --pause, --resume and --abort reach a deploy\n"
        "that runs elsewhere. Exit status 0: the version serves on every replica, or an abort put them back. 1: it\n"
        "doesn't, and the last line says what does. 3: --reconcile had nothing to do while a deploy is under way.",
        needs_ray=False,
        add_arguments=_deploy_arguments,
    ),
    "rollback": Command(
        "jobs.deploy",
        "serve the champion before the present one again",
        "slipstream rollback",
        more="On every replica, as a deploy does it, with the same limits and lines; again: the one before that. It\n"
        "waits for no cluster and no run. A deploy that is under way is aborted instead: slipstream deploy --abort.",
        needs_ray=False,
        add_arguments=_rollback_arguments,
    ),
    "history": Command(
        "jobs.history",
        "who moved which alias, when, from where and why",
        "slipstream history --alias champion",
        needs_ray=False,
        add_arguments=_history_arguments,
    ),
    "lineage": Command(
        "jobs.lineage",
        "what a version was made from and who promoted it; or which versions learned from some data",
        "slipstream lineage 3 --prompts",
        more="Takes a version's number, or the id of a drafter, of prompts, responses or states, or of one row.",
        needs_ray=False,
        add_arguments=_lineage_arguments,
    ),
    "erase": Command(
        "jobs.erase",
        "every request of a subject leaves the run root; versions that learned from one get a deadline",
        "slipstream erase --subject customer-4711",
        more="A keyed hash remains, by which records that turn up later are dropped. Records in the tap's committed\n"
        "logs on this machine are blanked; other logs that hold some are named. Names count letter for letter.",
        needs_ray=False,
        add_arguments=_erase_arguments,
    ),
    "expire": Command(
        "jobs.expire",
        "rows whose newest request is older than retention.ttl_days leave the run root",
        "slipstream expire --set retention.ttl_days=90",
        needs_ray=False,
    ),
    "watch": Command(
        "jobs.watch",
        "live acceptance by slice against what is expected and promised; alarms when it shifts, or traffic does",
        "slipstream watch --once",
        more="Reads the tap's records (watch.sources, else collect.sources) and the counters of serving.replicas.\n"
        "alarms.json, metrics.prom and report.html lie in watch/ under the root. With --once it ends with status 0\n"
        'where nothing fires, and 3 where something does; "retrain" in the JSON says whether training is the answer.\n'
        "With --reconcile it needs the control token, as deploy does.",
        needs_ray=False,
        add_arguments=_watch_arguments,
    ),
    "retire": Command(
        "jobs.retire",
        "drafters and states that were made for another target than the configured one serve and train no more",
        "slipstream retire --list",
        needs_ray=False,
        add_arguments=_retire_arguments,
    ),
    "status": Command(
        "jobs.status",
        "what is complete under the run root, which versions carry which alias, and what every replica serves",
        "slipstream status --follow",
        more="A line a replica: the version that serves, since when, its acceptance length since then, and what is\n"
        "wrong. Where a deploy is under way: its phase, how far it is, who is in charge, and what was asked of it.",
        needs_ray=False,
        add_arguments=_status_arguments,
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; exits 1 with one line for an error of ours, 2 for a command that does not exist, 3 where
    there is nothing to do or the gate said no."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return
    name, rest = arguments[0], arguments[1:]
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "slipstream --help lists the commands"
        print(f"slipstream: no command {name!r}; {hint}", file=sys.stderr)
        raise SystemExit(2)
    try:
        _run(name, command, rest)
    except KeyboardInterrupt:
        print(f"slipstream {name}: interrupted; the same command goes on where it stopped", file=sys.stderr)
        raise SystemExit(130)


def overview() -> str:
    """The text of ``slipstream --help``."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "Slipstream keeps a vLLM fleet's DFlash drafter tuned to the traffic it really serves.",
            "",
            "usage: slipstream COMMAND [--config FILE] [--group NAME] [--set TABLE.KEY=VALUE ...] [--dry-run]",
            "",
            *lines,
            "",
            "slipstream COMMAND --help shows an example. infra/slipstream.toml lists every setting.",
        ]
    )


def _run(name: str, command: Command, rest: list[str]) -> None:
    if command.parses_itself:
        importlib.import_module(command.module).main(rest)
        return
    from jobs.session import job_main

    def run(config: "Config", arguments: argparse.Namespace) -> None:
        importlib.import_module(command.module).main(config, arguments)

    description = f"{command.summary[0].upper()}{command.summary[1:]}.\n\nexample: {command.example}"
    job_main(
        f"{description}\n\n{command.more}" if command.more else description,
        run,
        add_arguments=command.add_arguments,
        argv=rest,
        needs_ray=command.needs_ray,
        prog=f"slipstream {name}",
    )


if __name__ == "__main__":
    main()
