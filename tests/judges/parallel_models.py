"""A small language model that implements tensor parallelism itself.

As Megatron's: columns, rows, a vocabulary, gate and up in one. Every parameter says how it was cut
(`CUT`), for the judge to gather it again; the collectives are plain torch.distributed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

HIDDEN, HEADS, FFN, WORDS, PADDED, LENGTH = 16, 4, 24, 29, 32, 6
CUT = "judged_cut"  # attribute: (dim, number of fused parts), or None: whole on every rank


class Tp:
    """The tensor-parallel group that layers are made for; set before a model is made."""

    group: Any = None
    size = 1
    rank = 0
    seed = 7


def parameter(name: str, shape: tuple[int, ...], cut: tuple[int, int] | None) -> nn.Parameter:
    """Return this rank's part of a parameter that is the same on every grid."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{Tp.seed} {name}".encode()))
    full = torch.randn(shape, generator=generator) * 0.1 + name.endswith("norm.weight")
    made = nn.Parameter(sliced(full, cut).clone())
    setattr(made, CUT, cut)
    return made


def sliced(full: Tensor, cut: tuple[int, int] | None) -> Tensor:
    """Return a rank's share of each fused part."""
    if cut is None:
        return full
    dim, parts = cut
    return torch.cat([p.chunk(Tp.size, dim)[Tp.rank] for p in full.chunk(parts, dim)], dim)


def join(pieces: Sequence[Tensor], cut: tuple[int, int] | None) -> Tensor:
    """Join the parts of a group's ranks; compare ranks that should have the same."""
    if cut is None:
        assert all(torch.equal(pieces[0], piece) for piece in pieces), "ranks have drifted apart"
        return pieces[0]
    dim, parts = cut
    cut_again = [piece.chunk(parts, dim) for piece in pieces]
    return torch.cat([torch.cat([p[n] for p in cut_again], dim) for n in range(parts)], dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=Tp.group)
        return grad


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=Tp.group)
        return x

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        pieces = [torch.empty_like(x) for _ in range(Tp.size)]
        dist.all_gather(pieces, x.contiguous(), group=Tp.group)
        return torch.cat(pieces, -1)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(Tp.size, -1)[Tp.rank].contiguous()


class Words(nn.Module):
    """Rows of the vocabulary; their weight is a module's of its own, as Megatron's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = parameter(name, (PADDED, HIDDEN), (0, 1))


class Embedding(nn.Module):
    """Words and positions; tied, the head uses the words alone."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = Words("words")
        self.position_embeddings = nn.Module()
        self.position_embeddings.weight = parameter("positions", (LENGTH, HIDDEN), None)

    @property
    def word_embeddings_weight(self) -> Tensor:
        """Return the weight that the head shares."""
        return self.word_embeddings.weight

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.word_embeddings.weight
        local = ids - Tp.rank * len(weight)
        mine = (local >= 0) & (local < len(weight))
        found = F.embedding(local.clamp(0, len(weight) - 1), weight) * mine.unsqueeze(-1)
        positions = self.position_embeddings.weight[: ids.shape[1]]
        return _Reduce.apply(found) + positions  # type: ignore[no-untyped-call, no-any-return]


class Norm(nn.Module):
    """A layer norm, whole on every rank."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = parameter(f"{name}.norm.weight", (HIDDEN,), None)
        self.bias = parameter(f"{name}.norm.bias", (HIDDEN,), None)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), self.weight, self.bias)


class Gain(nn.Module):
    """A factor for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = parameter("gain", (HIDDEN,), None)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.gain)


class Nothing(nn.Module):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Linear(nn.Module):
    """A linear layer: whole, or cut along its rows (column parallel) or columns (row parallel)."""

    def __init__(
        self, name: str, shape: tuple[int, int], cut: tuple[int, int] | None, *, bias: bool
    ) -> None:
        super().__init__()
        self.weight = parameter(f"{name}.weight", shape, cut)
        self.cut = cut
        own = cut if cut and cut[0] == 0 else None
        self.bias = parameter(f"{name}.bias", shape[:1], own) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.cut is None:
            return F.linear(x, self.weight, self.bias)
        if self.cut[0] == 0:
            return F.linear(_Copy.apply(x), self.weight, self.bias)  # type: ignore[no-untyped-call]
        out = _Reduce.apply(F.linear(x, self.weight))  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a gated layer; some of it may be frozen, and it has a buffer."""

    def __init__(self, number: int, *, frozen: bool = False) -> None:
        super().__init__()
        name = f"block{number}"
        self.input_norm = Norm(f"{name}.first")
        self.qkv = Linear(f"{name}.qkv", (3 * HIDDEN, HIDDEN), (0, 3), bias=True)
        self.dense = Linear(f"{name}.dense", (HIDDEN, HIDDEN), (1, 1), bias=True)
        self.gate_up = Linear(f"{name}.gate_up", (2 * FFN, HIDDEN), (0, 2), bias=False)
        self.down = Linear(f"{name}.down", (HIDDEN, FFN), (1, 1), bias=True)
        self.register_buffer("scale", torch.tensor([1.0 + number]))
        if frozen:
            self.input_norm.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.input_norm(x)).chunk(3, -1)
        heads = HEADS // Tp.size
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        x = x + self.dense(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.transform(x) * self.scale.to(x.dtype)

    def transform(self, x: Tensor) -> Tensor:
        """Return what the gated layer makes of the tokens."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Expert(nn.Module):
    """Two linear layers, which tensor-parallel ranks share or have whole, and a buffer."""

    def __init__(self, name: str, *, cut: bool) -> None:
        super().__init__()
        self.up = Linear(f"{name}.up", (FFN, HIDDEN), (0, 1) if cut else None, bias=True)
        self.down = Linear(f"{name}.down", (HIDDEN, FFN), (1, 1) if cut else None, bias=True)
        self.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x))) * self.scale.to(x.dtype)  # type: ignore[no-any-return]


