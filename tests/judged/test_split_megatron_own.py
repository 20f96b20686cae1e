"""Extra states and random states of Megatron's ranks, split and loaded by Megatron-core."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

import reshard
from reshard.errors import UnsupportedError, UsageError
from tests.judged.expected import read_expected
from tests.judges.megatron_judge import Grid, load_all, loading

# The pickles name classes of Megatron, whose modules warn when they are imported.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

CASE = "llama_fused_tp2pp2"
ROUTES = {"kept": ("torch", "torch"), "stacked": ("torch", "torch_dist")}
ROUTES |= {"unstacked": ("torch_dist", "torch")}


@pytest.fixture(scope="module")
def went_on(megatron_case, tmp_path_factory):
    """Return route -> (the split's report, what each rank of real Megatron-core had loaded)."""
    out = tmp_path_factory.mktemp("megatron")
    cases, reports = {}, {}
    for name, (source, form) in ROUTES.items():
        made = out / f"{name}.made"
        options = {"ckpt_format": form, "rng": "keep", "extra_state": "keep"}
        reports[name] = reshard.split(megatron_case(CASE) / source, made, **options)
        cases[name] = loading(CASE, made, form, rng=True)
    load_all(out, cases)
    held = {
        name: [torch.load(out / name / f"rank{rank}.pt", weights_only=False) for rank in range(4)]
        for name in cases
    }
    return {name: (reports[name], held[name]) for name in cases}


def read_saved(place, rank):
    """Return what a rank saved in the torch format; ranks count tensor first, then pipeline."""
    path = place / "iter_0000003" / f"mp_rank_{rank % 2:02d}_{rank // 2:03d}"
    return torch.load(path / "model_optim_rng.pt", weights_only=False)


def extra_of(state):
    return {
        name: value
        for name, value in state["model"].items()
        if name.endswith("_extra_state") and value is not None and value.numel()
    }


@pytest.mark.parametrize("route", ROUTES)
def test_modules_own_states_are_those_that_megatron_gives_each_rank(megatron_case, went_on, route):
    report, held = went_on[route]
    assert any("own states of" in text for text in report.kept)
    different = 0
    for rank in range(4):
        mine = extra_of(read_saved(megatron_case(CASE) / "torch", rank))
        first = extra_of(read_saved(megatron_case(CASE) / "torch", rank // 2 * 2))  # of torch_dist
        wanted = mine if route == "kept" else first
        assert len(wanted) == 4
        found = held[rank]["extra"]
        assert all(torch.equal(found[0, name], value) for name, value in wanted.items())
        different += any(not torch.equal(first[name], value) for name, value in mine.items())
    assert different == 2  # each tensor rank has its own


@pytest.mark.parametrize("route", ROUTES)
def test_random_states_are_those_of_the_rank(megatron_case, went_on, route):
    report, held = went_on[route]
    assert "random states of 4 ranks" in report.kept
    assert not any("no-load-rng" in text for text in (*report.notes, report.load_line))
    for rank in range(4):
        (wanted,), (found,) = (
            read_saved(megatron_case(CASE) / "torch", rank)["rng_state"],
            held[rank]["rng"],
        )
        assert found["random_rng_state"] == wanted["random_rng_state"]
        for mine, theirs in zip(found["np_rng_state"], wanted["np_rng_state"], strict=True):
            assert np.array_equal(mine, theirs)
        assert torch.equal(found["torch_rng_state"], wanted["torch_rng_state"])
        assert found["rng_tracker_states"].keys() == wanted["rng_tracker_states"].keys()
        for name, state in wanted["rng_tracker_states"].items():
            assert torch.equal(found["rng_tracker_states"][name], state), name


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"tp": 1, "extra_state": "keep"}, UsageError, "each belongs to one tensor-"),
        (
            {"transformer_impl": "local", "extra_state": "keep"},
            UsageError,
            "are not those of local",
        ),
        ({"tp": 1, "rng": "keep"}, UsageError, "each belongs to one model-parallel rank"),
        ({"rng": "derive"}, UnsupportedError, "--no-load-rng"),
        ({"to": "dcp", "extra_state": "keep"}, UsageError, "has no effect with --to dcp"),
    ],
)
def test_states_that_cannot_be_kept_are_refused(megatron_case, options, error, says, tmp_path):
    with pytest.raises(error, match=says):
        reshard.split(megatron_case(CASE) / "torch", tmp_path / "out", **options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tp": 1}, "each belongs to one tensor-"),
        ({"extra_state": "drop", "rng": "drop"}, "--extra-state drop"),
        ({"to": "dcp"}, "--to dcp cannot store them"),
    ],
)
def test_dropped_states_are_reported(megatron_case, options, why, tmp_path):
    report = reshard.split(megatron_case(CASE) / "torch", tmp_path / "out", **options)
    assert any("own states of 8 modules" in text and why in text for text in report.dropped)
    assert any(text.startswith("random states") for text in report.dropped)
    assert ("--no-load-rng" in report.load_line) is ("to" not in options)


