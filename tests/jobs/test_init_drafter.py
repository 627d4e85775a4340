"""A cold start's own prompts: what is set for the traffic leaves them alone."""

from jobs import init_drafter
from jobs.session import ray_session
from pipeline.config import Config
from pipeline.engines import Reply
from tests.pipeline.scripted_engines import ScriptedEngines
from tests.pipeline.test_regenerate import LAYERS, SOUND, words_of
from tests.tiny import tiny_target


def test_the_name_that_a_target_is_served_by_keeps_no_general_prompt_out(tmp_path):
    model = tiny_target(tmp_path / "target", layers=1)
    config = Config.model_validate(
        {
            "root": tmp_path / "root",
            "target": {"model": model, "dtype": "float32"},
            "init": {"num_prompts": 12},
            "collect": {"served_models": ["support"]},
        }
    )
    engines = ScriptedEngines(lambda asked: Reply(asked.row_id, (5, 6, 1), "stop"), words_of, check=SOUND, model=model)
    with ray_session():
        states = init_drafter.general_states(config, LAYERS, engines=engines)
    assert states.manifest.counts["rows"] == 12
