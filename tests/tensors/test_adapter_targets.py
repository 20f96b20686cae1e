"""The tensors that a configuration names are those that PEFT creates for it."""

from __future__ import annotations

import json

import pytest
import transformers
from safetensors.torch import load_file

from reshard.model.adapter_names import parse_part
from reshard.model.build import list_modules
from reshard.tensors.adapters import targets
from tests.judges import library_models as models

peft = pytest.importorskip("peft")

pytestmark = [pytest.mark.judge, pytest.mark.filterwarnings("ignore")]

Q = {"target_modules": ["q_proj", "up_proj"]}
LLAMA = [
    Q,
    {},
    {"target_modules": ["model.layers.1.self_attn.q_proj"]},
    {"target_modules": r".*\.(0|1)\..*(q|k)_proj"},
    {"target_modules": r"model\.layers\.\d+\.(?!self_attn).*(up|down)_proj"},
    {"target_modules": "all-linear"},
    {**Q, "layers_to_transform": 1},
    {**Q, "layers_to_transform": [0], "layers_pattern": ["layers"]},
    {**Q, "exclude_modules": ["layers.0.self_attn.q_proj"]},
    {**Q, "exclude_modules": r".*layers\.0\..*"},
    {**Q, "modules_to_save": ["layers.1.mlp", "norm"]},
    {**Q, "modules_to_save": ["embed_tokens", "lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    {**Q, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    {**Q, "use_dora": True},
    {**Q, "lora_bias": True},
    {**Q, "bias": "all"},
    {**Q, "bias": "lora_only"},
    {**Q, "trainable_token_indices": {"embed_tokens": [1, 2]}},
    {"target_modules": [], "target_parameters": ["q_proj.weight"]},
    {**Q, "rank_pattern": {"layers.0.self_attn.q_proj": 2}},
]
GPT2 = [
    {},
    {"target_modules": ["c_attn", "c_proj"], "layers_to_transform": [1], "layers_pattern": "h"},
    {"target_modules": "all-linear"},
    {"target_modules": ["c_fc"], "bias": "all"},
    {"target_modules": ["c_fc"], "modules_to_save": ["wpe", "ln_f"]},
]
MOE = [
    {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    {"target_modules": ["q_proj"], "target_parameters": ["down_proj"]},
    {"target_modules": "all-linear"},
    {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
]
T5 = [
    {"target_modules": r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$"},
    {"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": "block"},
]
BERT = [{"target_modules": ["query"]}, {"target_modules": "all-linear"}]
SMALL = {"vocab_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 12}


def build(kind):
    if kind == "gpt2":
        sizes = {"n_embd": 12, "n_layer": 2, "n_head": 2, "vocab_size": 32}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    if kind == "moe":
        config = transformers.Qwen3MoeConfig(
            **SMALL, num_key_value_heads=1, num_experts=4, moe_intermediate_size=8, head_dim=6
        )
        return transformers.Qwen3MoeForCausalLM(config)
    if kind == "t5":
        sizes = {"d_model": 12, "d_ff": 16, "d_kv": 6, "num_layers": 2, "num_heads": 2}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    if kind == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL))
    return models.build(kind)


CASES = {"llama": LLAMA, "llama_biased": LLAMA, "llama_tied": LLAMA}
CASES |= {"gpt2": GPT2, "moe": MOE, "t5": T5, "bert": BERT}


@pytest.mark.parametrize(
    ("kind", "number"), [(kind, n) for kind, forms in CASES.items() for n in range(len(forms))]
)
def test_each_layer_that_is_lost_or_added_is_found(kind, number, tmp_path):
    form, task = CASES[kind][number], "SEQ_CLS" if kind == "bert" else "CAUSAL_LM"
    build(kind).save_pretrained(tmp_path / "model")
    model = build(kind)
    base = [*model.state_dict()]
    peft.get_peft_model(model, peft.LoraConfig(r=3, task_type=task, **form)).save_pretrained(
        tmp_path
    )
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    names = [*load_file(tmp_path / "adapter_model.safetensors")]
    _, linear = list_modules(str(tmp_path / "model"))

    def differs(names, values=values):
        content = targets.read_content(names)
        args = content, values, base, linear
        return [*targets.find_missing(*args), *targets.find_unexpected(*args)]

    assert differs(names) == []
    assert differs(names, {**values, **form}) == []  # as it was before PEFT resolved it
    parts = {fqn: parse_part(fqn) for fqn in names}
    layers = {part.layer if part else fqn for fqn, part in parts.items()}
    for layer in layers:
        kept = [f for f in names if layer not in (f, parts[f] and parts[f].layer)]
        # `save_pretrained` adds embeddings of the base; rows of tokens are compared elsewhere.
        is_known = "base_layer.weight" in layer or "token_adapter" in layer
        is_tied = kind == "llama_tied" and form.get("ensure_weight_tying")
        assert differs(kept) or is_known or is_tied, layer
    adapted = {layer.removeprefix("base_model.model.") for layer in layers}
    for module in {fqn.rpartition(".")[0] for fqn in base} - adapted:
        root = f"base_model.model.{module}"
        added = [f"{root}.lora_A.weight", f"{root}.lora_B.weight"]
        inside = any(f".{name}." in f".{module}." for name in values["modules_to_save"] or ())
        tied = form.get("ensure_weight_tying") and module.endswith(("embed_tokens", "lm_head"))
        assert differs([*names, *added]) or inside or tied, module
