"""The sizes of a model from a config, a cached model, a parameter count, or names and shapes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard import units
from reshard.core.box import Index
from reshard.core.counts import check_config
from reshard.errors import UsageError
from reshard.sizing.families import UnknownSizesError, count_config, count_llama_block
from reshard.sizing.model import BlockSizes, ModelSizes, Parameter, Saved
from reshard.system.paths import as_path

_BLOCK = re.compile(r"(?P<block>(?:.*?\.)?\d+)\.(?P<rest>.+)")
_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
_NORM = re.compile(r"(norm|ln)[^.]*\.weight$")
_CACHED = re.compile(r"[\w.-]+/[\w.-]+")
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([KMBT]?)", re.IGNORECASE)
_SCALES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def find_model(model: str) -> ModelSizes:
    """Return the sizes of the model that a user names.

    Formulas count the known families; transformers builds others on the meta device.

    Args:
        model: a config.json, its directory, the name of a model in Hugging Face's cache, or
            ``module:factory``.
    """
    file = find_config(model)
    if file is None:
        return _build(model)
    config = read_config(file)
    try:
        return count_config(config, str(file))
    except UnknownSizesError:
        return _build(str(file), config)


def find_config(model: str) -> Path | None:
    """Return the config.json of a model, or None for ``module:factory``.

    Raises:
        UsageError: there is no such model.
    """
    path = as_path(model)
    if path.is_file():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    if _CACHED.fullmatch(model) and not path.exists():
        return _find_cached(model)
    if path.exists():
        raise UsageError(path, "contains no config.json", "pass a transformers config.json")
    return None


def _find_cached(model: str) -> Path:
    # The directories are those of huggingface_hub 1.x (``constants.py``, ``file_download.py``).
    base = as_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    home = as_path(os.environ.get("HF_HOME") or str(base / "huggingface")).expanduser()
    cache = as_path(os.environ.get("HF_HUB_CACHE") or str(home / "hub")).expanduser()
    folder = cache / f"models--{model.replace('/', '--')}"
    reference = folder / "refs" / "main"
    if reference.is_file():
        file = folder / "snapshots" / reference.read_text().strip() / "config.json"
        if file.is_file():
            return file
    for file in sorted(folder.glob("snapshots/*/config.json")):
        return file
    raise UsageError(
        f"--model {model}",
        f"is neither a path nor a model in {cache}",
        "pass a config.json, its directory, or --params 7B; nothing is downloaded",
    )


def read_config(file: Path) -> dict[str, Any]:
    """Read a config.json.

    Raises:
        UsageError: it is not a JSON object.
        CorruptError: it states a size that no model has.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(file, f"cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(file, "is not a JSON object", "pass a transformers config.json")
    check_config(file, config)
    return config


def count_parameters(text: str) -> ModelSizes:
    """Return a model of which only the number of parameters is known, for example ``7B``.

    Activations and LoRA need shapes: the model is assumed to be a Llama with 12 L h^2 parameters
    and h = 128 L (Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1, for
    the former).

    Raises:
        UsageError: not a number of parameters.
    """
    match = _COUNT.fullmatch(text.strip())
    numel = int(float(match[1]) * _SCALES[match[2].upper()]) if match else 0
    if numel < 1:
        raise UsageError(f"--params {text}", "is not a number of parameters", "write e.g. 7B")
    layers = max(1, round((numel / (12 * 128**2)) ** (1 / 3)))
    hidden, vocab = 128 * layers, 32_000
    share, rest = divmod(numel, layers)
    saved = count_llama_block(hidden, 8 * hidden // 3)
    first, others = (_list_matrices(numel, hidden) for numel in (share + rest, share))
    blocks = tuple(BlockSizes(f"layers.{n}", others if n else first, saved) for n in range(layers))
    note = (
        "--params states no shapes: activations and LoRA adapters are counted as those of a Llama"
        f" with {units.counted(layers, 'layer')} of width {hidden} and a vocabulary of {vocab}"
    )
    outer = Saved(2 * hidden, hidden)
    return ModelSizes(
        f"--params {text}", "given", (), blocks, (), outer, hidden, vocab, notes=(note,)
    )


def _list_matrices(numel: int, hidden: int) -> tuple[Parameter, ...]:
    # Four matrices of attention have h x h elements each, three of the MLP h x 8/3 h: together 12
    # of h x h. The rows are fewer or more than h if the block has another size.
    rows = numel // (12 * hidden)
    inner = 8 * rows // 3
    shapes = {
        **{f"self_attn.{name}_proj.weight": (rows, hidden) for name in "qkvo"},
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    matrices = tuple(Parameter(name, shape) for name, shape in shapes.items() if rows)
    return (*matrices, Parameter("others", (numel - sum(matrix.numel for matrix in matrices),)))


def _build(model: str, config: Mapping[str, Any] | None = None) -> ModelSizes:
    from reshard.model import describe

    shapes = describe(model)
    sizes = count_shapes(shapes.parameters, model, config)
    return replace(sizes, counted_by="the model on the meta device")


def count_shapes(
    shapes: Mapping[str, Index],
    source: str,
    config: Mapping[str, Any] | None,
    *,
    frozen: Collection[str] = (),
) -> ModelSizes:
    """Return the sizes of a model of which the names and shapes of the parameters are known.

    Args:
        shapes: full name -> shape; tied parameters once.
        config: the model's config, if it is known; a known family gives the activations.
        frozen: full names of the parameters that are not trained.
    """
    before, blocks, after = _group_into_blocks(shapes)
    notes: tuple[str, ...] = ()
    if not blocks:  # then the whole model is one block, so that its activations are not left out
        before, blocks, after = [], {"": [*before, *after]}, []
    known = _try_formula(config, source)
    saved = {_read_number(block.name): block.saved for block in known.blocks} if known else {}
    if known is not None and sorted(saved) == sorted(map(_read_number, blocks)):
        built = [
            BlockSizes(name, tuple(members), saved[_read_number(name)])
            for name, members in blocks.items()
        ]
        outer, hidden, vocab = known.saved, known.hidden, known.vocab
        positions, block_class = known.positions, known.block_class
    else:
        chosen = int((config or {}).get("num_experts_per_tok") or 0)
        built = [BlockSizes(n, tuple(t), _estimate_saved(t, chosen)) for n, t in blocks.items()]
        hidden, vocab = _guess_widths([*before, *after], shapes)
        outer, positions, block_class = Saved(2 * hidden, hidden), None, ""
        notes = (_ESTIMATED,)
    return ModelSizes(
        source,
        "names and shapes",
        tuple(before),
        tuple(built),
        tuple(after),
        outer,
        hidden,
        vocab,
        positions=positions,
        block_class=block_class,
        frozen=frozenset(frozen),
        notes=notes,
    )


def _read_number(block: str) -> int:
    return int(block.rpartition(".")[2] or -1)


_ESTIMATED = (
    "activations are estimated from the shapes of the matrices: the model is of no family with a"
    " formula, and the estimate can be wrong by 40%"
)


def _try_formula(config: Mapping[str, Any] | None, source: str) -> ModelSizes | None:
    try:
        return count_config(config, source) if config else None
    except UnknownSizesError:
        return None


def _group_into_blocks(
    shapes: Mapping[str, Index],
) -> tuple[list[Parameter], dict[str, list[Parameter]], list[Parameter]]:
    # A block is a module whose name ends in a number, at the highest level that has one.
    before: list[Parameter] = []
    after: list[Parameter] = []
    blocks: dict[str, list[Parameter]] = {}
    for name, shape in shapes.items():
        match = _BLOCK.fullmatch(name)
        is_cut = len(shape) > 1
        if match is None:
            (after if blocks else before).append(Parameter(name, shape, is_cut))
        else:
            rest = match["rest"]
            tensor = Parameter(rest, shape, is_cut, _EXPERTS.search(rest) is not None)
            blocks.setdefault(match["block"], []).append(tensor)
    return before, blocks, after


def _estimate_saved(tensors: list[Parameter], chosen: int) -> Saved:
    # A layer norm saves its input; an RMS norm, which has no bias, saves a float32 copy, too.
    names = {tensor.name for tensor in tensors}
    norms = Saved()
    for tensor in tensors:
        if _NORM.search(tensor.name) and len(tensor.shape) == 1:
            has_bias = tensor.name.replace("weight", "bias") in names
            norms = norms + Saved(tensor.numel, 0 if has_bias else tensor.numel)
    dense = sum(sum(t.shape) for t in tensors if len(t.shape) == 2 and not t.is_expert)
    stacked = [t for t in tensors if t.is_expert and len(t.shape) == 3]
    single = [t for t in tensors if t.is_expert and len(t.shape) == 2]
    mixed = chosen * sum(t.shape[1] + t.shape[2] for t in stacked)
    if single:
        number = len({re.sub(r"\D*experts\.(\d+)\..*", r"\1", t.name) for t in single})
        mixed += chosen * sum(sum(t.shape) for t in single) // max(number, 1)
    return norms + Saved(narrow_cut=dense + mixed)


def _guess_widths(outer: list[Parameter], shapes: Mapping[str, Index]) -> tuple[int, int]:
    tables = [t.shape for t in outer if len(t.shape) == 2] or [
        shape for shape in shapes.values() if len(shape) == 2
    ]
    if not tables:
        return 1, 1
    rows, columns = max(tables, key=lambda shape: shape[0] * shape[1])
    return min(rows, columns), max(rows, columns)


def describe_count(model: ModelSizes) -> str:
    """Return the number of parameters and how it was found, for a report."""
    return f"{units.show_count(model.numel)} parameters ({model.counted_by})"
