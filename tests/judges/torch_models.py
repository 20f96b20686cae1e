"""The models of the PyTorch cases. No factory takes arguments, as ``reshard --model`` requires."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.judges.models import llama_config

VOCABULARY = 64


class Menagerie(nn.Module):
    """A tiny Llama with grouped-query attention, and members whose shapes divide by nothing."""

    def __init__(
        self,
        *,
        tied: bool = False,
        frozen: bool = False,
        unused: bool = False,
        twin: bool = False,
    ) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.randn(7, 13))
        self.small = nn.Parameter(torch.randn(3))
        if frozen:
            self.frozen = nn.Parameter(torch.randn(11), requires_grad=False)
        if unused:
            self.unused = nn.Parameter(torch.randn(5, 2))
        self.register_buffer("running", torch.randn(5))
        self.register_buffer("count", torch.tensor(0))
        if twin:
            self.register_buffer("twin", torch.randn(3))  # with the shape of a parameter
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.llama = LlamaForCausalLM(_llama(tied=tied))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a loss to which every trained member contributes."""
        self.count += 1
        self.running.mul_(0.9)  # the same on every rank, as data would not be
        logits = self.llama(input_ids=tokens).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        scale = tokens.float().mean().to(loss.dtype) / VOCABULARY
        members = [self.odd, self.small, *([self.frozen] if hasattr(self, "frozen") else [])]
        return loss + scale * sum(member.square().mean() for member in members)


class Inner(nn.Module):
    """Wrapped inside a Block that is wrapped itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Block(nn.Module):
    """Has a parameter of its own, one before and one after the inner unit."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6) + 0.1 * torch.randn(6))
        self.norm = nn.LayerNorm(6)
        self.inner = Inner()
        self.out = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + self.out(self.inner(self.norm(x * self.gain)))


class Mlp(nn.Module):
    """Nothing of a Llama; the last block can be frozen, which makes a whole frozen unit."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 5)
        self.register_buffer("unset", torch.empty(0))
        if frozen:
            self.blocks[-1].requires_grad_(requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Convolutions(nn.Module):
    """Weights of four dimensions and a batch norm, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8 * 4)
        self.first = nn.Conv2d(4, 6, 3)
        self.norm = nn.BatchNorm2d(6, track_running_stats=False)
        self.second = nn.Conv2d(6, 2, (1, 2))
        self.scale = nn.Parameter(torch.tensor(1.5))  # 0-d, which only unsharded training takes

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).unflatten(-1, (4, 8)).transpose(1, 2)
        return self.scale * self.second(self.norm(self.first(x)).relu()).square().mean()


def menagerie() -> nn.Module:
    return Menagerie()


def menagerie_tied() -> nn.Module:
    return Menagerie(tied=True)


def menagerie_frozen() -> nn.Module:
    return Menagerie(frozen=True)


def menagerie_tied_frozen() -> nn.Module:
    return Menagerie(tied=True, frozen=True)


def menagerie_unused() -> nn.Module:
    return Menagerie(unused=True)


def menagerie_twin() -> nn.Module:
    return Menagerie(twin=True)


def menagerie_bf16() -> nn.Module:
    return Menagerie().to(torch.bfloat16)


def mlp() -> nn.Module:
    return Mlp()


def mlp_frozen() -> nn.Module:
    return Mlp(frozen=True)


def convolutions() -> nn.Module:
    return Convolutions()


def llama() -> nn.Module:
    return LlamaForCausalLM(_llama(tied=False))


def llama_tied() -> nn.Module:
    return LlamaForCausalLM(_llama(tied=True))


def _llama(*, tied: bool) -> LlamaConfig:
    return llama_config(VOCABULARY, tied=tied, intermediate=44)
