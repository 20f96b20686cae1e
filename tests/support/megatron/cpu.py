"""Stand-ins for the GPUs that Megatron-core needs. No function here writes a file.

Megatron-core allocates with ``device="cuda"``, uses streams, and recognizes half precision by the
type string of CUDA tensors. Plain PyTorch replaces kernels that need a compiler or a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.dummy
import queue
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


def replace_cuda() -> None:
    """Make every CUDA call act on the CPU; to be called before Megatron-core is imported."""
    _disable_compilers()
    _replace_streams()
    for name in FACTORIES.split():
        setattr(torch, name, _wrap_for_cpu(getattr(torch, name)))
    torch.Tensor.to = _wrap_for_cpu(torch.Tensor.to)
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self
    torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self
    plain_type = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = plain_type(self, *args, **kwargs)
        return CUDA_TYPES.get(found, found) if isinstance(found, str) else found

    torch.Tensor.type = type_
    sys.modules["grouped_gemm"] = _make_grouped_gemm()


def _disable_compilers() -> None:
    """Leave functions uncompiled: ``jit_fuser`` would compile small ones for seconds."""
    torch.compile = lambda model=None, **_kwargs: model if model is not None else (lambda f: f)
    torch.jit.script = lambda function, *_args, **_kwargs: function


def _wrap_for_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and str(kwargs["device"]).startswith("cuda"):
            kwargs["device"] = "cpu"
        args = tuple("cpu" if isinstance(a, str) and a == "cuda" else a for a in args)
        return function(*args, **kwargs)

    return call


class _StreamStandIn:
    """A CUDA stream or event whose operations have always finished already."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _StreamStandIn]:
        # Callers test for such names (``__deepcopy__``), and would take any value for a method.
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: self


def _replace_streams() -> None:
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
    """Add modules that are not installed, so that they can be imported.

    Args:
        modules: name -> functions and values of the module.
    """
    for name, values in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        sys.modules[name] = module


def _make_grouped_gemm() -> types.ModuleType:
    """Return a module with the operation of ``grouped_gemm`` that Megatron's GroupedMLP calls."""

    def gmm(a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, *, trans_b: bool) -> Any:
        parts = a.split(sizes.tolist())  # a: (tokens, k), b: (experts, k, n)
        return torch.cat([p @ (w.T if trans_b else w) for p, w in zip(parts, b, strict=True)])

    module = types.ModuleType("grouped_gemm")
    module.ops = types.SimpleNamespace(gmm=gmm)
    return module


def replace_gpu_modules() -> None:
    """Replace what only Transformer Engine has, and what takes seconds in each rank.

    Megatron-core must be imported already.
    """
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    moe_utils.te_general_gemm = None  # 0.16.1 uses this name even without Transformer Engine
    WrappedTorchNorm.__new__ = _make_norm
    _write_in_threads(filesystem_async)
    _share_groups(parallel_state)


def _share_groups(parallel_state: types.ModuleType) -> None:
    """Make one process group for all purposes that have the same ranks.

    Each of Megatron's thirty groups has threads, which wake up a hundred times a second.
    """
    create, made = parallel_state.create_group, dict[Any, Any]()

    def create_once(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        key = torch.distributed.group.WORLD, tuple(ranks)
        if key not in made:
            made[key] = create(ranks, *args, **kwargs)
        return made[key]

    parallel_state.create_group = create_once


def _write_in_threads(filesystem_async: types.ModuleType) -> None:
    """Have a rank write the files of torch_dist in threads.

    Megatron itself starts a process for each file, and one for the queue of their results, which
    imports torch again. The same functions write the same files.
    """
    filesystem_async._get_write_results_queue = functools.cache(queue.Queue)
    filesystem_async.mp = types.SimpleNamespace(get_context=lambda _method: multiprocessing.dummy)


class ZeroCenteredRMSNorm(torch.nn.RMSNorm):
    """A norm that multiplies by ``1 + weight``, as in Transformer Engine and apex."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized x, multiplied by ``1 + weight``."""
        return torch.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


class ZeroCenteredLayerNorm(torch.nn.LayerNorm):
    """A layer norm that multiplies by ``1 + weight``, as in Transformer Engine and apex."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized x, multiplied by ``1 + weight``, plus the bias."""
        return torch.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


_ZERO_CENTERED = {"RMSNorm": ZeroCenteredRMSNorm, "LayerNorm": ZeroCenteredLayerNorm}


def _make_norm(_cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_kwargs: Any) -> Any:
    """Return PyTorch's norm, marked for sequence parallelism as in fused_layer_norm.py."""
    if config.layernorm_zero_centered_gamma:
        norm = _ZERO_CENTERED[config.normalization](hidden_size, eps)
    else:
        norm = getattr(torch.nn, config.normalization)(normalized_shape=hidden_size, eps=eps)
    for param in norm.parameters():
        param.sequence_parallel = config.sequence_parallel
    return norm
