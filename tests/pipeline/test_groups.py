"""A drafter for each group of tenants, from one file, with nothing shared by accident."""

import json
from pathlib import Path

import pytest

from pipeline import collect
from pipeline.config import load_config
from pipeline.errors import ConfigError
from pipeline.schemas import PROMPTS
from pipeline.shards import read_tables

BASE = """
workload = "support"
root = "runs/support"
[target]
model = "model"
[collect]
sources = ["traffic"]
redaction = "none"
near_similarity = "off"
min_subjects = 1
max_subject_share = 1.0
[serving]
replicas = ["http://shared:8000"]
"""
RETAIL = """
[groups.retail]
collect.tenants = ["acme", "globex"]
serving.replicas = ["http://retail:8000"]
train.steps = 77
"""
BANK = """
[groups.bank]
collect.tenants = ["initech"]
"""


@pytest.fixture
def toml(tmp_path):
    def write(text=BASE + RETAIL + BANK):
        path = tmp_path / "slipstream.toml"
        path.write_text(text)
        return path

    return write


def test_a_group_has_its_own_root_workload_model_and_settings_and_the_files_for_the_rest(toml, tmp_path):
    retail = load_config(toml(), group="retail")
    assert (retail.workload, retail.root) == ("support-retail", tmp_path / "runs" / "support-retail")
    assert (retail.model_name, retail.train.steps) == ("model--support-retail", 77)
    assert retail.collect.tenants == ("acme", "globex")
    assert retail.collect.sources == (tmp_path / "traffic",)
    assert retail.serving.replicas == ("http://retail:8000",)


def test_a_group_without_replicas_of_its_own_has_none_and_not_the_others(toml):
    assert load_config(toml(), group="bank").serving.replicas == ()


def test_a_group_inherits_nothing_that_leads_to_anothers_fleet_logs_or_key(toml, tmp_path):
    more = (
        'split_key_env = "KEY"\n' + BASE.replace('replicas = ["http://shared:8000"]', "")
        + '[deploy]\nkubernetes_service = "vllm"\n[evaluate]\nserver_url = "http://idle:8000"\n'
        + '[watch]\nlisten = "127.0.0.1:9464"\nsources = ["traffic"]\n[capture]\nstorage = "s3://bucket/states/"\n'
        + '[groups.my-own]\ncollect.tenants = ["hooli"]\ncollect.sources = ["apart"]\n[groups.bank]\n'
        + 'collect.tenants = ["initech"]\n'
    )  # fmt: skip
    own, bank = load_config(toml(more), group="my-own"), load_config(toml(more), group="bank")
    assert (own.deploy.kubernetes_service, own.evaluate.server_url, own.watch.listen) == (None, None, None)
    assert (own.collect.sources, own.watch.sources) == ((tmp_path / "apart",), ())
    assert bank.watch.sources == (tmp_path / "traffic",)
    assert (own.split_key_env, bank.split_key_env) == ("KEY_MY_OWN", "KEY_BANK")
    assert (own.capture.storage, bank.capture.storage) == ("s3://bucket/states/my-own", "s3://bucket/states/bank")


@pytest.mark.parametrize("table", ["serving = 3", "collect = 3", 'serving.replicas = "http://one:8000"'])
def test_settings_of_a_wrong_shape_beside_groups_are_named_as_any_others(toml, table):
    rest = "\n".join(line for line in BASE.split("[collect]")[0].splitlines())
    with pytest.raises(ConfigError, match=r"cannot be used|collect\.tenants"):
        load_config(toml(f"{table}\n{rest}{BANK}"))


def test_the_drafter_of_everybody_else_leaves_the_groups_tenants_out(toml):
    rest = load_config(toml())
    assert (rest.workload, rest.collect.tenants) == ("support", ())
    assert rest.collect.except_tenants == ("acme", "globex", "initech")


