"""Checkpoints that real Megatron-core wrote, against what its models on one rank hold."""

from __future__ import annotations

import pytest
import torch

import reshard
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
        grouped = {fqn for group in manifest.train.param_groups for fqn in group.fqns}
        assert grouped == set(weights) - manifest.frozen
        assert set(manifest.train.optimizer_step.values()) == set(expected["steps"].values())


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
