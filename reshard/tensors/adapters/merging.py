"""Merging of a LoRA adapter into its base: which weights change, and what is added to them.

Source: PEFT 0.21 ``tuners/lora/layer.py`` (get_delta_weight and merge of every kind of layer),
``tuners/adalora/layer.py`` and
``utils/other.py`` (ModulesToSaveWrapper, TrainableTokensWrapper).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from reshard.core import dtypes
from reshard.core.box import Box
from reshard.core.chunks import Chunk
from reshard.core.manifest import PARAM, Entry, Manifest, find_most_common_dtype, index_entries
from reshard.core.views import Put, Take, apply_views
from reshard.errors import CorruptError, UnsupportedError, UsageError
from reshard.model.adapter_names import (
    IN,
    MAGNITUDE,
    OUT,
    SAVED_MODULE,
    SINGULAR,
    TOKENS,
    parse_part,
)
from reshard.tensors.adapters import base_names, layouts, settings
from reshard.tensors.adapters.config import AdapterConfig
from reshard.tensors.adapters.layouts import Fit
from reshard.tensors.adapters.product import Order, Product, merge_product
from reshard.tensors.adapters.targets import TOKEN_ADAPTER
from reshard.tensors.weights import find_head_name, find_heads
from reshard.training.companion_files import is_embedding


@dataclass(slots=True)
class Merged:
    """A base model with an adapter added.

    Args:
        base: the base model, under the names of the adapter's live model.
        prefix: what precedes the adapter's names in the base.
        manifest: the merged model; the weights that change are computed.
        products: weight -> what is added to it.
        replaced: weights that the adapter stores as a whole.
        added: those of them that the base does not have.
        token_rows: embedding -> number of rows that the adapter stores.
        untied: head -> embedding, where both are one weight in the base and the adapter changes
            one of them.
    """

    base: Manifest
    prefix: str
    manifest: Manifest
    products: dict[str, Product] = field(default_factory=dict)
    replaced: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    token_rows: dict[str, int] = field(default_factory=dict)
    untied: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Pair:
    layer: str
    roles: dict[str, Entry] = field(default_factory=dict)
    bias: Entry | None = None

    @property
    def a(self) -> Entry:
        return next(self.roles[role] for role in IN if role in self.roles)

    @property
    def b(self) -> Entry:
        return next(self.roles[role] for role in OUT if role in self.roles)

    @property
    def is_embedding(self) -> bool:
        return "lora_embedding_A" in self.roles


@dataclass(slots=True)
class _Tensors:
    pairs: dict[str, _Pair] = field(default_factory=dict)
    tokens: dict[str, Entry] = field(default_factory=dict)
    weights: dict[str, Entry] = field(default_factory=dict)

    @property
    def layers(self) -> list[str]:
        layers = dict.fromkeys(base_names.strip_peft(layer) for layer in self.pairs)
        return [*layers, *self.tokens] or [fqn.rpartition(".")[0] for fqn in self.weights]

    @property
    def redefined(self) -> set[str]:
        """The layers whose weight is no longer the base's for all of its users."""
        layers = {base_names.strip_peft(layer) for layer in self.pairs}
        return layers | {fqn.rpartition(".")[0] for fqn in self.weights}


def merge_adapter(
    base: Manifest, adapter: Sequence[Entry], config: AdapterConfig, *, is_tied: bool
) -> Merged:
    """Return the base model with the adapter added.

    Args:
        base: the base model.
        adapter: the tensors of the adapter, named as in PEFT's file; the configuration fits them.
        config: the configuration of the adapter.
        is_tied: whether a model without a stored head uses its embedding as its head.

    Raises:
        UsageError: the base is another model.
        UnsupportedError: reshard does not know how to merge a part of the adapter.
        CorruptError: the configuration does not fit the tensors.
    """
    settings.check_settings(config)
    tensors = _sort_tensors(adapter)
    base, prefix = base_names.match_names(base, tensors.layers)
    merger = _Merger(base, config, prefix)
    if is_tied:
        merger.untie({prefix + layer for layer in tensors.redefined})
    for fqn, entry in tensors.weights.items():
        merger.replace_weight(prefix + fqn, entry)
    for layer, entry in tensors.tokens.items():
        merger.replace_rows(layer, entry)
    merger.add_products(tensors.pairs.values())
    return merger.finish()


