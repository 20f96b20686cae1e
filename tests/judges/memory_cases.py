"""Strategies whose memory is measured in real frameworks: a small Llama on CPU with gloo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.judges.server import DEEPSPEED, Judge

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 509,
    "hidden_size": 192,
    "intermediate_size": 520,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
BUCKET = 1_000  # elements; the communication buckets of DeepSpeed are not model state
SEQ_LEN = 32


@dataclass(frozen=True)
class Case:
    """One strategy on a number of ranks."""

    strategy: str
    world: int
    precision: str = "bf16"
    frozen: str = ""


CASES = {
    f"{case.strategy}_{case.precision}_{case.world}{'_frozen' if case.frozen else ''}": case
    for case in (
        Case("ddp", 2),
        Case("fsdp", 2),
        Case("fsdp", 3, "fp32"),
        Case("hsdp", 4),
        Case("zero1", 2),
        Case("zero2", 3),
        Case("zero2", 2, "fp32"),
        Case("zero2", 2, frozen="mlp"),
        Case("zero2-offload", 2),
        Case("zero3", 3),
        Case("zero3", 2, "fp32"),
        Case("zero3-offload-optimizer", 2),
        Case("zero3-offload", 2),
        Case("fsdp", 2, frozen="mlp"),
    )
}
JUDGE = Judge("tests.judges.memory_worker", "memory", CASES, like=DEEPSPEED)
