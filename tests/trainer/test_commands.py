"""The command line as people use it, end to end: the example configurations, and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import reshard
from tests.trainer import worlds
from trainer.checkpoint import files, foreign, state

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
EXAMPLES = {  # and their global batch on two ranks
    "zero2_bf16.json": 8,
    "zero2_fp16_auto.json": 2,
    "zero3_offload_auto.json": 2,
    "accelerate_deepspeed.yaml": 2,
    "accelerate_fsdp.yaml": 2,
}


def flags(directory, *more):
    return ["--save", f"{directory}/run", "--log", f"{directory}/log.jsonl", *more]


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-mixtral", "tiny-gpt2"])
def test_every_named_model_trains_in_the_default_precision(model, tmp_path):
    printed = worlds.command(1, flags(tmp_path, "--model", model, "--steps", "1"))
    assert f"saved {tmp_path}/run/global_step1" in printed


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_configuration_runs_as_it_is_and_goes_on(tmp_path, name):
    kind = "--deepspeed" if name.endswith("json") else "--accelerate"
    config = [kind, str(CONFIGS / name)]
    printed = worlds.command(2, flags(tmp_path, *config, "--steps", "2", "--lr", "0.003"))
    assert f"saved {tmp_path}/run/global_step2" in printed
    document = state.read(tmp_path / "run/global_step2")
    assert document["progress"]["samples"] == 2 * EXAMPLES[name]

    whole = worlds.command(2, flags(tmp_path / "w", *config, "--steps", "3", "--lr", "0.003"))
    resume = ["--resume", f"{tmp_path}/run", "--steps", "3", *flags(tmp_path)]
    printed = worlds.command(2, [*resume, "--schedule-steps", "3"])
    if "Warmup" not in document["settings"]["schedule"]:  # a schedule over two steps is another one
        assert printed.splitlines()[-1] == whole.splitlines()[-1], "the same parameters"
    assert len(worlds.read_log(tmp_path / "log.jsonl").losses) == 3


TINIEST = {
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_rank_without_elements_of_a_group_counts_its_updates(tmp_path, strategy):
    """The only norm that trains has 8 elements, of which the last of 3 or 5 ranks has none."""
    (tmp_path / "config.json").write_text(json.dumps(TINIEST))
    ranks = {"zero1": 3, "zero3": 5}[strategy]
    frozen = ["--freeze", "input_layernorm", "--freeze", "post_attention_layernorm"]
    common = [*frozen, "--strategy", strategy, "--model", f"{tmp_path}/config.json"]
    common += ["--seq-len", "8", "--global-batch", str(ranks), *flags(tmp_path)]
    worlds.command(ranks, [*common, "--steps", "1"])
    worlds.command(ranks, [*common, "--steps", "2", "--resume", f"{tmp_path}/run"])
    with foreign.allow_classes():
        for path in (tmp_path / "run/global_step2").glob("*_optim_states.pt"):
            states = files.load(path)["optimizer_state_dict"]
            base = states.get("base_optimizer_state") or states["optimizer_state_dict"]
            assert [float(slots["step"]) for slots in base["state"].values()] == [2.0, 2.0]
    assert reshard.verify(tmp_path / "run").passed


def test_the_log_counts_samples_and_memory(tmp_path):
    worlds.command(2, flags(tmp_path, *"--strategy zero3 --steps 1 --global-batch 4".split()))
    line = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])
    assert line["peak_memory"] > 2**20
    assert line["samples"] == 4


def test_a_finished_run_says_so_and_changes_nothing(tmp_path):
    worlds.command(1, flags(tmp_path, "--steps", "1"))
    before = sorted((tmp_path / "run").rglob("*"))
    printed = worlds.command(1, ["--resume", f"{tmp_path}/run"])
    assert "nothing to do" in printed
    assert sorted((tmp_path / "run").rglob("*")) == before
