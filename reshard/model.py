"""A model's names, shapes and FSDP1 units, from its config or its code, on the meta device.

For checkpoints whose files do not say: an FSDP1 flat parameter (``LOCAL_STATE_DICT``, the raw
optimizer) is one long vector, and only the model that was wrapped knows what lies in it.

Sources: torch 2.13 ``torch/distributed/fsdp``: ``wrap.py`` (which modules are wrapped),
``_init_utils.py`` ``_get_orig_params`` and ``_flat_param.py`` ``_init_flat_param_and_metadata``
(which parameters a wrapped module owns, in which order), ``_wrap_utils.py`` ``_auto_wrap`` (what
mixed precision changes).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from reshard.box import Index
from reshard.errors import UnsupportedError, UsageError
from reshard.paths import as_path

if TYPE_CHECKING:
    from torch import nn

_FACTORY = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
_COUNT = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)(?:e\+?(\d{1,2})|([KMBGT]))?", re.IGNORECASE)
_FACTORS = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_WRITE = "write LlamaDecoderLayer[,OtherClass], size=100M or none"


@dataclass(frozen=True, slots=True)
class Unit:
    """One FSDP1 flat parameter.

    Args:
        prefix: the name of the wrapped module; empty for the root.
        members: the names of its parameters in flat order, shared ones once.
        full_precision: mixed precision passes it by (batch norm): its forward dtype is its own.
    """

    prefix: str
    members: tuple[str, ...]
    full_precision: bool = False


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """What a model would hold, in the order in which PyTorch names it.

    Args:
        source: what it was read from, and its class.
        parameters: shapes by name, tied ones once, in ``named_parameters()`` order. A parameter
            that is shared by two units stands here once a unit: FSDP1 trains it as two.
        buffers: shapes of those that are saved; shared ones once.
        tied: every further name of a parameter or a saved buffer -> its first.
        units: in the order in which FSDP1 numbers its flat parameters; empty if not asked for.
        tensor_plan: of transformers models in it: patterns of modules and parameters -> a style.
        embeddings: every name of the weights of ``nn.Embedding``.
    """

    source: str
    parameters: Mapping[str, Index]
    buffers: Mapping[str, Index]
    tied: Mapping[str, str]
    units: tuple[Unit, ...] = ()
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Told:
    """What a user says of a model: ``--model`` and ``--wrap``."""

    model: str
    wrap: str | None = None

    def shapes(self, units: Iterable[str] = ()) -> ModelShapes:
        """What the model would hold.

        Args:
            units: the flat parameters that there are. Whether FSDP had a ``MixedPrecision`` is not
                told; batch norms that are units of their own show it.

        Raises:
            UsageError, UnsupportedError: as `describe`.
        """
        plain = describe(self.model, self.wrap)
        wanted = set(units)
        if not wanted or {unit.prefix for unit in plain.units} == wanted:
            return plain
        mixed = describe(self.model, self.wrap, mixed_precision=True)
        return mixed if {unit.prefix for unit in mixed.units} == wanted else plain


def describe(model: str, wrap: str | None = None, *, mixed_precision: bool = False) -> ModelShapes:
    """The names, shapes and units of a model, without its memory and without the network.

    ``module:factory`` **imports and calls the user's own code**, found as Python finds it or in the
    working directory: only a user who names it asks for that. Code that lies beside a config is
    never run.

    Args:
        model: a transformers ``config.json`` or a directory with one, or ``module:factory``, a
            function without arguments that returns the module which FSDP wrapped.
        wrap: how FSDP1 was told to wrap it: class names, which also count for their subclasses, as
            ``transformer_auto_wrap_policy`` and ``ModuleWrapPolicy``; ``size=N`` as
            ``size_based_auto_wrap_policy`` with ``min_num_params=N``; ``none`` for the root alone.
        mixed_precision: FSDP had a ``MixedPrecision``: it then wraps every batch norm by itself,
            and ``size=`` looks into ``nn.MultiheadAttention`` too.

    Raises:
        UsageError: there is no such model or class, or FSDP1 could not have wrapped it so.
    """
    policy = None if wrap is None else _parse(wrap)
    return _shapes(_build(model), model, policy, mixed_precision=mixed_precision)


def shapes_of(
    root: nn.Module, wrap: str | None = None, *, mixed_precision: bool = False
) -> ModelShapes:
    """``describe`` for a module that is there; its values are not looked at.

    Raises:
        UsageError, UnsupportedError: as `describe`.
    """
    policy = None if wrap is None else _parse(wrap)
    return _shapes(root, "model", policy, mixed_precision=mixed_precision)


# What was asked for


@dataclass(frozen=True, slots=True)
class _Policy:
    """Wrap these classes, or else what holds so many parameters, or else (neither) nothing."""

    classes: tuple[str, ...] = ()
    least: int | None = None


def _parse(wrap: str) -> _Policy:
    text = wrap.strip()
    if text.lower() == "none":
        return _Policy()
    if text.startswith("size="):
        return _Policy(least=_parse_count(text.removeprefix("size=")))
    names = tuple(name.strip() for name in text.split(","))
    if not all(name.isidentifier() for name in names):
        raise UsageError(f"--wrap {wrap}", "is not a way to wrap", _WRITE)
    return _Policy(names)


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


# The model


def _build(model: str) -> nn.Module:
    if as_path(model).exists():
        return _from_config(as_path(model))
    if _FACTORY.fullmatch(model):
        return _from_factory(model)
    raise UsageError(
        f"--model {model}",
        "is neither a file or directory nor module:factory",
        "give a config.json, the directory that holds it, or e.g. train:make_model",
    )


def _from_config(path: Path) -> nn.Module:
    """A transformers model on the meta device; the class is the config's, else a causal LM's."""
    import torch
    import transformers

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            path, "holds no config.json", "give a transformers config.json or module:factory"
        )
    options: dict[str, Any] = {"trust_remote_code": False}  # never the code beside a config
    remedy = "give the model as module:factory; code that lies beside a config is not run"
    try:
        config = transformers.AutoConfig.from_pretrained(file, local_files_only=True, **options)
    except Exception as error:
        problem = f"transformers {transformers.__version__} cannot read it: {_brief(error)}"
        raise UsageError(file, problem, remedy) from error
    cls = _model_class(transformers, config.architectures)
    autos: list[Any] = [transformers.AutoModelForCausalLM, transformers.AutoModel]
    built: nn.Module
    try:
        with torch.device("meta"):
            if cls is not None:
                built = cls(config)
                return built
            for auto in autos:
                if type(config) in auto._model_mapping:  # noqa: SLF001 - from_config's own question
                    built = auto.from_config(config, **options)
                    return built
    except Exception as error:
        raise UsageError(file, f"the model does not build: {_brief(error)}", remedy) from error
    raise UsageError(file, f"transformers has no model for a {type(config).__name__}", remedy)


def _model_class(transformers: Any, architectures: object) -> Any:
    """The transformers model that is named first, or None; a config may say anything."""
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if model else None


def _from_factory(spec: str) -> nn.Module:
    import torch

    option = f"--model {spec}"
    with _working_directory_importable():
        try:
            factory = resolve_name(spec)
        except (ImportError, AttributeError, SyntaxError) as error:
            raise UsageError(
                option,
                f"cannot be imported: {_brief(error)}",
                "run reshard where the module lies, or set PYTHONPATH",
            ) from error
        try:
            with torch.device("meta"):
                built = factory()
        except Exception as error:
            raise UsageError(
                option,
                f"raised {_brief(error)}",
                "it is called without arguments, and its tensors live on the meta device",
            ) from error
    if not isinstance(built, torch.nn.Module):
        raise UsageError(option, f"returned a {type(built).__name__}", "return the torch.nn.Module")
    return built


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    """As ``python -m`` has it; a console script does not."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


