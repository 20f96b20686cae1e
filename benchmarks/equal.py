"""Check that two merged models have the same tensors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def check(made: Path, reference: Path) -> None:
    """Compare in a process of its own: a child's peak RSS begins at its parent's.

    Raises:
        SystemExit: a tensor differs, or is missing.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        said = pool.submit(_difference, made, reference).result()
    if said:
        raise SystemExit(f"{made}: {said}")


def _difference(made: Path, reference: Path) -> str:
    import torch
    from safetensors import safe_open

    with ExitStack() as stack:
        known = stack.enter_context(safe_open(reference, "pt"))
        missing = set(known.keys())
        for name, tensor in _tensors(made, stack):
            if name in missing and not torch.equal(tensor, known.get_tensor(name)):
                return f"{name} differs"
            missing.discard(name)
    return f"lacks {sorted(missing)[:3]}" if missing else ""


def _tensors(made: Path, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    for path in _files(made):
        tensors = _of_safetensors(path, stack) if path.suffix == ".safetensors" else _of_torch(path)
        for name, tensor in tensors:
            yield from _by_layer(name, tensor)


def _files(made: Path) -> list[Path]:
    if made.is_dir():
        return sorted(made.rglob("*.safetensors")) or sorted(made.rglob("*.pt"))
    return [made]


def _of_safetensors(path: Path, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    file = stack.enter_context(safe_open(path, "pt"))
    for name in file.keys():  # noqa: SIM118 - not a mapping
        yield name, file.get_tensor(name)


def _of_torch(path: Path) -> Iterator[tuple[str, Any]]:
    import torch

    state = torch.load(path, mmap=True, weights_only=False)
    for name, value in state.get("model", state).items():
        if isinstance(value, torch.Tensor):
            yield name, value


NORMS = {  # what a layer of Megatron-core's own calls them, by what its torch_dist calls them
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def _by_layer(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """Yield one tensor, or one per layer: Megatron's torch_dist has those of all layers as one."""
    before, layers, own = name.partition("decoder.layers.")
    if not layers or own[0].isdigit():
        yield name, tensor
        return
    for number, part in enumerate(tensor):
        yield f"{before}{layers}{number}.{NORMS.get(own, own)}", part
