"""Getting an engine ready: environment, linted JSON, arguments."""

import pytest

from hf_dist.errors import ConfigError, EngineError
from hf_dist.training.engines import lifecycle as engines


def test_one_process_becomes_a_group_of_one_for_deepspeed():
    environ: dict[str, str] = {}
    engines.prepare_environment("zero2", environ)
    assert {environ[name] for name in ("RANK", "LOCAL_RANK")} == {"0"}
    assert environ["WORLD_SIZE"] == "1" and int(environ["MASTER_PORT"]) > 0
    engines.prepare_environment("zero2", environ)
    bare: dict[str, str] = {}
    engines.prepare_environment("none", bare)
    assert "RANK" not in bare


def test_a_users_json_is_linted_at_the_start(own):
    with pytest.raises(ConfigError, match="grad_clipping.*use gradient_clipping"):
        engines.prepare_environment(own(grad_clipping=1), {})
    engines.prepare_environment(own(), {})


def test_problems_come_with_the_line_that_works():
    with pytest.raises(EngineError, match=r"What works: HF_DIST_NPROC=2 torchrun .* --preset zero2"):
        engines.prepare_environment("zero2", {"WORLD_SIZE": "2"})


def test_user_settings_of_ddp_stay():
    assert engines.training_argument_overrides("none")["ddp_find_unused_parameters"] is False
    given = {"ddp_find_unused_parameters": True}
    assert "ddp_find_unused_parameters" not in engines.training_argument_overrides("none", given)
