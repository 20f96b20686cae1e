"""``python -m trainer --resume`` reads what real frameworks saved, at any number of ranks.

Nothing is written: each rank reads from the source what ``reshard split`` would have written for
it. The proof is that the state and the next losses are those of a resume after that ``split``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

import reshard
from tests.judges.models import llama_config
from tests.trainer import resumes, worlds

pytestmark = pytest.mark.slow

TEXT = "THE NEXT LOSSES ARE EQUAL BIT BY BIT, AT 1, 2, 3 AND 4 RANKS. " * 40  # bytes below 96


@dataclass(frozen=True)
class Source:
    """A checkpoint, the model that it is of, and the step that it records."""

    path: str
    model: str = "llama"
    precision: str = "fp32"
    step: int = 4
    names: str | None = None


DEEPSPEED = {
    "zero 0": Source("hf_z0_tied/run", "deepspeed tied", "bf16", 3),
    "zero 1": Source("hf_z1_fp32_tied/run", "deepspeed tied", "fp32", 3),
    "zero 2": Source("hf_z2/run", "deepspeed", "bf16", 3),
    "zero 3": Source("hf_z3/run", "deepspeed", "bf16", 3),
    "hf-trainer zero 2": Source("trainer_zero2_fp16/run", "deepspeed tied", "fp16", 3),
    "accelerate zero 2": Source("accelerate_zero2_bf16/run", "deepspeed", "bf16", 3),
}
LIBRARIES = {
    "hf-trainer ddp": Source("trainer_ddp/ckpt"),
    "hf-trainer alone": Source("trainer_tied/ckpt", "llama tied"),
    "hf-trainer fsdp 1 dcp": Source("trainer_fsdp1_sharded/ckpt"),
    "hf-trainer fsdp 1 full": Source("trainer_fsdp1_full/ckpt", "llama tied"),
    "hf-trainer fsdp 2 dcp": Source("trainer_fsdp2_sharded/ckpt"),
}
MEGATRON = {
    "megatron": Source("llama_tp2pp2/torch", "megatron", step=3, names="hf"),
    "megatron torch_dist": Source("llama_tp2pp2/torch_dist", "megatron", step=3, names="hf"),
    "megatron distributed optimizer": Source(
        "llama_distopt_tp2dp2/torch", "megatron", "bf16", 3, "hf"
    ),
}
SOURCES = {**DEEPSPEED, **LIBRARIES, **MEGATRON}
MODELS = {
    "deepspeed": llama_config(97, hidden=64),
    "deepspeed tied": llama_config(97, hidden=64, tied=True),
    "llama": llama_config(96),
    "llama tied": llama_config(96, tied=True),
    "megatron": llama_config(96, layers=4),
}
ZERO = ("ddp", "zero1", "zero2", "zero3")
FSDP = ("fsdp", "fsdp2")
GROUPS = [{"weight_decay": 0.01, "lr": 1e-3}, {"match": "norm", "weight_decay": 0.0, "lr": 1e-3}]
WORLDS = (1, 2, 3, 4)


def targets():
    """Return source, strategy, number of ranks: two sizes of a ZeRO and an FSDP for each source."""
    for number, name in enumerate(SOURCES):
        for turn, strategies in enumerate((ZERO, FSDP)):
            yield name, strategies[number % len(strategies)], WORLDS[(number + turn) % 4]


TARGETS = tuple(targets())


@pytest.fixture(scope="module")
def sources(made, libraries, megatron_case):
    """Return name -> the directory that a user passes."""
    found = {name: made / source.path for name, source in DEEPSPEED.items()}
    found |= {name: libraries / source.path for name, source in LIBRARIES.items()}
    for name, source in MEGATRON.items():
        case, _, form = source.path.partition("/")
        found[name] = megatron_case(case) / form
    return found


@pytest.fixture(scope="module")
def resumed(sources, tmp_path_factory):
    """Return target -> what each rank has (as it is, after a split)."""
    place = tmp_path_factory.mktemp("resumed")
    (place / "text").write_text(TEXT)
    (place / "groups.json").write_text(json.dumps(GROUPS))
    for name, config in MODELS.items():
        config.save_pretrained(place / name)
    jobs = {}
    for name, strategy, world in TARGETS:
        source = SOURCES[name]
        chosen = {
            "strategy": strategy,
            "model": str(place / source.model),
            "data": str(place / "text"),
            "precision": source.precision,
            "global_batch": 12,
            "micro_batch": 12 // world,
            "seq_len": 8,
        }
        out = place / f"{name} {strategy} {world}"
        split(sources[name], out, strategy, world, dtype=source.precision, names=source.names)
        key = name, strategy, world
        jobs[key, "live"] = world, {**chosen, "resume": str(sources[name])}
        jobs[key, "split"] = world, {**chosen, "resume": str(out)}
    found = {}
    for world in WORLDS:
        mine = {key: job for key, (ranks, job) in jobs.items() if ranks == world}
        by_rank = worlds.run(world, resumes.resume_all, list(mine.values()))
        found |= dict(zip(mine, zip(*by_rank, strict=True), strict=True))
    return {key: (found[key, "live"], found[key, "split"]) for key in TARGETS}


def split(source, out, strategy, world, **options):
    if strategy in FSDP:
        options |= {"to": "fsdp", "dtype": "fp32", "param_groups": out.parent / "groups.json"}
    else:
        options |= {"to": "deepspeed", "zero_stage": max(ZERO.index(strategy), 1)}
    reshard.split(source, out, world_size=world, **options)


@pytest.mark.parametrize("target", TARGETS, ids=lambda each: " ".join(map(str, each)))
def test_a_run_continues_as_after_a_split(target, resumed):
    live, after_split = resumed[target]
    assert [rank["state"] for rank in live] == [rank["state"] for rank in after_split]
    assert [rank["losses"] for rank in live] == [rank["losses"] for rank in after_split]
    assert [rank["scaler"] for rank in live] == [rank["scaler"] for rank in after_split]
    assert live[0]["progress"]["step"] == SOURCES[target[0]].step
