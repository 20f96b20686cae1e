"""LoRA adapters that modules of Megatron-Bridge and ms-swift trained, and load at other sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import reshard
from tests.judges import megatron_judge, programs
from tests.judges import megatron_lora_worker as worker
from tests.judges.megatron_cases import Case, Grid
from tests.judges.server import Judge

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]
FLAT, SHARDED = "torch_dist", worker.FORM  # of a distributed optimizer
FORMS = {"distributed": True, "forms": (FLAT, SHARDED)}
EXPERTS = f"experts of {worker.SWIFT}"
RUNS = {
    "LoRA": [
        Case("plain", "llama", Grid(tp=2, pp=2), "fp32", forms=(FLAT,)),
        Case("sharded", "llama", Grid(tp=2, dp=2), "fp32", **FORMS),
    ],
    "CanonicalLoRA": [Case("apart", "llama", Grid(tp=2), "fp32", forms=(FLAT,))],
    worker.SWIFT: [
        Case("swift", "llama", Grid(tp=2, dp=2), "fp32", distributed=True, forms=(FLAT,))
    ],
    EXPERTS: [Case("experts", "mixtral", Grid(dp=2, ep=2), "fp32", forms=(FLAT,))],
}
RESUMED = {
    ("plain", FLAT): (Grid(tp=4), Grid(dp=2)),
    ("sharded", FLAT): (Grid(pp=2, dp=2),),
    ("sharded", SHARDED): (Grid(tp=2, pp=2),),
    ("apart", FLAT): (Grid(tp=2, pp=2), Grid(pp=2)),
    ("swift", FLAT): (Grid(tp=4),),
    ("experts", FLAT): (Grid(pp=2),),
}
KINDS = [
    pytest.param(
        kind, marks=programs.need(worker.SWIFT if worker.SWIFT in kind else worker.PROGRAM)
    )
    for kind in RUNS
]
REORDERED = ("gate.linear_out.weight", "up.linear_out.weight", "fc1.lora_B.default.weight")
NOISE = 1e-5


def ask(place, kind, base, cases):
    """Return the directory of each case of Megatron-Bridge."""
    table = {case.name: case for case in cases}
    judge = Judge(worker.__name__, "Megatron-Bridge", table, like=megatron_judge.WORKER)
    made = judge.make(place, table, table=table, base=str(base), kind=kind)
    return {name: result.path for name, result in made.items()}


def compute_losses(model, tokens):
    with torch.no_grad():
        logits = model.eval()(tokens[:, :-1]).logits
    targets = tokens[:, 1:]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def load(path):
    return torch.load(path / "expected.pt", weights_only=False)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_has_the_adapter_and_megatron_resumes_it(kind, megatron_case, tmp_path):
    is_swift = worker.SWIFT in kind
    base = megatron_case("mixtral_ep2" if kind == EXPERTS else "llama_tp2pp2") / "torch_dist"
    reshard.merge(base, tmp_path / "base")
    # Arguments of ms-swift do not describe the model.
    model = tmp_path / "base" if is_swift else None
    made = ask(tmp_path / "runs", kind, base, RUNS[kind])
    told = {name: load(path) for name, path in made.items()}
    resumed = {}
    for case, form in [(each, form) for each in RUNS[kind] for form in each.forms]:
        run, out = made[case.name] / form, tmp_path / case.name / form
        out.mkdir(parents=True)
        check_matrices(run, told[case.name])
        check_losses(run, out, tmp_path / "base", told[case.name], model)
        for grid in RESUMED[case.name, form]:
            split = out / f"split{grid.tp}{grid.pp}{grid.dp}"
            sizes = {axis: getattr(grid, axis) for axis in ("tp", "pp", "dp", "ep")}
            reshard.split(run, split, **sizes, model=model)
            assert reshard.diff(run, split, kinds=["weight", "optimizer"]).same
            name = f"{case.name}_{form}_{split.name}"
            new = replace(case, name=name, grid=grid, start=str(split), forms=())
            resumed[new] = told[case.name]
    paths = ask(tmp_path / "resumed", kind, base, resumed)
    for case, expected in resumed.items():
        found = load(paths[case.name])
        assert (found["losses"] - expected["losses"]).abs().max() < NOISE
        # The loss that balances experts depends on the samples of each rank.
        noise = 1e-3 if kind == EXPERTS else NOISE
        assert found["later"] == pytest.approx(expected["later"], abs=noise)


def check_matrices(run, expected):
    """Compare every matrix and slot with those that Megatron holds on one rank."""
    wanted = {
        name.replace(".to_wrap", ""): (value, expected["optimizer"][name])
        for name, value in expected["params"].items()
        if ".adapter." in name or ".lora_" in name
    }
    with reshard.open(run) as checkpoint:
        assert set(checkpoint) == set(wanted)
        for name, (value, slots) in wanted.items():
            assert torch.equal(checkpoint[name][...], in_model(name, value)), name
            for slot in ("exp_avg", "exp_avg_sq"):
                own = in_model(name, slots[slot].view_as(value))
                assert torch.equal(checkpoint.optimizer(slot)[name][...], own), (slot, name)


def in_model(name, value):
    """Return a matrix of two ranks as they had it: both libraries store parts in another order."""
    if not name.endswith(REORDERED) or ".experts." in name:
        return value
    return value.unflatten(0, (2, 2, -1)).transpose(0, 1).flatten(0, 2)


def check_losses(run, out, base, expected, model):
    """Compare the losses of PEFT, and those of the merged model, with the run's own."""
    reshard.merge(run, out / "adapter", adapter="default", hf_dir=model)
    reshard.merge(run, out / "merged", merge_lora=base)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(plain, out / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(out / "merged", dtype=torch.float32)
    for each in (adapted, merged):
        found = compute_losses(each, expected["tokens"])
        assert (found - expected["losses"]).abs().max() < NOISE
