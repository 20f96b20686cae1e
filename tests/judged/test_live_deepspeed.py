"""`reshard.deepspeed.load_checkpoint`: real engines load any checkpoint, and nothing is written."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

import reshard
import reshard.deepspeed
from reshard.errors import UnsupportedError
from tests.judged.alike import assert_same_tensors
from tests.judged.expected import read_expected
from tests.judged.resumed import Resumed, assert_goes_on, resume_all
from tests.judges import old_deepspeed, programs
from tests.trainer import worlds

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
    Resumed("z3_groups_empty", "z3_groups_empty", 3, 3),
    Resumed("hf_z3_tied", "hf_z0_tied", 2, 0),
    Resumed("z2_checkpointed", "z3_checkpointed", 2, 3),
    Resumed("z3_bf16", "z3_subgroups", 3, 3),
    Resumed("z3_bf16", "z3_hpz_ws2", 2, 3),
    Resumed("moe_z0", "moe_z1_ep1", 2, 1),  # whose engine shares experts among other ranks
    Resumed("moe_z2", "moe_z2_turns", 4, 2),
)
OTHER_GROUPS = (  # of the live optimizer than in the source
    Resumed("z2_bf16", "z2_groups_decay", 2, 2),
    Resumed("z2_groups_decay", "z3_bf16", 2, 3),
    Resumed("z3_groups_tiny", "z1_fp32", 2, 1),
    Resumed("z2_groups_decay", "z3_groups_empty", 2, 3),
)
WEIGHTS = (
    Resumed("z2_bf16", "z3_bf16", 3, 3),
    Resumed("z3_bf16", "z2_bf16", 2, 2),
    Resumed("z2_groups_tiny", "z3_subgroups", 2, 3),
)
OFFLOADED = (
    Resumed("z3_bf16", "z3_offload_both", 3, 3),
    Resumed("z3_offload_both", "z1_offload_cpu", 4, 1),
)
SWAPPED = (  # engines whose optimizer, and in one case whose weights, are in files
    Resumed("z3_nvme_optimizer", "z3_nvme_optimizer", 2, 3),
    Resumed("z3_nvme_optimizer", "z3_nvme_both", 3, 3),
    Resumed("z3_nvme_both", "z3_nvme_optimizer", 4, 3),
    Resumed("z3_bf16", "z3_nvme_unswapped", 3, 3),
)
FROM_DCP = Resumed("z3_bf16", "z2_bf16", 3, 2)


def resume_live(runs, made, place, **how):
    """Return for each run what real engines have after a load without files."""
    return resume_all({run: made / run.source / "run" for run in runs}, place, live=True, **how)


@pytest.fixture(scope="module")
def resumed(made, tmp_path_factory):
    return resume_live(RUNS, made, tmp_path_factory.mktemp("live"))


def test_an_engine_continues_from_another_framework(made, tmp_path):
    """FSDP's files have an order of their own: the live model gives DeepSpeed's."""
    source = tmp_path / "dcp"
    reshard.split(made / FROM_DCP.source / "run", source, to="dcp", world_size=2)
    got = resume_all({FROM_DCP: source}, tmp_path, live=True)
    assert_goes_on(FROM_DCP, got[FROM_DCP], made)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_an_engine_continues_from_any_layout(run, resumed, made):
    assert_goes_on(run, resumed[run], made)


@pytest.fixture(scope="module")
def offloaded(made, tmp_path_factory):
    return resume_live(OFFLOADED, made, tmp_path_factory.mktemp("offloaded"))


@pytest.mark.parametrize("run", OFFLOADED, ids=str)
def test_offloaded_parameters_and_optimizers_are_loaded(run, offloaded, made):
    assert_goes_on(run, offloaded[run], made)


@pytest.fixture(scope="module")
def swapped(request, made, tmp_path_factory):
    if not request.config.getoption("--nvme"):
        pytest.skip("needs DeepSpeed's aio op (libaio-dev, minutes of compiling): give --nvme")
    return resume_live(SWAPPED, made, tmp_path_factory.mktemp("swapped"))


@pytest.mark.parametrize("run", SWAPPED, ids=str)
def test_an_optimizer_offloaded_to_nvme_goes_on_at_other_ranks(run, swapped, made):
    assert_goes_on(run, swapped[run], made)


@pytest.mark.parametrize("how", [{"load_module_only": True}, {"load_optimizer_states": False}])
def test_weights_are_loaded_into_an_engine_with_nvme(how, swapped, made, tmp_path):
    del swapped  # skips without the op
    assert_weights_alone(made, tmp_path, SWAPPED[1:3], how)


@pytest.fixture(scope="module")
def regrouped(made, tmp_path_factory):
    return resume_live(OTHER_GROUPS, made, tmp_path_factory.mktemp("groups"))


@pytest.mark.parametrize("run", OTHER_GROUPS, ids=str)
def test_the_live_optimizer_decides_the_param_groups(run, regrouped, made):
    assert isinstance(regrouped[run], dict), regrouped[run]
    loaded, wanted = regrouped[run]["loaded"], read_expected(made / run.source)
    assert_same_tensors(loaded["params"], wanted["params"])
    for slot, tensors in wanted["slots"].items():
        assert_same_tensors(loaded["slots"][slot], tensors)
    own = read_expected(made / run.case)["train"]["param_groups"]
    groups = loaded["train"]["param_groups"]
    assert len(groups) == len(own)
    rates = {group["weight_decay"] for group in wanted["train"]["param_groups"]}
    assert {group["weight_decay"] for group in groups} <= rates | {
        group["weight_decay"] for group in own
    }


@pytest.mark.parametrize("how", [{"load_module_only": True}, {"load_optimizer_states": False}])
def test_weights_are_loaded_without_the_optimizer(how, made, tmp_path):
    assert_weights_alone(made, tmp_path, WEIGHTS, how)


def assert_weights_alone(made, place, runs, how):
    got = resume_live(runs, made, place, **how)
    for run in runs:
        assert isinstance(got[run], dict), got[run]
        loaded, wanted = got[run]["loaded"], read_expected(made / run.source)
        assert_same_tensors(loaded["live"], wanted["live"])
        if run.stage == 3:  # else DeepSpeed makes fp32 masters of the module's weights
            assert_same_tensors(loaded["params"], wanted["params"])
        assert not any(value.any() for slot in loaded["slots"].values() for value in slot.values())


OLD = "deepspeed-0.16.0"  # the oldest that pyproject.toml allows


@programs.need(OLD)
def test_an_older_deepspeed_goes_on(tmp_path):
    jobs = [
        (2, old_deepspeed.go_on, tmp_path / f"{stage}{new}", stage, new)
        for stage, new in ((1, 3), (3, 2))
    ]
    for wanted, found, mine in worlds.run_in_turn(partial(old_deepspeed.enter, OLD), jobs):
        assert found == wanted
        assert mine == 5


@pytest.mark.parametrize(
    "config",
    [{"checkpoint": {"load_universal": True}}, {"expert_parallel": {"enabled": True}}],
    ids=["universal", "autoep"],
)
def test_a_configuration_for_other_files_is_refused(config):
    engine = SimpleNamespace(_config=SimpleNamespace(_param_dict=config))
    with pytest.raises(UnsupportedError, match="engine's configuration"):
        reshard.deepspeed.load_checkpoint(engine, "run")


def test_a_deepspeed_older_than_what_was_tried_is_refused(monkeypatch):
    monkeypatch.setattr("deepspeed.__version__", "0.15.4+cpu")
    engine = SimpleNamespace(_config=SimpleNamespace(_param_dict={}))
    with pytest.raises(UnsupportedError, match=r"0.15.4\+cpu: .*oldest is 0.16") as told:
        reshard.deepspeed.load_checkpoint(engine, "run")
    assert "reshard split --to deepspeed" in told.value.remedy


def test_an_older_deepspeed_with_an_optimizer_in_files_is_refused():
    engine = SimpleNamespace(
        _config=SimpleNamespace(_param_dict={}), optimizer=SimpleNamespace(swap_optimizer=True)
    )
    with pytest.raises(UnsupportedError, match="is set to NVMe") as told:
        reshard.deepspeed.load_checkpoint(engine, "run")
    assert "0.16.9" in told.value.remedy