def list_layers(adapter: Iterable[Entry]) -> list[str]:
    """Return the names of the layers that an adapter changes, as its live model has them."""
    tensors = _sort_tensors(adapter)
    return [*dict.fromkeys((*tensors.layers, *tensors.redefined))]


def _sort_tensors(adapter: Iterable[Entry]) -> _Tensors:
    tensors = _Tensors()
    for entry in adapter:
        part = parse_part(entry.fqn)
        if part is None:
            tensors.weights[base_names.strip_peft(entry.fqn)] = entry
        elif part.role == TOKENS:
            layer = base_names.strip_peft(part.layer).removesuffix(TOKEN_ADAPTER)
            tensors.tokens[layer] = entry
        elif part.role in OUT and part.saved_as.endswith(".bias"):
            tensors.pairs.setdefault(part.layer, _Pair(part.layer)).bias = entry
        else:
            tensors.pairs.setdefault(part.layer, _Pair(part.layer)).roles[part.role] = entry
    _leave_out_copies(tensors.weights)
    return tensors


def _leave_out_copies(weights: dict[str, Entry]) -> None:
    # PEFT saves both embeddings under all names of their live modules if they were resized (0.21
    # ``utils/save_and_load.py``, save_embedding_layers).
    for fqn in list(weights):
        layer, _, name = fqn.rpartition(".")
        wrapper, _, copy = layer.rpartition(".")
        if copy in (SAVED_MODULE, "original_module") and f"{wrapper}.{name}" in weights:
            del weights[fqn]


