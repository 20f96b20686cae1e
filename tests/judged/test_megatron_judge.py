"""The test setup of Megatron-core, checked against itself, without reshard."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.judged.expected import read_expected
from tests.judges.megatron_judge import CASES, Grid, JudgeError, load_all, loading

pytestmark = pytest.mark.slow

OWN = [  # test_split_megatron has further cases on the same grid, with the same bits
    ("llama_distopt_tp2dp2", "torch_dist"),
    ("gpt2_buckets_pp2dp2", "torch_dist_fully_reshardable"),
    ("mixtral_ep2", "torch"),
    ("mixtral_distopt_ep2dp4", "torch"),
    ("mixtral_distopt_ep2dp4", "torch_dist_fully_reshardable"),
]
EXACT = 1e-5  # in float32 grids differ in the order of sums only
HALF = 0.15  # in 16 bits also in what they round, and which experts they choose
ONE_RANK, OTHER_GRID = "one rank", "other grid"


@pytest.fixture(scope="module")
def went_on(megatron_case, tmp_path_factory):
    """Load own checkpoints again, on the same grids and on two others: (case, form) -> state."""
    out = tmp_path_factory.mktemp("went_on")
    cases = {
        f"{case} {form}": loading(case, megatron_case(case) / form, form) for case, form in OWN
    }
    start = megatron_case("llama_tp2pp2") / "torch_dist"
    for name, grid in ((ONE_RANK, Grid()), (OTHER_GRID, Grid(tp=4))):
        cases[name] = loading("llama_tp2pp2", start, "torch_dist", grid=grid)
    load_all(out, cases)
    return {name: read_expected(out / name) for name in cases}


@pytest.mark.parametrize("case", CASES)
def test_one_rank_has_the_loss_of_all(megatron_case, case):
    expected = read_expected(megatron_case(case))
    difference = (expected["losses"] - expected["losses_alone"]).abs().max()
    assert difference < (EXACT if CASES[case].precision == "fp32" else HALF)


@pytest.mark.parametrize("case", CASES)
def test_the_expected_state_is_complete(megatron_case, case):
    expected = read_expected(megatron_case(case))
    main = {"fp32_param"} if CASES[case].precision != "fp32" or CASES[case].distributed else set()
    trained = expected["params"].keys() - set(expected["frozen"])
    assert trained == expected["optimizer"].keys() == expected["steps"].keys()
    assert set(expected["steps"].values()) == {3.0}
    grouped = [name for group in expected["groups"] for name in group["params"]]
    assert sorted(grouped) == sorted(trained)
    for name, slots in expected["optimizer"].items():
        assert slots.keys() == {"exp_avg", "exp_avg_sq"} | main
        assert all(slot.shape == expected["params"][name].shape for slot in slots.values())
        if main:
            held, master = expected["params"][name], slots["fp32_param"]
            rounded = master.to(held.dtype)
            if CASES[case].adam == "remainders":  # half up, not half to even
                rounded = (master.view(torch.int32) + 0x8000 >> 16).to(torch.int16).view(held.dtype)
            assert torch.equal(rounded, held)


@pytest.mark.parametrize(("case", "form"), OWN)
def test_a_loaded_checkpoint_continues_like_its_source(megatron_case, went_on, case, form):
    source, found = read_expected(megatron_case(case)), went_on[f"{case} {form}"]
    assert found["later"] == source["later"]
    assert torch.equal(found["losses"], source["losses"])
    for name, slots in source["optimizer"].items():
        for slot, value in slots.items():
            assert torch.equal(found["optimizer"][name][slot], value)


@pytest.mark.parametrize("grid", [ONE_RANK, OTHER_GRID])
def test_another_grid_continues_alike(megatron_case, went_on, grid):
    source, found = read_expected(megatron_case("llama_tp2pp2")), went_on[grid]
    assert found["later"] == pytest.approx(source["later"], abs=EXACT)
    assert (found["losses"] - source["losses"]).abs().max() < EXACT
    for name, value in source["params"].items():
        assert torch.equal(found["params"][name][: len(value)], value)


def test_the_loader_refuses_incomplete_files_and_detects_changes(megatron_case, tmp_path):
    displaced = shutil.copytree(megatron_case("llama_tp2pp2") / "torch", tmp_path / "displaced")
    first, last = (displaced / "iter_0000003" / f"mp_rank_00_00{stage}" for stage in (0, 1))
    shutil.copy(first / "model_optim_rng.pt", last / "model_optim_rng.pt")

    source = megatron_case("llama_distopt_tp2dp2")
    negated = shutil.copytree(source / "torch", tmp_path / "negated")
    path = negated / "iter_0000003" / "mp_rank_01" / "distrib_optim.pt"
    state = torch.load(path)
    (buffer,) = state[0].values()
    buffer["exp_avg"] = -buffer["exp_avg"]
    torch.save(state, path)

    cases = {
        "displaced": loading("llama_tp2pp2", displaced),
        "negated": loading("llama_distopt_tp2dp2", negated),
    }
    with pytest.raises(JudgeError, match=r"Missing key.*final_layernorm"):
        load_all(tmp_path / "out", cases)
    wanted, found = read_expected(source), read_expected(tmp_path / "out" / "negated")
    assert torch.equal(found["losses"], wanted["losses"])
    assert found["later"] != wanted["later"]