# Which modules are wrapped


def _wrapped(root: nn.Module, policy: _Policy, *, mixed_precision: bool) -> set[nn.Module]:
    """The modules inside the root that FSDP1 wraps."""
    apart = (_batch_norm(),) if mixed_precision else ()
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


def _batch_norm() -> type[nn.Module]:
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


# What each of them owns


def _shapes(
    root: nn.Module, source: str, policy: _Policy | None, *, mixed_precision: bool
) -> ModelShapes:
    wrapped = _wrapped(root, policy or _Policy(), mixed_precision=mixed_precision)
    owners = _owners(root, wrapped)
    names = {module: fqn for fqn, module in root.named_modules()}
    apart = _batch_norm() if mixed_precision else ()
    units = []
    firsts: dict[tuple[nn.Module, nn.Parameter], str] = {}
    for unit in root.modules():
        if unit is not root and unit not in wrapped:
            continue
        members = _members(unit, names[unit], owners)
        firsts.update({(unit, parameter): fqn for parameter, fqn in members.items()})
        if policy is not None and members:
            _refuse_unflattenable(members)
            full = unit is not root and isinstance(unit, apart)
            units.append(Unit(names[unit], tuple(members.values()), full))
    parameters: dict[str, Index] = {}
    buffers: dict[str, Index] = {}
    tied: dict[str, str] = {}
    saved: dict[Any, str] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            fqn = _join(path, name)
            first = firsts[owners[module], parameter]
            if fqn == first:
                parameters[fqn] = tuple(parameter.shape)
            else:
                tied[fqn] = first
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name in module._non_persistent_buffers_set:  # noqa: SLF001 - it has no public name
                continue
            fqn = _join(path, name)
            if saved.setdefault(buffer, fqn) == fqn:
                buffers[fqn] = tuple(buffer.shape)
            else:
                tied[fqn] = saved[buffer]
    source = f"{source} ({type(root).__name__})"
    return ModelShapes(
        source, parameters, buffers, tied, tuple(units), _tensor_plan(root), _embeddings(root)
    )


