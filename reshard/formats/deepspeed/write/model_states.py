"""Lay out ``*_model_states.pt``: the module, and all of the run that is not in the optimizer.

Source: DeepSpeed 0.19.8 ``runtime/engine.py`` (``_common_checkpoint_state``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from reshard.containers.pickles.values import Call
from reshard.containers.torch_writer import Storage, StorageView, build_whole_tensor
from reshard.core.box import Index
from reshard.formats.deepspeed.experts.layout import parse_expert_name
from reshard.formats.deepspeed.write.pickled_objects import UNIVERSAL_VERSION, WRITTEN_AS
from reshard.formats.deepspeed.write.pipeline import Layer
from reshard.formats.deepspeed.write.spec import OutputSpec, adapt_args
from reshard.formats.deepspeed.write.stage0 import make_optimizer
from reshard.formats.deepspeed.write.stage3 import make_fragment
from reshard.state_dict.own_values import find_scheduler


def make_shared_file(spec: OutputSpec) -> OrderedDict[str, Any]:
    """Return the file of stages 0 to 2, one for all data-parallel ranks.

    Only stages 2 and 3 list frozen parameters (DeepSpeed 0.19.8 ``runtime/engine.py``,
    ``_save_checkpoint``: where gradients are partitioned).
    """
    slots = _build_whole_tensors(spec)
    frozen = {spec.get_listed_name(weight.fqn): slots[weight.fqn] for weight in spec.frozen}
    return _build_root(spec, _with_aliases(spec, slots), frozen if spec.stage == 2 else None)


def make_rank_file(spec: OutputSpec, rank: int) -> OrderedDict[str, Any]:
    """Return a rank's file of stage 3: the buffers whole, a placeholder for each parameter."""
    frozen = {
        spec.get_listed_name(w.fqn): make_fragment(*spec.stored(w), spec.world_size, rank)
        for w in spec.frozen
    }
    root = _build_root(spec, _with_aliases(spec, _build_placeholders(spec)), frozen)
    if rank:
        root["shared_params"] = {}  # DeepSpeed lists them on rank 0 alone
    return root


def make_layer_file(spec: OutputSpec, layer: Layer) -> OrderedDict[str, StorageView]:
    """Return the file of a pipeline's layer: its own state dict."""
    weights = {weight.fqn: weight for weight in spec.state.weights}
    return OrderedDict(
        (name, build_whole_tensor(*spec.stored(weights[fqn]))) for name, fqn in layer.names.items()
    )


def make_universal_file(spec: OutputSpec, *, weights: bool) -> OrderedDict[str, Any]:
    """Return the file beside ``zero/``, with all that is not in the optimizer.

    Args:
        weights: whether it holds the weights, or placeholders as at stage 3; buffers are there
            either way.
    """
    slots = _build_whole_tensors(spec) if weights else _build_placeholders(spec)
    frozen = {spec.get_listed_name(weight.fqn): slots[weight.fqn] for weight in spec.frozen}
    if spec.layered:  # without the files of layers, this file alone has what is not trained
        slots = {weight.fqn: slots[weight.fqn] for weight in (*spec.frozen, *spec.buffers)}
    module = _with_aliases(spec, slots)
    return OrderedDict(
        {
            "universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION},
            **_build_root(spec, module, frozen if weights else None),
            "module": module or None,
        }
    )


def _build_whole_tensors(spec: OutputSpec) -> dict[str, StorageView]:
    return {weight.fqn: build_whole_tensor(*spec.stored(weight)) for weight in spec.state.weights}


def _build_placeholders(spec: OutputSpec) -> dict[str, StorageView]:
    buffers = {weight.fqn for weight in spec.buffers}
    empty: dict[Any, StorageView] = {}
    slots = {}
    for weight in spec.state.weights:
        entry, dtype = spec.stored(weight)
        if weight.fqn in buffers:
            slots[weight.fqn] = build_whole_tensor(entry, dtype)
        else:
            slots[weight.fqn] = empty.setdefault(dtype, StorageView(Storage(dtype, 0), (0,)))
    return slots


def _with_aliases(spec: OutputSpec, slots: dict[str, StorageView]) -> OrderedDict[str, StorageView]:
    tied = spec.state.manifest.tied.items()
    aliases = {alias: slots[kept] for alias, kept in tied if kept in slots and alias not in slots}
    return OrderedDict(slots | aliases)


def _build_root(
    spec: OutputSpec, module: OrderedDict[str, StorageView], frozen: dict[str, StorageView] | None
) -> OrderedDict[str, Any]:
    # An OrderedDict can have the stamp as an attribute. As a key it would reach the next save:
    # DeepSpeed returns keys that it does not know to the user (``client_state``).
    train = spec.state.manifest.train
    if spec.lacks_frozen:  # the engine looks up every frozen parameter in a dict, not in None
        frozen = None
    samples = {} if train.samples is None else {"global_samples": train.samples}
    sharded = spec.stage > 0
    # A layer's file has no names of shared modules: without an optimizer, only this list has them.
    lists_names = sharded or (spec.layered and spec.weights_only)
    experts: dict[str, Any] = {}
    if spec.experts:
        own = (item for item in module.items() if not parse_expert_name(item[0]))
        module = OrderedDict(own)
        experts = {"num_experts": list(spec.experts), "ds_autoep_layers": None}
    root = {
        "module": None if spec.layered else module,
        "buffer_names": [weight.fqn for weight in spec.buffers],
        "optimizer": None if sharded or spec.weights_only else make_optimizer(spec),
        "param_shapes": _list_param_shapes(spec) if lists_names else None,
        "frozen_param_shapes": None if frozen is None else _list_frozen_shapes(spec),
        "shared_params": _list_shared_params(spec) if sharded else None,
        "frozen_param_fragments": None if frozen is None else OrderedDict(frozen),
        "lr_scheduler": find_scheduler(train),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": train.skipped_steps or 0,
        "global_steps": spec.state.step,
        **samples,
        "dp_world_size": spec.world_size,
        "mp_world_size": spec.sizes.model,
        "checkpoint_parallel_dimensions": {
            "pp_degree": spec.sizes.pipeline,
            "tp_degree": spec.sizes.tensor,
        },
        "ds_config": spec.config,
        "ds_version": WRITTEN_AS,
        **experts,
        **adapt_args(spec.extra_state, spec.sizes, spec.world_size, spec.mp_rank),
    }
    return OrderedDict(root)


def _list_param_shapes(spec: OutputSpec) -> list[OrderedDict[str, Any]]:
    return [
        OrderedDict((spec.get_listed_name(m.fqn), _make_size(spec, m.weight.shape)) for m in flat)
        for flat in spec.flats
    ]


def _list_frozen_shapes(spec: OutputSpec) -> OrderedDict[str, Any]:
    return OrderedDict(
        (spec.get_listed_name(w.fqn), _make_size(spec, w.shape)) for w in spec.frozen
    )


def _list_shared_params(spec: OutputSpec) -> dict[str, str]:
    tied = spec.state.manifest.tied.items()
    return {spec.get_listed_name(alias): spec.get_listed_name(kept) for alias, kept in tied}


def _make_size(spec: OutputSpec, shape: Index) -> Index | Call:
    """Return a ``torch.Size``; a tuple in runs with experts, of which the engine saves a copy."""
    return shape if spec.experts else Call("torch.Size", (shape,))
