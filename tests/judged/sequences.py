"""Runs with several checkpoints that real frameworks save, once per session."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.judges import server
from tests.judges.deepspeed_cases import CASES, WARMUP, Case, ds_config

JUDGE = server.Judge(
    "tests.judges.sequence_worker", "DeepSpeed and PyTorch", {}, like=server.DEEPSPEED
)
SAVES = (2, 4, 6)


def _deepspeed(world: int, saves: tuple[int, ...] = SAVES, **row: Any) -> tuple[int, Any]:
    return world, {"kind": "deepspeed", "case": Case("", world, **row), "saves": saves}


def _torch(kind: str, world: int, saves: tuple[int, ...] = SAVES, **told: Any) -> tuple[int, Any]:
    return world, {"kind": kind, "saves": saves, **told}


RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "z1_bf16": _deepspeed(2, config=ds_config(1, "bf16"), model="llama"),
    "z3_bf16": _deepspeed(3, config=ds_config(3, "bf16"), model="llama"),
    "z3_tied": _deepspeed(2, config=ds_config(3, "fp32"), model="llama_tied"),
    "z2_menagerie": _deepspeed(2, config=ds_config(2, "bf16"), groups="decay"),
    "z1_fp16_skipped": _deepspeed(
        2, (1, 2, 3, 4, 5, 6), config=ds_config(1, "fp16"), overflow_at=2
    ),
    "z3_warmup": _deepspeed(
        2,
        (1, 2, 4),
        config=ds_config(
            3,
            "bf16",
            top={"scheduler": {**WARMUP, "params": {**WARMUP["params"], "warmup_min_lr": 0}}},
        ),
    ),
    "z0_fp32": _deepspeed(1, config=ds_config(0, "fp32")),
    "z1_sgd": _deepspeed(
        2,
        config=ds_config(1, "bf16", top={"optimizer": None, "zero_allow_untested_optimizer": True}),
        client_optimizer="sgd",
        slots=CASES["z1_sgd"].slots,
    ),
    "dcp": _torch("fsdp2", 2),
    "dcp_slow": _torch("fsdp2", 2, settings={"lr": 1e-4}),
    "dcp_other": _torch("fsdp2", 2, settings={"lr": 1e-4}, seed=8),
    "dcp_tied": _torch("fsdp2", 2, tied=True),
    "dcp_frozen": _torch("fsdp2", 2, frozen=True),
    "dcp_lora": _torch("fsdp2", 2, lora=True),
    "dcp_warmup": _torch("fsdp2", 2, (1, 2, 5), warmup=10),
    "dcp_amsgrad": _torch("fsdp2", 2, settings={"amsgrad": True, "weight_decay": 0.1}),
    "hf": _torch("alone", 1),
    "hf_tied": _torch("alone", 1, tied=True),
}


def make_all(out: Path, names: Iterable[str]) -> None:
    """Make the named runs; each is renamed into place once it is complete."""
    work = out / ".making"
    shutil.rmtree(work, ignore_errors=True)
    found = JUDGE.run(work, {name: RUNS[name] for name in names})
    failures = [result for result in found.values() if isinstance(result, str)]
    if failures:
        raise server.JudgeError("\n\n".join(failures))
    for name in found:
        (work / name).rename(out / name)
    shutil.rmtree(work)
