"""The tiny models that the DeepSpeed judge trains, and the global batch that all of them use.

The menagerie holds every kind of tensor that has broken a checkpoint tool somewhere: prime sizes,
0-d, empty, frozen, never reached by a gradient, tied, and buffers of four dtypes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaForCausalLM

from tests.judges.models import llama_config
from tests.judges.models import named as parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB = 97
GLOBAL_BATCH = 12  # divisible by 1, 2, 3 and 4 ranks, so every world size sees the same samples
SEQUENCE = 9
NEVER_STEPPED = "extras.unused"
FROZEN = ("extras.frozen", "extras.frozen_vector")


def llama(*, tied: bool, hidden: int = 64) -> LlamaForCausalLM:
    """Return a Llama of two layers."""
    return LlamaForCausalLM(llama_config(VOCAB, tied=tied, hidden=hidden))


def is_llama(module: nn.Module) -> bool:
    """Return whether a model is a pure transformers one, loadable from a merged directory."""
    return isinstance(module, LlamaForCausalLM)


def llama_logits(params: dict[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
    """Return logits of a fresh fp32 Llama that holds ``params``, on fixed tokens in eval mode."""
    model = llama(tied=tied).float().eval()
    absent = model.load_state_dict(params, strict=False)
    if absent.unexpected_keys or set(absent.missing_keys) > ({"lm_head.weight"} if tied else set()):
        raise AssertionError(f"the gathered parameters do not fill the model: {absent}")
    input_ids = global_batch(0, 0, 1)
    with torch.no_grad():
        return {"input_ids": input_ids, "logits": model(input_ids=input_ids).logits}


class Hollow(nn.Module):
    """Owns an empty parameter and is never called.

    ZeRO-3 cannot gather an empty parameter in a batch with others (partition_parameters.py:
    "ValueError: torch.cat(): expected a non-empty list of Tensors"); one it never fetches is fine.
    """

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 5))


class Extras(nn.Module):
    """The odd tensors. A submodule, so that ZeRO-3's module hooks gather them for its forward."""

    scale: Tensor
    calls: Tensor

    def __init__(self, scalar_shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.seven = nn.Parameter(torch.linspace(-1.0, 1.0, 7))
        self.scalar = nn.Parameter(torch.full(scalar_shape, 0.75))
        self.thirteen = nn.Parameter(torch.linspace(0.1, 2.0, 13))
        self.hollow = Hollow()
        self.unused = nn.Parameter(torch.linspace(-2.0, 2.0, 15).reshape(3, 5))
        self.frozen = nn.Parameter(
            torch.linspace(-0.5, 0.5, 77).reshape(7, 11), requires_grad=False
        )
        self.frozen_vector = nn.Parameter(torch.linspace(1.0, 3.0, 5), requires_grad=False)
        self.register_buffer("scale", torch.tensor([0.5, 1.25, -2.0]))
        self.register_buffer("calls", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.register_buffer("pair", torch.tensor([1.5, -0.375], dtype=torch.bfloat16))
        self.register_buffer("scratch", torch.full((4,), 9.0), persistent=False)

    def forward(self) -> Tensor:
        """Return a small loss that reaches all trained parameters but ``unused`` and ``empty``."""
        self.calls += 1
        mixed = (self.seven @ self.frozen).square().mean() * self.frozen_vector.sum()
        curve = (self.thirteen * self.scalar).cos().mean() * self.scale.sum()
        return 0.1 * (mixed + curve).float()


class Menagerie(nn.Module):
    """A Llama with the odd tensors beside it."""

    def __init__(self, *, tied: bool, scalar_shape: tuple[int, ...] = (), hidden: int = 64) -> None:
        super().__init__()
        self.llama = llama(tied=tied, hidden=hidden)
        self.extras = Extras(scalar_shape)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.llama(input_ids=input_ids, labels=input_ids).loss.float()
        return loss + self.extras()


def checkpointed(model: Menagerie) -> Menagerie:
    """Return a model with activation checkpointing around the last layer and the odd tensors."""
    layers = model.llama.model.layers
    layers[-1] = checkpoint_wrapper(layers[-1])
    model.extras = checkpoint_wrapper(model.extras)
    return model


def repeated(model: Menagerie) -> Menagerie:
    """Return a model that uses its first layer a second time, under another name."""
    layers = model.llama.model.layers
    layers.append(layers[0])
    model.llama.config.num_hidden_layers = len(layers)
    return model


class Headed(nn.Module):
    """A model with a value head, which saves itself as TRL 0.11's ``modeling_value_head.py`` does.

    The state dict has the names of the inner model, and those of the head.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = inner
        self.v_head = nn.Linear(8, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the loss."""
        value = self.v_head(torch.ones(8, dtype=self.v_head.weight.dtype))
        loss: Tensor = self.pretrained_model(input_ids) + value.float().square().mean()
        return loss

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Return the inner model's state dict, with the head's beside it."""
        state: dict[str, Any] = self.pretrained_model.state_dict(*args, **options)
        head = self.v_head.state_dict(*args, **options)
        return state | {f"v_head.{name}": value for name, value in head.items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        """Load both parts."""
        head = {n: v for n, v in state_dict.items() if n.startswith("v_head.")}
        rest = {n: v for n, v in state_dict.items() if n not in head}
        own = {name.removeprefix("v_head."): value for name, value in head.items()}
        self.v_head.load_state_dict(own, *args, **options)
        return self.pretrained_model.load_state_dict(rest, *args, **options)


class MoeToy(nn.Module):
    """Layers of experts behind DeepSpeed's gates, one with a shared expert beside them.

    The loss is the same on any ranks: no token is dropped, and the gates' auxiliary loss, which a
    rank takes of its own share of the batch, is not in it.
    """

    def __init__(self, experts: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.embed = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList()
        for number, (count, ranks) in enumerate(experts):
            expert = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
            layer = MoE(
                16,
                expert,
                num_experts=count,
                ep_size=ranks,
                drop_tokens=False,
                use_residual=number == 0,
            )
            self.layers.append(layer)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the loss."""
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        logits = self.head(self.norm(hidden)).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, input_ids.flatten())


def global_batch(step: int, micro: int, accumulation: int) -> Tensor:  # (GLOBAL_BATCH, SEQUENCE)
    """Return token ids of a micro step of all ranks; they depend on the position in time alone."""
    generator = torch.Generator().manual_seed(1000 + step * accumulation + micro)
    return torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQUENCE), generator=generator)


