"""The real Trainer continues LoRA runs from a checkpoint of other ranks, without files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import reshard
from reshard.errors import IncompleteError, ReshardError, UnsupportedError, UsageError
from tests.judged.alike import assert_resumed_state
from tests.judged.trained import JUDGE, SAVED, train
from tests.judges import resume_worker
from tests.judges.models import llama_config
from tests.support.sample_tensors import same

# PEFT and transformers warn about each other.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

peft = pytest.importorskip("peft")
VOCABULARY = resume_worker.VOCABULARY
NAMED = re.compile(r"\.(default|polite)\.")  # of an adapter
FSDP2 = {"kind": "fsdp2", "type": "SHARDED_STATE_DICT", "family": "lora"}
DDP = {"kind": "ddp", "family": "lora"}
WHOLE = {**FSDP2, "family": "lora and embeddings"}  # PEFT saves embeddings after all matrices


def deepspeed(stage, family="lora"):
    return {"kind": "deepspeed", "stage": stage, "family": family}


RUNS = {  # at two ranks
    "z2": deepspeed(2),
    "z3": deepspeed(3),
    "z2 by the trainer": {**deepspeed(2), "optimizer": "trainer", "scheduler": "trainer"},
    "ddp": DDP,
    "fsdp2": FSDP2,
    "fsdp2 embeddings": WHOLE,
    "fsdp2 full embeddings": {**WHOLE, "type": "FULL_STATE_DICT"},
    "ddp embeddings": {"kind": "ddp", "family": "lora and embeddings"},
    "ddp of a name": {"kind": "ddp", "family": "lora of a name"},
    "z2 resized": deepspeed(2, "lora of resized embeddings"),
    "fsdp1": {**FSDP2, "kind": "fsdp1"},
    "fsdp1 embeddings": {**WHOLE, "kind": "fsdp1"},
}
RESUMED = {  # name -> the run, ranks, stage
    "z2 at 2": ("z2", 2, 2),
    "z3 at 2": ("z3", 2, 3),
    "z2 at 4 and stage 3": ("z2", 4, 3),
    "z3 at 1 and stage 2": ("z3", 1, 2),
    "fsdp2 at 2 and stage 2": ("fsdp2", 2, 2),
    "fsdp2 at 4 and stage 3": ("fsdp2", 4, 3),
    "ddp at 2 and stage 2": ("ddp", 2, 2),
    "ddp at 4 and stage 3": ("ddp", 4, 3),
    "ddp embeddings at 2 and stage 2": ("ddp embeddings", 2, 2),
    "ddp of a name at 2 and stage 2": ("ddp of a name", 2, 2),
    "fsdp2 embeddings at 2 and stage 3": ("fsdp2 embeddings", 2, 3),
    "fsdp2 full embeddings at 4 and stage 2": ("fsdp2 full embeddings", 4, 2),
}
AS_FSDP2 = {  # name -> the run, ranks, state dict type
    "fsdp2 at 4, sharded": ("fsdp2", 4, "sharded"),
    "fsdp2 at 2, full": ("fsdp2", 2, "full"),
    "z2 at 4, sharded": ("z2", 4, "sharded"),
    "z3 at 2, full": ("z3", 2, "full"),
    "z2 by the trainer at 2, sharded": ("z2 by the trainer", 2, "sharded"),  # one group is empty
}
OWN = {"ddp at 4": ("ddp", 4), "fsdp2 at 4": ("fsdp2", 4)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Train the real runs; return name -> the checkpoint, and the run's state and losses."""
    return train(tmp_path_factory.mktemp("saved"), RUNS)


@pytest.fixture(scope="module")
def resumed(saved, tmp_path_factory):
    """Resume each output; return the state of the real Trainer then, and its next losses."""
    place = tmp_path_factory.mktemp("written")
    jobs, base = {}, save_base(place / "base")
    for name, (run, ranks, stage) in RESUMED.items():
        source, told = saved[run][0], deepspeed(stage, RUNS[run]["family"])
        if RUNS[run]["kind"] != "deepspeed":
            told["scheduler"] = "trainer"
        rng = {} if ranks == 2 else {"rng": "derive"}
        model = {"model": str(base)} if RUNS[run]["kind"] == "ddp" else {}
        how = {"world_size": ranks, "zero_stage": stage, **rng, **model}
        reshard.split(source, place / name, to="hf-trainer", **how)
        jobs[name] = ranks, {**told, "resume": place / name / "checkpoint-3"}
        jobs[f"{name} live"] = ranks, {**told, "resume": source, "live": rng}
    for name, (run, ranks, form) in AS_FSDP2.items():
        reshard.split(
            saved[run][0], place / name, to="hf-trainer", world_size=ranks, state_dict_type=form
        )
        told = {**FSDP2, "type": f"{form.upper()}_STATE_DICT"}
        jobs[name] = ranks, {**told, "resume": place / name / "checkpoint-3"}
    for name, (run, ranks) in OWN.items():
        jobs[name] = ranks, {**RUNS[run], "resume": saved[run][0]}
        jobs[f"{name} live"] = ranks, {**RUNS[run], "resume": saved[run][0], "live": {}}
    return JUDGE.run(tmp_path_factory.mktemp("resumed"), jobs)


