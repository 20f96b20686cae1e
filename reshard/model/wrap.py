"""The modules of a model that FSDP 1 wraps: by class, by size, or the root only.

Source: torch 2.13 ``torch/distributed/fsdp``: ``wrap.py``; ``_wrap_utils.py`` ``_auto_wrap`` (what
mixed precision changes).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from torch import nn

_COUNT = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)(?:e\+?(\d{1,2})|([KMBGT]))?", re.IGNORECASE)
_FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
OWN_LAYERS = "_no_split_modules"
"""The attribute in which a transformers model lists the classes of its blocks."""
_WRITE = f"write LlamaDecoderLayer[,OtherClass], size=100M, none or {OWN_LAYERS}"


class Policy(NamedTuple):
    """The classes to wrap, or else the least number of parameters; neither: the root only."""

    classes: tuple[str, ...] = ()
    least: int | None = None


def parse(wrap: str) -> Policy:
    """Parse the value of ``--wrap``.

    Raises:
        UsageError: the value is not valid.
    """
    text = wrap.strip()
    if text.lower() == "none":
        return Policy()
    if text.startswith("size="):
        return Policy(least=_parse_count(text.removeprefix("size=")))
    names = tuple(name.strip() for name in text.split(","))
    if not all(name.isidentifier() for name in names):
        raise UsageError(f"--wrap {wrap}", "is not a valid wrapping", _WRITE)
    return Policy(names)


def make_block_policy(root: nn.Module) -> Policy:
    """Return the default policy of trainers: wrap the blocks that transformers declares.

    Source: verl ``utils/fsdp_utils.py`` (``get_fsdp_wrap_policy``): ``module._no_split_modules``.
    """
    named: Iterable[str] = getattr(root, "_no_split_modules", None) or ()
    present = {type(module).__name__ for module in root.modules()}
    return Policy(tuple(name for name in named if name in present))


def _parse_count(text: str) -> int:
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--wrap size={text}",
            "is not a number of parameters",
            "write e.g. size=1e6 or 100M",
        )
    whole, _, decimals = match[1].partition(".")
    factor = 10 ** int(match[2] or 0) * _FACTORS.get((match[3] or "").upper(), 1)
    # In integers, because a float does not hold every count above 2**53.
    count: int = int(whole + decimals) * factor // 10 ** len(decimals)
    if count == 0:
        raise UsageError(
            f"--wrap size={text}",
            "is ambiguous: with it Accelerate wraps only the root, but FSDP every module",
            "write none or size=1",
        )
    return count


def find_wrapped(root: nn.Module, policy: Policy, *, mixed_precision: bool) -> set[nn.Module]:
    """Return the modules inside the root that FSDP1 wraps."""
    always = (get_batch_norm(),) if mixed_precision else ()
    if policy.least is not None:
        by_size = _BySize(policy.least, always)
        by_size.search(root)
        modules = by_size.found
    elif policy.classes:
        classes = (*_resolve_classes(root, policy.classes), *always)
        modules = {module for module in root.modules() if isinstance(module, classes)}
    else:
        modules = set()
    return modules - {root}


def get_batch_norm() -> type[nn.Module]:
    """Return the class of ``MixedPrecision._module_classes_to_ignore``, wrapped separately."""
    from torch.nn.modules.batchnorm import _BatchNorm

    return _BatchNorm


def _resolve_classes(root: nn.Module, names: tuple[str, ...]) -> list[type[nn.Module]]:
    from torch import nn

    exact = [type(module) for module in root.modules()]
    if names == (OWN_LAYERS,):
        names = _list_own_layers(root, {cls.__name__ for cls in exact})
    bases = [base for cls in exact for base in cls.__mro__ if base is not nn.Module]
    present: dict[str, type[nn.Module]] = {}
    for cls in (*exact, *bases):
        if issubclass(cls, nn.Module):
            present.setdefault(cls.__name__, cls)
    for name in names:
        if name not in present:
            raise UsageError(
                f"--wrap {name}",
                "the model has no such module; it has "
                + ", ".join(sorted({cls.__name__ for cls in exact})),
                "name the classes that FSDP wrapped; under Accelerate and Trainer the default is "
                "the model's _no_split_modules",
            )
    return [present[name] for name in names]


def _list_own_layers(root: nn.Module, present: set[str]) -> tuple[str, ...]:
    """Return the classes in the model's ``_no_split_modules`` that it has, as Accelerate does."""
    named = sorted(getattr(root, OWN_LAYERS, None) or ())
    if not named:
        raise UsageError(
            f"--wrap {OWN_LAYERS}",
            f"{type(root).__name__} does not name its repeated layers",
            "name the classes that FSDP wrapped",
        )
    return tuple(name for name in named if name in present)


class _BySize:
    """The search of ``size_based_auto_wrap_policy``, from the leaves up.

    Args:
        least: a module with at least this many elements outside of inner units is wrapped.
        always: classes that are wrapped whatever their size. With any of them, torch also
            evaluates a policy that always searches the children.
    """

    def __init__(self, least: int, always: tuple[type[nn.Module], ...]) -> None:
        self.found: set[nn.Module] = set()
        self._least = least
        self._always = always
        self._taken: set[nn.Module] = set()  # modules with own parameters in the units found

    def search(self, module: nn.Module) -> int:
        """Wrap modules among this one and those inside it; return the elements now in units."""
        from torch import nn

        if not self._taken.isdisjoint(module.modules()):
            raise UnsupportedError(
                f"--wrap size={self._least}",
                f"a module is both in a {type(module).__name__} and in an earlier unit, so the"
                " units of size= would depend on the number of ranks",
                "name the classes that FSDP wrapped",
            )
        numel = sum(parameter.numel() for parameter in module.parameters())
        # FORCE_LEAF_MODULES and, below, EXCLUDE_WRAP_MODULES of size_based_auto_wrap_policy.
        large = numel >= self._least and not isinstance(module, nn.MultiheadAttention)
        if not large and not self._always:
            return 0
        inside = sum(map(self.search, module.children()))
        large = numel - inside >= self._least
        container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if (large and not container) or isinstance(module, self._always):
            self.found.add(module)
            self._taken.update(filter(_has_parameters, module.modules()))
            return numel
        return inside


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))
