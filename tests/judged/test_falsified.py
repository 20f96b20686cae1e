"""A small part of `falsified`, whose table is in docs/identity.md."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

import reshard
from reshard import formats
from reshard.checks.identity import check_identity
from reshard.errors import ReshardError
from reshard.formats.megatron.optimizers import dist_flat
from tests.judged import falsified
from tests.judged.mutations import list_sources

NO_FILE = {
    "betas": "a value that no optimizer can have is found when the files are joined",
    "param_shapes.#.*": "the masters do not fit it: their file is named, which can be wrong too",
}
NO_KEY = {  # the message says in words what it counts
    *("params", "numel_unpadded", "dp_world_size", "mp_world_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
}


@pytest.mark.parametrize(
    "name",
    [
        *("deepspeed z1_fp16", "deepspeed z3_fp32_ws3", "deepspeed moe_z0"),
        *("torch fsdp2_ranks", "library verl_fsdp2", "library trainer_ddp"),
        *("megatron gpt2_tp2pp2 torch", "megatron llama_distopt_tp2dp2 torch"),
    ],
)
def test_values_that_ranks_repeat_are_compared(made, torch_made, libraries, megatron_made, name):
    (source,) = (each for each in list_sources(made) if each.name == name)
    found = list(falsified.try_source(source))
    counts = Counter(trial.outcome for trial in found)
    assert counts[falsified.REFUSED] + counts[falsified.REPORTED] > 4
    bad = {falsified.SILENT, falsified.FALSE_ALARM}
    assert [trial.path for trial in found if trial.outcome in bad] == []
    refused = [trial for trial in found if trial.outcome == falsified.REFUSED]
    assert [t for t in refused if not (t.file or t.path.endswith(tuple(NO_FILE)))] == []
    assert [t for t in refused if not (t.key or t.path.endswith(tuple(NO_KEY)))] == []


def test_settings_that_differ_between_groups_of_ranks_are_refused():
    """In torch_dist each model-parallel group has the param groups of its optimizer."""
    objects = {
        f"optimizer.distributed.dp_group_idx_{number}.optimizer": [
            {"param_groups": [{"wd_mult": 1.0, "lr": 0.1}, {"wd_mult": 0.0, "lr": rate}]}
        ]
        for number, rate in enumerate((0.1, 0.1, 0.2))
    }
    with pytest.raises(ReshardError, match=r"lr of a param group is 0\.2 .* group 2, but 0\.1"):
        dist_flat.find_group_states(objects, None, "run")
    objects.popitem()
    assert len(dist_flat.find_group_states(objects, None, "run")) == 1


def without_first(mappings):
    return [dict(list(mapping.items())[1:]) for mapping in mappings]


LIES = {
    "group_paddings": lambda value: [n + 1 for n in value],
    "param_alignment_paddings": lambda value: [[n + 1 for n in group] for group in value],
    "partition_count": lambda value: [n + 1 for n in value],
    "param_slice_mappings": without_first,
    "clip_grad": lambda value: value + 1,
    "zero_stage": lambda value: 3 - int(value),
    "dynamic_loss_scale": lambda value: not value,
    "single_partition_of_fp32_groups": lambda value: value[:-1],
}


# Partitions can be read without these statements, so that --trust none ignores a wrong one.
CLAIMS = {"group_paddings", "partition_count", "param_slice_mappings"}


@pytest.mark.parametrize("key", LIES)
@pytest.mark.parametrize("case", ["z1_fp16", "z2_bf16_ws3", "z2_fp32_ws1", "moe_z1_ws4"])
def test_what_follows_from_the_parameters_is_compared(copied, case, key):
    run = copied(case)
    for path in run.rglob("*_optim_states.pt"):
        content = path.read_bytes()
        state = torch.load(path, weights_only=False)
        held = state["optimizer_state_dict"]
        held[key] = LIES[key](held[key])
        torch.save(state, path)
        with pytest.raises(ReshardError, match=rf"(?s)(?=.*{path.name}).*{key}"):
            check_identity(formats.read(run))
        if key in CLAIMS:
            check_identity(formats.read(run), "none")
        path.write_bytes(content)


def test_the_model_states_of_a_universal_checkpoint_are_compared(made, tmp_path):
    root = Path(shutil.copytree(made / "universal_z3" / "universal", tmp_path / "universal"))
    path = max(root.rglob("*model_states.pt"))
    state = torch.load(path, weights_only=False)
    state["global_steps"] += 1
    torch.save(state, path)
    with pytest.raises(ReshardError, match="global_steps is 4, but 3"):
        formats.read(root)


def test_both_copies_of_a_frozen_parameter_are_compared(copied, tmp_path):
    run = copied("z2_bf16")
    (path,) = run.rglob("mp_rank_00_model_states.pt")
    state = torch.load(path, weights_only=False)
    state["frozen_param_fragments"]["extras.frozen"] = torch.zeros(7, 11)
    torch.save(state, path)
    with pytest.raises(ReshardError, match=r"extras\.frozen: differs"):
        reshard.merge(run, tmp_path / "model.safetensors")
    assert reshard.verify(run, deep=True).check("replicas").failures
    (difference,) = reshard.verify(run).check("agreement").failures
    assert "extras.frozen differs between" in difference
    state["frozen_param_fragments"]["extras.frozen"] = torch.zeros(11, 7)
    torch.save(state, path)
    with pytest.raises(ReshardError, match=r"frozen_param_fragments has \[11, 7\]"):
        formats.read(run)


CONFIG_LIES = {
    "hidden_size": 0,
    "num_attention_heads": "x",
    "vocab_size": -1,
    "head_dim": 10**30,
    "num_hidden_layers": 3,  # two are stored
}


@pytest.mark.parametrize("key", [*CONFIG_LIES, None])
def test_verify_refuses_the_configs_that_merge_refuses(copied, key, tmp_path):
    run = copied("hf_z3_tied")
    config = json.loads((run / "config.json").read_text())
    if key is not None:
        assert key in config
    changed = json.dumps(config | {key: CONFIG_LIES[key]}) if key else '{"cut off'
    (run / "config.json").write_text(changed)
    with pytest.raises(ReshardError):
        reshard.merge(run, tmp_path / "model")
    report = reshard.verify(run)
    (failure,) = report.check("model").failures
    assert "config.json" in failure
    assert report.exit_code


def test_verify_refuses_a_tie_that_the_weights_deny(copied, tmp_path):
    run = copied("hf_z2")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ReshardError, match="is tied to"):
        reshard.merge(run, tmp_path / "model")
    (failure,) = reshard.verify(run).check("model").failures
    assert failure.startswith("lm_head.weight differs from model.embed_tokens.weight")


def test_verify_builds_no_model_for_a_sound_config(copied, monkeypatch):
    monkeypatch.setattr("reshard.model.ModelHint.shapes", None)
    assert not reshard.verify(copied("hf_z3_tied")).exit_code
