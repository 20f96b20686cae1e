"""Configuration files of DeepSpeed and Accelerate mean here what they mean there."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.support.programs import run_python
from trainer.choices import Choices
from trainer.config_files import _ACCELERATE, _DEEPSPEED, read_accelerate, read_deepspeed
from trainer.core.errors import SettingsError
from trainer.resolve import resolve
from trainer.settings import Settings

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
BATCH = {"train_micro_batch_size_per_gpu": 1}


def of_json(tmp_path, document, **flags):
    """Return the choices of flags and a ds.json, which may be text."""
    choices = Choices()
    for name, value in flags.items():
        choices.state(name, value, "--" + name)
    file = tmp_path / "ds.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    read_deepspeed(file, choices)
    return choices


def of_yaml(tmp_path, text, *, world=None, **flags):
    """Return the choices of flags and an accelerate.yaml; plain text is a section of FSDP."""
    choices = Choices()
    for name, value in flags.items():
        choices.state(name, value, "--" + name)
    file = tmp_path / "a.yaml"
    file.write_text(text)
    read_accelerate(file, choices, world=world)
    return choices


def fsdp(*fields):
    return "distributed_type: FSDP\nfsdp_config:\n" + "".join(f"  {field}\n" for field in fields)


def inline(*fields):
    return "distributed_type: DEEPSPEED\ndeepspeed_config:\n" + "".join(
        f"  {field}\n" for field in fields
    )


def changed(settings):
    """Return what differs from the defaults."""
    default = Settings()
    return {
        name: getattr(settings, name)
        for name in Settings.__dataclass_fields__
        if getattr(settings, name) != getattr(default, name)
    }


# The five files, whole


def nested(text):
    """Return what ``a.b=1 a.c=2`` says, as nested dicts."""
    document = {}
    for field in text.split():
        path, _, value = field.partition("=")
        *sections, name = path.split(".")
        target = document
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = json.loads(value)
    return document


WARMUP = 'precision="fp16" schedule="WarmupDecayLR" accumulation=1'
WHOLE = {  # what differs from the defaults
    ("zero2_bf16.json", 2): """reduction="canonical" accumulation=4 global_batch=8
        reduce_bucket_size=500000 sub_group_size=500000""",
    ("zero2_fp16_auto.json", 2): f'{WARMUP} reduction="canonical" global_batch=2',
    ("zero3_offload_auto.json", 4): f"""{WARMUP} reduction="canonical" global_batch=4
        strategy="zero3" offload_optimizer="cpu" offload_param="cpu" """,
    ("accelerate_deepspeed.yaml", 2): f'{WARMUP} reduction="canonical" global_batch=2',
    ("accelerate_fsdp.yaml", 2): """reduction="fast" accumulation=1 global_batch=2
        strategy="fsdp" precision="fp32" device="cpu" state_dict_type="full"
        fsdp_transformer_layer_cls_to_wrap=["LlamaDecoderLayer"]
        fsdp_min_num_params=100000000""",
}


@pytest.mark.parametrize(("name", "nproc"), WHOLE)
def test_an_example_resolves_to_exactly_this(name, nproc):
    choices = Choices()
    read = read_deepspeed if name.endswith(".json") else read_accelerate
    read(CONFIGS / name, choices)
    chosen = choices.values
    found = changed(resolve(chosen, chosen.get("nproc", nproc)))
    assert json.loads(json.dumps(found)) == {
        "schedule_steps": 20,
        "nproc": nproc,
        **nested(WHOLE[name, nproc]),
    }


def test_flags_fill_every_auto(tmp_path):
    document = json.loads((CONFIGS / "zero3_offload_auto.json").read_text())
    flags = {
        "lr": 3e-4,
        "weight_decay": 0.1,
        "clip": 0.5,
        "warmup_steps": 5,
        "warmup_min_lr": 1e-5,
        "schedule_steps": 50,
        "global_batch": 8,
        "micro_batch": 4,
        "reduce_bucket_size": 1000,
    }
    values = of_json(tmp_path, document, **flags).values
    assert {name: values[name] for name in flags} == flags


# DeepSpeed, field by field

STATED = [  # fields, and the settings that they are; where only the names differ, the value is JSON
    ("train_batch_size=8", "global_batch=8"),
    ("train_micro_batch_size_per_gpu=2", "micro_batch=2"),
    ("gradient_accumulation_steps=4.0", "accumulation=4"),
    ("gradient_clipping=0", "clip=0.0"),
    ("zero_optimization.stage=0", 'strategy="ddp"'),
    ("zero_optimization.stage=1", 'strategy="zero1"'),
    ("zero_optimization.stage=2", 'strategy="zero2"'),
    ("zero_optimization.stage=3", 'strategy="zero3"'),
    ("zero_optimization.reduce_bucket_size=5e5", "reduce_bucket_size=500000"),
    ("zero_optimization.sub_group_size=1e9", "sub_group_size=1000000000"),
    ('zero_optimization.offload_optimizer.device="cpu"', 'offload_optimizer="cpu"'),
    ('zero_optimization.offload_param.device="cpu"', 'offload_param="cpu"'),
    ("zero_optimization.offload_param=null zero_optimization.stage=1", 'strategy="zero1"'),
    ("bf16.enabled=true", 'precision="bf16"'),
    ("fp16.enabled=true", 'precision="fp16"'),
    ("fp16.loss_scale=128", "loss_scale=128.0"),
    ("fp16.initial_scale_power=8", "initial_scale_power=8"),
    ("fp16.loss_scale_window=500", "loss_scale_window=500"),
    ("fp16.hysteresis=3", "hysteresis=3"),
    ("fp16.min_loss_scale=2", "min_loss_scale=2.0"),
    ('data_types.grad_accum_dtype="bf16"', 'grad_dtype="bf16"'),
    ('optimizer.type="Adam" optimizer.params.lr=5e-4', "lr=5e-4"),
    ('optimizer.type="Adam" optimizer.params.betas=[0.8,0.9]', "beta1=0.8 beta2=0.9"),
    ('optimizer.type="Adam" optimizer.params.eps=1e-6', "eps=1e-6"),
    ('optimizer.type="Adam" optimizer.params.weight_decay=0.2', "weight_decay=0.2"),
    ('optimizer.type="AdamW" optimizer.params.adam_w_mode=false', "weight_decay=0.0"),
    ('scheduler.type="WarmupLR"', 'schedule="WarmupLR"'),
    ('scheduler.type="WarmupCosineLR"', 'schedule="WarmupCosineLR"'),
    *(
        (f'scheduler.type="{kind}" scheduler.params.{field}={value}', f"{setting}={value}")
        for kind, field, setting, value in (
            ("WarmupLR", "warmup_min_lr", "warmup_min_lr", "1e-6"),
            ("WarmupLR", "warmup_max_lr", "lr", "1e-4"),
            ("WarmupLR", "warmup_num_steps", "warmup_steps", "7"),
            ("WarmupLR", "warmup_type", "warmup_type", '"linear"'),
            ("WarmupCosineLR", "total_num_steps", "schedule_steps", "90"),
            ("WarmupCosineLR", "warmup_min_ratio", "warmup_min_ratio", "0.1"),
            ("WarmupCosineLR", "cos_min_ratio", "cos_min_ratio", "0.2"),
        )
    ),
]


@pytest.mark.parametrize(("document", "expected"), STATED)
def test_a_field_of_deepspeed_is_a_setting(tmp_path, document, expected):
    values, expected = of_json(tmp_path, nested(document)).values, nested(expected)
    assert {name: values.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, {"strategy": "ddp", "precision": "fp32"}),
        ({"optimizer": {"type": "AdamW"}}, {"weight_decay": 0.0}),
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": False}}}, {"weight_decay": 0.0}),
        ({"scheduler": {"type": "WarmupLR"}}, {"warmup_steps": 1000}),
    ],
)
def test_what_is_left_out_is_what_deepspeed_makes_of_it_unless_a_flag_says(
    tmp_path, document, expected
):
    values = of_json(tmp_path, document).values
    assert {name: values[name] for name in expected} == expected
    other = {"strategy": "zero3", "precision": "bf16", "weight_decay": 0.5, "warmup_steps": 3}
    values = of_json(tmp_path, document, **{name: other[name] for name in expected}).values
    assert {name: values[name] for name in expected} == {name: other[name] for name in expected}


def test_what_deepspeed_and_we_do_alike_is_not_chosen(tmp_path):
    document = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    alike = {"weight_decay", "clip", "lr", "grad_dtype", "warmup_steps"}
    assert not alike & of_json(tmp_path, document).values.keys()


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_auto_precision_comes_from_the_flag(tmp_path, name):
    document = {name: {"enabled": "auto"}}
    assert of_json(tmp_path, document, precision=name).values["precision"] == name
    assert "precision" not in of_json(tmp_path, document).values


def test_what_has_no_effect_is_named_once(tmp_path):
    document = {
        "steps_per_print": 10,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": None},
    }
    assert of_json(tmp_path, document).notes == (
        "ds.json: no effect here: steps_per_print, zero_optimization.overlap_comm"
    )


REFUSED = [
    ({"optimizer": {"type": "Lamb"}}, "optimizer.type"),
    ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "adam_w_mode"),
    ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "amsgrad"),
    ({"scheduler": {"type": "OneCycle"}}, "scheduler.type"),
    ({"amp": {"enabled": True}}, "amp"),
    ({"elasticity": {"enabled": True}}, "elasticity"),
    ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights"),
    ({"fp16": {"enabled": True, "consecutive_hysteresis": True}}, "consecutive_hysteresis"),
]


@pytest.mark.parametrize(("document", "named"), REFUSED)
def test_what_would_change_the_training_is_refused_by_name(tmp_path, document, named):
    with pytest.raises(SettingsError, match=named):
        of_json(tmp_path, document)


WRONG = [
    ({"zero_optimization": {"stage": "two"}}, 'stage: expected one of 0, 1, 2, 3, found "two"'),
    ({"zero_optimization": {"stage": 4}}, "found 4"),
    ({"zero_optimization": {"stage": True}}, "found true"),
    ({"zero_optimization": []}, "zero_optimization: expected an object"),
    ({"train_batch_size": 0}, "expected a whole number, 1 or more, found 0"),
    ({"train_batch_size": 1.5}, "found 1.5"),
    ({"gradient_clipping": "1"}, "gradient_clipping: expected a number"),
    ({"bf16": {"enabled": "yes"}}, "bf16.enabled: expected true or false"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, "betas: expected two numbers"),
    ({"optimizer": {"type": 3}}, "optimizer.type"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "1 or more"),
    ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, '"none", "cpu"'),
    ([], "expected an object"),
    ("{'a': 1}", "cannot parse"),
    ('{"a": 1,}', "cannot parse"),
    ("", "cannot parse"),
    ('{"gradient_clipping": NaN}', "expected a number"),
    ('{"train_batch_size": Infinity}', "a number"),
]


@pytest.mark.parametrize(("document", "message"), WRONG)
def test_a_wrong_value_is_an_error_with_file_field_and_both_sides(tmp_path, document, message):
    with pytest.raises(SettingsError) as error:
        of_json(tmp_path, document)
    assert "ds.json" in str(error.value)
    assert message in str(error.value)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    for file in (tmp_path / "none.json", tmp_path, tmp_path / "binary.json"):
        with pytest.raises(SettingsError, match=r"cannot (read|parse)"):
            read_deepspeed(file, Choices())


LR = 'optimizer.type="AdamW" optimizer.params.lr=5e-4'
WARM, DECAY = 'scheduler.type="WarmupLR"', 'scheduler.type="WarmupDecayLR"'
CONTRADICTIONS = [
    (LR, {"lr": 1e-3}, ["0.0005", "0.001"]),
    ("zero_optimization.stage=2", {"strategy": "zero3"}, ["zero2", "zero3"]),
    ("fp16.enabled=true", {"precision": "bf16"}, ["fp16", "bf16"]),
    ("bf16.enabled=false", {"precision": "bf16"}, ["bf16.enabled"]),
    ("train_batch_size=8", {"global_batch": 16}, ["8", "16"]),
    (f"{LR} {WARM} scheduler.params.warmup_max_lr=1e-3", {}, ["optimizer.params.lr", "max_lr"]),
    (f"{LR} {DECAY} scheduler.params.total_num_steps=9", {}, ["its default"]),
]


@pytest.mark.parametrize(("document", "flags", "named"), CONTRADICTIONS)
def test_contradicting_sources_are_both_named(tmp_path, document, flags, named):
    with pytest.raises(SettingsError) as error:
        of_json(tmp_path, nested(document), **flags)
    for part in [*named, "ds.json", *("--" + name for name in flags)]:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "text", ["distributed_type: FSDP\n", "distributed_type: NO\n", inline("gradient_clipping: 1")]
)
def test_a_flag_cannot_change_the_kind_of_the_file(tmp_path, text):
    other = "zero2" if "DEEPSPEED" not in text else "fsdp"
    with pytest.raises(SettingsError, match=f"{other} by --strategy"):
        assert of_yaml(tmp_path, text, strategy=other).values


def test_a_deepspeed_file_and_fsdp_contradict_in_either_order(tmp_path):
    choices = of_json(tmp_path, {})
    read_accelerate(CONFIGS / "accelerate_fsdp.yaml", choices)
    with pytest.raises(SettingsError, match=r"strategy.*ds\.json"):
        assert choices.values
    with pytest.raises(SettingsError, match="fsdp2 by --strategy"):
        assert of_json(tmp_path, {}, strategy="fsdp2").values


def test_sources_that_agree_are_fine(tmp_path):
    document = {"optimizer": {"type": "AdamW", "params": {"lr": 0.0005}}}
    assert of_json(tmp_path, document, lr=5e-4).origins["lr"] == "--lr"


# Accelerate, field by field

FSDP_FIELDS = [
    ("fsdp_version: 1", {"strategy": "fsdp"}),
    ("fsdp_version: 2", {"strategy": "fsdp2", "state_dict_type": "sharded"}),
    ("fsdp_sharding_strategy: 1", {"fsdp_sharding_strategy": "FULL_SHARD"}),
    ("fsdp_sharding_strategy: NO_SHARD", {"fsdp_sharding_strategy": "NO_SHARD"}),
    (
        "fsdp_sharding_strategy: HYBRID_SHARD_ZERO2",
        {"fsdp_sharding_strategy": "_HYBRID_SHARD_ZERO2"},
    ),
    ("fsdp_reshard_after_forward: true", {"fsdp_sharding_strategy": "FULL_SHARD"}),
    ("fsdp_reshard_after_forward: false", {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}),
    ("fsdp_auto_wrap_policy: SIZE_BASED_WRAP", {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}),
    ("fsdp_min_num_params: 5000", {"fsdp_min_num_params": 5000}),
    ("fsdp_use_orig_params: false", {"fsdp_use_orig_params": False}),
    ("fsdp_offload_params: true", {"fsdp_offload_params": True}),
    ("fsdp_state_dict_type: SHARDED_STATE_DICT", {"state_dict_type": "sharded"}),
    ("fsdp_state_dict_type: LOCAL_STATE_DICT", {"state_dict_type": "local"}),
    ("fsdp_activation_checkpointing: true", {"activation_checkpointing": True}),
    (
        "fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer, GPT2Block",
        {"fsdp_transformer_layer_cls_to_wrap": ("LlamaDecoderLayer", "GPT2Block")},
    ),
]


@pytest.mark.parametrize(("field", "expected"), FSDP_FIELDS)
def test_a_field_of_fsdp_is_a_setting(tmp_path, field, expected):
    values = of_yaml(tmp_path, fsdp(field)).values
    assert {name: values[name] for name in expected} == expected


def test_what_fsdp_leaves_out_is_what_accelerate_makes_of_it(tmp_path):
    values = of_yaml(tmp_path, "distributed_type: FSDP\n").values
    assert values == {
        "strategy": "fsdp",
        "precision": "fp32",
        "state_dict_type": "full",
        "fsdp_auto_wrap_policy": "NO_WRAP",
        "fsdp_min_num_params": 100_000_000,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("distributed_type: MULTI_CPU\n", {"strategy": "ddp", "device": "cpu"}),
        ("distributed_type: MULTI_GPU\nmixed_precision: bf16\n", {"precision": "bf16"}),
        ("distributed_type: NO\nmixed_precision: no\n", {"strategy": "ddp", "precision": "fp32"}),
        ("distributed_type: 'NO'\nuse_cpu: true\n", {"device": "cpu"}),
        ("distributed_type: FSDP\nnum_processes: 4\n", {"nproc": 4}),
        (inline("zero_stage: 3"), {"strategy": "zero3"}),
        (inline("gradient_accumulation_steps: 4"), {"strategy": "zero2", "accumulation": 4}),
        (inline("gradient_clipping: 0.5"), {"clip": 0.5}),
        (inline("gradient_clipping: auto"), {"strategy": "zero2"}),
        (
            inline("offload_optimizer_device: cpu"),
            {"offload_optimizer": "cpu"},
        ),
        (
            inline("offload_param_device: cpu", "offload_param_nvme_path: none"),
            {"offload_param": "cpu"},
        ),
    ],
)
def test_a_field_of_accelerate_is_a_setting(tmp_path, text, expected):
    values = of_yaml(tmp_path, text).values
    assert {name: values.get(name) for name in expected} == expected


def test_a_model_that_is_not_written_is_told(tmp_path):
    choices = of_yaml(tmp_path, inline("zero3_save_16bit_model: true"))
    assert choices.notes == "a.yaml: no effect here: deepspeed_config.zero3_save_16bit_model"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: MEGATRON_LM\n", "distributed_type"),
        ("distributed_type: XLA\n", "distributed_type"),
        ("mixed_precision: bf16\n", "no field distributed_type"),
        ("distributed_type: FSDP\nmixed_precision: fp8\n", "mixed_precision"),
        (
            "distributed_type: FSDP\ncompute_environment: AMAZON_SAGEMAKER\n",
            "compute_environment",
        ),
        ("distributed_type: FSDP\nnum_processes: many\n", "num_processes"),
        ("distributed_type: FSDP\nnum_machines: 2\n", "torchrun"),
        (
            "distributed_type: FSDP\nparallelism_config:\n  parallelism_config_tp_size: 2\n",
            "parallel",
        ),
        (fsdp("fsdp_sharding_strategy: 9"), 'one of "FULL_SHARD"'),
        (fsdp("fsdp_offload_params: maybe"), "true or false"),
        (fsdp("fsdp_version: 3"), "fsdp_version"),
        (
            fsdp("fsdp_reshard_after_forward: false", "fsdp_sharding_strategy: 1"),
            "fsdp_reshard_after_forward",
        ),
        (inline("zero_stage: 5"), "zero_stage"),
        ("distributed_type: [\n", "cannot parse"),
        ("just text", "no field distributed_type"),
    ],
)
def test_accelerate_is_refused_by_name(tmp_path, text, message):
    with pytest.raises(SettingsError, match=message):
        of_yaml(tmp_path, text)


@pytest.mark.parametrize("field", ["use_cpu:", "mixed_precision: auto"])
def test_an_accelerate_field_without_a_value_is_as_one_left_out(tmp_path, field):
    plain = of_yaml(tmp_path, "distributed_type: FSDP\n").values
    assert of_yaml(tmp_path, f"distributed_type: FSDP\n{field}\n").values == plain


def test_a_launcher_knows_better_than_the_file(tmp_path):
    text = "distributed_type: FSDP\nnum_processes: 4\nnum_machines: 2\n"
    choices = of_yaml(tmp_path, text, world=8)
    assert "nproc" not in choices.values


def test_a_deepspeed_file_is_found_beside_the_yaml_then_here(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    text = inline("deepspeed_config_file: other.json")
    (tmp_path / "other.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert of_yaml(folder, text).values["strategy"] == "zero1"
    (folder / "other.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert of_yaml(folder, text).values["strategy"] == "zero3"


@pytest.mark.parametrize(
    ("mixed", "json_says", "expected"),
    [
        ("fp16", {"fp16": {"enabled": True}}, "fp16"),
        ("bf16", {}, "bf16"),
        ("bf16", {"bf16": {"enabled": "auto"}}, "bf16"),
        ("no", {"fp16": {"enabled": True}}, "fp16"),  # as Accelerate: the JSON decides
        ("no", {"bf16": {"enabled": "auto"}}, "fp32"),
        ("fp16", {"bf16": {"enabled": True}}, None),
        ("fp16", {"fp16": {"enabled": False}}, None),
    ],
)
def test_both_files_agree_on_the_precision(tmp_path, mixed, json_says, expected):
    (tmp_path / "x.json").write_text(json.dumps(json_says))
    text = f"mixed_precision: '{mixed}'\n" + inline("deepspeed_config_file: x.json")
    if expected:
        assert of_yaml(tmp_path, text).values["precision"] == expected
    else:
        with pytest.raises(SettingsError, match=r"mixed_precision in a\.yaml"):
            of_yaml(tmp_path, text)


# Judged by the frameworks: nothing that is read is unknown there

NAMES = """
import json, re
from pathlib import Path
import deepspeed, accelerate
from deepspeed.runtime import config, constants
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import *
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.monitor.config import TensorBoardConfig, WandbConfig, CSVConfig, CometConfig
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.commands.config.config_args import ClusterConfig