def test_torch_dist_keeps_them_for_every_grid(megatron_case, tmp_path):
    source = megatron_case(CASE) / "torch_dist"
    report = reshard.split(source, tmp_path / "out", tp=1, pp=1, ckpt_format="torch_dist")
    assert any("own states of" in text for text in report.kept)
    first = {
        name.replace("layers.0", f"layers.{2 * stage}").replace(
            "layers.1", f"layers.{2 * stage + 1}"
        )
        if stage
        else name: value
        for stage in (0, 1)
        for name, value in extra_of(read_saved(megatron_case(CASE) / "torch", 2 * stage)).items()
    }
    reshard.split(tmp_path / "out", tmp_path / "one", tp=1, pp=1, ckpt_format="torch")
    path = tmp_path / "one" / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    found = extra_of(torch.load(path, weights_only=False))
    assert found.keys() == first.keys()
    assert all(torch.equal(found[name], value) for name, value in first.items())


def test_streams_of_older_transformer_engines_are_kept(megatron_case, tmp_path):
    """Before version 2 it saved a stream of bytes, which torch pickles whole."""
    made = tmp_path / "made"
    reshard.split(megatron_case(CASE) / "torch", made)
    wanted = {}
    for path in sorted(made.rglob("model_optim_rng.pt")):
        state = torch.load(path, weights_only=False)
        for name in extra_of(state):
            state["model"][name] = io.BytesIO(f"{path.parent.name} {name}".encode())
        wanted[path.parent.name] = {
            name: value.getvalue()
            for name, value in state["model"].items()
            if isinstance(value, io.BytesIO)
        }
        torch.save(state, path)
    report = reshard.split(made, tmp_path / "again")
    assert any("own states of 8 modules" in text for text in report.kept)
    for path in (tmp_path / "again").rglob("model_optim_rng.pt"):
        held = torch.load(path, weights_only=False)["model"]
        for name, value in wanted[path.parent.name].items():
            assert held[name].getvalue() == value


def read_files(place):
    """Return what each rank's file of the torch format holds."""
    paths = sorted(place.rglob("model_optim_rng.pt"))
    return [torch.load(path, weights_only=False) for path in paths]


def test_context_parallel_ranks_count_among_the_data_parallel_ones(megatron_case, tmp_path):
    """As Megatron-core numbers ranks: the first of each group of copies saves."""
    from megatron.core.parallel_state import RankGenerator

    source, out = megatron_case("llama_tp2pp2") / "torch", tmp_path / "out"
    reshard.split(source, out, cp=2, dp=2)
    copies = RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=2, order="tp-cp-ep-dp-pp").get_ranks("cp-dp")
    args = [vars(file["args"]) for file in read_files(out)]
    assert sorted(each["rank"] for each in args) == sorted(ranks[0] for ranks in copies)
    names = ("world_size", "context_parallel_size", "data_parallel_size")
    assert {tuple(map(each.get, names)) for each in args} == {(16, 2, 2)}
    reshard.split(out, tmp_path / "again", tp=1)  # the source's own --cp and number of ranks
    args = [vars(file["args"]) for file in read_files(tmp_path / "again")]
    assert {tuple(map(each.get, names)) for each in args} == {(16, 2, 4)}
    assert reshard.diff(source, tmp_path / "again", kinds=["weight", "optimizer"]).same


@pytest.mark.parametrize(
    ("form", "sizes", "loaded"),
    [
        ("torch", {"tp": 2, "ep": 4, "etp": 1, "dp": 2}, Grid(tp=2, dp=2, ep=4, etp=1, sp=True)),
        ("torch_dist", {"ep": 2, "etp": 2, "dp": 4}, Grid(dp=4, ep=2, etp=2)),
    ],
)
def test_experts_are_cut_over_ranks_of_their_own(megatron_case, tmp_path, form, sizes, loaded):
    source = megatron_case("mixtral_ep2")
    reshard.split(source / "torch", tmp_path / "out", ckpt_format=form, **sizes)
    load_all(tmp_path, {"run": loading("mixtral_ep2", tmp_path / "out", form, grid=loaded)})
    expected, found = read_expected(source), read_expected(tmp_path / "run")
    for name, value in expected["params"].items():
        assert torch.equal(found["params"][name], value), name
        for slot, held in expected["optimizer"][name].items():
            assert torch.equal(found["optimizer"][name][slot], held), (name, slot)


def test_experts_over_each_other_in_one_file_are_refused(megatron_case, tmp_path):
    source = megatron_case("mixtral_ep2") / "torch"
    with pytest.raises(UsageError, match="is more than --tp 1: Megatron then saves several"):
        reshard.split(source, tmp_path / "out", etp=2, ep=1, dp=2)


def test_the_vocabulary_and_the_samples_come_back_from_deepspeed(megatron_case, tmp_path):
    source, grid = megatron_case("llama_tp2pp2") / "torch", {"tp": 2, "pp": 2, "dp": 1}
    reshard.split(source, tmp_path / "ds", to="deepspeed", names="hf", world_size=2)
    report = reshard.split(
        tmp_path / "ds", tmp_path / "back", to="megatron", transformer_impl="local", **grid
    )
    before, after = (read_files(place)[0] for place in (source, tmp_path / "back"))
    for name in ("padded_vocab_size", "consumed_train_samples"):
        assert getattr(after["args"], name) == getattr(before["args"], name), name
    assert "--padded-vocab-size 96" in report.load_line
    assert after["opt_param_scheduler"]["num_steps"] == before["opt_param_scheduler"]["num_steps"]
    assert reshard.diff(source, tmp_path / "back", kinds=["weight", "optimizer"]).same
