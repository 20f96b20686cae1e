"""Read a ``ds_config.json`` of DeepSpeed, and the YAML file that ``accelerate config`` writes.

A table maps the fields that are settings here. Some fields change speed or output only: they are
named in a note. Any other field is refused, because it could change the training. ``auto`` becomes
the value of a flag, else our default. A field that is left out gets the default of its framework
(DeepSpeed 0.19, Accelerate 1.x), unless a flag sets it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.choices import Choice, Choices, make_contradiction
from trainer.core.errors import SettingsError
from trainer.core.settings import FSDP, ZERO

Kind = Callable[[Any], Any]
"""Value in the file -> value of the setting; raises ValueError(what was expected)."""
Table = Mapping[str, tuple[str, Kind]]
"""Path of a field -> the setting, or an empty string if `read_...` uses the field, and its kind."""


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError("a number")
    return float(value)


def _count(value: Any, least: int = 0) -> int:
    """Return a whole number; 5e8 is one."""
    if _number(value) < least or value % 1:
        raise ValueError(f"a whole number, {least} or more")
    return int(value)


def _positive(value: Any) -> int:
    return _count(value, 1)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")  # noqa: TRY004 - `_File.read_fields` names the field
    return value


def _text(value: Any) -> str | None:
    if not isinstance(value, str):
        raise ValueError("text")  # noqa: TRY004
    return None if value == "none" else value


def _one_of(meanings: Mapping[Any, Any]) -> Kind:
    """Return the kind that maps each allowed value to its meaning here."""

    def kind(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value not in meanings:
            raise ValueError("one of " + ", ".join(map(json.dumps, meanings)))
        return meanings[value]

    return kind


def _words(*values: str) -> Kind:
    return _one_of({value: value for value in values})


def _off_or(kind: Kind) -> Kind:
    """Return a kind that also takes the word no, which YAML reads as false."""
    return lambda value: kind("no" if value in (False, "NO") else value)


def _named(*values: str, suffix: str = "") -> Kind:
    """Return the kind of one of ``values``, by its name or, as Accelerate has it, its number."""
    names = {value.lstrip("_").upper() + suffix: value for value in values}
    return _one_of({**names, **dict(enumerate(values, 1))})


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("two numbers")
    return _number(value[0]), _number(value[1])


def _classes(value: Any) -> tuple[str, ...]:
    return tuple(name.strip() for name in (_text(value) or "").split(",") if name.strip())


_STAGE = _one_of(dict(enumerate(ZERO)))
_DEVICE = _words("none", "cpu")
_ZERO, _ADAM, _SCHEDULE = "zero_optimization", "optimizer.params", "scheduler.params"
_DEEPSPEED: Table = {
    "train_batch_size": ("global_batch", _positive),
    "train_micro_batch_size_per_gpu": ("micro_batch", _positive),
    "gradient_accumulation_steps": ("accumulation", _positive),
    "gradient_clipping": ("clip", _number),
    f"{_ZERO}.stage": ("strategy", _STAGE),
    f"{_ZERO}.reduce_bucket_size": ("reduce_bucket_size", _positive),
    f"{_ZERO}.sub_group_size": ("sub_group_size", _count),
    f"{_ZERO}.offload_optimizer.device": ("offload_optimizer", _DEVICE),
    f"{_ZERO}.offload_param.device": ("offload_param", _DEVICE),
    "bf16.enabled": ("", _boolean),
    "fp16.enabled": ("", _boolean),
    "fp16.loss_scale": ("loss_scale", _number),
    "fp16.initial_scale_power": ("initial_scale_power", _count),
    "fp16.loss_scale_window": ("loss_scale_window", _positive),
    "fp16.hysteresis": ("hysteresis", _positive),
    "fp16.min_loss_scale": ("min_loss_scale", _number),
    "data_types.grad_accum_dtype": ("grad_dtype", _words("fp32", "bf16", "fp16")),
    "optimizer.type": ("", _words("Adam", "AdamW")),
    f"{_ADAM}.lr": ("lr", _number),
    f"{_ADAM}.betas": ("beta1 beta2", _betas),
    f"{_ADAM}.eps": ("eps", _number),
    f"{_ADAM}.weight_decay": ("weight_decay", _number),
    f"{_ADAM}.torch_adam": ("", _boolean),
    f"{_ADAM}.adam_w_mode": ("", _boolean),
    "scheduler.type": ("schedule", _words("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")),
    f"{_SCHEDULE}.warmup_min_lr": ("warmup_min_lr", _number),
    f"{_SCHEDULE}.warmup_max_lr": ("lr", _number),
    f"{_SCHEDULE}.warmup_num_steps": ("warmup_steps", _positive),
    f"{_SCHEDULE}.warmup_type": ("warmup_type", _words("log", "linear")),
    f"{_SCHEDULE}.total_num_steps": ("schedule_steps", _positive),
    f"{_SCHEDULE}.warmup_min_ratio": ("warmup_min_ratio", _number),
    f"{_SCHEDULE}.cos_min_ratio": ("cos_min_ratio", _number),
}
_DEEPSPEED_SPEED = {
    "steps_per_print",
    "wall_clock_breakdown",
    *(f"{_ZERO}.offload_{what}.pin_memory" for what in ("optimizer", "param")),
    *(
        f"{_ZERO}.{name}"
        for name in "allgather_partitions allgather_bucket_size overlap_comm reduce_scatter"
        " contiguous_gradients stage3_prefetch_bucket_size stage3_max_live_parameters"
        " stage3_max_reuse_distance round_robin_gradients stage3_param_persistence_threshold"
        " stage3_gather_16bit_weights_on_model_save".split()
    ),
}
_SHARDING = _named("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_JSON = "deepspeed_config.deepspeed_config_file"
_WRAP = _named("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_ACCELERATE: Table = {
    "compute_environment": ("", _words("LOCAL_MACHINE")),
    "distributed_type": ("", _off_or(_words("DEEPSPEED", "FSDP", "MULTI_CPU", "MULTI_GPU", "no"))),
    "num_processes": ("", _positive),
    "num_machines": ("", _positive),
    "mixed_precision": ("", _off_or(_one_of({"no": "fp32", "fp16": "fp16", "bf16": "bf16"}))),
    "use_cpu": ("", _boolean),
    _JSON: ("", _text),
    "deepspeed_config.zero_stage": ("strategy", _STAGE),
    "deepspeed_config.gradient_accumulation_steps": ("accumulation", _positive),
    "deepspeed_config.gradient_clipping": ("clip", _number),
    "deepspeed_config.offload_optimizer_device": ("offload_optimizer", _DEVICE),
    "deepspeed_config.offload_param_device": ("offload_param", _DEVICE),
    "fsdp_config.fsdp_version": ("strategy", _one_of({1: "fsdp", 2: "fsdp2"})),
    "fsdp_config.fsdp_sharding_strategy": ("fsdp_sharding_strategy", _SHARDING),
    "fsdp_config.fsdp_reshard_after_forward": (
        "fsdp_sharding_strategy",
        lambda value: "FULL_SHARD" if _boolean(value) else "SHARD_GRAD_OP",
    ),
    "fsdp_config.fsdp_auto_wrap_policy": ("fsdp_auto_wrap_policy", _WRAP),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": (
        "fsdp_transformer_layer_cls_to_wrap",
        _classes,
    ),
    "fsdp_config.fsdp_min_num_params": ("fsdp_min_num_params", _count),
    "fsdp_config.fsdp_state_dict_type": (
        "state_dict_type",
        _named("full", "local", "sharded", suffix="_STATE_DICT"),
    ),
    "fsdp_config.fsdp_activation_checkpointing": ("activation_checkpointing", _boolean),
    "fsdp_config.fsdp_use_orig_params": ("fsdp_use_orig_params", _boolean),
    "fsdp_config.fsdp_offload_params": ("fsdp_offload_params", _boolean),
}
_ACCELERATE_SPEED = {
    *"debug machine_rank main_process_ip main_process_port main_training_function".split(),
    *"rdzv_backend same_network enable_cpu_affinity downcast_bf16".split(),
    "deepspeed_config.zero3_init_flag",
    "deepspeed_config.deepspeed_multinode_launcher",
    "deepspeed_config.zero3_save_16bit_model",
    *(f"deepspeed_config.offload_{what}_nvme_path" for what in ("optimizer", "param")),
    *(
        f"fsdp_config.fsdp_{name}"
        for name in "backward_prefetch backward_prefetch_policy forward_prefetch"
        " sync_module_states cpu_ram_efficient_loading limit_all_gathers".split()
    ),
}


@dataclass
class _File:
    """One configuration file, read into choices."""

    path: Path
    choices: Choices

    def origin(self, field: str) -> str:
        return f"{field} in {self.path.name}"

    def read_fields(self, document: Any, table: Table, speed: set[str]) -> dict[str, Any]:
        """State the settings of the known fields; return the converted value of each field.

        Args:
            document: the content of the file.
            table: the fields that are settings.
            speed: the fields that change speed or output only.

        Raises:
            SettingsError: an unknown field, a wrong type, or a contradicting value.
        """
        sections = {path.rpartition(".")[0] for path in (*table, *speed)}
        sections |= {path.rpartition(".")[0] for path in sections}
        found = {}
        for path, value in self._flatten(document, sections):
            if path in speed:
                if value not in (None, "auto", False):
                    self.choices.note(f"{self.path.name}: no effect here", path)
            elif path not in table:
                raise SettingsError(
                    f"{self.path.name}: field {path} is not supported here", "remove the field"
                )
            elif value is not None and value != "auto":
                setting, kind = table[path]
                try:
                    found[path] = kind(value)
                except ValueError as error:
                    raise self.wrong(path, str(error), value) from None
                names = setting.split()
                values = found[path] if len(names) > 1 else (found[path],)
                for name, each in zip(names, values, strict=False):  # some only check the value
                    if each is not None:
                        self.choices.state(name, each, self.origin(path))
        return found

    def _flatten(
        self, section: Any, sections: set[str], prefix: str = ""
    ) -> Iterator[tuple[str, Any]]:
        if not isinstance(section, dict):
            raise self.wrong(prefix.rstrip(".") or "the file", "an object of named fields", section)
        for name, value in section.items():
            path = f"{prefix}{name}"
            if path not in sections:
                yield path, value
            elif value is not None:
                yield from self._flatten(value, sections, f"{path}.")

    def wrong(self, path: str, expected: str, found: Any) -> SettingsError:
        shown = json.dumps(found, default=str)
        return SettingsError(
            f"{self.path.name}: {path}: expected {expected}, found {shown}",
            f"correct it in {self.path}",
        )

    def parse(self, parse: Callable[[str], Any], error_type: type[Exception]) -> Any:
        """Return the content of the file.

        Raises:
            SettingsError: the file is missing, or has another syntax.
        """
        try:
            return parse(self.path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(
                f"cannot read {self.path}: {error.strerror}", "give a readable text file"
            ) from None
        except (error_type, UnicodeDecodeError) as error:
            raise SettingsError(
                f"cannot parse {self.path}: {' '.join(str(error).split())}", "correct the file"
            ) from None


def read_deepspeed(path: Path, choices: Choices) -> None:
    """Add the settings of a ``ds_config.json`` to ``choices``.

    Raises:
        SettingsError: the file cannot be read, has an unknown field, contradicts another source, or
            needs something that is not supported.
    """
    file = _File(path, choices)
    document = file.parse(json.loads, ValueError)
    found = file.read_fields(document, _DEEPSPEED, _DEEPSPEED_SPEED)
    given = {
        name for name in ("global_batch", "micro_batch", "accumulation") if choices.stated(name)
    }
    if given == {"global_batch"}:  # as runtime/config.py of DeepSpeed 0.19.8 has it
        choices.assume("accumulation", 1, f"train_batch_size alone in {path.name}")
    choices.limit("strategy", ZERO, path.name)
    choices.assume("strategy", "ddp", f"no zero_optimization.stage in {path.name}")
    _choose_precision(file, document, found)
    if "optimizer.type" in found:
        if found["optimizer.type"] == "Adam" and found.get(f"{_ADAM}.adam_w_mode") is False:
            raise file.wrong(f"{_ADAM}.adam_w_mode", "true: only AdamW is supported", False)
        params = document["optimizer"].get("params") or {}
        if "weight_decay" not in params and not params.get("torch_adam"):  # DeepSpeed's own Adam
            choices.assume("weight_decay", 0.0, f"no {_ADAM}.weight_decay in {path.name}")
    if "scheduler.type" in found:
        params = document["scheduler"].get("params") or {}
        if "warmup_num_steps" not in params:
            choices.assume("warmup_steps", 1000, f"no {_SCHEDULE}.warmup_num_steps in {path.name}")
        if found["scheduler.type"] == "WarmupDecayLR" and "warmup_max_lr" not in params:
            # DeepSpeed then warms up to 0.001, whatever the optimizer's lr is.
            choices.state("lr", 0.001, file.origin(f"{_SCHEDULE}.warmup_max_lr (its default)"))


def _choose_precision(file: _File, document: dict[str, Any], found: dict[str, Any]) -> None:
    """State the precision of the section that is enabled; without one, DeepSpeed trains in fp32."""
    on = [name for name in ("fp16", "bf16") if found.get(f"{name}.enabled")]
    for name in on:
        file.choices.state("precision", name, file.origin(f"{name}.enabled"))
    known = file.choices.stated("precision")
    if known and found.get(f"{known.value}.enabled") is False:
        disabled = Choice(f"not {known.value}", file.origin(f"{known.value}.enabled"))
        raise make_contradiction("precision", known, disabled)
    is_auto = any((document.get(name) or {}).get("enabled") == "auto" for name in ("fp16", "bf16"))
    if not on and not is_auto:
        origin = f"neither fp16 nor bf16 in {file.path.name}"
        file.choices.assume("precision", "fp32", origin)


def read_accelerate(path: Path, choices: Choices, *, world: int | None = None) -> None:
    """Add the settings of a YAML file, and of the DeepSpeed file that it names, to ``choices``.

    Args:
        path: a file that ``accelerate config`` wrote.
        choices: the settings of other sources, to which this file's are added.
        world: the number of ranks, if a launcher has started them already.

    Raises:
        SettingsError: the file cannot be read, has an unknown field, contradicts another source, or
            needs something that is not supported.
    """
    import yaml  # type: ignore[import-untyped]

    file = _File(path, choices)
    document = file.parse(yaml.safe_load, yaml.YAMLError)
    if not isinstance(document, dict) or "distributed_type" not in document:
        raise SettingsError(
            f"{path} has no field distributed_type", "make the file with accelerate config"
        )
    for name, owner in (("deepspeed_config", "DEEPSPEED"), ("fsdp_config", "FSDP")):
        if document["distributed_type"] != owner and document.pop(name, None):
            choices.note(f"{path.name}: no effect with {document['distributed_type']}", name)
    found = file.read_fields(document, _ACCELERATE, _ACCELERATE_SPEED)
    _state_ranks(file, found, world)
    _state_precision(file, found)
    _state_strategy(file, found)


def _state_ranks(file: _File, found: dict[str, Any], world: int | None) -> None:
    """Set the number of ranks, unless a launcher has started them, and their device."""
    if world is None:
        if found.get("num_machines", 1) > 1:
            raise file.wrong("num_machines", "1, or a start by torchrun", found["num_machines"])
        if "num_processes" in found:
            file.choices.state("nproc", found["num_processes"], file.origin("num_processes"))
    if found.get("distributed_type") == "MULTI_CPU" or found.get("use_cpu"):
        file.choices.state("device", "cpu", file.origin("use_cpu"))


def _state_precision(file: _File, found: dict[str, Any]) -> None:
    """Set the precision; "no" states nothing if there is a DeepSpeed file, which then decides."""
    precision, decides = found.get("mixed_precision"), not found.get(_JSON)
    if precision and (decides or precision != "fp32"):
        file.choices.state("precision", precision, file.origin("mixed_precision"))
    else:
        file.choices.assume("precision", "fp32", f"no mixed_precision in {file.path.name}")


def _state_strategy(file: _File, found: dict[str, Any]) -> None:
    choices, path, kind = file.choices, file.path, found.get("distributed_type", "no")
    origin = file.origin("distributed_type")
    if kind == "DEEPSPEED":
        choices.limit("strategy", ZERO, origin)
        if json_file := found.get(_JSON):
            beside = path.parent / json_file
            read_deepspeed(beside if beside.exists() else Path(json_file), choices)
        choices.assume("strategy", "zero2", f"no deepspeed_config.zero_stage in {path.name}")
    elif kind == "FSDP":
        choices.limit("strategy", FSDP, origin)
        is_second = found.get("fsdp_config.fsdp_version") == "fsdp2"
        for setting, value in {
            "strategy": "fsdp",
            "fsdp_auto_wrap_policy": "NO_WRAP",
            "fsdp_min_num_params": 100_000_000,
            "state_dict_type": "sharded" if is_second else "full",
        }.items():
            choices.assume(setting, value, f"the default of Accelerate, in {path.name}")
    else:
        choices.state("strategy", "ddp", origin)
