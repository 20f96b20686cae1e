"""Our files in a script of real DeepSpeed, its files in our engines, and both trained on."""

from __future__ import annotations

import json
import os
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.judges import server
from trainer.core.schedule import compute_learning_rate
from trainer.settings import Settings

pytestmark = pytest.mark.judge

STAGES = ("ddp", "zero1", "zero2", "zero3")
PRECISIONS = ("fp32", "bf16", "fp16")
ALL = [(stage, precision) for precision in PRECISIONS for stage in STAGES]
SOME = [*((stage, "fp32") for stage in STAGES), ("zero2", "bf16"), ("zero2", "fp16")]
AT, STEPS = 3, 5
TAG = f"global_step{AT}"
EXACT, SANE = 1e-6, {"fp32": 1e-6, "bf16": 3e-3, "fp16": 3e-4}
"""Relative difference of losses: required in fp32; observed in 16 bits, with a margin."""
MODEL = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
FROZEN = (r"layers\.0\.mlp\.up", r"layers\.1\.input_layernorm")
COMMON = {
    "global_batch": 6,
    "micro_batch": 1,
    "seq_len": 16,
    "steps": STEPS,
    "save_every": AT,
    "dropout": 0.0,
    "freeze": FROZEN,
    "schedule": "WarmupDecayLR",
    "schedule_steps": 20,
    "warmup_steps": 2,
    "warmup_type": "linear",
    "warmup_min_lr": 1e-3,
    "lr": 4e-3,
    "weight_decay": 0.1,
    "reduce_bucket_size": 2000,
    "sub_group_size": 2000,
}
# Without accumulation: DeepSpeed scales the loss after dividing by it, so it overflows later.
FP16 = {"micro_batch": 3, "initial_scale_power": 17}
SCHEDULE = {n: v for n, v in COMMON.items() if "warmup" in n or "schedule" in n or n == "lr"}
UNIVERSAL = ("zero1", "zero2", "zero3")


class Plan:
    """Jobs for the worker, by name; their directories."""

    def __init__(self, root):
        self.root = root
        self.worlds = []
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text(json.dumps(MODEL))

    def world(self, world):
        self.worlds.append((world, []))

    def add(self, name, function, **arguments):
        self.worlds[-1][1].append((name, function, arguments))

    def run(self, name):
        return str(self.root / name)

    def chosen(self, stage, precision, **more):
        # Stage 0 of DeepSpeed knows no other; stage 1 in bf16 makes a BF16_Optimizer of fp32.
        gradients = precision if stage == "ddp" else "fp32"
        return {
            **COMMON,
            "model": str(self.root / "model" / "config.json"),
            "strategy": stage,
            "reduction": "canonical",
            **(FP16 if precision == "fp16" else {}),
            "precision": precision,
            "grad_dtype": gradients,
            "progress": False,
            **more,
        }

    def train(self, name, stage, precision, source=None, **more):
        if source:
            more |= {"resume": self.run(source), "tag": TAG, "is_saved": False}
        log = self.run(name) + ".jsonl"
        self.add(
            name, "train", **self.chosen(stage, precision, save=self.run(name), log=log, **more)
        )

    def look(self, name, stage, precision, source, **more):
        more = {"resume": self.run(source), "tag": TAG, **more}
        self.add(name, "look", **self.chosen(stage, precision, **more))

    def bare(self, name, stage, precision, source=None, **config):
        """Run the script of real DeepSpeed, which starts and saves, or goes on from ``source``."""
        place = {"load": (self.run(source), TAG)} if source else {"save": self.run(name)}
        self.add(
            name,
            "bare",
            config={**bare_config(stage, precision, self.worlds[-1][0]), **config},
            chosen=self.chosen(stage, precision),
            at=AT,
            **place,
        )


def bare_config(stage, precision, world):
    micro = FP16["micro_batch"] if precision == "fp16" else 1
    number = STAGES.index(stage)
    zero = {"stage": number}
    if number:
        zero["reduce_bucket_size"] = 2000
    if number == 3:
        zero |= {"sub_group_size": 2000, "stage3_param_persistence_threshold": 50}
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 6 // world // micro,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 4e-3, "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": 20,
                "warmup_num_steps": 2,
                "warmup_type": "linear",
                "warmup_min_lr": 1e-3,
                "warmup_max_lr": 4e-3,
            },
        },
        "zero_optimization": zero,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
        if number:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = FP16["initial_scale_power"]
    return config


