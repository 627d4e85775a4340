import tomllib
from pathlib import Path

import pytest

from pipeline.config import Config, load_config
from pipeline.errors import ConfigError

INFRA = Path(__file__).resolve().parents[2] / "infra"


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "slipstream.toml"
    path.write_text('root = "runs"\n[target]\nmodel = "model"\n[train]\nsteps = 10\n')
    return path


def test_an_override_takes_the_place_of_the_file_and_bare_words_are_text(toml):
    config = load_config(toml, ["train.steps=20", "workload=mails", "collect.consent=allow_all", "train.seed=3"])
    assert (config.train.steps, config.workload, config.train.seed) == (20, "mails", 3)
    assert config.collect.consent == "allow_all"


def test_relative_paths_are_relative_to_the_file_not_to_where_one_stands(toml, tmp_path):
    config = load_config(toml, ['collect.sources=["traffic", "/abs/log.jsonl"]'])
    assert config.root == tmp_path / "runs"
    assert config.target.model == tmp_path / "model"
    assert config.collect.sources == (tmp_path / "traffic", Path("/abs/log.jsonl"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stepz=5", ["train.stepz", "Extra inputs"]),
        ("nonsense.key=5", ["nonsense", "Extra inputs"]),
        ("train.steps=-1", ["train.steps", "greater than 0", "-1"]),
        ("train.optimizer=sgd", ["train.optimizer", "'muon' or 'adamw'", "sgd"]),
        ("workload=Has Spaces", ["workload", "Has Spaces"]),
        ("train.steps", ["expected table.key=value"]),
        ("root.a.b=1", ["root is a value, not a table"]),
        ("capture.stream=true", ["capture: ", "needs max_bytes"]),
        ('regenerate.engine_args={dtype="half"}', ["dtype: set by Slipstream"]),
        ("regenerate.reuse=exact", ["needs collect.served_models"]),
        ("collect.redaction=maybe", ["collect.redaction: ", "'none'", "maybe"]),
        ("collect.redaction.namez=x", ["collect.redaction.namez: ", "Extra inputs"]),
        ('collect.redaction.custom=[{name="a", pattern="("}]', ["custom.0.pattern", "not a regular expression"]),
        ('collect.redaction.custom=[{name="a", pattern="x*"}]', ["custom.0.pattern", "matches the empty text"]),
        ('collect.redaction.custom=[{name="A B", pattern="x"}]', ["custom.0.name", "should match pattern"]),
        ("sweep.learning_rates=[]", ["sweep.learning_rates", "at least 1 item"]),
        ("sweep.learning_rates=[1e-3, 0.0]", ["sweep.learning_rates.1", "greater than 0"]),
        ("sweep.learning_rates=[-1e-3]", ["sweep.learning_rates.0", "greater than 0"]),
        ("sweep.learning_rates=[inf]", ["sweep.learning_rates.0", "finite"]),
        ("train.learning_rate=inf", ["train.learning_rate", "finite"]),
        ("train.warm_start_tolerance=inf", ["train.warm_start_tolerance", "finite"]),
        ("train.decay_gamma=0", ["train.decay_gamma", "greater than 0"]),
        ("train.seed=-1", ["train.seed", "greater than or equal to 0"]),
        ("train.seed=4294967296", ["train.seed", "less than 4294967296"]),
        ('collect.sample_by=["nation"]', ["collect.sample_by.0", "'tenant', 'route'", "nation"]),
        ("collect.near_similarity=0.3", ["collect.near_similarity", "greater than or equal to 0.5"]),
        ("collect.max_prompt_tokens=0", ["collect.max_prompt_tokens", "greater than 0"]),
        ("collect.max_subject_share=0", ["collect.max_subject_share", "greater than 0"]),
        ("train.dpace_alpha=3", ["train.dpace_alpha", "less than or equal to 1"]),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_with_what_was_expected(toml, override, words):
    with pytest.raises(ConfigError) as error:
        load_config(toml, [override])
    assert all(word in str(error.value) for word in words), str(error.value)


def test_every_wrong_setting_is_named_at_once(toml):
    with pytest.raises(ConfigError, match="2 setting") as error:
        load_config(toml, ["train.steps=0", "gate.confidence=2"])
    assert "train.steps" in str(error.value) and "gate.confidence" in str(error.value)


def test_a_missing_and_a_broken_file_say_which(tmp_path):
    with pytest.raises(ConfigError, match=r"absent.toml: no such config file"):
        load_config(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("[target\n")
    with pytest.raises(ConfigError, match=r"broken.toml: not valid TOML"):
        load_config(tmp_path / "broken.toml")


def test_a_config_cannot_change_after_it_was_read(toml):
    with pytest.raises(Exception, match="frozen"):
        load_config(toml).train.steps = 5


def test_in_a_ray_upload_paths_must_be_absolute(tmp_path):
    upload = tmp_path / "runtime_resources" / "working_dir_files" / "pkg"
    upload.mkdir(parents=True)
    (upload / "s.toml").write_text('root = "runs"\n[target]\nmodel = "/models/m"\n')
    with pytest.raises(ConfigError, match="must be absolute in a Ray job"):
        load_config(upload / "s.toml")
    assert load_config(upload / "s.toml", ["root=/shared/runs"]).root == Path("/shared/runs")


@pytest.mark.parametrize("path", sorted(INFRA.rglob("*.toml")), ids=lambda path: path.name)
def test_every_shipped_config_is_read_and_every_key_in_it_is_known(path):
    config = load_config(path)
    assert isinstance(config, Config)
    assert set(tomllib.loads(path.read_text())) <= set(Config.model_fields)


def test_redaction_is_on_unless_the_word_none_is_typed_and_a_model_is_named_alone_or_in_a_list(toml):
    assert load_config(toml).collect.redaction.names == "required"
    assert load_config(toml, ["collect.redaction=none"]).collect.redaction == "none"
    for names in ("en_core_web_lg", '["en_core_web_lg"]'):
        assert load_config(toml, [f"collect.redaction.names={names}"]).collect.redaction.names == ("en_core_web_lg",)
