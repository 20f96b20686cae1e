"""Forecasts of `reshard plan` against the real frameworks, and their reading of what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import reshard
from reshard.errors import UsageError
from reshard.sizing.families import FORMULAS, count_config
from reshard.sizing.rank_share import take_share
from reshard.sizing.setup import Cluster, Training
from reshard.sizing.sources import count_parameters
from reshard.sizing.strategies import STRATEGIES, forecast, forecast_one
from tests.judges.memory_cases import CASES, CONFIG, JUDGE, SEQ_LEN

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

SMALL = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT = {
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 6,
    "n_group": 2,
    "topk_group": 1,
}
GPT2 = {"vocab_size": 101, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 30}
FAMILIES = {
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 28, "decoder_sparse_step": 2},
    "qwen3_moe": EXPERTS | {"mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "deepseek_v2": LATENT | {"q_lora_rank": None},
    "deepseek_v3": LATENT,
    "llama": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen3": {"attention_bias": True},
}


def config_of(family):
    sizes = GPT2 if family == "gpt2" else SMALL | FAMILIES.get(family, {})
    if family in ("deepseek_v2", "deepseek_v3", "gpt_neox", "phi3", "olmo2", "qwen2", "qwen2_moe"):
        sizes = {name: value for name, value in sizes.items() if name != "head_dim"}
    return {"model_type": family, **sizes}


@pytest.mark.parametrize("family", sorted(FORMULAS))
def test_every_formula_gives_the_names_and_shapes_of_transformers(family):
    from reshard.model import describe_config

    config = config_of(family)
    expected = dict(describe_config(config, family).parameters)
    assert {n: t.shape for n, t in count_config(config, family).named_tensors()} == expected


@pytest.fixture(scope="module")
def measured(checkpoints):
    """Return bytes of the tensors of each rank, by case."""
    made = checkpoints(JUDGE.make, list(CASES), "memory")
    return {name: json.loads((made / name / "found.json").read_text()) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_model_states_are_within_3_percent_of_the_frameworks(name, measured):
    case = CASES[name]
    nodes = 2 if case.strategy == "hsdp" else 1
    cluster = Cluster(case.world // nodes, 10**9, nodes)
    training = Training(precision=case.precision, seq_len=SEQ_LEN, freeze=case.frozen)
    strategy = next(each for each in STRATEGIES if each.name == case.strategy)
    model = count_config(CONFIG, "config")
    row = forecast_one(strategy, model, take_share(model, training), cluster, training)
    # On CPU the host's memory is the device's.
    assert max(measured[name]) == pytest.approx(row.states + row.host / cluster.gpus, rel=0.03)


def count_saved(config, attention="sdpa", *, checkpointing=False):
    """Return the bytes that a forward pass of the real model saves, without its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    built = AutoConfig.for_model(**config)
    built._attn_implementation = attention
    model = AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16).train()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage  # kept alive, so that no address is used twice
        return tensor

    ids = torch.arange(2 * 128).reshape(2, 128) % 90
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, use_cache=False)
    return sum(storage.nbytes() for storage in saved.values())


WIDE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
}
WIDE_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
SAVED = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "olmo2": {},
    "gemma": {},
    "gemma3_text": {},
    "gemma2": {"attention": "eager"},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": WIDE_EXPERTS | {"shared_expert_intermediate_size": 192},
    "qwen3_moe": WIDE_EXPERTS,
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "attention": "eager"},
    # Heads of queries and values are equally wide: else torch's CPU kernel keeps all scores.
    "deepseek_v3": LATENT
    | {
        "num_key_value_heads": 8,
        "q_lora_rank": 64,
        "kv_lora_rank": 48,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 48,
        "moe_intermediate_size": 128,
    },
    "gpt_neox": {},
}


@pytest.mark.parametrize("family", SAVED)
def test_activations_are_within_5_percent_of_the_saved_tensors(family):
    changes = dict(SAVED[family])
    attention = changes.pop("attention", "sdpa")
    config = {"model_type": family, **WIDE, **changes}
    if family in ("deepseek_v3", "gpt_neox", "phi3", "olmo2"):
        config.pop("head_dim")
    share = take_share(count_config(config, family), Training(micro_batch=2, seq_len=128))
    assert share.saved_bytes == pytest.approx(count_saved(config, attention), rel=0.05)


