"""The words by which a user chooses among Megatron's forms."""

from __future__ import annotations

from typing import Literal

Form = Literal["torch", "torch_dist"]  # --ckpt-format
Impl = Literal["local", "transformer_engine"]  # --transformer-impl
Adam = Literal["fused", "torch"]  # whose state: Apex's and Transformer Engine's, or torch's
ExtraState = Literal["keep", "drop"]  # modules' own
