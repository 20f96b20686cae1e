"""Which modules of a model FSDP 1 wraps, as it was told to: by class, by size, or the root alone.

Source: torch 2.13 ``torch/distributed/fsdp``: ``wrap.py``; ``_wrap_utils.py`` ``_auto_wrap`` (what
mixed precision changes).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from torch import nn

_COUNT = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)(?:e\+?(\d{1,2})|([KMBGT]))?", re.IGNORECASE)
_FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_WRITE = "write LlamaDecoderLayer[,OtherClass], size=100M or none"


@dataclass(frozen=True, slots=True)
class Policy:
    """Wrap these classes, or else what holds so many parameters, or else (neither) nothing."""

    classes: tuple[str, ...] = ()
    least: int | None = None


def parse(wrap: str) -> Policy:
    """What ``--wrap`` says.

    Raises:
        UsageError: it says nothing of the kind.
    """
    text = wrap.strip()
    if text.lower() == "none":
        return Policy()
    if text.startswith("size="):
        return Policy(least=_parse_count(text.removeprefix("size=")))
    names = tuple(name.strip() for name in text.split(","))
    if not all(name.isidentifier() for name in names):
        raise UsageError(f"--wrap {wrap}", "is not a way to wrap", _WRITE)
    return Policy(names)


def blocks_of(root: nn.Module) -> Policy:
    """Return the policy that trainers use where a user names none: transformers' own blocks.

    verl ``utils/fsdp_utils.py`` (``get_fsdp_wrap_policy``): ``module._no_split_modules``.
    """
    named: Iterable[str] = getattr(root, "_no_split_modules", None) or ()
    present = {type(module).__name__ for module in root.modules()}
    return Policy(tuple(name for name in named if name in present))


def _parse_count(text: str) -> int:
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--wrap size={text}", "is not a number of parameters", "write e.g. size=1e6 or 100M"
        )
    whole, _, decimals = match[1].partition(".")
    factor = 10 ** int(match[2] or 0) * _FACTORS.get((match[3] or "").upper(), 1)
    count: int = int(whole + decimals) * factor // 10 ** len(decimals)
    if count == 0:
        raise UsageError(
            f"--wrap size={text}",
            "Accelerate wraps the root alone then, and FSDP every module",
            "write none or size=1",
        )
    return count


def wrapped_in(root: nn.Module, policy: Policy, *, mixed_precision: bool) -> set[nn.Module]:
    """The modules inside the root that FSDP1 wraps.

    Raises:
        UsageError: the model has no module of a class that is named.
        UnsupportedError: what ``size=`` wraps depends on the number of ranks.
    """
    apart = (batch_norm(),) if mixed_precision else ()
    if policy.least is not None:
        by_size = _BySize(policy.least, apart)
        by_size.look_into(root)
        found = by_size.found
    elif policy.classes:
        classes = (*_classes(root, policy.classes), *apart)
        found = {module for module in root.modules() if isinstance(module, classes)}
    else:
        found = set()
    return found - {root}


def batch_norm() -> type[nn.Module]:
    """``MixedPrecision._module_classes_to_ignore``: wrapped by themselves, in full precision."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return _BatchNorm


def _classes(root: nn.Module, names: tuple[str, ...]) -> list[type[nn.Module]]:
    """The class of each name: the first module's that has it, else a base class of a module's."""
    from torch import nn

    exact = [type(module) for module in root.modules()]
    bases = [base for cls in exact for base in cls.__mro__ if base is not nn.Module]
    present: dict[str, type[nn.Module]] = {}
    for cls in (*exact, *bases):
        if issubclass(cls, nn.Module):
            present.setdefault(cls.__name__, cls)
    for name in names:
        if name not in present:
            raise UsageError(
                f"--wrap {name}",
                "no module of the model is one; it has "
                + ", ".join(sorted({cls.__name__ for cls in exact})),
                "name the classes that FSDP wrapped; under Accelerate and Trainer the default is "
                "the model's _no_split_modules",
            )
    return [present[name] for name in names]


class _BySize:
    """``size_based_auto_wrap_policy``, from the leaves up.

    Args:
        least: elements that no unit inside has, from which on a module is wrapped.
        apart: classes that are wrapped whatever their size. torch asks their policy too, and that
            always looks inside.
    """

    def __init__(self, least: int, apart: tuple[type[nn.Module], ...]) -> None:
        self.found: set[nn.Module] = set()
        self._least = least
        self._apart = apart
        self._taken: set[nn.Module] = set()  # what in those found has parameters of its own

    def look_into(self, module: nn.Module) -> int:
        """Find the modules to wrap, this one among them; the elements that they hold."""
        from torch import nn

        if not self._taken.isdisjoint(module.modules()):
            raise UnsupportedError(
                f"--wrap size={self._least}",
                f"a module lies both in a {type(module).__name__} and in a unit before it: what "
                "size= wraps then depends on the number of ranks",
                "name the classes that FSDP wrapped",
            )
        numel = sum(parameter.numel() for parameter in module.parameters())
        large = numel >= self._least and not isinstance(module, nn.MultiheadAttention)
        if not large and not self._apart:
            return 0
        inside = sum(map(self.look_into, module.children()))
        large = numel - inside >= self._least
        container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if (large and not container) or isinstance(module, self._apart):
            self.found.add(module)
            self._taken.update(filter(_has_parameters, module.modules()))
            return numel
        return inside


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))
