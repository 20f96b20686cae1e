"""What the files of a Megatron checkpoint state twice: by arguments and tensors, or on every rank.

Sources: Megatron-LM core_v0.16.1 ``core/models/gpt/gpt_model.py``, ``core/transformer/``
(``attention.py``, ``multi_latent_attention.py``, ``mlp.py``, ``moe/router.py``: which tensors a
module has), and ``megatron/training/checkpointing.py`` (``generate_state_dict``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from reshard.containers.pickles.values import Call
from reshard.core.box import Index
from reshard.core.manifest import PARAM, Entry
from reshard.errors import shown
from reshard.formats.megatron import names
from reshard.formats.megatron.arguments import Arguments, has_own_configs, is_hybrid
from reshard.formats.megatron.optimizers.rank_optimizer import list_groups, list_states
from reshard.state_dict.optimizers.hyper_parameters import read_hyper
from reshard.state_dict.plain_values import to_plain

Statement = tuple[str, str, str]  # what, the value of the tensors or of other ranks, and the other

_ATTENTION, _MLP = "self_attention.", "mlp."
_POSITIONS = "embedding.position_embeddings.weight"
_FINAL_NORM = "decoder.final_layernorm."
_SIZES = (  # a tensor outside of layers, or of a layer of the decoder; a dim of it; its argument
    (names.EMBEDDING, 0, "padded_vocab_size"),
    (names.EMBEDDING, 1, "hidden_size"),
    (_POSITIONS, 0, "max_position_embeddings"),
    (f"{_MLP}linear_fc2.weight", 1, "ffn_hidden_size"),
    (f"{_MLP}experts.local_experts.0.linear_fc2.weight", 1, "moe_ffn_hidden_size"),
    (f"{_MLP}shared_experts.linear_fc2.weight", 1, "moe_shared_expert_intermediate_size"),
    (f"{_MLP}router.weight", 0, "num_experts"),
    (f"{_ATTENTION}linear_q_up_proj.weight", 1, "q_lora_rank"),
    (f"{_ATTENTION}linear_kv_up_proj.weight", 1, "kv_lora_rank"),
)
# In names of arguments that each rank or node has for itself; q_lora_rank is none of them.
_OF_RANK = re.compile(r"(?:^|_)(?<!lora_)(?:rank|port|time|pid)(?:_|$)")
_OF_PLACE = re.compile(r"[/\d]")  # in texts that may name a directory, a node or a device
_SHARED = ("opt_param_scheduler", "lr_scheduler", "num_floating_point_operations_so_far")


def compare_model(args: Arguments, whole: Mapping[tuple[str, str], Entry]) -> Iterator[Statement]:
    """Yield each size and property of the model that its arguments and its tensors state."""
    values = args.values
    weights = {fqn: entry.shape for (kind, fqn), entry in whole.items() if kind == PARAM}
    stacks = {fqn.partition(".layers.")[0] for fqn in weights if ".layers." in fqn}
    layers = {names.find_layer(fqn) for fqn in weights} - {None}
    differ = is_hybrid(values) or has_own_configs(values)
    # T5's encoder and decoder may have other numbers of layers.
    if len(stacks) == 1 and layers and not differ and type(values.get("num_layers")) is int:
        yield "num_layers", str(len(layers)), str(values["num_layers"])
    if not has_own_configs(values):
        yield from _compare_shapes(values, weights)
    embedding = whole.get((PARAM, names.EMBEDDING))
    given = [name for name in ("bf16", "fp16") if args.flag(name)]
    if embedding is not None and len(given) == 1:
        precision = {"bfloat16": "bf16", "float16": "fp16"}.get(embedding.dtype.name)
        if precision is not None:
            yield "precision", precision, given[0]


def _compare_shapes(values: Mapping[str, Any], weights: Mapping[str, Index]) -> Iterator[Statement]:
    found: dict[str, Index] = {}
    for fqn, shape in weights.items():
        in_layer = fqn.startswith("decoder.layers.")
        found.setdefault(fqn.split(".", 3)[3] if in_layer else fqn, shape)
    for name, dim, argument in _SIZES:
        shape, value = found.get(name, ()), values.get(argument)
        if dim < len(shape) and type(value) is int:
            yield argument, str(shape[dim]), str(value)
    for argument, value, beside, name in _list_properties(values):
        if beside in found and type(value) is bool:
            yield argument, str(name in found), str(value)


def _list_properties(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, str]]:
    """Yield an argument, its value, a tensor of any such model, and the one that it has if set."""
    qkv, out = f"{_ATTENTION}linear_qkv", f"{_ATTENTION}linear_proj"
    biases = values.get("add_bias_linear")
    yield "add_bias_linear", biases, f"{out}.weight", f"{out}.bias"
    latent = f"{_ATTENTION}linear_kv_up_proj.weight"
    yield "multi_latent_attention", values.get("multi_latent_attention"), f"{out}.weight", latent
    if biases is False:
        yield "add_qkv_bias", values.get("add_qkv_bias"), f"{qkv}.weight", f"{qkv}.bias"
    head = values.get("untie_embeddings_and_output_weights")
    yield "untie_embeddings_and_output_weights", head, names.EMBEDDING, names.OUTPUT
    if not values.get("qk_l2_norm"):  # a norm without weights
        norm = f"{_ATTENTION}q_layernorm.weight"
        yield "qk_layernorm", values.get("qk_layernorm"), f"{qkv}.weight", norm
    kind = values.get("normalization")
    if kind in ("LayerNorm", "RMSNorm"):
        is_layer = kind == "LayerNorm"
        yield "LayerNorm", is_layer, f"{_FINAL_NORM}weight", f"{_FINAL_NORM}bias"
    kind = values.get("position_embedding_type")
    if isinstance(kind, str):
        yield "learned_absolute positions", kind == "learned_absolute", names.EMBEDDING, _POSITIONS


def compare_ranks(root: Mapping[str, Any], first: Mapping[str, Any]) -> Iterator[Statement]:
    """Yield each value of a rank's file that differs from that of another rank's.

    Ranks have the same command line, except for what names the rank or its node.
    """
    own, other = _list_values(root), _list_values(first)
    for name in own.keys() & other.keys():
        if own[name] != other[name]:
            yield name, shown(other[name]), shown(own[name])


def _list_values(root: Mapping[str, Any]) -> dict[str, Any]:
    stored = root.get("args")
    state = stored.state if isinstance(stored, Call) else stored
    args = state if isinstance(state, Mapping) else {}
    values = {
        f"args.{name}": value
        for name, value in args.items()
        if _is_of_run(value) and not _OF_RANK.search(str(name))
    }
    for key in _SHARED:
        value = to_plain(root.get(key))
        own = value if isinstance(value, Mapping) else {"": value}
        values.update((f"{key}.{name}".rstrip("."), part) for name, part in own.items())
    return values


def _is_of_run(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, (int, float)) for item in value)
    is_word = isinstance(value, str) and not _OF_PLACE.search(value)
    return is_word or isinstance(value, (int, float))


def compare_groups(optimizers: Sequence[Any]) -> Iterator[tuple[int, Statement]]:
    """Yield each setting of a param group that no group of the rank with the most groups has.

    Every rank has the groups of the whole model since core 0.9, before it those of its own
    parameters: their settings are the same, and only their steps and members are its own.

    Args:
        optimizers: the state of the optimizer, or of a chain, of each rank.
    """
    settings = [_list_settings(optimizer) for optimizer in optimizers]
    known = max(settings, key=len, default=[])
    for number, own in enumerate(settings):
        left = list(known)
        for group in own:
            if group in left:
                left.remove(group)
            elif left:
                usual = max(left, key=lambda other: len(other.items() & group.items()))
                name = next(n for n in (*usual, *group) if usual.get(n) != group.get(n))
                what = f"{name} of a param group"
                yield number, (what, str(usual.get(name)), str(group.get(name)))


def _list_settings(value: Any) -> list[dict[str, str]]:
    groups: Iterable[Mapping[str, Any]] = (
        group for state in list_states(value) for group in list_groups(state)
    )
    read = (read_hyper(group, skip=["step"]) for group in groups)
    return [{name: shown(setting) for name, setting in hyper.items()} for hyper in read]