def _tensor_plan(root: nn.Module) -> dict[str, str]:
    """The plans of all models in it; an outer one of transformers has those of its parts.

    Source: transformers 5.23 ``distributed/mixin.py`` (``init_parallel_plans``).
    """
    found: dict[str, str] = {}
    for path, module in root.named_modules():
        plan = getattr(module, "tp_plan", None)
        for pattern, style in plan.items() if isinstance(plan, dict) else ():
            found.setdefault(_join(path, pattern), style)
    return found


def _embeddings(root: nn.Module) -> frozenset[str]:
    from torch import nn

    return frozenset(
        _join(path, name)
        for path, module in root.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Embedding)
        for name, _ in module.named_parameters(recurse=False)
    )


def _owners(root: nn.Module, wrapped: set[nn.Module]) -> dict[nn.Module, nn.Module]:
    """The unit of each module: FSDP1 wraps from the leaves up, and who comes first takes it."""
    owners: dict[nn.Module, nn.Module] = {}
    for unit in _post_order(root, {root}):
        if unit in wrapped or unit is root:
            for module in unit.modules():
                owners.setdefault(module, unit)
    return owners


def _post_order(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if child not in seen:
            seen.add(child)
            yield from _post_order(child, seen)
    yield module


def _members(
    unit: nn.Module, prefix: str, owners: Mapping[nn.Module, nn.Module]
) -> dict[nn.Parameter, str]:
    """The parameters of one unit in flat order, each at its first name in the unit.

    A parameter of two modules in two units is in both: with ``use_orig_params=False`` they train
    apart from then on. With ``use_orig_params=True`` FSDP1 gives it to the first, and no forward
    of the second succeeds.
    """
    members: dict[nn.Parameter, str] = {}
    for path, module in unit.named_modules(remove_duplicate=False):
        if owners[module] is unit:
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                members.setdefault(parameter, _join(prefix, path, name))
    return members


def _refuse_unflattenable(members: Mapping[nn.Parameter, str]) -> None:
    for parameter, fqn in members.items():
        if parameter.dim() == 0:
            raise UsageError(
                fqn, "is a scalar, which FSDP1 refuses", "is this the model that was trained?"
            )
        if not parameter.is_contiguous():
            raise UnsupportedError(
                fqn,
                f"has strides {parameter.stride()}: FSDP1 flattens it in the order of its memory",
                "open an issue with the model's class",
            )


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