def plan_two_ranks(plan):
    for stage, precision in ALL:
        key = f"{stage}-{precision}"
        plan.train(f"native-{key}", stage, precision)
        plan.bare(f"ds-{key}", stage, precision)
        plan.bare(f"ds-of-native-{key}", stage, precision, f"native-{key}")
        plan.train(f"native-of-ds-{key}", stage, precision, f"ds-{key}")
        for of in ("native", "ds"):
            plan.look(f"look-native-of-{of}-{key}", stage, precision, f"{of}-{key}")


def plan_three_ranks(plan):
    for stage in STAGES:
        key = f"{stage}-fp32"
        plan.train(f"native-{key}-3", stage, "fp32")
        plan.bare(f"ds-of-native-{key}-3", stage, "fp32", f"native-{key}-3")
        plan_native_of_deepspeed(plan, stage, 3)
    for stage in UNIVERSAL:
        name = f"universal-{stage}"
        plan.bare(name, stage, "fp32", name, checkpoint={"load_universal": True})


def plan_native_of_deepspeed(plan, stage, world):
    for precision in PRECISIONS if stage == "zero2" else ("fp32",):
        key = f"{stage}-{precision}"
        micro = {"micro_batch": 2} if precision == "fp16" and world == 3 else {}
        for look, do in (("", plan.train), ("look-", plan.look)):
            name = f"{look}native-of-ds-{key}-{world}"
            do(name, stage, precision, f"ds-{key}", **micro)