def test_overrides_come_last(toml):
    assert load_config(toml(), ["train.steps=5"], group="retail").train.steps == 5


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ('[groups.two]\ncollect.tenants = ["acme"]\n', "groups.retail and groups.two share the tenant acme"),
        ('[groups.two]\nroot = "runs/support"\ncollect.tenants = ["x"]\n', "runs/support: nothing may leak"),
        (
            '[groups.two]\nroot = "./runs/x/../support-retail/"\ncollect.tenants = ["x"]\n',
            "runs/support-retail: nothing",
        ),
        ('[groups.two]\nworkload = "support-retail"\ncollect.tenants = ["x"]\n', "share the workload support-retail"),
        (
            '[groups.two]\nserving.replicas = ["http://shared:8000"]\ncollect.tenants = ["x"]\n',
            "outside the groups and groups.two share the replica",
        ),
        (
            '[groups.two]\nserving.replicas = ["HTTP://Retail:8000/"]\ncollect.tenants = ["x"]\n',
            "groups.retail and groups.two share the replica http://retail:8000",
        ),
        (
            '[groups.two]\nevaluate.server_url = "http://shared:8000"\ncollect.tenants = ["x"]\n',
            "outside the groups and groups.two share the replica",
        ),
        (
            '[groups.two]\ndeploy.kubernetes_service = "vllm"\ncollect.tenants = ["x"]\n'
            '[groups.three]\ndeploy.kubernetes_service = "vllm"\ncollect.tenants = ["y"]\n',
            "groups.two and groups.three share the service /vllm",
        ),
        (
            '[groups.two]\nwatch.listen = "127.0.0.1:9"\ncollect.tenants = ["x"]\n'
            '[groups.three]\nwatch.listen = "127.0.0.1:9"\ncollect.tenants = ["y"]\n',
            "groups.two and groups.three share the address 127.0.0.1:9",
        ),
        ('[groups.two]\nsplit_key_env = "SLIPSTREAM_SPLIT_KEY"\ncollect.tenants = ["x"]\n', "share the split key"),
        (
            '[groups.two]\ntarget.model = "m"\nworkload = "x"\ncollect.tenants = ["x"]\n'
            '[groups.three]\ntarget.model = "m--x"\nworkload = "y"\ncollect.tenants = ["y"]\n'
            '[groups.four]\ntarget.model = "m"\nworkload = "x--y"\ncollect.tenants = ["z"]\n',
            "groups.three and groups.four share the model m--x--y",
        ),
        (
            '[groups.two]\ncollect.tenants = ["x"]\ncollect.sources = ["./traffic"]\n',
            "outside the groups and groups.two share the logs",
        ),
        (
            '[groups.two]\ncollect.tenants = ["x"]\ncollect.sources = [{ path = "traffic/two" }]\n',
            "outside the groups and groups.two share the logs",
        ),
        ("[groups.two]\ncollect.tenants = [3]\n", "groups.two: whose drafter is it"),
        ("[groups.two]\ntrain.steps = 3\n", "groups.two: whose drafter is it"),
        ("[groups.two]\ncollect.tenants = []\n", "groups.two: whose drafter is it"),
        ('[groups."A b"]\ncollect.tenants = ["x"]\n', "expected a name"),
        ("[groups]\ntwo = 3\n", "expected tables"),
    ],
)
def test_what_would_leak_is_refused_by_name_for_every_group(toml, block, words):
    path = toml(BASE + (RETAIL if "[groups]" not in block else "") + block)
    for group in (None, "retail", "two"):
        with pytest.raises(ConfigError, match=r".") as error:
            load_config(path, group=group)
        assert words in str(error.value)


def test_a_group_that_is_not_there_is_named_with_those_that_are(toml):
    with pytest.raises(ConfigError, match="no group 'retial'; there are retail, bank"):
        load_config(toml(), group="retial")
    with pytest.raises(ConfigError, match=r"there is no \[groups.retail\] table"):
        load_config(toml(BASE), group="retail")


def test_a_wrong_setting_of_a_group_is_named_as_any_other(toml):
    with pytest.raises(ConfigError, match=r"train\.stepz"):
        load_config(toml(BASE + RETAIL.replace("train.steps", "train.stepz")), group="retail")


def words_of(config):
    artifact = collect.run(config)
    rows = read_tables(artifact.folder, artifact.manifest.shards, PROMPTS).to_pylist()
    return {json.loads(row["messages"])[0]["content"] for row in rows}, artifact


def test_of_one_log_each_group_gets_its_own_tenants_records_and_no_root_holds_anothers(toml, tmp_path):
    tenants = ["acme", "globex", "initech", "hooli", None]
    records = [
        {"consent": "recorded", "prompt": f"secret of {tenant} {i}", "tenant": tenant, "subject": f"s{i}"}
        for tenant in tenants
        for i in range(8)
    ]
    (tmp_path / "traffic").mkdir()
    (tmp_path / "traffic" / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    expected = {"retail": {"acme", "globex"}, "bank": {"initech"}, None: {"hooli", "None"}}
    for group, own in expected.items():
        config = load_config(toml(), group=group)
        texts, artifact = words_of(config)
        assert texts == {f"secret of {tenant} {i}" for tenant in own for i in range(8)}
        assert artifact.manifest.rejects == {"other_tenant": 40 - 8 * len(own)}
        others = [f"secret of {tenant}".encode() for tenant in {"acme", "globex", "initech", "hooli"} - own]
        for path in (path for path in Path(config.root).rglob("*") if path.is_file()):
            body = path.read_bytes()
            assert not any(text in body for text in others), path
