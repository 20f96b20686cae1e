"""FSDP with --reduction canonical: the bits of ddp and ZeRO, at any number of ranks."""

from __future__ import annotations

import itertools

import pytest

from tests.support.combinations import choose_combinations
from tests.trainer import worlds

pytestmark = pytest.mark.slow

STEPS = 3
COMMON = {"global_batch": 6, "seq_len": 8, "steps": STEPS, "dropout": 0.1, "clip": 0.5}
MODELS = {
    "fp32": {"precision": "fp32", "model": "tiny-gpt2", "param_groups": "single"},
    "fp16": {
        "precision": "fp16",
        "initial_scale_power": 17,
        "loss_scale_window": 1,
        "hysteresis": 1,
    },
    "bf16 sums": {"precision": "bf16", "grad_dtype": "bf16"},
    "frozen": {"precision": "bf16", "freeze": (r"layers\.0\.mlp\.up",)},
}
FSDP = ("fsdp", "fsdp2")
RUNS = choose_combinations(
    itertools.product(MODELS, FSDP, (1, 2, 3, 4)),
    needed=[("frozen", "fsdp", 1), ("fp16", "fsdp2", 3)],  # tests name them
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return (model, strategy, ranks) -> what the run logged."""
    place, jobs = tmp_path_factory.mktemp("runs"), {}
    for name, key, world in [*((name, "ddp", 1) for name in MODELS), *RUNS]:
        path = f"{place}/{name} {key} {world}"
        where = {"save": path, "log": f"{path}.jsonl", "is_saved": False}
        chosen = {**COMMON, **MODELS[name], "strategy": key, **where, "reduction": "canonical"}
        jobs[name, key, world] = world, chosen
    # FSDP 1 calls this SHARD_GRAD_OP: what is gathered stays until the backward pass is over.
    path = f"{place}/grad op"
    (_, alike) = jobs["fp32", "ddp", 1]
    changes = {"strategy": "fsdp", "fsdp_sharding_strategy": "SHARD_GRAD_OP"}
    jobs["fp32", "grad op", 3] = 3, {**alike, **changes, "save": path, "log": f"{path}.jsonl"}
    return worlds.trained(jobs)


def test_losses_and_norms_are_those_of_ddp(runs):
    for (model, strategy, world), run in runs.items():
        ddp = runs[model, "ddp", 1]
        assert run.losses == ddp.losses, (model, strategy, world)
        assert (run.norms, run.scales, run.skipped) == (ddp.norms, ddp.scales, ddp.skipped)
        assert len(set(run.losses)) > 1, "it trains"


def test_parameters_have_the_same_bits_at_any_number_of_ranks(runs):
    """Frozen parameters are float32 in FSDP and 16-bit in ZeRO, so their hash is another one."""
    for (model, strategy, world), run in runs.items():
        like = runs[model, "fsdp" if model == "frozen" else "ddp", 1]
        if strategy != "ddp":
            assert run.digest == like.digest, (model, strategy, world)


def test_some_steps_of_the_fp16_run_are_skipped(runs):
    skipped = runs["fp16", "fsdp2", 3].skipped
    assert any(skipped)
    assert not all(skipped)


@pytest.mark.parametrize("strategy", FSDP)
def test_it_goes_on_at_another_number_of_ranks_with_the_same_bits(runs, strategy, tmp_path):
    path = f"{tmp_path}/half"
    chosen = {**COMMON, **MODELS["fp32"], "strategy": strategy, "reduction": "canonical"}
    half = {**chosen, "steps": 1, "schedule_steps": STEPS, "save": path, "log": f"{path}.jsonl"}
    worlds.train_on(2, [half])
    rest = worlds.train_on(3, [{"resume": path, "steps": STEPS, "log": f"{path}.rest"}])[0][0]
    whole = runs["fp32", "ddp", 1]
    assert (rest.losses, rest.digest) == (whole.losses[1:], whole.digest)