@pytest.mark.parametrize("family", ["starcoder2", "stablelm", "glm4", "cohere"])
def test_a_family_without_a_formula_is_built_on_the_meta_device(family, tmp_path):
    from reshard.model import describe_config

    config = {"model_type": family, **WIDE}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    report = reshard.plan(model=str(path), seq_len=128, micro_batch=2)
    assert report.model.counted_by == "the model on the meta device"
    shapes = describe_config(config, family).parameters
    assert {n: t.shape for n, t in report.model.named_tensors()} == dict(shapes)
    row = next(row for row in report.rows if row.strategy.name == "fsdp")
    assert row.activations == pytest.approx(count_saved(config), rel=0.4)
    assert any("can be wrong by 40%" in note for note in report.notes)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_with_checkpointing_blocks_save_their_inputs(family):
    config = {"model_type": family, **WIDE, **SAVED[family]}
    share = take_share(count_config(config, family), Training(micro_batch=2, seq_len=128))
    one = count_config(config | {"num_hidden_layers": 1}, family)
    block = take_share(one, Training(micro_batch=2, seq_len=128)).saved_bytes
    counted = count_saved(config, checkpointing=True)
    # The forecast includes the one block that is recomputed, and the hooks do not see it.
    assert share.recomputed_bytes - counted == pytest.approx(block, rel=0.2)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(("targets", "given"), [("all-linear", ()), (["q_proj", "v_proj"],) * 2])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_adapters_have_as_many_parameters_as_pefts(family, targets, given):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config_of(family) | {"attention_bias": False, "mlp_bias": False}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    training = Training(lora_rank=4, lora_targets=tuple(given))
    assert take_share(count_config(config, family), training).trained == trained


def test_deepspeeds_own_estimate_counts_more_gradients():
    """DeepSpeed counts the float32 gradients of the step, too: 18 bytes instead of 14 or 16."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    model, numel = count_parameters("7B"), 7 * 10**9
    for gpus, nodes in ((1, 1), (8, 1), (8, 8)):
        rows = {
            row.strategy.name: row
            for row in forecast(model, Cluster(gpus, 10**9, nodes), Training())
        }
        _, two = estimate_zero2_model_states_mem_needs(numel, gpus, nodes, cpu_offload=False)
        assert rows["zero2"].states + rows["zero2"].step == pytest.approx(two, rel=1e-6)
        _, three, layer = estimate_zero3_model_states_mem_needs(
            numel, model.largest_block, gpus, nodes, cpu_offload=False
        )
        assert rows["zero3"].states * 18 / 16 == pytest.approx(three - layer, rel=1e-6)
        _, offloaded = estimate_zero2_model_states_mem_needs(numel, gpus, nodes, cpu_offload=True)
        assert rows["zero2-offload"].states == offloaded


def test_accelerates_own_estimate_of_adam_is_the_same_sum():
    from accelerate.commands.estimate import estimate_training_usage

    estimate = estimate_training_usage(4 * 7 * 10**9, "float32")
    row = forecast(count_parameters("7B"), Cluster(1, 10**9), Training(precision="fp32"))[0]
    assert row.states == estimate["step"] == 112 * 10**9


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {"architectures": ["LlamaForCausalLM"]}))
    return path


def test_a_run_keeps_its_global_batch_on_more_ranks(libraries):
    """Two ranks with two samples each: on four, `split` writes a micro batch of one."""
    source = libraries / "peft_zero3/ckpt/checkpoint-2"
    for ranks, micro in ((1, 2), (2, 2), (4, 1)):
        training = reshard.plan(source, gpus=f"{ranks}x24GB").training
        assert (training.global_batch, training.micro_batch) == (4, micro)
    with pytest.raises(UsageError, match="not a multiple of 3 data-parallel ranks"):
        reshard.plan(source, gpus="3x24GB")


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero2-offload", "zero3", "zero3-offload"])
def test_deepspeed_parses_its_configuration(config, tmp_path, strategy):
    from deepspeed.runtime.config import DeepSpeedConfig

    file = tmp_path / "ds_config.json"
    reshard.plan(model=str(config), gpus="1x80GB", strategy=strategy, write=file)
    parsed = DeepSpeedConfig(json.loads(file.read_text()))
    assert parsed.zero_optimization_stage == int(strategy[4])
    assert parsed.bfloat16_config.enabled
    assert parsed.gradient_accumulation_steps == 1


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp", "zero2", "zero3-offload"])
def test_accelerate_loads_its_configuration(config, tmp_path, strategy):
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "accelerate.yaml"
    nodes = 2 if strategy == "hsdp" else 1
    reshard.plan(model=str(config), gpus="8x80GB", nodes=nodes, strategy=strategy, write=file)
    loaded = load_config_from_file(str(file))
    kind = "FSDP" if strategy in ("fsdp", "hsdp") else "DEEPSPEED"
    assert loaded.distributed_type == ("MULTI_GPU" if strategy == "ddp" else kind)
    assert loaded.num_processes == 8 * nodes


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_the_hugging_face_trainer_accepts_its_arguments(config, tmp_path, strategy):
    from transformers import TrainingArguments

    file = tmp_path / "arguments.json"
    nodes = 2 if strategy == "hsdp" else 1
    reshard.plan(model=str(config), gpus="8x80GB", nodes=nodes, strategy=strategy, write=file)
    arguments = json.loads(file.read_text())
    made = TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, **arguments)
    assert made.per_device_train_batch_size == 1
    assert bool(made.fsdp) == (strategy != "ddp")
