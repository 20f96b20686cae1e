"""The nanotron run that a training state of another framework becomes.

A nanotron run states in its own files how ranks share each parameter, and which stage trains it.
For other sources both follow from nanotron's models, of which Llama and Qwen2 are known here.

Sources: nanotron at 2411b02 ``models/{llama,qwen}.py`` (modules, ``contiguous_chunks``),
``helpers.py`` (``init_optimizer_and_grad_accumulator``: a param group per parameter),
``optim/optimizer_from_gradient_accumulator.py``, ``serialize/metadata.py`` (``TrainingMetadata``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.core.manifest import ParamGroup
from reshard.errors import UnsupportedError
from reshard.layouts.model_parallel import names as renaming
from reshard.layouts.model_parallel.architecture import Architecture, Described
from reshard.layouts.model_parallel.fused_tensors import make_form
from reshard.layouts.model_parallel.rules import add_user_rules, load_table
from reshard.naming import tables
from reshard.naming.options import NameOptions, Naming
from reshard.state_dict.optimizers.hyper_parameters import TensorNumber
from reshard.state_dict.torch_state_dict import build_hyper
from reshard.training.state import Weight, WritableState
from reshard_nanotron import layout, stages
from reshard_nanotron.directory import METADATA, TABLE
from reshard_nanotron.layout import ParameterCut, RunFacts
from reshard_nanotron.model import FLAGS
from reshard_nanotron.slices import SHAPE
from reshard_nanotron.stages import Stage

if TYPE_CHECKING:
    from reshard.formats.base import StateConversion
    from reshard.layouts.model_parallel.traits import Traits

_VERSION = "1.5"  # of nanotron's checkpoints at 2411b02
_QKV, _GATE_UP = ".attn.qkv_proj.", ".mlp.gate_up_proj."
# Modules of a layer in the order of ``named_parameters``; Qwen2 makes both norms first.
_LAYER = ("input_layernorm", "attn", "post_attention_layernorm", "mlp")
_QWEN_LAYER = ("input_layernorm", "post_attention_layernorm", "attn", "mlp")
_ROWS = ("qkv_proj.weight", "qkv_proj.bias", "o_proj.weight", "gate_up_proj", "down_proj")


def rename(conversion: StateConversion, names: NameOptions) -> Naming:
    """Return the state under nanotron's names, with the description of its model.

    Raises:
        UsageError: nothing states what the model is.
        UnsupportedError: nanotron has no such model.
    """
    source = conversion.source
    run = conversion.manifest.train.config
    manifest, traits, family = tables.rename_to_hf_first(
        conversion.manifest, source.names, names, conversion.request.model_hint
    )
    if family.name not in FLAGS:
        raise UnsupportedError(
            traits.source,
            f"is a {family.name} model, but nanotron is supported for {' and '.join(FLAGS)}",
        )
    _refuse_unknown(traits)
    table = add_user_rules(load_table(TABLE), names.rules)
    architecture = tables.build_architecture(traits, names)
    renamed = renaming.rename_from_hf(manifest, table, traits.make_architecture())
    sequence = run.get("seq_length") if isinstance(run, Mapping) else None
    args = {
        "config": _make_config(traits, family.name, architecture.vocab),
        "sequence": sequence if type(sequence) is int else traits.max_positions or 0,
    }
    notes = (*renamed.notes, f"renamed to nanotron's names, by the table of {family.name}")
    described = Described(table, architecture, args)
    return Naming(renamed.manifest, notes, described=described, merged=renamed.merged)


def _refuse_unknown(traits: Traits) -> None:
    hidden, heads = traits.hidden or 0, traits.heads or 1
    if traits.rope_scaling is not None:
        problem = f"scales rotary positions ({traits.rope_scaling})"
    elif traits.head_dim not in (None, hidden // heads):
        problem = f"has heads of {traits.head_dim} elements, nanotron of {hidden // heads}"
    else:
        return
    raise UnsupportedError(traits.source, f"{problem}, which nanotron's model does not have")


def _make_config(traits: Traits, family: str, vocab_size: int | None) -> dict[str, Any]:
    return {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": traits.activation,
        "hidden_size": traits.hidden,
        "initializer_range": 0.02,
        "intermediate_size": traits.ffn,
        FLAGS[family]: True,
        "max_position_embeddings": traits.max_positions,
        "num_attention_heads": traits.heads,
        "num_hidden_layers": traits.layers,
        "attention_bias": traits.qkv_bias,
        "num_key_value_heads": traits.groups,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "rms_norm_eps": traits.norm_eps,
        "rope_scaling": None,
        "rope_theta": traits.rope_theta,
        "rope_interleaved": False,
        "tie_word_embeddings": traits.tied,
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def add_layout(state: WritableState, described: Described, pipeline: int) -> WritableState:
    """Return the state with what nanotron's files state of a run on so many pipeline stages."""
    config, path = described.args["config"], state.manifest.origin.path
    weights = sorted(state.weights, key=lambda weight: _compute_sort_key(weight.fqn, config))
    stage_params = stages.list_blocks(
        path, config, [weight.fqn for weight in weights]
    ).assign_stages(pipeline)
    stages.refuse_empty(stage_params)
    # Reversed, so that the first of two stages stays: nanotron saves a tied parameter there.
    first = {fqn: stage for stage, fqns in reversed([*enumerate(stage_params)]) for fqn in fqns}
    cuts = dict(_make_cuts(weights, first, described))
    known = RunFacts(cuts, tuple(_make_stages(state, stage_params)), config, 0, ())
    train = state.manifest.train
    about = {METADATA: _make_metadata(state, described.args["sequence"])}
    train = replace(
        train, client={**train.client, **about}, opaque={**train.opaque, layout.KEY: known}
    )
    return replace(state, manifest=replace(state.manifest, train=train))


