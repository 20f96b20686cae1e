"""A model on the meta device, without its memory and without the network: from config or code."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from reshard.errors import UsageError
from reshard.paths import as_path

if TYPE_CHECKING:
    from torch import nn

_OPTIONS: dict[str, Any] = {"trust_remote_code": False}  # never the code beside a config
_REMEDY = "give the model as module:factory; code that lies beside a config is not run"
_FACTORY = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")

# what fills a tensor in place with random numbers, as torch calls it
_DRAWS = frozenset(
    "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_".split()
)


def build(model: str) -> nn.Module:
    """The module that a user names: a config, its directory or ``module:factory``.

    Raises:
        UsageError: there is none, or it does not build.
    """
    if as_path(model).exists():
        return _from_config(as_path(model))
    if _FACTORY.fullmatch(model):
        return _from_factory(model)
    raise UsageError(
        f"--model {model}",
        "is neither a file or directory nor module:factory",
        "give a config.json, the directory that holds it, or e.g. train:make_model",
    )


def build_configured(config: Mapping[str, Any], source: str) -> nn.Module:
    """Build the transformers model of a config on the meta device.

    Raises:
        UsageError: transformers has no such model.
    """
    import transformers

    return _configured(transformers.AutoConfig.for_model(**config), source)


def _from_config(path: Path) -> nn.Module:
    """A transformers model on the meta device; the class is the config's, else a causal LM's."""
    import transformers

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            path, "holds no config.json", "give a transformers config.json or module:factory"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(file, local_files_only=True, **_OPTIONS)
    except Exception as error:
        problem = f"transformers {transformers.__version__} cannot read it: {_brief(error)}"
        raise UsageError(file, problem, _REMEDY) from error
    return _configured(config, file)


def _configured(config: Any, source: Path | str) -> nn.Module:
    import transformers

    cls = _model_class(transformers, config.architectures)
    autos: list[Any] = [transformers.AutoModelForCausalLM, transformers.AutoModel]
    built: nn.Module
    try:
        with _shapes_alone():
            if cls is not None:
                built = cls(config)
                return built
            for auto in autos:
                if type(config) in auto._model_mapping:  # noqa: SLF001 - from_config's own question
                    built = auto.from_config(config, **_OPTIONS)
                    return built
    except Exception as error:
        raise UsageError(source, f"the model does not build: {_brief(error)}", _REMEDY) from error
    raise UsageError(source, f"transformers has no model for a {type(config).__name__}", _REMEDY)


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
            with _shapes_alone():
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
def _shapes_alone() -> Iterator[None]:
    """New tensors are on the meta device, and nothing draws their first values.

    On that device torch draws them by code that imports its compiler, seconds for no value at all.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class NoValues(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = args[0] if args else (kwargs or {}).get("tensor")
            if getattr(func, "__name__", "") in _DRAWS and given is not None and given.is_meta:
                return given
            return func(*args, **(kwargs or {}))

    with torch.device("meta"), NoValues():
        yield


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
