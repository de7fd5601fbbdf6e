"""The engine that runs, compared with the one that was asked for."""

import pytest

from hf_dist.errors import EngineError
from hf_dist.training.engines.running import Engine, check_engine
from tests.training.engines.environments import TORCHRUN


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        (Engine(kind="single"), "single"),
        (Engine(kind="ddp", world_size=2), "ddp"),
        (Engine(kind="deepspeed", zero_stage=2), "deepspeed-zero2"),
        (Engine(kind="deepspeed", zero_stage=2, offload_optimizer="cpu"), "deepspeed-zero2-offload"),
        (
            Engine(kind="deepspeed", zero_stage=3, offload_optimizer="nvme", offload_param="cpu"),
            "deepspeed-zero3-nvme",
        ),
        (Engine(kind="deepspeed", zero_stage=3, hpz_size=4), "deepspeed-zero3-hpz"),
    ],
)
def test_names_of_engines(engine, name):
    assert engine.name == name


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Engine(kind="ddp", world_size=2, data_parallel_size=2), "kind is ddp instead of deepspeed"),
        (Engine(kind="deepspeed", zero_stage=2, world_size=2, data_parallel_size=2), "zero_stage is 2"),
        (
            Engine(
                kind="deepspeed", zero_stage=3, offload_optimizer="cpu", world_size=2, data_parallel_size=2
            ),
            "offload_optimizer is cpu instead of none",
        ),
        (Engine(kind="deepspeed", zero_stage=3), "world_size is 1 instead of 2"),
    ],
)
def test_another_engine_is_an_error_with_the_line_that_works(engine, said):
    with pytest.raises(EngineError) as caught:
        check_engine("zero3", engine, TORCHRUN)
    message = str(caught.value)
    assert said in message
    assert "torchrun --standalone --nproc_per_node 2" in message and "--preset zero3" in message


def test_the_right_engine_passes_and_the_precision_counts():
    engine = Engine(kind="deepspeed", zero_stage=3, world_size=2, data_parallel_size=2)
    check_engine("zero3", engine, TORCHRUN, {"bf16": False})
    with pytest.raises(EngineError, match="precision is fp32 instead of bf16"):
        check_engine("zero3", engine, TORCHRUN, {"bf16": True})