def _compute_sort_key(fqn: str, config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the position of a parameter in its layer; all others have a block of their own."""
    modules = _QWEN_LAYER if config.get("is_qwen2_config") else _LAYER
    inside = fqn.partition(".pp_block.")[2]
    module = next((n for n, name in enumerate(modules) if inside.startswith(f"{name}.")), 0)
    return module, next((n for n, name in enumerate(_ROWS) if name in inside), 0)


def _make_cuts(
    weights: Sequence[Weight], stage: Mapping[str, int], described: Described
) -> Iterator[tuple[str, ParameterCut]]:
    for weight in weights:
        # Both families, Llama and Qwen2, have gated linear units.
        split = described.table.require(weight.fqn, {}).rule.split(gated=True)
        if split.dim is not None:
            parts = _find_parts(weight, described.architecture)
            texts = {SHAPE: str(weight.shape), "version": _VERSION}
            yield weight.fqn, ParameterCut(stage[weight.fqn], split.dim, parts, texts)


def _find_parts(weight: Weight, model: Architecture) -> tuple[int, ...]:
    form = {_QKV: "qkv_rows", _GATE_UP: "gate_up"}
    name = next((form[part] for part in form if part in weight.fqn), None)
    return make_form(name, weight.shape[0], model).parts if name else ()


def _make_stages(state: WritableState, stage_params: Sequence[Sequence[str]]) -> Iterator[Stage]:
    hypers: dict[str, dict[str, Any]] = {}
    for trained in state.groups:
        # nanotron's scheduler computes with numbers: a learning rate in a tensor becomes one.
        numbers = {
            name: float(value) if isinstance(value, TensorNumber) else value
            for name, value in trained.hyper.items()
        }
        hyper = build_hyper(state, replace(trained, hyper=numbers))
        hyper.setdefault("initial_lr", hyper["lr"])
        hypers.update((fqn, hyper) for fqn in trained.fqns)
    for fqns in stage_params:
        own = [fqn for fqn in fqns if fqn in hypers]
        groups = tuple(ParamGroup(hypers[fqn], (fqn,)) for fqn in own)
        yield Stage(groups, _make_scheduler([group.hyper for group in groups], state.step))


def _make_scheduler(hypers: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any]:
    return {
        "base_lrs": [hyper["initial_lr"] for hyper in hypers],
        "last_epoch": step,
        "_step_count": step + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": [hyper["lr"] for hyper in hypers],
        # ``LambdaLR.load_state_dict`` updates each lambda of the new run with its dict: no change.
        "lr_lambdas": [{} for _ in hypers],
    }


def _make_metadata(state: WritableState, sequence: int) -> dict[str, Any]:
    # nanotron checks that samples and tokens of the stages add up to those of the run.
    samples, source = state.manifest.train.samples or 0, state.manifest.origin.format
    tokens = samples * sequence
    stage = {
        "name": source,
        "start_training_step": 1,
        "consumed_train_samples": samples,
        "sequence_length": sequence,
        "consumed_tokens_per_dataset_folder": {source: tokens},
    }
    metas = {
        "consumed_train_samples": samples,
        "last_train_step": state.step,
        "consumed_tokens_total": tokens,
        "last_stage_idx": 0,
        "data_stages": [stage],
    }
    return {"version": _VERSION, "cp": 1, "custom_metas": None, "metas": metas}


def describe(described: Described) -> Iterator[str]:
    """Yield notes on what nanotron's own configuration has to say."""
    sequence = described.args["sequence"]
    yield (
        "config.yaml belongs to the run: its model is that of model_config.json, and the first of"
        f" its data_stages continues after the samples in {METADATA} (sequence_length {sequence})"
    )
