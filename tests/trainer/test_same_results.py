"""Canonical reduction: the same bits at any number of ranks, by any strategy, through a resume."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.support.combinations import choose_combinations
from tests.trainer import worlds

pytestmark = pytest.mark.slow

WORLDS = (1, 2, 3, 4, 5)  # four and five ranks do not divide 6 micro batches
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp2")
COMMON = {
    "reduction": "canonical",
    "global_batch": 6,
    "micro_batch": 1,
    "seq_len": 16,
    "steps": 4,
    "dropout": 0.1,
    "clip": 0.5,
    "schedule": "WarmupDecayLR",
    "warmup_steps": 2,
    "reduce_bucket_size": 20_000,
    "sub_group_size": 20_000,
}
MODELS = {
    "bf16": {"precision": "bf16", "tie_embeddings": True, "freeze": (r"layers\.0\.mlp\.up",)},
    "fp32-gpt2": {"precision": "fp32", "model": "tiny-gpt2", "param_groups": "single"},
    "fp16-overflowing": {
        "precision": "fp16",
        "initial_scale_power": 16,
        "loss_scale_window": 1,
        "hysteresis": 1,
        "activation_checkpointing": True,
    },
    "bf16-sums": {
        "precision": "bf16",
        "grad_dtype": "bf16",
        "freeze": (r"layers\.1\.", r"layers\.0\.input_layernorm", r"model\.norm", "embed"),
    },
}
JOBS = list(itertools.product(MODELS, STRATEGIES))
OVERFLOWING = [("fp16-overflowing", "zero3", 4), ("fp16-overflowing", "fsdp2", 3)]
RUNS = choose_combinations(
    itertools.product(MODELS, STRATEGIES, WORLDS),
    needed=[
        *OVERFLOWING,
        *((model, "ddp", 1) for model in MODELS),
    ],  # the others are compared to it
)


def job(directory, model, **changes):
    name = "-".join(str(value).replace("/", "_") for value in (model, *changes.values()))
    chosen = {**COMMON, **MODELS.get(model, {}), **changes}
    return {**chosen, "save": f"{directory}/{name}", "log": f"{directory}/{name}.jsonl"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return (model, strategy, world) -> what an unbroken run of all steps logged."""
    results = {}
    for world in WORLDS:
        directory = tmp_path_factory.mktemp(f"world-{world}")
        keys = [(model, strategy) for model, strategy, ranks in RUNS if ranks == world]
        jobs = [job(directory, model, strategy=s, is_saved=False) for model, s in keys]
        runs_of_jobs = worlds.train_on(world, jobs)[0]
        results |= {(*key, world): run for key, run in zip(keys, runs_of_jobs, strict=True)}
    return results


@pytest.mark.parametrize("model", MODELS)
def test_losses_norms_scales_and_parameters_have_the_same_bits_everywhere(trained, model):
    one = trained[model, "ddp", 1]
    assert len(set(one.losses)) == COMMON["steps"], "it trains"
    runs = {key: run for key, run in trained.items() if key[0] == model}
    assert {world for _, _, world in runs} == set(WORLDS)
    for key, run in runs.items():
        assert_same(run, one, key)


def assert_same(run, one, key):
    """Frozen parameters are float32 in FSDP and 16-bit in ZeRO, so their hash is another one."""
    model, strategy, *_ = key
    if "freeze" in MODELS[model] and "fsdp" in strategy:
        run = dataclasses.replace(run, digest=one.digest)
    assert run == one, key


@pytest.mark.parametrize("key", OVERFLOWING)
def test_the_scale_of_the_fp16_case_grows_overflows_and_backs_off(trained, key):
    run = trained[key]
    assert any(run.skipped)
    assert not all(run.skipped)
    assert any(later > earlier for earlier, later in zip(run.scales, run.scales[1:], strict=False))


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """Return (model, strategy) -> the first two steps on two ranks, and where they were saved."""
    directory = tmp_path_factory.mktemp("halves")
    jobs = [
        job(directory, model, strategy=strategy, steps=2, schedule_steps=COMMON["steps"])
        for model, strategy in JOBS
    ]
    runs_of_jobs = worlds.train_on(2, jobs)[0]
    return {
        key: (run, chosen["save"])
        for key, chosen, run in zip(JOBS, jobs, runs_of_jobs, strict=True)
    }


@pytest.mark.parametrize("world", [2, 3])
def test_a_resumed_run_ends_as_the_unbroken_one_from_any_stage_to_any(
    trained, halves, tmp_path, world
):
    routes = [(m, s, STRATEGIES[(i + world) % len(STRATEGIES)]) for i, (m, s) in enumerate(JOBS)]
    if world == 2:
        routes = [(model, strategy, strategy) for model, strategy in JOBS]
    jobs = []
    for model, strategy, into in routes:
        name = f"{tmp_path}/{model}-{strategy}-{into}"
        source = halves[model, strategy][1]
        jobs.append(
            {
                "resume": source,
                "steps": COMMON["steps"],
                "strategy": into,
                "reduction": COMMON["reduction"],
                "save": name,
                "log": f"{name}.jsonl",
                "is_saved": False,
            }
        )
    runs_of_jobs = worlds.train_on(world, jobs)[0]
    for (model, strategy, into), rest in zip(routes, runs_of_jobs, strict=True):
        whole = halves[model, strategy][0] + rest
        assert_same(whole, trained[model, "ddp", 1], (model, into, strategy))


OFFLOAD = [
    {"strategy": "zero1", "offload_optimizer": "cpu"},
    {"strategy": "zero2", "offload_optimizer": "cpu"},
    {"strategy": "zero3", "offload_optimizer": "cpu", "offload_param": "cpu"},
]


def test_offload_changes_where_things_are_and_nothing_else(trained, tmp_path):
    jobs = [job(tmp_path, "bf16", **changes) for changes in OFFLOAD]
    for run in worlds.train_on(2, jobs)[0]:
        assert run == trained["bf16", "ddp", 1]


def test_fast_reduction_is_near_but_need_not_be_equal(trained, tmp_path):
    jobs = [
        job(tmp_path, "fp32-gpt2", strategy=strategy, reduction="fast")
        for strategy in STRATEGIES[:4]  # test_fsdp has FSDP's
    ]
    canonical = trained["fp32-gpt2", "ddp", 1].values()
    for run in worlds.train_on(3, jobs)[0]:
        assert run.values() == pytest.approx(canonical, rel=1e-5)
