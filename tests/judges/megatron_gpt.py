"""Megatron's GPT in plain torch, on full tensors under megatron-core's own names.

Written after megatron-core 0.16.1 (``core/transformer/attention.py``, ``mlp.py``,
``moe/router.py``, ``core/models/common/embeddings``), not after reshard: it cuts the fused query,
key and value as Megatron does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812 - everybody's name for it


@dataclass(frozen=True)
class Gpt:
    """What Megatron's arguments say of the model."""

    heads: int
    groups: int
    rms: bool = True
    gated: bool = True
    tanh: bool = False
    positions: str = "rope"
    theta: float = 10000.0
    rotary: float = 1.0
    eps: float = 1e-5
    top_k: int = 0
    pre_softmax: bool = False
    parallel: bool = False

    def logits(self, tensors: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, vocabulary)."""
        get = tensors.get
        embedding = tensors["embedding.word_embeddings.weight"]
        x = embedding[tokens]
        if self.positions == "learned":
            x = x + tensors["embedding.position_embeddings.weight"][: tokens.shape[1]]
        if "embedding.word_embeddings.norm.weight" in tensors:
            x = self._norm(tensors, "embedding.word_embeddings.norm", x)
        layer = 0
        while f"decoder.layers.{layer}.input_layernorm.weight" in tensors:
            at = f"decoder.layers.{layer}."
            attended = self._attention(tensors, at, self._norm(tensors, at + "input_layernorm", x))
            if self.parallel:
                x = (
                    x
                    + attended
                    + self._mlp(tensors, at, self._norm(tensors, at + "pre_mlp_layernorm", x))
                )
            else:
                x = x + attended
                x = x + self._mlp(tensors, at, self._norm(tensors, at + "pre_mlp_layernorm", x))
            layer += 1
        x = self._norm(tensors, "decoder.final_layernorm", x)
        return x @ get("output_layer.weight", embedding).T

    def _norm(self, tensors, name, x):
        weight, bias = tensors[name + ".weight"], tensors.get(name + ".bias")
        if self.rms:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)

    def _attention(self, tensors, at, x):
        qkv = _linear(tensors, at + "self_attention.linear_qkv", x)
        batch, length, width = qkv.shape
        per = self.heads // self.groups
        size = width // (self.groups * (per + 2))
        qkv = qkv.view(batch, length, self.groups, (per + 2) * size)
        q, k, v = qkv.split([per * size, size, size], dim=3)
        q = q.reshape(batch, length, self.heads, size)
        if at + "self_attention.q_layernorm.weight" in tensors:
            q = self._norm(tensors, at + "self_attention.q_layernorm", q)
            k = self._norm(tensors, at + "self_attention.k_layernorm", k)
        if self.positions == "rope":
            q, k = self._rotated(q), self._rotated(k)
        k, v = (each.repeat_interleave(per, dim=2) for each in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
        if self.positions == "alibi":
            slopes = torch.tensor([2.0 ** (-8 * (h + 1) / self.heads) for h in range(self.heads)])
            scores = scores + slopes[:, None, None] * torch.arange(length)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(batch, length, -1)
        return _linear(tensors, at + "self_attention.linear_proj", mixed)

    def _rotated(self, x):
        dim = int(x.shape[-1] * self.rotary)
        frequencies = 1 / self.theta ** (torch.arange(0, dim, 2).float() / dim)
        angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies)
        angles = torch.cat([angles, angles], -1)[:, None, :]
        turned, rest = x[..., :dim], x[..., dim:]
        first, second = turned.chunk(2, -1)
        half = torch.cat([-second, first], -1)
        return torch.cat([turned * angles.cos() + half * angles.sin(), rest], -1)

    def _mlp(self, tensors, at, x):
        if at + "mlp.router.weight" not in tensors:
            return self._dense(tensors, at + "mlp.", x)
        logits = x @ tensors[at + "mlp.router.weight"].T
        if self.pre_softmax:
            shares, chosen = logits.softmax(-1).topk(self.top_k, -1)
        else:
            best, chosen = logits.topk(self.top_k, -1)
            shares = best.softmax(-1)
        out = torch.zeros_like(x)
        for number in range(logits.shape[-1]):
            share = (shares * (chosen == number)).sum(-1, keepdim=True)
            out += share * self._dense(tensors, f"{at}mlp.experts.local_experts.{number}.", x)
        if at + "mlp.shared_experts.linear_fc1.weight" in tensors:
            gate = torch.sigmoid(x @ tensors[at + "mlp.shared_experts.gate_weight"].T)
            out = out + gate * self._dense(tensors, at + "mlp.shared_experts.", x)
        return out

    def _dense(self, tensors, at, x):
        hidden = _linear(tensors, at + "linear_fc1", x)
        if self.gated:
            gate, up = hidden.chunk(2, -1)
            hidden = F.silu(gate) * up
        else:
            hidden = F.gelu(hidden, approximate="tanh" if self.tanh else "none")
        return _linear(tensors, at + "linear_fc2", hidden)


def _linear(tensors, name, x):
    return F.linear(x, tensors[name + ".weight"], tensors.get(name + ".bias"))