def rank_share(batch: Tensor, rank: int, world: int) -> Tensor:
    """Return this rank's equal, contiguous part of a global batch."""
    size = batch.shape[0] // world
    return batch[rank * size : (rank + 1) * size]


def param_groups(model: nn.Module, split: str) -> list[dict[str, Any]]:
    """Return trainable parameters in user groups: ``one``, ``decay``, ``tiny`` or ``empty``.

    ``tiny`` puts the single-element scalar in a group of its own, smaller than any number of ranks;
    ``empty`` puts the parameter without elements there.
    """
    named = [(name, p) for name, p in parameters(model) if p.requires_grad]
    if split == "one":
        return [{"params": [p for _, p in named]}]
    alone = {"tiny": "scalar", "empty": "empty"}.get(split)
    lone = [p for name, p in named if name.rpartition(".")[2] == alone]
    decay = [p for name, p in named if _decays(name) and not _holds(lone, p)]
    plain = [p for name, p in named if not _decays(name) and not _holds(lone, p)]
    groups: list[dict[str, Any]] = [
        {"params": decay, "weight_decay": 0.1},
        {"params": plain, "weight_decay": 0.0},
        {"params": lone, "weight_decay": 0.05, "lr": 3e-3},
    ]
    return [group for group in groups if group["params"]]


def _decays(name: str) -> bool:
    """Return whether a parameter decays, by its name: ``zero.Init`` makes all of them 1-d."""
    return "norm" not in name and not name.startswith("extras.")


def _holds(params: Sequence[nn.Parameter], wanted: nn.Parameter) -> bool:
    return any(p is wanted for p in params)


def menagerie() -> nn.Module:
    """Return the model of most runs; without arguments, as ``--model`` needs it."""
    return Menagerie(tied=False)


def menagerie_tied() -> nn.Module:
    """Return the model of the tied ZeRO-3 run; without arguments, as ``--model`` needs it."""
    return Menagerie(tied=True)
