"""Whether two merged models hold the same tensors."""

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
    import torch
    from safetensors import safe_open

    if made.suffix == ".pt":
        state = torch.load(made, mmap=True, weights_only=True)
        yield from state.get("model", state).items()
        return
    files = sorted(made.glob("*.safetensors")) if made.is_dir() else [made]
    for path in files:
        file = stack.enter_context(safe_open(path, "pt"))
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)
