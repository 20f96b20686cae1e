"""Runs of real DeepSpeed with tensor, pipeline and expert parallelism, one row per checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8}},
}
EXPERT_COUNTS = (4, 8, 4, 4)  # of each layer of an ``experts`` case


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        kind: pipeline (PipelineModule), mpu (a module and ranks of its own), experts (either of
            these, by the number of stages, with a mixture of experts), autotp (a Llama of
            transformers that DeepSpeed cuts).
        ep: ranks that share the experts of a layer.
        cuts_experts: whether tensor-parallel ranks share each expert too
            (``enable_expert_tensor_parallelism``).
        patterns: whether the client saves ``universal_checkpoint_info``.
        groups: one, or decay: two by weight decay.
        universal: whether it loads a universal checkpoint.
        frozen: whether the first block has a frozen parameter; of experts, all of the first block,
            and a bias of each expert of the second.
        odd: whether a pipeline has a layer without tensors, two with an empty parameter, and a
            module that is used on both stages, each time as a layer with a file.
        lone: whether a pipeline has a shared module that is used only once.
        heads: of an autotp model: of queries, and of keys and values.
        words: the rows of its vocabulary.
    """

    name: str
    kind: str = "pipeline"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cuts_experts: bool = False
    stage: int = 1
    precision: str = "bf16"
    tied: bool = True
    patterns: bool = True
    groups: str = "decay"
    universal: bool = False
    frozen: bool = False
    odd: bool = False
    lone: bool = False
    method: str = "uniform"
    heads: tuple[int, int] = (4, 2)
    words: int = 32

    @property
    def world(self) -> int:
        """Return the number of all ranks."""
        return self.tp * self.pp * self.dp

    @property
    def is_pipeline(self) -> bool:
        """Return whether the model is a PipelineModule."""
        return self.kind == "pipeline" or self.pp > 1

    @property
    def config(self) -> dict[str, Any]:
        """Return the config of DeepSpeed."""
        return {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2 if self.is_pipeline else 1,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage},
            "checkpoint": {"load_universal": self.universal},
            **({"tensor_parallel": {"autotp_size": self.tp}} if self.kind == "autotp" else {}),
            **PRECISIONS[self.precision],
        }


CASES = {
    case.name: case
    for case in (
        Case("pp2dp2", pp=2, dp=2, patterns=False, frozen=True),
        Case("pp2_fp32", pp=2, precision="fp32", patterns=False, tied=False),
        Case("pp2_fp16", pp=2, dp=2, precision="fp16", method="parameters"),
        Case("pp2_z0_fp32", pp=2, stage=0, precision="fp32", tied=False),
        Case("pp2_z0_bf16", pp=2, stage=0, tied=False),
        Case("pp2_odd", pp=2, precision="fp32", tied=False, patterns=False, odd=True),
        Case("pp4_odd_tied", pp=4, precision="fp32", patterns=False, odd=True, groups="one"),
        Case(
            "pp2_lone",
            pp=2,
            precision="fp32",
            tied=False,
            patterns=False,
            lone=True,
            method="parameters",
        ),
        Case("pp1_odd", dp=2, tied=False, patterns=False, odd=True, method="parameters"),
        Case("pp4_tied", pp=4, groups="one"),
        Case("tp2pp2", tp=2, pp=2),
        Case("tp2pp2_untied", tp=2, pp=2, tied=False),
        Case("tp2dp2", tp=2, dp=2, precision="fp32"),
        Case("tp4", tp=4),
        Case("mpu2_z1", "mpu", tied=False, tp=2, dp=2),
        Case("mpu2_z2_fp32", "mpu", tied=False, tp=2, dp=2, stage=2, precision="fp32"),
        Case("mpu2_z3", "mpu", tied=False, tp=2, dp=2, stage=3),
        Case("mpu2_z0", "mpu", tied=False, tp=2, stage=0, precision="fp32"),
        Case("experts2_z0", "experts", tied=False, tp=2, dp=2, ep=2, stage=0, precision="fp32"),
        Case("experts2_z1", "experts", tied=False, tp=2, dp=2, ep=2),
        Case("experts4_z2", "experts", tied=False, tp=2, dp=2, ep=4, stage=2, precision="fp32"),
        Case(
            "cut_experts2_z0", "experts", tied=False, tp=2, dp=2, ep=2, stage=0, cuts_experts=True
        ),
        Case("cut_experts2_z1", "experts", tied=False, tp=2, dp=2, ep=2, cuts_experts=True),
        Case("cut_experts1_z2", "experts", tied=False, tp=2, dp=2, stage=2, cuts_experts=True),
        Case("experts2_frozen_z0", "experts", tied=False, tp=2, dp=2, ep=2, stage=0, frozen=True),
        Case("experts2_frozen_z1", "experts", tied=False, tp=2, dp=2, ep=2, frozen=True),
        Case("experts_pp2_z0", "experts", tied=False, pp=2, stage=0, patterns=False),
        Case("experts_pp2_z1", "experts", tied=False, pp=2, dp=2, ep=2, patterns=False),
        Case("autotp2_z0_fp32", "autotp", tied=False, tp=2, stage=0, precision="fp32"),
        Case("autotp2_z1", "autotp", tied=False, tp=2, dp=2),
        Case("autotp2_z2_fp32", "autotp", tied=False, tp=2, dp=2, stage=2, precision="fp32"),
        Case("autotp2_z3", "autotp", tied=False, tp=2, dp=2, stage=3),
        Case("autotp2_tied", "autotp", tp=2, groups="one"),
        Case("autotp2_uneven", "autotp", tied=False, tp=2, heads=(6, 3), words=29),
        Case("autotp4_headless", "autotp", tied=False, tp=4, heads=(6, 3), words=29),
    )
}
