"""What docs/swap.md and the replicas' manifest tell people to set and send is what the server reads and takes."""

import json
import re
from pathlib import Path

import yaml

from serving.supervise import _names_drafter
from serving.swap_order import PREFIX_CACHE, parse_order

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs" / "swap.md").read_text()


def test_every_variable_on_the_page_is_one_that_the_server_reads():
    code = "".join(path.read_text() for path in (CHECKOUT / "serving").rglob("*.py"))
    named = set(re.findall(r"SLIPSTREAM_[A-Z_]+", PAGE))
    assert len(named) >= 7 and all(f'"{name}"' in code for name in named), named


def test_the_order_on_the_page_is_taken():
    body = re.search(r"-d '(\{.*?\})'", PAGE, re.DOTALL).group(1)
    order = json.loads(body) | {"sha256": "0" * 64}
    assert parse_order(json.dumps(order).encode()).expected_version == "2"
    assert set(re.findall(r"^\| `(keep|clear|salt)` \|", PAGE, re.MULTILINE)) == set(PREFIX_CACHE)


def test_replicas_on_kubernetes_can_be_asked_by_the_jobs_and_restarted_with_another_drafter():
    _, stateful = yaml.safe_load_all((CHECKOUT / "infra" / "kubernetes" / "vllm.yaml").read_text())
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["SLIPSTREAM_CONTROL_PEERS"] and "SLIPSTREAM_CONTROL_TOKEN" in variables
    command = container["command"] + container["args"]
    keep = Path(command[command.index("--keep") + 1])
    assert keep.parent in [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
    assert command[2] == "/opt/slipstream/serving/supervise.py" and _names_drafter(container["args"])
