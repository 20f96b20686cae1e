"""The tiny models of the library cases, one factory each for ``--model module:factory``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tests.judges.models import Enclosing, llama_config

VOCAB = 96
SEQUENCE = 8
BATCH = 4  # of all ranks together


class Net(nn.Module):
    """A Llama with odd sizes beside it, buffers that are saved and one that is not."""

    running: Tensor
    count: Tensor

    def __init__(self, *, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.linspace(-1.0, 1.0, 91).reshape(7, 13))
        self.small = nn.Parameter(torch.tensor([0.5, -0.25, 1.5]))
        if frozen:
            self.frozen = nn.Parameter(torch.linspace(1.0, 2.0, 11), requires_grad=False)
        self.llama = LlamaForCausalLM(llama_config(VOCAB, tied=tied))
        self.register_buffer("running", torch.linspace(0.0, 1.0, 5))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("scratch", torch.full((4,), 9.0), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the loss, to which every parameter contributes."""
        self.count += 1
        loss: Tensor = self.llama(input_ids=input_ids, labels=input_ids).loss.float()
        extra = self.odd.float().square().mean() * self.small.float().sum()
        if hasattr(self, "frozen"):
            extra = extra * self.frozen.float().sum()
        return loss + 0.1 * extra


def net() -> Net:
    """Return a model that is untied and wholly trained."""
    return Net()


def net_tied() -> Net:
    """Return a model whose output embedding is its input embedding."""
    return Net(tied=True)


def net_frozen() -> Net:
    """Return a model with a parameter that is not trained."""
    return Net(frozen=True)


def net_enclosed() -> Enclosing:
    """Return a model all of whose names begin with ``module.``."""
    return Enclosing(Net())


def llama() -> LlamaForCausalLM:
    """Return the pure transformers model."""
    return LlamaForCausalLM(llama_config(VOCAB))


def llama_tied() -> LlamaForCausalLM:
    """Return the pure transformers model with one embedding under two names."""
    return LlamaForCausalLM(llama_config(VOCAB, tied=True))


def llama_bf16() -> LlamaForCausalLM:
    """Return a model that is bfloat16 as a whole, optimizer state included."""
    return LlamaForCausalLM(llama_config(VOCAB)).to(torch.bfloat16)


def llama_biased() -> LlamaForCausalLM:
    """Return a model whose attention has biases."""
    config = llama_config(VOCAB)
    config.attention_bias = True
    return LlamaForCausalLM(config)


def llama_small() -> LlamaForCausalLM:
    """Return a model for samples that are kept in the repository."""
    return LlamaForCausalLM(llama_config(VOCAB, hidden=8, layers=1))


def tiny() -> nn.Module:
    """Return a model for formats that need kilobytes for each parameter."""
    return nn.Sequential(nn.Linear(6, 13), nn.Linear(13, 3, bias=False))


def plain() -> nn.Module:
    """Return a few layers, for libraries that do not know transformers."""
    return nn.Sequential(
        nn.Linear(6, 13),
        nn.ReLU(),
        nn.BatchNorm1d(13),
        nn.Linear(13, 13),
        nn.ReLU(),
        nn.Linear(13, 3),
    )


def build(name: str, seed: int = 7) -> nn.Module:
    """Build the model of a factory's name, with the same values on every rank."""
    torch.manual_seed(seed)
    made: nn.Module = globals()[name.rpartition(":")[2]]()
    return made


def tokens(count: int) -> Tensor:  # (count, SEQUENCE)
    """Return fixed token ids."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(0, VOCAB, (count, SEQUENCE), generator=generator)


def draw(model: nn.Module) -> nn.Module:
    """Give all parameters of a model random values, and return the model."""
    torch.manual_seed(3)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(std=0.1)
    return model


def compute_logits(model: nn.Module) -> Tensor:
    """Return the logits of two rows of fixed tokens."""
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens(2)).logits
    return logits