class ExpertBlock(Block):
    """A block with experts, each of which begins with values of its own.

    Args:
        count: number of experts.
        sharing: ranks that share them.
        first: number of this rank's first expert.
        cut: whether tensor-parallel ranks share each expert.
        frozen: the end of the names of the experts' frozen parameters; None: all are trained.
    """

    def __init__(
        self,
        number: int,
        *,
        count: int,
        sharing: int,
        first: int,
        cut: bool,
        frozen: str | None = None,
    ) -> None:
        super().__init__(number)
        del self.gate_up, self.down
        self.moe = MoE(
            HIDDEN,
            Expert(f"block{number}.shared", cut=cut),
            num_experts=count,
            ep_size=sharing,
            capacity_factor=count,  # an expert has room for all tokens
            use_residual=number % 2 == 1,
            enable_expert_tensor_parallelism=cut,
        )
        for at, expert in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts):
            own = Expert(f"block{number}.expert{first + at}", cut=cut)
            expert.load_state_dict(own.state_dict())
            for mine, its in zip(expert.parameters(), own.parameters(), strict=True):
                setattr(mine, CUT, getattr(its, CUT))
            for name, param in expert.named_parameters():
                param.requires_grad_(frozen is None or not name.endswith(frozen))
        others = [self.moe.deepspeed_moe.gate.wg.weight]
        if self.moe.use_residual:
            others += self.moe.coefficient.parameters()
        for at, param in enumerate(others):
            made = parameter(f"block{number}.other{at}", tuple(param.shape), None)
            param.data.copy_(made.data)
            setattr(param, CUT, None)

    def transform(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]  # type: ignore[no-any-return]


class Head(nn.Module):
    """The output layer of a model that is not tied."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = Words("head")

    def forward(self, x: Tensor) -> Tensor:
        return logits(self.lm_head.weight, x)


def logits(weight: Tensor, x: Tensor) -> Tensor:
    """Return the logits of all words, on every rank."""
    return _Gather.apply(F.linear(_Copy.apply(x), weight))  # type: ignore[no-untyped-call, no-any-return]


def tied_logits(embedding: Embedding, x: Tensor) -> Tensor:
    """Return the logits of a tied model."""
    return logits(embedding.word_embeddings_weight, x)


def loss_of(out: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of the next word, among the words that are not padding."""
    return F.cross_entropy(out[..., :WORDS].float().flatten(0, 1), labels.flatten())


def patterns(*, tied: bool, blocks: range) -> dict[str, Any]:
    """Return ``universal_checkpoint_info`` of a pipeline of these layers."""
    words = "tied_modules.embed.word_embeddings.weight" if tied else r"0.word_embeddings.weight"
    positions = words.replace("word_", "position_")
    head = [] if tied else [rf"{blocks.stop + 1}.lm_head.weight"]
    return {
        "universal_checkpoint_version": 0.2,
        "original_vocab_size": WORDS,
        "padded_vocab_size": PADDED,
        "vocabulary_parameter_patterns": [words, *head],
        "pipeline_replicated_parameter_patterns": [words, positions] if tied else [],
        "tp_replicated_parameter_patterns": [
            positions,
            r"\d+.input_norm.(weight|bias)",
            r"\d+.(weight|bias)",
            r"\d+.(dense|down).bias",
        ],
        "parameter_with_row_parallelism_patterns": [r"\d+.(dense|down).weight"],
        "parameter_with_2_sub_params_cat_dim_0": [r"\d+.gate_up.weight"],
        "parameter_with_sub_params": [
            {"patterns": [r"\d+.qkv.weight"], "shape": (3, -1), "partition_dim": 0},
            {"patterns": [r"\d+.qkv.bias"], "shape": (3,), "partition_dim": 0},
        ],
    }


def expert_patterns(*, blocks: range, cut: bool) -> dict[str, Any]:
    """Return ``universal_checkpoint_info`` of a model with experts."""
    info = patterns(tied=False, blocks=blocks)
    whole = info["tp_replicated_parameter_patterns"]
    whole += [r"\d+.moe.coefficient", r"\d+.moe.deepspeed_moe.gate.wg.weight"]
    experts = r"\d+.moe.(mlp|deepspeed_moe.experts.deepspeed_experts.\d+)."
    if cut:
        whole.append(experts + "down.bias")
        info["parameter_with_row_parallelism_patterns"].append(experts + "down.weight")
    else:
        whole.append(experts)
    del info["parameter_with_2_sub_params_cat_dim_0"]
    return info


def batch(step: int, count: int = 8) -> Tensor:
    """Return ids of a global batch (count, LENGTH)."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, WORDS, (count, LENGTH), generator=generator)
