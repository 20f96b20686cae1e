"""Construction of models on the meta device, without memory or network: from config or code."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from reshard.core.counts import check_config
from reshard.errors import CorruptError, ReshardError, UsageError
from reshard.system import optional
from reshard.system.files import read_small_file
from reshard.system.paths import as_path

if TYPE_CHECKING:
    from torch import nn

_OPTIONS: dict[str, Any] = {"trust_remote_code": False}  # never run code beside a config
_REMEDY = "pass the model as module:factory; code beside a config is not run"
_TABLES = "_MAPPING_NAMES"
_FACTORY = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")

# torch methods that fill a tensor in place with random numbers
_DRAWS = frozenset(
    "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_".split()
)


def build(model: str) -> nn.Module:
    """Build the module that a user names: a config, its directory or ``module:factory``."""
    refuse_missing(model)
    if as_path(model).exists():
        return _build_from_file(as_path(model))
    return _build_from_factory(model)


def refuse_missing(model: str) -> None:
    """Refuse a name that is neither a path that exists nor spelled as a function.

    Raises:
        UsageError: it is neither.
    """
    if not as_path(model).exists() and not _FACTORY.fullmatch(str(model)):
        raise UsageError(
            f"--model {model}",
            "is not a file, a directory or module:factory",
            "pass a config.json, its directory, or a function such as train:make_model",
        )


def list_modules(model: str) -> tuple[list[str], frozenset[str]]:
    """Return the names of a model's weights and buffers, and of its linear layers.

    The layer that computes the output is left out, as PEFT's ``all-linear`` does (PEFT 0.21
    ``tuners/tuners_utils.py``, _maybe_include_all_linear_layers).
    """
    from torch import nn

    root: Any = build(model)
    head = root.get_output_embeddings() if hasattr(root, "get_output_embeddings") else None
    linear = (
        name
        for name, module in root.named_modules()
        if module is not head
        and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    )
    return list(root.state_dict()), frozenset(linear)


def build_configured(config: Mapping[str, Any], source: str) -> nn.Module:
    """Build the transformers model of a config on the meta device."""
    import transformers

    check_config(source, config)
    return _build_from_config(transformers.AutoConfig.for_model(**_decode_floats(config)), source)


def _build_from_file(path: Path) -> nn.Module:
    import transformers

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            path, "contains no config.json", "pass a transformers config.json or module:factory"
        )
    try:
        stated = json.loads(read_small_file(file))
        check_config(file, stated)
        if "_diffusers_version" in stated:
            return _build_of_diffusers(stated, file)
        config = transformers.AutoConfig.from_pretrained(file, local_files_only=True, **_OPTIONS)
    except CorruptError as error:
        raise UsageError(file, error.problem, _REMEDY) from error
    except ReshardError:
        raise
    # Each class of config refuses values with errors of its own, so no narrower class is possible.
    except Exception as error:
        problem = f"transformers {transformers.__version__} cannot read it: {_summarize(error)}"
        raise UsageError(file, problem, _REMEDY) from error
    return _build_from_config(config, file)


def _build_of_diffusers(config: dict[str, Any], file: Path) -> nn.Module:
    optional.require("diffusers", f"building the model of {file}")
    import diffusers

    cls: Any = getattr(diffusers, str(config.get("_class_name")), None)
    is_model = isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin)
    if not is_model:
        problem = f"diffusers {diffusers.__version__} has no model {config.get('_class_name')}"
        raise UsageError(file, problem, _REMEDY)
    with _naming_failure(file), _without_values():
        built: nn.Module = cls.from_config(config)
    return built


def _decode_floats(value: Any) -> Any:
    # transformers writes infinities as ``__float__`` (5.23 ``configuration_utils.py``,
    # ``_encode_special_floats``).
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decode_floats(item) for key, item in value.items()}
    return [_decode_floats(item) for item in value] if isinstance(value, list) else value


def _build_from_config(config: Any, source: Path | str) -> nn.Module:
    import transformers

    cls = _find_model_class(transformers, config)
    autos: list[Any] = [transformers.AutoModelForCausalLM, transformers.AutoModel]
    built: nn.Module
    with _naming_failure(source), _without_values():
        if cls is not None:
            built = cls(config)
            return built
        for auto in autos:
            if type(config) in auto._model_mapping:  # noqa: SLF001 - as from_config checks it
                built = auto.from_config(config, **_OPTIONS)
                return built
    raise UsageError(
        source, f"transformers has no model class for a {type(config).__name__}", _REMEDY
    )


@contextmanager
def _naming_failure(source: Path | str) -> Iterator[None]:
    # A library's model code runs in the block, and can raise errors of any class.
    try:
        yield
    except ModuleNotFoundError:
        raise
    except Exception as error:
        raise UsageError(
            source, f"constructing the model fails: {_summarize(error)}", _REMEDY
        ) from error


def _find_model_class(transformers: Any, config: Any) -> Any:
    # Some parts of models are classes that the package does not export, with configs that it does:
    # they are in the module beside the config's.
    names = config.architectures
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not name.isidentifier():
        return None
    cls = getattr(transformers, name, None) or _find_beside(type(config).__module__, name)
    is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    return cls if is_model else None


def list_classes(model_type: str) -> list[str]:
    """Return the names of the transformers classes for a model type.

    Source: transformers 5.23 ``models/auto/modeling_auto.py``, a table for each task.
    """
    from transformers.models.auto import modeling_auto

    tables = (table for name, table in vars(modeling_auto).items() if name.endswith(_TABLES))
    found = (table.get(model_type, ()) for table in tables if isinstance(table, Mapping))
    classes = ((name,) if isinstance(name, str) else name for name in found)
    return list(dict.fromkeys(name for names in classes for name in names))


def _find_beside(module: str, name: str) -> Any:
    package, _, leaf = module.rpartition(".configuration_")
    if not package.startswith("transformers.models."):
        return None
    try:
        return resolve_name(f"{package}.modeling_{leaf}:{name}")
    except (ImportError, AttributeError):
        return None


def _build_from_factory(spec: str) -> nn.Module:
    import torch

    option = f"--model {spec}"
    with _working_directory_importable():
        try:
            factory = resolve_name(spec)
        except (ImportError, AttributeError, SyntaxError) as error:
            raise UsageError(
                option,
                f"cannot be imported: {_summarize(error)}",
                "run reshard in the directory of the module, or set PYTHONPATH",
            ) from error
        try:
            with _without_values():
                built = factory()
        # The user's own code runs here, and can raise anything.
        except Exception as error:
            raise UsageError(
                option,
                f"raised {_summarize(error)}",
                "the function must work without arguments, with tensors on the meta device",
            ) from error
    if not isinstance(built, torch.nn.Module):
        raise UsageError(option, f"returned a {type(built).__name__}", "return the torch.nn.Module")
    return built


@contextmanager
def _without_values() -> Iterator[None]:
    # On the meta device torch draws initial values by code that imports its compiler, which takes
    # seconds.
    import torch
    from torch.overrides import TorchFunctionMode

    class NoValues(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if getattr(func, "__name__", "") in _DRAWS and tensor is not None and tensor.is_meta:
                return tensor
            return func(*args, **(kwargs or {}))

    with torch.device("meta"), NoValues():
        yield


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    """Put the working directory on Python's path, which a console script does not do."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:  # the user's code may have removed it
            sys.path.remove(here)


def _summarize(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    shown = lines[:2] if lines[0].endswith(":") else lines[:1]
    return f"{type(error).__name__}: {' '.join(map(str.strip, shown))}"
