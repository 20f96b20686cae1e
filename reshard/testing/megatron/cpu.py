"""What makes CPUs pass for the GPUs that Megatron-core asks for. Nothing here writes a byte.

Megatron-core allocates with ``device="cuda"``, asks for streams, and tells half precision by the
type string of CUDA tensors. Kernels that need a compiler or a GPU stand in as plain PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FACTORIES = (
    "arange as_tensor empty empty_like full full_like ones ones_like rand randn tensor zeros "
    "zeros_like linspace"
)
CUDA_TYPES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}


def pass_for_gpus() -> None:
    """Make every CUDA call act on the CPU, before Megatron-core is imported."""
    _compile_nothing()
    _stand_in_for_streams()
    for name in FACTORIES.split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _on_cpu(torch.Tensor.to)
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self
    torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self
    plain_type = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = plain_type(self, *args, **kwargs)
        return CUDA_TYPES.get(found, found) if isinstance(found, str) else found

    torch.Tensor.type = type_
    sys.modules["grouped_gemm"] = _grouped_gemm()


def _compile_nothing() -> None:
    """``jit_fuser`` would compile small functions for seconds."""
    torch.compile = lambda model=None, **_kwargs: model if model is not None else (lambda f: f)
    torch.jit.script = lambda function, *_args, **_kwargs: function


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(a, str) and a == "cuda" else a for a in args)
        return function(*args, **kwargs)

    return call


class _StreamStandIn:
    """A CUDA stream or event: what is asked of it has happened already."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _StreamStandIn]:
        # Callers probe for such names (``__deepcopy__``), and any answer passes for a method.
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: self


def _stand_in_for_streams() -> None:
    cuda = torch.cuda
    cuda.Stream = cuda.Event = _StreamStandIn
    cuda.current_stream = cuda.default_stream = _StreamStandIn
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.synchronize = cuda.empty_cache = lambda *_args: None
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = lambda _device: None
    cuda.device_count = lambda: 1
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_args: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda._lazy_call = lambda call, **_kwargs: call()
    cuda.default_generators = {torch.device("cpu"): torch.default_generator}


def add_modules(modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Let modules that are not installed be imported: name -> their functions and values."""
    for name, values in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        sys.modules[name] = module


def _grouped_gemm() -> types.ModuleType:
    """Return the one operation of ``grouped_gemm`` that Megatron's GroupedMLP calls."""

    def gmm(a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, *, trans_b: bool) -> Any:
        parts = a.split(sizes.tolist())  # a: (tokens, k), b: (experts, k, n)
        return torch.cat([p @ (w.T if trans_b else w) for p, w in zip(parts, b, strict=True)])

    module = types.ModuleType("grouped_gemm")
    module.ops = types.SimpleNamespace(gmm=gmm)
    return module


def after_import() -> None:
    """Replace what only Transformer Engine has, and what costs seconds in each rank."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    moe_utils.te_general_gemm = None  # a name that 0.16.1 uses without it
    WrappedTorchNorm.__new__ = _norm
    filesystem_async._get_write_results_queue = _forked_queue


@functools.cache
def _forked_queue() -> Any:
    """Return the queue of a rank's writers, whose process Megatron spawns: it imports torch."""
    return multiprocessing.get_context("fork").Manager().Queue()


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """A norm of ``1 + weight``, which Transformer Engine and apex have, and PyTorch has not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as a norm of ``1 + weight`` makes it."""
        return torch.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def _norm(_cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_kwargs: Any) -> Any:
    """Return PyTorch's norm, marked for sequence parallel as fused_layer_norm.py marks its own."""
    if config.layernorm_zero_centered_gamma:
        assert config.normalization == "RMSNorm"
        norm = ZeroCenteredRMSNorm(hidden_size, eps)
    else:
        norm = getattr(torch.nn, config.normalization)(normalized_shape=hidden_size, eps=eps)
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel
    return norm