def plan_one_rank(plan):
    for stage in STAGES:
        plan_native_of_deepspeed(plan, stage, 1)
    for stage in UNIVERSAL:
        run, out = plan.run(f"native-{stage}-fp32"), plan.run(f"universal-{stage}")
        plan.add(f"to-universal-{stage}", "to_universal", run=run, tag=TAG, out=out)
    for stage in STAGES[1:]:
        for precision in PRECISIONS:
            run = plan.run(f"native-{stage}-{precision}")
            plan.add(f"merged-{stage}-{precision}", "zero_to_fp32", run=run, tag=TAG)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the result of every job, by its name."""
    root = tmp_path_factory.mktemp("deepspeed")
    plan = Plan(root)
    plan.world(2)
    plan_two_ranks(plan)
    plan.world(1)
    plan_one_rank(plan)
    plan.world(3)
    plan_three_ranks(plan)
    torch.save(plan.worlds, root / "jobs.pt")
    worker = ["-m", "tests.trainer.deepspeed_worker", str(root / "jobs.pt")]
    command = [*server.fork_python(server.DEEPSPEED), *worker]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return Results(torch.load(root / "jobs.pt.done", weights_only=False))


class Results(dict):
    """By name of the job; asking for one that failed is an error."""

    def __repr__(self):
        return "results"

    def __getitem__(self, name):
        result = super().__getitem__(name)
        assert not isinstance(result, str), f"{name}: {result}"
        return result


def losses_of(run):
    return np.array(run.losses if isinstance(run, SimpleNamespace) else run.values())


def apart(run, other, start=0):
    """Return the largest relative difference of losses."""
    left, right = map(losses_of, (run, other))
    right = right[start:]
    assert len(left) == len(right)
    return float(np.max(np.abs(left - right) / np.abs(right)))


def assert_same(state, other):
    """Compare masters and moments bit by bit."""
    for key in ("parameters", "exp_avg", "exp_avg_sq"):
        assert state[key].keys() == other[key].keys()
        for name, value in state[key].items():
            assert np.array_equal(value, other[key][name]), (key, name)


def assert_same_scale(theirs, ours, stage):
    """Compare the loss scale and its counts; stage 0 of DeepSpeed has no hysteresis."""
    names = theirs.keys() - ({"patience"} if stage == "ddp" else set())
    assert {name: theirs[name] for name in names} == {name: ours[name] for name in names}


@pytest.mark.parametrize(("stage", "precision"), ALL)
def test_deepspeed_takes_over_our_state(results, stage, precision):
    theirs = results[f"ds-of-native-{stage}-{precision}"]
    ours = results[f"look-native-of-native-{stage}-{precision}"]
    assert_same(theirs.state, ours)
    progress, counters = ours["progress"], theirs.counters
    assert theirs.state["steps"] == ours["steps"] == {float(progress["updates"])}
    assert counters["global_steps"] == AT
    assert counters["skipped_steps"] == progress["skipped"]
    assert (counters["skipped_steps"] > 0) == (precision == "fp16")
    assert counters["global_samples"] == AT * 6
    assert counters["last_batch_iteration"] == progress["updates"] - 1
    # Its optimizer was made with the highest rate.
    rates = {group["lr"] for group in counters["groups"]}
    assert rates == {compute_learning_rate(Settings(**SCHEDULE), progress["updates"])}
    assert [group["weight_decay"] for group in counters["groups"]] == [0.1, 0.0]
    assert [group["betas"] for group in counters["groups"]] == [(0.9, 0.999)] * 2
    if precision == "fp16":
        assert_same_scale(counters["scaler"], ours["scaler"], stage)
        fresh = (2.0 ** FP16["initial_scale_power"], 2)
        assert (ours["scaler"]["scale"], ours["scaler"]["patience"]) != fresh


RUNS = [f"{stage}-{precision}" for stage, precision in ALL]


@pytest.mark.parametrize("run", [*RUNS, *(f"{stage}-fp32-3" for stage in STAGES)])
def test_deepspeed_continues_our_run(results, run):
    ours, theirs = results[f"native-{run}"], results[f"ds-of-native-{run}"]
    assert apart(theirs, ours, AT) < SANE[run.split("-")[1]]
    assert theirs.counters["global_steps"] == AT
    assert theirs.skipped == ours.skipped[AT:]


@pytest.mark.parametrize(("stage", "precision"), ALL)
def test_we_take_over_deepspeeds_state(results, stage, precision):
    ours, theirs = (
        results[f"look-native-of-ds-{stage}-{precision}"],
        results[f"ds-{stage}-{precision}"],
    )
    assert_same(ours, theirs.state)
    assert ours["steps"] == theirs.state["steps"]
    progress, counters = ours["progress"], theirs.counters
    assert progress == {
        "step": counters["global_steps"],
        "skipped": counters["skipped_steps"],
        "samples": counters["global_samples"],
        "updates": counters["last_batch_iteration"] + 1,
    }
    if precision == "fp16":
        assert_same_scale(counters["scaler"], ours["scaler"], stage)


@pytest.mark.parametrize(("stage", "precision"), ALL)
def test_we_continue_deepspeeds_run(results, stage, precision):
    theirs = results[f"ds-{stage}-{precision}"]
    ours = results[f"native-of-ds-{stage}-{precision}"]
    assert apart(ours, theirs, AT) < SANE[precision]
    assert ours.skipped == theirs.skipped[AT:]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("stage", "precision"), SOME)
def test_we_continue_deepspeeds_run_at_other_numbers_of_ranks(results, stage, precision, world):
    key = f"{stage}-{precision}"
    theirs = results[f"ds-{key}"]
    assert_same(results[f"look-native-of-ds-{key}-{world}"], theirs.state)
    if (precision, world) == ("fp16", 3):
        return  # other micro batches, so other overflows
    run = results[f"native-of-ds-{key}-{world}"]
    assert apart(run, theirs, AT) < SANE[precision]


@pytest.mark.parametrize("stage", STAGES)
def test_both_engines_from_scratch(results, stage):
    assert apart(results[f"ds-{stage}-fp32"], results[f"native-{stage}-fp32"]) < EXACT


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES[1:])
def test_deepspeeds_own_merge_reads_our_files(results, stage, precision):
    state = results[f"look-native-of-native-{stage}-{precision}"]
    merged = results[f"merged-{stage}-{precision}"]
    for name, value in state["exp_avg"].items():
        assert value.shape == merged[name].shape
        assert np.array_equal(merged[name], state["parameters"][name]), name
    frozen = state["parameters"].keys() - state["exp_avg"].keys()
    if stage != "zero1":  # there it drops what is frozen
        assert {n for n in frozen if np.array_equal(merged[n], state["parameters"][n])} == frozen
    assert np.array_equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])


@pytest.mark.parametrize("stage", UNIVERSAL)
def test_universal_conversion_of_our_files(results, stage):
    assert results[f"to-universal-{stage}"] is None
    theirs = results[f"universal-{stage}"]
    assert theirs.counters["global_steps"] == AT
    assert apart(theirs, results[f"native-{stage}-fp32"], AT) < EXACT