@pytest.mark.parametrize("name", RESUMED)
def test_an_adapter_is_resumed_with_every_bit_and_the_losses_of_split(name, saved, resumed):
    run, ranks, _ = RESUMED[name]
    live, expected = resumed[f"{name} live"], saved[run][1]
    assert_resumed(live, expected)
    assert live["losses"] == resumed[name]["losses"]
    if ranks == 2 and RUNS[run]["kind"] != "fsdp2":
        assert live["losses"] == expected["losses"]


def test_the_base_model_tells_the_order_of_an_adapter(saved, tmp_path):
    """Pass it, or let ``adapter_config.json`` name its directory."""
    source, expected = saved["ddp"]
    copy = Path(shutil.copytree(source, tmp_path / "checkpoint-3"))
    base = save_base(tmp_path / "base")
    with pytest.raises(IncompleteError, match="cannot be assigned to parameters"):
        reshard.split(copy, tmp_path / "out", to="hf-trainer", zero_stage=2)
    assert_named(copy, expected, model=str(base))
    config = copy / "adapter_config.json"
    values = json.loads(config.read_text()) | {"base_model_name_or_path": str(base)}
    config.write_text(json.dumps(values))
    assert_named(copy, expected)
    with pytest.raises(UnsupportedError, match="pass the checkpoint itself"):
        reshard.split(copy, tmp_path / "out", to="hf-trainer", state_dict_type="unsharded")


def test_ties_of_frozen_weights_that_were_not_saved_are_left_out(saved):
    source, expected = saved["z2 resized"]
    with reshard.open(source) as checkpoint:
        weights = checkpoint.state_dict()
        assert len(weights) == len(checkpoint)
    for fqn, value in expected["params"].items():
        assert same(weights.pop(fqn), value), fqn
    assert list(weights) == ["base_model.model.lm_head.modules_to_save.default.weight"]


def test_an_adapter_with_tied_and_resized_embeddings_is_merged(saved, tmp_path):
    source = saved["z2 resized"][0]
    reshard.merge(source, tmp_path / "adapter", adapter="default")
    own = load_file(source / "adapter_model.safetensors")
    got = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert got.keys() == own.keys()
    assert all(same(got[fqn], own[fqn]) for fqn in own)

    base = resume_worker.resized()
    base.save_pretrained(tmp_path / "base")
    reshard.merge(source, tmp_path / "merged", merge_lora=tmp_path / "base")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = peft.PeftModel.from_pretrained(base, source).merge_and_unload()
    wanted = adapted.state_dict()
    for fqn, value in merged.state_dict().items():
        assert value.shape == wanted[fqn].shape
        assert (value - wanted[fqn]).abs().max() < 1e-6, fqn


@pytest.mark.parametrize(
    "settings",
    [{"trainable_token_indices": [1, VOCABULARY]}, {"modules_to_save": ["embed_tokens"]}],
)
def test_a_base_without_the_rows_of_new_tokens_is_refused(settings, tmp_path):
    config = peft.LoraConfig(target_modules=["q_proj"], **settings)
    peft.get_peft_model(resume_worker.resized(), config).save_pretrained(tmp_path / "adapter")
    LlamaForCausalLM(llama_config(VOCABULARY, tied=True)).save_pretrained(tmp_path / "base")
    with pytest.raises(UsageError, match="the run resized the embeddings"):
        reshard.merge(tmp_path / "adapter", tmp_path / "out", merge_lora=tmp_path / "base")


@pytest.mark.parametrize("run", ["fsdp1", "fsdp1 embeddings"])
def test_weights_of_adapters_that_peft_leaves_out_are_named(run, saved, tmp_path):
    """PEFT 0.21 saves none under FSDP 1; others that it saves are no complete adapter."""
    with pytest.raises(ReshardError, match=r"no weights(?s:.*)save again with FSDP 2"):
        reshard.merge(saved[run][0], tmp_path / "out", adapter="default")


def save_base(place):
    """Save the config of the base model, which tells the order of what DDP saved."""
    llama_config(VOCABULARY).save_pretrained(place)
    return place


def assert_named(source, expected, **how):
    with reshard.open(source, **how) as checkpoint:
        assert set(checkpoint) == expected["optimizer"].keys()
        for fqn, slots in expected["optimizer"].items():
            for slot in ("exp_avg", "exp_avg_sq"):
                assert same(checkpoint.optimizer(slot)[fqn][...], slots[slot]), f"{slot} of {fqn}"


@pytest.mark.parametrize("name", AS_FSDP2)
def test_fsdp_2_loads_a_written_adapter_with_every_bit(name, saved, resumed):
    expected = saved[AS_FSDP2[name][0]][1]
    assert_resumed(resumed[name], expected)
    assert resumed[name]["losses"] == pytest.approx(expected["losses"], rel=1e-2)


@pytest.mark.parametrize("name", OWN)
def test_other_strategies_load_their_own_files_at_other_ranks(name, saved, resumed):
    """So nothing needs to be done there, and the error says so."""
    assert_resumed(resumed[name], saved[OWN[name][0]][1])
    assert "pass the checkpoint itself to trainer.train" in resumed[f"{name} live"]


def assert_resumed(seen, expected):
    adapter = {fqn: value for fqn, value in expected["params"].items() if NAMED.search(fqn)}
    assert len(adapter) >= 8
    assert_resumed_state(seen, {**expected, "params": adapter}, SAVED)