def fields(model):
    return sorted({n for k, f in model.model_fields.items() for n in (k, f.alias or k)})

read = (Path(config.__file__)).read_text()
top = set(re.findall(r'param_dict(?:\\.get\\(|\\[)["\\'](\\w+)', read))
for name in re.findall(r"get_\\w+_param\\(param_dict, ([A-Z_]+)", read):
    top.add(getattr(config, name))
top |= set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
flags = {a.dest for a in launch_command_parser()._actions}
questions = Path(accelerate.__file__).parent / "commands" / "config" / "cluster.py"
print(json.dumps({
    "clip": constants.GRADIENT_CLIPPING_DEFAULT,
    "": sorted(top),
    "zero_optimization": fields(DeepSpeedZeroConfig),
    "zero_optimization.removed": sorted(config._REMOVED_ZERO_CONFIG_KEYS),
    "zero_optimization.offload_param": fields(DeepSpeedZeroOffloadParamConfig),
    "zero_optimization.offload_optimizer": fields(DeepSpeedZeroOffloadOptimizerConfig),
    "zero_optimization.leaf_module": fields(DeepSpeedZeroLeafModuleConfig),
    "bf16": fields(DeepSpeedBF16Config), "fp16": fields(DeepSpeedFP16Config),
    "tensorboard": fields(TensorBoardConfig), "wandb": fields(WandbConfig),
    "csv_monitor": fields(CSVConfig), "comet": fields(CometConfig),
    "comms_logger": fields(CommsLoggerConfig), "compile": fields(CompileConfig),
    "hybrid_engine": fields(config.HybridEngineConfig),
    "tensor_parallel": fields(TPTrainingConfig),
    "yaml": sorted(ClusterConfig.__dataclass_fields__),
    "yaml.fsdp_config": sorted(n for n in flags if n.startswith("fsdp_")),
    "yaml.deepspeed_config": sorted(
        n for n in re.findall(r'deepspeed_config\\["(\\w+)"\\]', questions.read_text())),
}))
"""


@pytest.fixture(scope="module")
def real_names():
    if not all(map(importlib.util.find_spec, ("deepspeed", "accelerate"))):
        pytest.skip("needs deepspeed and accelerate")
    done = run_python("-c", NAMES, check=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.judge
def test_every_field_that_is_read_is_one_of_the_real_frameworks(real_names):
    paths = {*_DEEPSPEED, *(f"yaml.{path}" for path in _ACCELERATE)}
    unknown = set()
    for path in paths:
        section, _, name = path.rpartition(".")
        if section and section in real_names and name not in real_names[section]:
            unknown.add(path)
    assert unknown == set()


@pytest.mark.judge
def test_a_file_without_clipping_clips_as_deepspeed_does(real_names):
    assert real_names["clip"] == Settings().clip
