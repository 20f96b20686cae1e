"""`reshard.deepspeed.load_checkpoint`: real engines load any checkpoint, and nothing is written."""

from __future__ import annotations

import pytest

import reshard
from tests.judged.resumed import Resumed, assert_goes_on, resume_all

pytestmark = pytest.mark.slow

RUNS = (
    Resumed("z2_bf16", "z2_bf16", 2, 2),
    Resumed("z2_groups_decay", "z3_groups_decay", 3, 3),
    Resumed("z3_bf16", "z1_round_robin", 3, 1),
    Resumed("z1_round_robin", "z2_bf16", 4, 2),
    Resumed("z2_alignment", "z2_alignment", 3, 2),
    Resumed("z3_fp32", "z1_fp32", 1, 1),
    Resumed("z0_fp16_overflow", "z2_fp16", 2, 2),
    Resumed("z3_groups_tiny", "z2_groups_tiny", 4, 2),
    Resumed("hf_z3_tied", "hf_z0_tied", 2, 0),
    Resumed("z2_checkpointed", "z3_checkpointed", 2, 3),
    Resumed("z3_bf16", "z3_subgroups", 3, 3),
)
FROM_DCP = Resumed("z3_bf16", "z2_bf16", 3, 2)


@pytest.fixture(scope="module")
def resumed(made, tmp_path_factory):
    directories = {run: made / run.source / "run" for run in RUNS}
    return resume_all(directories, tmp_path_factory.mktemp("live"), live=True)


def test_an_engine_goes_on_from_another_framework(made, tmp_path):
    """FSDP's files have an order of their own: the live model gives DeepSpeed's."""
    source = tmp_path / "dcp"
    reshard.split(made / FROM_DCP.source / "run", source, to="dcp", world_size=2)
    got = resume_all({FROM_DCP: source}, tmp_path, live=True)
    assert_goes_on(FROM_DCP, got[FROM_DCP], made)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_engine_goes_on_from_any_layout(run, resumed, made):
    assert_goes_on(run, resumed[run], made)
