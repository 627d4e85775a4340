"""Logs made up so that what a watch has to say of them is known beforehand, and looks at them."""

import json

from jobs.watch_look import Watch
from pipeline.config import Config
from pipeline.watch.hours import HOUR_S

START = 1_798_761_600  # Friday, 1 January 2027, 00:00 UTC
RATES = {"mail": 2.0, "code": 3.0}
SETTINGS = {"learn_days": 3, "reference_days": 5, "keep_days": 9, "settle_hours": 6, "dimensions": ["route"]}


def records(first, count, *, start=START, factor=lambda route: 1.0, version="1", conversations=10, secret=""):
    """So many hours of records: a request a conversation, half of them a third over their route's rate, half under."""
    found = []
    for number in range(first, first + count):
        for route, rate in RATES.items():
            for i in range(conversations):
                accepted = 30 * rate * factor(route) * (1.3 if i % 2 else 0.7)
                found.append(
                    {
                        "id": f"{number}-{route}-{i}",
                        "ts": start + number * HOUR_S + 60 * i,
                        "consent": "recorded",
                        "slice": route,
                        "subject": f"subject-{number}-{i}",
                        "drafter_version": version,
                        "acceptance": {
                            "num_drafts": 30,
                            "num_draft_tokens": 210,
                            "num_accepted_tokens": round(accepted),
                        },
                        "messages": [{"role": "user", "content": f"{route} {i % 3}{secret}"}],
                        "params": {},
                        "response": {"usage": {"prompt_tokens": 20}},
                    }
                )
    return found


def write_log(folder, some, name="traffic-host-1-1700000000000.jsonl"):
    folder.mkdir(exist_ok=True)
    with (folder / name).open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in some)


def config_of(root, *, sources=(), **more):
    body = {"root": root, "target": {"model": "/models/toy"}, "workload": "mails", "watch": SETTINGS}
    body["collect"] = {"sources": [str(one) for one in sources]}
    return Config.model_validate({**body, **more})


def look(config, hour, *, start=START):
    """One look by a watch that was started for it, half an hour after the end of an hour."""
    return Watch(config, clock=lambda: start + (hour + 1.5) * HOUR_S).look()


def fall(route):
    return 0.75
