"""Checkpoints that real Megatron-core wrote, against what its models on one rank hold."""

from __future__ import annotations

import shutil

import pytest
import torch

import reshard
from reshard.errors import IncompleteError
from tests.judged.expected import read_expected
from tests.judges.megatron_judge import CASES

FORMS = [(name, form) for name, case in CASES.items() for form in case.forms]
EXPERTS, HIDDEN = 4, 32


def separate(tensors):
    """Separate the experts that Megatron's GroupedMLP keeps side by side, as it views them."""
    found = {}
    for name, tensor in tensors.items():
        prefix, side_by_side, number = name.partition(".mlp.experts.weight")
        if not side_by_side:
            found[name] = tensor
            continue
        shape = (EXPERTS, HIDDEN, -1) if number == "1" else (EXPERTS, -1, HIDDEN)
        for expert, matrix in enumerate(tensor.view(shape)):
            own = f"{prefix}.mlp.experts.local_experts.{expert}.linear_fc{number}.weight"
            found[own] = matrix.T
    return found


@pytest.mark.parametrize(("case", "form"), FORMS)
def test_every_tensor_is_megatron_s_own(megatron_case, case, form):
    folder = megatron_case(case)
    expected = read_expected(folder)
    with reshard.open(folder / form) as checkpoint:
        manifest = checkpoint.manifest
        weights = separate(expected["params"])
        slots = {}
        for name, held in expected["optimizer"].items():
            for slot, value in held.items():
                if slot != "step":
                    slots.setdefault("master" if slot == "fp32_param" else slot, {})[name] = value
        wanted = {("param", name): tensor for name, tensor in weights.items()}
        for slot, held in slots.items():
            wanted |= {(slot, name): tensor for name, tensor in separate(held).items()}
        assert set(manifest.entries) == set(wanted)
        for (kind, name), tensor in wanted.items():
            found = stored(checkpoint, kind, name)
            assert found.dtype == tensor.dtype, name
            assert torch.equal(found, tensor), (kind, name)
        assert manifest.train.step == expected["step"]
        frozen = {name: expected["params"][name] for name in expected["frozen"]}
        assert manifest.frozen == set(separate(frozen))
        assert sum("frozen" in note for note in manifest.warnings) == bool(frozen)
        grouped = {fqn for group in manifest.train.param_groups for fqn in group.fqns}
        assert grouped == set(weights) - manifest.frozen
        assert set(manifest.train.optimizer_step.values()) == set(expected["steps"].values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("case", "form", "lacking"),
    [
        ("llama_tp2pp2vpp2", "torch", None),
        ("mixtral_ep2", "torch", None),
        ("mixtral_pp2ep2", "torch", None),
        ("mixtral_grouped_ep2", "torch", None),
        ("llama_distopt_tp2dp2", "torch", "swiglu"),
        ("llama_distopt_tp2dp2", "torch_dist", "swiglu"),
    ],
)
def test_folders_and_shapes_show_what_no_argument_states(
    megatron_case, tmp_path, case, form, lacking
):
    """Programs that call Megatron-core themselves save few arguments, or none."""
    folder = megatron_case(case)
    run = shutil.copytree(folder / form, tmp_path / "run")
    for path in [*run.rglob("model_optim_rng.pt"), *run.rglob("common.pt")]:
        state = torch.load(path, weights_only=False)
        if lacking:
            delattr(state["args"], lacking)
        else:
            del state["args"]
        torch.save(state, path)
    expected = read_expected(folder)
    with reshard.open(run) as checkpoint:
        for name, tensor in separate(expected["params"]).items():
            assert torch.equal(stored(checkpoint, "param", name), tensor), name
        moments = {name: held["exp_avg"] for name, held in expected["optimizer"].items()}
        for name, tensor in separate(moments).items():
            assert torch.equal(stored(checkpoint, "exp_avg", name), tensor), name
    if lacking:
        reshard.split(run, tmp_path / "out", to="megatron", tp=1)
        assert not reshard.diff(tmp_path / "out", run).unequal


def test_ranks_that_older_versions_do_not_save_are_named(megatron_case, tmp_path):
    """Before 0.18, only the ranks with the first copy of the experts saved their weights."""
    run = shutil.copytree(megatron_case("mixtral_distopt_tp4ep2_etp1") / "torch", tmp_path / "run")
    for folder in ("mp_rank_02_000", "mp_rank_03_001"):
        (run / "iter_0000003" / folder / "model_optim_rng.pt").unlink()
    with pytest.raises(
        IncompleteError,
        match=r"(?s)lacks the weights of mp_rank_02_000, mp_rank_03_001: of the 4 ranks .* only 2.*"
        r"save with --ckpt-format torch_dist",
    ):
        reshard.open(run)


def stored(checkpoint, kind, name):
    if kind == "param":
        entries = {entry.fqn: entry for entry in checkpoint.manifest.of_kind("param")}
        return reshard.tensors.lazy.LazyTensor(entries[name], checkpoint._pool)[...]
    return checkpoint.optimizer(kind)[name][...]


@pytest.mark.parametrize("case", CASES)
def test_all_forms_of_a_run_are_the_same(megatron_case, case):
    first, *others = CASES[case].forms
    for other in others:
        report = reshard.diff(megatron_case(case) / first, megatron_case(case) / other)
        assert report.same, other
