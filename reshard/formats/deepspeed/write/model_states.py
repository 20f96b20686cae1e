"""``*_model_states.pt``: the module, and all of the run that the optimizer does not hold.

Source: DeepSpeed 0.19.8 ``runtime/engine.py`` (``_common_checkpoint_state``).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from reshard.box import Index
from reshard.containers.torch_writer import Slot, Storage, build_whole_tensor
from reshard.formats.deepspeed import expert_layout
from reshard.formats.deepspeed.write import carried, whole
from reshard.formats.deepspeed.write.choice import Choice
from reshard.formats.deepspeed.write.objects import UNIVERSAL_VERSION, WRITTEN_AS, size
from reshard.formats.deepspeed.write.partitioned import fragment
from reshard.formats.deepspeed.write.pipeline import Layer
from reshard.pickles.values import Call
from reshard.state_dict.own_values import find_scheduler


def whole_file(choice: Choice) -> OrderedDict[str, Any]:
    """Stages 0 to 2: one file for all ranks."""
    slots = _whole_tensors(choice)
    frozen = {choice.listed(weight.fqn): slots[weight.fqn] for weight in choice.frozen}
    return _root(choice, _with_aliases(choice, slots), frozen if choice.stage == 2 else None)


def file_of(choice: Choice, rank: int) -> OrderedDict[str, Any]:
    """Stage 3: one a rank, with the buffers whole and a placeholder for each parameter."""
    frozen = {
        choice.listed(weight.fqn): fragment(*choice.stored(weight), choice.world_size, rank)
        for weight in choice.frozen
    }
    root = _root(choice, _with_aliases(choice, _placeholders(choice)), frozen)
    if rank:
        root["shared_params"] = {}  # as there: only rank 0 looks
    return root


def layer_file(choice: Choice, layer: Layer) -> OrderedDict[str, Slot]:
    """A layer of a pipeline: its own state dict."""
    weights = {weight.fqn: weight for weight in choice.state.weights}
    return OrderedDict(
        (name, build_whole_tensor(*choice.stored(weights[fqn])))
        for name, fqn in layer.names.items()
    )


def universal(choice: Choice, *, weights: bool) -> OrderedDict[str, Any]:
    """Beside ``zero/``, all that the optimizer does not hold.

    Args:
        weights: whether to hold them, or placeholders as at stage 3; buffers are there either way.
    """
    slots = _whole_tensors(choice) if weights else _placeholders(choice)
    frozen = {choice.listed(weight.fqn): slots[weight.fqn] for weight in choice.frozen}
    if choice.layered:  # the files of layers are not there: what else would be lost
        slots = {weight.fqn: slots[weight.fqn] for weight in (*choice.frozen, *choice.buffers)}
    module = _with_aliases(choice, slots)
    return OrderedDict(
        {
            "universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION},
            **_root(choice, module, frozen if weights else None),
            "module": module or None,
        }
    )


def _whole_tensors(choice: Choice) -> dict[str, Slot]:
    return {
        weight.fqn: build_whole_tensor(*choice.stored(weight)) for weight in choice.state.weights
    }


def _placeholders(choice: Choice) -> dict[str, Slot]:
    """The buffers, and an empty tensor for each parameter."""
    whole_ones = {weight.fqn for weight in choice.buffers}
    empty: dict[Any, Slot] = {}
    slots = {}
    for weight in choice.state.weights:
        entry, dtype = choice.stored(weight)
        if weight.fqn in whole_ones:
            slots[weight.fqn] = build_whole_tensor(entry, dtype)
        else:
            slots[weight.fqn] = empty.setdefault(dtype, Slot(Storage(dtype, 0), (0,)))
    return slots


def _with_aliases(choice: Choice, slots: dict[str, Slot]) -> OrderedDict[str, Slot]:
    """The module's state dict: a tied name has the tensor of the name that it is tied to."""
    tied = choice.state.manifest.tied.items()
    aliases = {alias: slots[kept] for alias, kept in tied if kept in slots and alias not in slots}
    return OrderedDict(slots | aliases)


def _root(
    choice: Choice, module: OrderedDict[str, Slot], frozen: dict[str, Slot] | None
) -> OrderedDict[str, Any]:
    """All of a file. Its stamp is an attribute of the root, which is ordered for that alone.

    DeepSpeed hands keys that it does not know to the user (``client_state``), whose next save would
    keep the stamp of this one.
    """
    train = choice.state.manifest.train
    if choice.lacks_frozen:  # the engine looks up every frozen parameter in a dict, not in None
        frozen = None
    counted = {} if train.samples is None else {"global_samples": train.samples}
    sharded = choice.stage > 0
    experts: dict[str, Any] = {}
    if choice.experts:
        own = (
            (name, slot)
            for name, slot in module.items()
            if not expert_layout.parse_expert_name(name)
        )
        module = OrderedDict(own)
        experts = {"num_experts": list(choice.experts), "ds_autoep_layers": None}
    root = {
        "module": None if choice.layered else module,
        "buffer_names": [weight.fqn for weight in choice.buffers],
        "optimizer": None if sharded or choice.weights_only else whole.optimizer(choice),
        "param_shapes": _param_shapes(choice) if sharded else None,
        "frozen_param_shapes": None if frozen is None else _frozen_shapes(choice),
        "shared_params": _shared(choice) if sharded else None,
        "frozen_param_fragments": None if frozen is None else OrderedDict(frozen),
        "lr_scheduler": find_scheduler(train),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": train.skipped_steps or 0,
        "global_steps": choice.state.step(),
        **counted,
        "dp_world_size": choice.world_size,
        "mp_world_size": choice.sizes.model,
        "checkpoint_parallel_dimensions": {
            "pp_degree": choice.sizes.pipeline,
            "tp_degree": choice.sizes.tensor,
        },
        "ds_config": choice.config,
        "ds_version": WRITTEN_AS,
        **experts,
        **carried.of_grid(choice.carried, choice.sizes, choice.world_size, choice.mp_rank),
    }
    return OrderedDict(root)


def _param_shapes(choice: Choice) -> list[OrderedDict[str, Any]]:
    return [
        OrderedDict(
            (choice.listed(member.fqn), _size(choice, member.weight.shape)) for member in flat
        )
        for flat in choice.flats
    ]


def _frozen_shapes(choice: Choice) -> OrderedDict[str, Any]:
    return OrderedDict(
        (choice.listed(weight.fqn), _size(choice, weight.shape)) for weight in choice.frozen
    )


def _shared(choice: Choice) -> dict[str, str]:
    """Alias -> kept."""
    tied = choice.state.manifest.tied.items()
    return {choice.listed(alias): choice.listed(kept) for alias, kept in tied}


def _size(choice: Choice, shape: Index) -> Index | Call:
    """A ``torch.Size``; a tuple in runs with experts, of which the engine saves a copy."""
    return shape if choice.experts else size(shape)
