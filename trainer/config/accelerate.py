"""Read the YAML file that ``accelerate config`` writes: what each of its fields means here.

A field that is left out gets the default of Accelerate 1.x, unless a flag sets it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import deepspeed
from trainer.config.choices import Choices
from trainer.config.rules import (
    OFF,
    Into,
    Kind,
    Only,
    Table,
    Walk,
    boolean,
    integer,
    into,
    number,
    one_of,
    positive,
    read_text,
    refused,
    text,
    without_effect,
)
from trainer.errors import SettingsError
from trainer.settings import FSDP, ZERO

_SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_WRAPPING = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_STATE_DICTS = ("full", "local", "sharded")


def _loosely(kind: Kind) -> Kind:
    """Return a kind that also takes strings, because Accelerate passes environment variables."""
    booleans = {"true": True, "yes": True, "on": True, "y": True, "t": True}
    booleans |= {"false": False, "no": False, "off": False, "n": False, "f": False}

    def parse(value: Any) -> Any:
        if kind is boolean:
            text = str(value).lower()
            return kind(booleans.get(text, {"1": True, "0": False}.get(text, value)))
        if isinstance(value, str) and kind in (integer, positive, number):
            with contextlib.suppress(ValueError):  # then the kind raises the error
                value = float(value)
        return kind(value)

    return parse


_flag, _count, _rate = _loosely(boolean), _loosely(positive), _loosely(number)


def _named(values: tuple[str, ...], suffix: str = "") -> Kind:
    """Return the kind of one of ``values``, by its name in any case or by its number from 1."""
    known: dict[Any, str] = {}
    for position, value in enumerate(values, 1):
        spelled = value.lstrip("_").upper() + suffix
        known |= dict.fromkeys((spelled, value, position, str(position)), value)

    def kind(value: Any) -> str:
        simple = isinstance(value, (str, int, float)) and not isinstance(value, bool)
        name = known.get(value.upper() if isinstance(value, str) else value) if simple else None
        if name is None:
            names = [each.lstrip("_").upper() + suffix for each in values]
            raise ValueError("one of " + ", ".join(names))
        return name

    return kind


_strategy = _named(_SHARDING)


def _reshard(value: Any) -> str:
    """Return the sharding strategy from a boolean (FSDP 2) or its name (FSDP 1)."""
    try:
        return "FULL_SHARD" if _flag(value) else "SHARD_GRAD_OP"
    except ValueError:
        return str(_strategy(value))


def _classes(value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("class names, separated by commas")
    return tuple(name.strip() for name in names if name.strip())


_PRECISION: Mapping[Any, str] = {"no": "fp32", "fp16": "fp16", "bf16": "bf16"}


def _precision(value: Any) -> str:
    """Return the precision; YAML reads an unquoted no as false."""
    return str(one_of(_PRECISION)("no" if value is False else value))


def _world(value: Any) -> int:
    return -1 if value in (-1, "-1") else int(_count(value))


_DEEPSPEED: Table = {
    "deepspeed_config_file": Into(text),
    "zero_stage": into("strategy", one_of({n: s for i, s in enumerate(ZERO) for n in (i, str(i))})),
    "gradient_accumulation_steps": into("accumulation", _count),
    "gradient_clipping": into("clip", _rate),
    "offload_optimizer_device": into("offload_optimizer", deepspeed.DEVICE),
    "offload_param_device": into("offload_param", deepspeed.DEVICE),
    "offload_optimizer_nvme_path": Into(text),
    "offload_param_nvme_path": Into(text),
    "zero3_save_16bit_model": into("save_16bit_model", _flag),
    **without_effect(
        "zero3_init_flag deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter"
        " deepspeed_multinode_launcher deepspeed_moe_layer_cls_names"
    ),
}

_FSDP: Table = {
    "fsdp_version": into("strategy", one_of({1: "fsdp", 2: "fsdp2", "1": "fsdp", "2": "fsdp2"})),
    "fsdp_sharding_strategy": into("fsdp_sharding_strategy", _strategy),
    "fsdp_reshard_after_forward": into("fsdp_sharding_strategy", _reshard),
    "fsdp_auto_wrap_policy": into("fsdp_auto_wrap_policy", _named(_WRAPPING)),
    "fsdp_transformer_layer_cls_to_wrap": into("fsdp_transformer_layer_cls_to_wrap", _classes),
    "fsdp_min_num_params": into("fsdp_min_num_params", _loosely(integer)),
    **dict.fromkeys(
        ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy"),  # the second is its old name
        into("fsdp_backward_prefetch", _named(_PREFETCH)),
    ),
    **{
        name: into(name, _flag)
        for name in (
            "fsdp_forward_prefetch",
            "fsdp_use_orig_params",
            "fsdp_sync_module_states",
            "fsdp_cpu_ram_efficient_loading",
            "fsdp_offload_params",
            "fsdp_limit_all_gathers",
        )
    },
    "fsdp_state_dict_type": into("state_dict_type", _named(_STATE_DICTS, "_STATE_DICT")),
    "fsdp_activation_checkpointing": into("activation_checkpointing", _flag),
    "fsdp_ignored_modules": Only("every module is sharded"),
    **without_effect("fsdp_activation_checkpointing_offload"),
}

_TYPES = ("DEEPSPEED", "FSDP", "MULTI_CPU", "MULTI_GPU", "NO")


def _type(value: Any) -> str:
    return str(one_of(_TYPES)("NO" if value is False else value))


TABLE: Table = {
    "compute_environment": Only(
        "only the local machine is supported", (None, "LOCAL_MACHINE", "LOCAL_CLUSTER")
    ),
    "distributed_type": Into(_type),
    "num_processes": Into(_world),
    "num_machines": Into(_count),
    "mixed_precision": Into(_precision),
    "fp16": Into(_flag),  # the old form of mixed_precision
    "use_cpu": Into(_flag),
    "gpu_ids": Only("name the GPUs in CUDA_VISIBLE_DEVICES", (*OFF, "all")),
    "deepspeed_config": _DEEPSPEED,
    "fsdp_config": _FSDP,
    "parallelism_config": {
        **dict.fromkeys(
            (f"parallelism_config_{kind}_size" for kind in ("dp_replicate", "tp", "cp", "sp")),
            Only("only data parallelism in one mesh is supported here", (*OFF, 1)),
        ),
        **without_effect(
            "parallelism_config_dp_shard_size parallelism_config_cp_backend"
            " parallelism_config_cp_comm_strategy parallelism_config_sp_backend"
            " parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable"
            " parallelism_config_sp_attn_implementation"
        ),
    },
    **refused("fp8 and Megatron-LM are not supported", "fp8_config megatron_lm_config"),
    **{
        name: Only("compilation is not supported", (*OFF, "no", "NO", {"dynamo_backend": "NO"}))
        for name in ("dynamo_config", "dynamo_backend")
    },
    **without_effect(
        "debug machine_rank main_process_ip main_process_port main_training_function rdzv_backend"
        " same_network enable_cpu_affinity downcast_bf16 mpirun_config ipex_config tpu_name"
        " tpu_zone tpu_use_cluster tpu_use_sudo tpu_env tpu_vm command_file commands",
        *OFF,
        *("no", "main", "static", True),  # as the questionnaire writes them by default
    ),
}

# Accelerate's defaults for missing fields: field -> setting, value
_FSDP_DEFAULTS = {
    "fsdp_version": ("strategy", "fsdp"),
    "fsdp_auto_wrap_policy": ("fsdp_auto_wrap_policy", "NO_WRAP"),
    "fsdp_min_num_params": ("fsdp_min_num_params", 100_000_000),
    "fsdp_backward_prefetch": ("fsdp_backward_prefetch", "NO_PREFETCH"),
    "fsdp_state_dict_type": ("state_dict_type", "full"),
}


def read(
    file: Path, choices: Choices, *, world: int | None = None, ignore_unknown: bool = False
) -> None:
    """Add the settings of ``file``, and of the DeepSpeed file that it names, to ``choices``.

    Args:
        file: a YAML file.
        choices: the settings of other sources, to which this file's are added.
        world: the number of ranks, if a launcher has started them already.
        ignore_unknown: ignore unknown fields.

    Raises:
        SettingsError: the file cannot be read, has an unknown field, contradicts another source, or
            needs something that is not supported.
    """
    walk = Walk(file, choices, TABLE, ignore_unknown)
    document = _load(file)
    if not isinstance(document, dict) or "distributed_type" not in document:
        raise SettingsError(
            f"{file} has no field distributed_type", "make the file with accelerate config"
        )
    kind = document["distributed_type"] or "NO"
    for name, owner in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP")):
        if kind != owner and document.pop(name, None):
            choices.note(f"{file.name}: no effect with {kind}", name)
    if isinstance(document.get("fsdp_config"), dict):  # Accelerate adds the prefix as well
        document["fsdp_config"] = {
            name if str(name).startswith("fsdp") else f"fsdp_{name}": value
            for name, value in document["fsdp_config"].items()
        }
    walk.fields(document, TABLE)
    document = {name: value for name, value in document.items() if value not in (None, "auto")}
    _derive_ranks(document, walk, world)
    if kind == "MULTI_CPU" or ("use_cpu" in document and _flag(document["use_cpu"])):
        choices.state("device", "cpu", walk.origin("use_cpu"))
    if kind == "DEEPSPEED":
        choices.limit("strategy", ZERO, walk.origin("distributed_type"))
        _derive_deepspeed(document, walk)
    else:
        _derive_precision(document, walk)
    if kind == "FSDP":
        choices.limit("strategy", FSDP, walk.origin("distributed_type"))
        _derive_fsdp(document.get("fsdp_config") or {}, walk)
    elif kind != "DEEPSPEED":
        choices.state("strategy", "ddp", walk.origin("distributed_type"))


def _load(file: Path) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise SettingsError(f"cannot read {file} without PyYAML", "pip install pyyaml") from None
    try:
        return yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise SettingsError(
            f"{file} is not YAML: {' '.join(str(error).split())}", "correct the file"
        ) from None


def _derive_ranks(document: dict[str, Any], walk: Walk, world: int | None) -> None:
    """Set the number of ranks, unless a launcher has started them."""
    processes = _world(document.get("num_processes") or -1)
    if world is None and _count(document.get("num_machines") or 1) > 1:
        raise SettingsError(
            f"{walk.origin('num_machines')} is {document['num_machines']}, and the trainer starts "
            "ranks on one machine only",
            "run on each machine: torchrun --nnodes N --nproc-per-node N --rdzv-endpoint HOST:PORT"
            " -m trainer ...",
        )
    if processes == -1:
        return
    if world is None:
        walk.choices.state("nproc", processes, walk.origin("num_processes"))
    elif processes != world:
        walk.choices.note(
            f"{walk.file.name}: no effect with a launcher of {world} ranks", "num_processes"
        )


def _derive_precision(document: dict[str, Any], walk: Walk, *, decides: bool = True) -> None:
    """Set the precision of ``mixed_precision`` or of its old form ``fp16``.

    Args:
        document: the content of the file.
        walk: reads the file.
        decides: whether "no" is a statement; with a DeepSpeed file, that file decides.
    """
    value = document.get("mixed_precision")
    if value is None and "fp16" in document:
        value = "fp16" if _flag(document["fp16"]) else "no"
    if value is None:
        walk.choices.assume("precision", "fp32", f"no mixed_precision in {walk.file.name}")
        return
    precision = _precision(value)
    set_value = walk.choices.state if decides or precision != "fp32" else walk.choices.assume
    set_value("precision", precision, walk.origin("mixed_precision"))


def _derive_deepspeed(document: dict[str, Any], walk: Walk) -> None:
    section = document.get("deepspeed_config") or {}
    file_name = str(section.get("deepspeed_config_file") or "none")
    has_file = file_name != "none"
    _derive_precision(document, walk, decides=not has_file)
    for what in ("optimizer", "param"):
        field = f"offload_{what}_nvme_path"
        if section.get(field) not in OFF:
            walk.choices.state(
                "nvme_path", section[field], walk.origin(f"deepspeed_config.{field}")
            )
    if has_file:
        paths = (walk.file.parent / file_name, Path(file_name))
        file = next((path for path in paths if path.is_file()), None)
        if file is None:
            raise SettingsError(
                f"{walk.origin('deepspeed_config.deepspeed_config_file')} is {file_name}, which is"
                f" neither beside {walk.file.name} nor in the current directory",
                "correct the path",
            )
        deepspeed.read(file, walk.choices, ignore_unknown=walk.ignore_unknown)
    elif "zero_stage" not in section:
        walk.choices.assume(
            "strategy", "zero2", f"no deepspeed_config.zero_stage in {walk.file.name}"
        )


def _derive_fsdp(section: dict[str, Any], walk: Walk) -> None:
    if str(section.get("fsdp_version")) == "2" and "fsdp_state_dict_type" not in section:
        walk.choices.assume("state_dict_type", "sharded", walk.origin("fsdp_config.fsdp_version 2"))
    for field, (setting, value) in _FSDP_DEFAULTS.items():
        if field not in section:
            walk.choices.assume(setting, value, f"no fsdp_config.{field} in {walk.file.name}")
