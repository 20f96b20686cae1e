"""Our files in real DeepSpeed, its files in our engines, and both trained on: the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import reshard
from tests.judges import server

pytestmark = pytest.mark.judge

STAGES = ("ddp", "zero1", "zero2", "zero3")
PRECISIONS = ("fp32", "bf16", "fp16")
ALL = [(stage, precision) for precision in PRECISIONS for stage in STAGES]
SOME = [*((stage, "fp32") for stage in STAGES), ("zero2", "bf16"), ("zero2", "fp16")]
AT, STEPS = 3, 5
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
    "persistence_threshold": 50,
}
# Without accumulation: DeepSpeed scales the loss after dividing by it, so it overflows later.
FP16 = {"micro_batch": 3, "initial_scale_power": 17}
PLAIN = {"reduction": "fast", "engine": "deepspeed"}
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

    def chosen(self, stage, precision, engine, **more):
        own = PLAIN if engine == "deepspeed" else {"reduction": "canonical", "engine": "native"}
        # Stage 0 of DeepSpeed knows no other; stage 1 in bf16 makes a BF16_Optimizer of fp32.
        gradients = precision if stage == "ddp" else "fp32"
        base = {"model": str(self.root / "model" / "config.json"), "strategy": stage}
        return {
            **COMMON,
            **base,
            **own,
            **(FP16 if precision == "fp16" else {}),
            "precision": precision,
            "grad_dtype": gradients,
            "progress": False,
            **more,
        }

    def train(self, name, stage, precision, engine, source=None, **more):
        if source:
            saved = engine == "deepspeed" and source.startswith("ds-")  # where it resumed itself
            more |= {"resume": self.run(source), "tag": f"global_step{AT}", "is_saved": saved}
        log = self.run(name) + ".jsonl"
        chosen = self.chosen(stage, precision, engine, save=self.run(name), log=log, **more)
        self.add(name, "train", **chosen)

    def look(self, name, stage, precision, engine, source, **more):
        more = {"resume": self.run(source), "tag": f"global_step{AT}", **more}
        self.add(name, "look", **self.chosen(stage, precision, engine, **more))


def bare_config(stage, world, **more):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 6 // world,
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1.0, "weight_decay": 0.1, "torch_adam": True},
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
        "zero_optimization": {"stage": int(stage[-1]), "sub_group_size": 2000},
        **more,
    }


def plan_two_ranks(plan, *, nvme):
    for stage, precision in ALL:
        key = f"{stage}-{precision}"
        plan.train(f"native-{key}", stage, precision, "native")
        plan.train(f"ds-{key}", stage, precision, "deepspeed")
        plan.train(f"ds-of-native-{key}", stage, precision, "deepspeed", f"native-{key}")
        plan.train(f"native-of-ds-{key}", stage, precision, "native", f"ds-{key}")
        if (stage, precision) in SOME:
            plan.train(f"ds-of-ds-{key}", stage, precision, "deepspeed", f"ds-{key}")
        for of in ("native", "ds"):
            plan.look(f"look-native-of-{of}-{key}", stage, precision, "native", f"{of}-{key}")
            plan.look(f"look-ds-of-{of}-{key}", stage, precision, "deepspeed", f"{of}-{key}")
    for stage in STAGES[1:]:
        run = plan.run(f"native-{stage}-fp32")
        plan.add(
            f"bare-{stage}",
            "bare",
            run=run,
            tag=f"global_step{AT}",
            model=f"{run}/global_step{AT}",
            config=bare_config(stage, 2),
            frozen=FROZEN,
            first=AT * 6,
            steps=STEPS - AT,
            chosen=plan.chosen(stage, "fp32", "native"),
        )
    plan.train("offload-zero2", "zero2", "fp32", "deepspeed", offload_optimizer="cpu")
    both = {"offload_optimizer": "cpu", "offload_param": "cpu"}
    plan.train("offload-zero3", "zero3", "fp32", "deepspeed", **both)
    for stage, offload in (("zero2", {"offload_optimizer": "cpu"}), ("zero3", both)):
        name = f"offload-{stage}"
        plan.train(f"{name}-again", stage, "fp32", "deepspeed", name, **offload)
    place = {"nvme_path": plan.run("swap"), "offload_optimizer": "nvme"}
    chosen = plan.chosen("zero3", "fp32", "deepspeed", **place)
    plan.add("no-libaio", "without_libaio", **chosen)
    plan.add(
        "nvme-resume",
        "refused_resume",
        **plan.chosen("zero3", "fp32", "deepspeed", **place),
        resume=plan.run("ds-zero3-fp32"),
        tag=f"global_step{AT}",
    )
    plan.add(
        "other-stage",
        "refused_resume",
        **plan.chosen("zero3", "fp32", "deepspeed"),
        resume=plan.run("native-zero2-fp32"),
        tag=f"global_step{AT}",
    )
    if nvme:
        plan.train("nvme", "zero3", "fp32", "deepspeed", **place, save_every=0)
    overflows = [step in (3, 4, 5, 11, 20) for step in range(40)]
    for window in (1, 2, 3, 10):
        plan.add(f"scalers-{window}", "scalers", window=window, overflows=overflows)
    disk = plan.chosen("zero2", "fp32", "deepspeed", save=plan.run("full"))
    plan.add("full-disk", "full_disk", at=STEPS, **disk)


def plan_three_ranks(plan):
    tag = f"global_step{AT}"
    for stage in STAGES:
        key = f"{stage}-fp32"
        plan.train(f"native-{key}-3", stage, "fp32", "native")
        plan.train(f"ds-of-native-{key}-3", stage, "fp32", "deepspeed", f"native-{key}-3")
        plan.look(f"look-ds-of-native-{key}-3", stage, "fp32", "deepspeed", f"native-{key}-3")
        plan_native_of_deepspeed(plan, stage, 3)
    for stage in UNIVERSAL:
        plan.add(
            f"universal-{stage}",
            "bare",
            run=plan.run(f"universal-{stage}"),
            tag=tag,
            model=plan.run("model"),
            config=bare_config(stage, 3, checkpoint={"load_universal": True}),
            frozen=FROZEN,
            first=AT * 6,
            steps=STEPS - AT,
            chosen=plan.chosen(stage, "fp32", "native"),
        )
        chosen = plan.chosen(stage, "fp32", "deepspeed")
        source = {"resume": plan.run(f"native-{stage}-fp32"), "tag": tag}
        plan.add(f"other-world-{stage}", "refused_resume", **chosen, **source)


def plan_native_of_deepspeed(plan, stage, world):
    for precision in PRECISIONS if stage == "zero2" else ("fp32",):
        key = f"{stage}-{precision}"
        micro = {"micro_batch": 2} if precision == "fp16" and world == 3 else {}
        for look, do in (("", plan.train), ("look-", plan.look)):
            name = f"{look}native-of-ds-{key}-{world}"
            do(name, stage, precision, "native", f"ds-{key}", **micro)


def plan_one_rank(plan):
    tag = f"global_step{AT}"
    for stage in STAGES:
        plan_native_of_deepspeed(plan, stage, 1)
    for stage in UNIVERSAL:
        run, out = plan.run(f"native-{stage}-fp32"), plan.run(f"universal-{stage}")
        plan.add(f"to-universal-{stage}", "to_universal", run=run, tag=tag, out=out)
    for stage in STAGES[1:]:
        for precision in PRECISIONS:
            run = plan.run(f"native-{stage}-{precision}")
            plan.add(f"merged-{stage}-{precision}", "zero_to_fp32", run=run, tag=tag)
    plan_refusals(plan)


def plan_refusals(plan):
    chosen = plan.chosen("zero2", "bf16", "deepspeed")
    plan.add("missing", "without_deepspeed", **chosen)
    plan.add("skip", "refused", **{**chosen, "on_nan": "skip"})
    plan.add("ddp-gradients", "refused", **{**chosen, "strategy": "ddp"})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def results(root, request):
    """Return the result of every job, by its name."""
    plan = Plan(root)
    plan.world(2)
    plan_two_ranks(plan, nvme=request.config.getoption("--nvme"))
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


def apart(run, other, start=0):
    """Return the largest relative difference of losses."""
    left, right = (np.array(each.values()) for each in (run, other))
    right = right[start:]
    assert len(left) == len(right)
    return float(np.max(np.abs(left - right) / np.abs(right)))


def assert_same(state, other):
    """Compare masters and moments bit by bit."""
    for key in ("parameters", "exp_avg", "exp_avg_sq"):
        assert state[key].keys() == other[key].keys()
        for name, value in state[key].items():
            assert np.array_equal(value, other[key][name]), (key, name)


@pytest.mark.parametrize(("stage", "precision"), ALL)
def test_deepspeed_takes_over_our_state(results, stage, precision):
    theirs = results[f"look-ds-of-native-{stage}-{precision}"]
    ours = results[f"look-native-of-native-{stage}-{precision}"]
    assert_same(theirs, ours)
    assert theirs["steps"] == ours["steps"] == {float(ours["progress"]["updates"])}
    assert theirs["progress"] == ours["progress"]
    counters, scaler = theirs["counters"], theirs["scaler"]
    assert counters["global_steps"] == AT
    assert counters["skipped_steps"] == ours["progress"]["skipped"]
    assert (counters["skipped_steps"] > 0) == (precision == "fp16")
    assert counters["global_samples"] == AT * 6
    assert counters["last_batch_iteration"] == ours["progress"]["updates"] - 1
    if precision == "fp16":
        assert scaler == ours["scaler"]
        fresh = (2.0 ** FP16["initial_scale_power"], 2)
        assert (scaler["scale"], scaler["patience"]) != fresh


@pytest.mark.parametrize(("stage", "precision"), ALL)
def test_deepspeed_continues_our_run(results, stage, precision):
    ours = results[f"native-{stage}-{precision}"]
    theirs = results[f"ds-of-native-{stage}-{precision}"]
    assert apart(theirs, ours, AT) < SANE[precision]
    assert theirs.skipped == ours.skipped[AT:]


@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_continues_our_run_of_three_ranks(results, stage):
    ours = results[f"native-{stage}-fp32-3"]
    assert apart(results[f"ds-of-native-{stage}-fp32-3"], ours, AT) < EXACT
    assert results[f"look-ds-of-native-{stage}-fp32-3"]["counters"]["global_steps"] == AT


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_script_without_trainer_continues_our_run(results, stage):
    loaded, losses = results[f"bare-{stage}"]
    tensors = results[f"native-{stage}-fp32"].values()[AT:]
    assert losses == pytest.approx(tensors, rel=EXACT)
    assert loaded["global_steps"] == AT
    assert loaded["last_batch_iteration"] == AT - 1
    # Its optimizer was made with another rate.
    assert [group["lr"] for group in loaded["groups"]] == pytest.approx([4e-3, 4e-3])
    assert [group["weight_decay"] for group in loaded["groups"]] == [0.1, 0.0]
    assert [group["betas"] for group in loaded["groups"]] == [(0.9, 0.999)] * 2


@pytest.mark.parametrize(("stage", "precision"), ALL)
def test_we_take_over_deepspeeds_state(results, stage, precision):
    ours = results[f"look-native-of-ds-{stage}-{precision}"]
    theirs = results[f"look-ds-of-ds-{stage}-{precision}"]
    assert_same(ours, theirs)
    assert ours["steps"] == theirs["steps"]
    assert ours["progress"] == theirs["progress"]
    if precision == "fp16":
        assert ours["scaler"] == theirs["scaler"]


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
    theirs = results[f"look-ds-of-ds-{key}"]
    assert_same(results[f"look-native-of-ds-{key}-{world}"], theirs)
    if (precision, world) == ("fp16", 3):
        return  # other micro batches, so other overflows
    run = results[f"native-of-ds-{key}-{world}"]
    assert apart(run, results[f"ds-{key}"], AT) < SANE[precision]


@pytest.mark.parametrize(("stage", "precision"), SOME)
def test_deepspeed_resumes_itself_bitwise_through_our_loop(results, stage, precision):
    whole, part = results[f"ds-{stage}-{precision}"], results[f"ds-of-ds-{stage}-{precision}"]
    assert part.losses == whole.losses[AT:]
    assert part.scales == whole.scales[AT:]
    assert part.digest == whole.digest


@pytest.mark.parametrize("stage", STAGES)
def test_both_engines_from_scratch(results, stage):
    ours, theirs = results[f"native-{stage}-fp32"], results[f"ds-{stage}-fp32"]
    assert apart(theirs, ours) < EXACT
    for left, right in zip(ours.norms, theirs.norms, strict=True):
        assert float.fromhex(left) == pytest.approx(float.fromhex(right), rel=1e-5)


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


@pytest.mark.parametrize(("stage", "precision"), ALL)
def test_reshard_reads_our_files(results, root, tmp_path, stage, precision):
    state = results[f"look-native-of-native-{stage}-{precision}"]
    source = root / f"native-{stage}-{precision}"
    if stage == "ddp" and precision != "bf16":  # shapes are ambiguous, and no masters give names
        dtype = {"fp32": torch.float32, "fp16": torch.float16}[precision]
        tensors = {n: torch.tensor(v).to(dtype) for n, v in state["parameters"].items()}
        with reshard.open(source, tag=f"global_step{AT}") as checkpoint:
            assert all(torch.equal(checkpoint[n][...], v) for n, v in tensors.items())
        return
    reshard.merge(source, tmp_path / "x.safetensors", dtype="fp32", tag=f"global_step{AT}")
    merged = load_file(tmp_path / "x.safetensors")
    for name, value in state["parameters"].items():
        assert np.array_equal(merged[name].numpy(), value), name
    with reshard.open(source, tag=f"global_step{AT}") as checkpoint:
        for key in ("exp_avg", "exp_avg_sq"):
            moment = checkpoint.optimizer(key)
            for name, value in state[key].items():
                assert np.array_equal(moment[name][...].numpy(), value), (key, name)


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_offload_to_the_cpu(results, stage):
    run = results[f"offload-{stage}"]
    assert apart(run, results[f"ds-{stage}-fp32"]) < EXACT
    again = results[f"offload-{stage}-again"]
    assert again.losses == run.losses[AT:]
    assert again.digest == run.digest


def test_offload_to_disk(results):
    if "nvme" not in results:
        pytest.skip("DeepSpeed compiles its disk operation for minutes; give --nvme")
    assert apart(results["nvme"], results["ds-zero3-fp32"]) < EXACT


@pytest.mark.parametrize("stage", UNIVERSAL)
def test_universal_conversion_of_our_files(results, stage):
    assert results[f"to-universal-{stage}"] is None
    loaded, losses = results[f"universal-{stage}"]
    assert loaded["global_steps"] == AT
    assert losses == pytest.approx(results[f"native-{stage}-fp32"].values()[AT:], rel=EXACT)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("missing", "SettingsError", ["pip install deepspeed"]),
        ("skip", "SettingsError", ["--on-nan skip", "--on-nan stop"]),
        ("ddp-gradients", "SettingsError", ["stage 0", "--grad-dtype bf16"]),
        ("no-libaio", "SettingsError", ["nvme", "aio", "libaio-dev"]),
        ("nvme-resume", "SettingsError", ["does not restore", "--engine native"]),
        (
            "other-stage",
            "CheckpointError",
            ["zero_pp_rank_0_mp_rank_00_model_states.pt is missing"],
        ),
        ("other-world-zero1", "CheckpointError", ["2 ranks", "this run has 3", "--world-size 3"]),
        ("other-world-zero3", "CheckpointError", ["2 ranks", "this run has 3", "reshard split"]),
        ("full-disk", "TrainingError", ["rank 1 could not write", "No space left on device"]),
    ],
)
def test_refusals(results, name, kind, words):
    found, text = results[name]
    assert found == kind, text
    for word in words:
        assert word in text


def test_run_directories_hold_whole_checkpoints_only(results, root):
    assert results["ds-zero2-fp32"]
    names = {path.name for path in (root / "ds-zero2-fp32").iterdir()}
    assert names == {f"global_step{AT}", f"global_step{STEPS}", "latest"}
    inside = {path.name for path in (root / "ds-zero2-fp32" / f"global_step{AT}").iterdir()}
    assert {name for name in inside if name.endswith(".pt")} == {
        "mp_rank_00_model_states.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    }
    assert not any(name.startswith("zero_to") for name in inside)
    assert (root / "full" / "latest").read_text().strip() == f"global_step{AT}"


@pytest.mark.parametrize("window", [1, 2, 3, 10])
def test_our_loss_scale_follows_deepspeeds(results, window):
    scales = results[f"scalers-{window}"]
    assert [ours for _, ours in scales] == [theirs for theirs, _ in scales]


def test_on_the_command_line_without_a_launcher(tmp_path):
    """One rank, alone: nothing is printed beyond what our loop prints."""
    flags = "--engine deepspeed --strategy zero1 --precision fp32 --steps 2 --seq-len 16 --save r"
    command = [sys.executable, "-m", "trainer", *flags.split()]
    hidden = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "DS_ACCELERATOR"}
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    starts = ["step 1/2", "step 2/2", "saved r/global_step2", "parameters sha256"]
    lines = done.stdout.splitlines()
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