class _Merger:
    def __init__(self, base: Manifest, config: AdapterConfig, prefix: str) -> None:
        self._config = config
        self._prefix = prefix
        self._entries = {entry.fqn: entry for entry in base.entries.values()}
        self._modules = base_names.group_by_module(self._entries)
        self._merged = Merged(base, prefix, base)
        common = find_most_common_dtype(entry.dtype for entry in base.entries.values())
        self._dtype = dtypes.parse(common) if common else dtypes.FLOAT32

    @property
    def _targets(self) -> Sequence[str]:
        return self._config.values.get("target_parameters") or ()

    def untie(self, changed: set[str]) -> None:
        """Give a tied head an entry of its own if the adapter changes it or its embedding.

        PEFT 0.21 adds the product of either layer to the one tensor that both share.

        Args:
            changed: names of the changed layers.

        Raises:
            UnsupportedError: the name of the head is not known.
        """
        embeddings = [fqn for fqn in self._entries if is_embedding(fqn)]
        for fqn in embeddings:
            head = find_head_name(fqn)
            if head in self._entries:
                continue
            if {fqn.removesuffix(".weight"), (head or "").removesuffix(".weight")} & changed:
                if head is None:
                    raise UnsupportedError(
                        fqn,
                        "is changed by the adapter, and the model may also use it as its output"
                        " head; reshard does not know the name of the head",
                        "untie the two weights and merge this adapter with PEFT",
                    )
                self._entries[head] = replace(self._entries[fqn], fqn=head)
                self._merged.untied[head] = fqn
        self._modules = base_names.group_by_module(self._entries)

    def replace_weight(self, fqn: str, entry: Entry) -> None:
        """Take a whole weight from the adapter; an embedding may have another number of rows.

        Raises:
            UsageError: the base has it with another shape.
        """
        before = self._entries.get(fqn)
        if before is None:
            self._merged.added.append(fqn)
        elif before.shape != entry.shape and (
            len(entry.shape) != 2 or before.shape[1:] != entry.shape[1:]
        ):
            raise self._build_shape_error(fqn, entry)
        dtype, kind = (before.dtype, before.kind) if before else (self._dtype, PARAM)
        self._entries[fqn] = replace(entry, fqn=fqn, kind=kind, dtype=dtype)
        self._merged.replaced.append(fqn)

    def replace_rows(self, layer: str, rows: Entry) -> None:
        """Take the rows of trained tokens from the adapter.

        Raises:
            UsageError: the base has no such embedding, or lacks the rows of some tokens.
            CorruptError: the configuration lists other tokens.
        """
        fqn = f"{self._prefix}{layer}.weight"
        base, tokens = self._entries.get(fqn), settings.list_trained_tokens(self._config, layer)
        if base is None or base.shape[1:] != rows.shape[1:]:
            raise self._build_shape_error(fqn, rows)
        beyond = [row for row in tokens if row >= base.shape[0]]
        if beyond:
            raise self._build_rows_error(fqn, base.shape[0], f"trains token {beyond[0]}")
        known = {row for row in tokens if row >= 0}
        if not len(known) == len(tokens) == rows.shape[0]:
            raise CorruptError(
                self._config.path,
                f"the config lists {len(known)} different tokens of {layer}, but the adapter has"
                f" {rows.shape[0]} rows",
                "pass the directory of the adapter's own configuration as --hf-dir",
            )
        self._entries[fqn] = _replace_rows(base, rows, tokens)
        self._merged.token_rows[fqn] = len(tokens)

    def add_products(self, pairs: Iterable[_Pair]) -> None:
        """Add the product of every pair of matrices, and the biases of ``lora_B``.

        Raises:
            UsageError, UnsupportedError: as in `merge_adapter`.
        """
        found = list(self._find_weights(pairs))
        others = [fit for pair, fit in found if not pair.is_embedding]
        flag = bool(self._config.values.get("fan_in_fan_out"))
        for pair, fit in found:
            if not pair.a.numel:
                continue  # AdaLoRA has taken all ranks from the layer
            order = layouts.choose_order(fit, others, fan_in_fan_out=flag)
            if order is None:
                raise UnsupportedError(
                    fit.weight,
                    "is square, and no other weight shows whether the adapter takes it as (in,"
                    " out) or (out, in); that depends on the layer and on the version of PEFT",
                    "merge this adapter with the PEFT version that trained it",
                )
            product = self._build_product(pair, fit, order)
            self._add(fit.weight, product)
            if pair.bias is not None:
                self._add_bias(fit.weight, replace(product, a=None, b=pair.bias))

    def finish(self) -> Merged:
        """Return the merged model.

        Raises:
            UsageError: the adapter resizes an embedding, and the head is the base's, or reversed.
        """
        base, merged = self._merged.base, self._merged
        self._check_rows()
        dtypes = {fqn: entry.dtype for fqn, entry in self._entries.items()}
        merged.manifest = replace(
            base,
            entries=index_entries(self._entries.values()),
            trained_dtypes={**dtypes, **base.trained_dtypes},
        )
        return merged

    def _find_weights(self, pairs: Iterable[_Pair]) -> Iterator[tuple[_Pair, Fit]]:
        """Yield every pair of matrices with its weight; ParamWrapper puts several on a module."""
        modules: dict[str, list[_Pair]] = defaultdict(list)
        for pair in pairs:
            modules[self._prefix + base_names.strip_peft(pair.layer)].append(pair)
        for module, group in modules.items():
            names = base_names.list_params(self._modules.get(module, ()), module, self._targets)
            if not names:
                raise self._build_missing_error(module)
            candidates = [self._fit(pair, names) for pair in group]
            yield from zip(group, layouts.assign(module, candidates, names), strict=True)

    def _fit(self, pair: _Pair, names: Iterable[str]) -> Mapping[str, Fit]:
        a, b = pair.a.shape, pair.b.shape
        fits = (
            layouts.fit(name, self._entries[name].shape, a, b, is_embedding=pair.is_embedding)
            for name in names
        )
        return {fit.weight: fit for fit in fits if fit is not None}

    def _build_product(self, pair: _Pair, fit: Fit, order: Order) -> Product:
        magnitude = pair.roles.get(MAGNITUDE)
        if magnitude is not None and (order != "out_in" or len(pair.a.shape) > 2):
            raise UnsupportedError(
                pair.layer,
                "is a DoRA layer of an embedding, a convolution or a Conv1D; reshard merges DoRA of"
                " linear layers only",
                "merge this adapter with PEFT",
            )
        rank = pair.a.shape[0] // fit.experts
        scale = settings.compute_scale(self._config, self._get_pattern_name(fit), rank)
        singular = pair.roles.get(SINGULAR)
        return Product(pair.layer, pair.a, pair.b, scale, order, fit.experts, magnitude, singular)

    def _get_pattern_name(self, fit: Fit) -> str:
        """Return the name that PEFT compares with patterns: a module's, or a parameter's."""
        fqn = fit.weight.removeprefix(self._prefix)
        targeted = base_names.is_targeted(fqn, self._targets)
        return fqn if targeted else fqn.rpartition(".")[0]

    def _add(self, fqn: str, product: Product) -> None:
        if fqn in self._merged.token_rows:
            raise UnsupportedError(
                fqn, "has both trained tokens and a LoRA product, but PEFT allows only one of them"
            )
        self._entries[fqn] = merge_product(self._entries[fqn], product)
        self._merged.products[fqn] = product

    def _add_bias(self, weight: str, product: Product) -> None:
        fqn = f"{weight.rpartition('.')[0]}.bias"
        base = self._entries.get(fqn)
        if base is None or base.shape != product.b.shape:
            raise UsageError(
                fqn,
                "the adapter has a bias of lora_B, but the base model has no bias to which it"
                " could be added",
                "PEFT cannot merge this adapter either: use it with PeftModel.from_pretrained",
            )
        self._add(fqn, product)

    def _check_rows(self) -> None:
        before = {entry.fqn: entry for entry in self._merged.base.entries.values()}
        for head, embedding in find_heads(self._entries):
            rows = {fqn: self._entries[fqn].shape[0] for fqn in (embedding, head)}
            own = {before[fqn].shape[0] for fqn in rows if fqn in before}
            if len(set(rows.values())) == 1 or len(own) > 1:
                continue
            kept, resized = sorted(rows, key=lambda fqn: rows[fqn] not in own)
            raise self._build_rows_error(kept, rows[kept], f"has {rows[resized]} of {resized}")

    def _build_rows_error(self, fqn: str, rows: int, found: str) -> UsageError:
        return UsageError(
            self._merged.base.origin.path,
            f"has {rows} rows of {fqn}, but the adapter {found}: the run resized the embeddings",
            "resize those of the base as the run did (model.resize_token_embeddings), save it, and"
            " pass its directory",
        )

    def _build_missing_error(self, module: str) -> UsageError:
        path = self._merged.base.origin.path
        if f"{module}.0" in {name.rpartition(".")[0] for name in self._modules}:
            return UsageError(
                path,
                f"stores each expert of {module} separately, but the adapter was trained on a live"
                " model that stacks them",
                "copy the model's config.json to its directory, and install a version of"
                " transformers that supports the model",
            )
        return UsageError(
            path,
            f"has no weight of the adapted layer {module}",
            "pass the base model that the adapter was trained on",
        )

    def _build_shape_error(self, fqn: str, entry: Entry) -> UsageError:
        before = self._entries.get(fqn)
        found = f"{fqn} with shape {before.shape}" if before else f"no {fqn}"
        return UsageError(
            self._merged.manifest.origin.path,
            f"has {found}, but the adapter has {entry.shape} values for it",
            "pass the base model that the adapter was trained on",
        )


def _replace_rows(base: Entry, rows: Entry, numbers: Sequence[int]) -> Entry:
    """``numbers`` are the places of the new rows, in their order; all different."""
    taken = sorted(numbers)
    chunks: list[Chunk] = []
    for before, after in pairwise([-1, *taken, base.shape[0]]):
        if after > before + 1:
            kept = _select_rows(base, before + 1, after)
            chunks += apply_views(base.chunks, [Take(base.shape, kept), Put(base.shape, kept)])
    for at, number in enumerate(numbers):
        taken_row, put_row = _select_rows(rows, at, at + 1), _select_rows(base, number, number + 1)
        chunks += apply_views(rows.chunks, [Take(rows.shape, taken_row), Put(base.shape, put_row)])
    return replace(base, chunks=tuple(chunks))


def _select_rows(entry: Entry, start: int, stop: int) -> Box:
    rest = entry.shape[1:]
    return Box((start, *(0 for _ in rest)), (stop - start, *rest))
