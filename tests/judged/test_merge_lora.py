"""LoRA adapters added to their base, against PEFT's own ``merge_and_unload`` and live models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Mxfp4Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import reshard
from reshard.core.keys import Edits
from reshard.errors import (
    CorruptError,
    DifferentError,
    IncompleteError,
    UnsupportedError,
    UsageError,
)
from tests.judged.expected import read_expected
from tests.judged.test_quantised import fp8_model, gpt_oss
from tests.judges import library_models as models
from tests.judges.library_cases import SHARDED_ADAPTERS
from tests.quantised.models import FP8, read_tensors, scale_blocks, write_model

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT and transformers warn about each other

CONFIG = "adapter_config.json"
PLAIN = {"r": 3, "target_modules": ["q_proj", "v_proj"]}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GPT2 = {"r": 3, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
FORMS = {
    "plain": PLAIN,
    "alpha": {**PLAIN, "lora_alpha": 5},
    "stable": {**PLAIN, "use_rslora": True},
    "deep": {"r": 70, "target_modules": ["q_proj", "up_proj"], "lora_alpha": 70},
    "patterns": {
        **PLAIN,
        "rank_pattern": {"layers.0.self_attn.q_proj": 5},
        "alpha_pattern": {r"^model\.layers\.\d+\.self_attn\.v_proj": 3},
    },
    "dora": {**PLAIN, "use_dora": True, "target_modules": "all-linear"},
    "head": {**PLAIN, "modules_to_save": ["lm_head"]},
    "bias": {**PLAIN, "bias": "lora_only"},
    "biases": {**PLAIN, "bias": "all"},
    "lora_bias": {**PLAIN, "lora_bias": True},
    "embedding": {"r": 3, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "tokens": {**PLAIN, "trainable_token_indices": [7, 1, 5]},
    "parameters": {"r": 3, "target_modules": [], "target_parameters": ["q_proj.weight"]},
    "one_layer": {**PLAIN, "layers_to_transform": [1], "layers_pattern": "layers"},
    "excluded": {**PLAIN, "exclude_modules": ["layers.0.self_attn.q_proj"]},
}


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(n_embd=24, n_layer=2, n_head=2, vocab_size=96, n_positions=32)
    )


def gpt_neox():
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=96,
            tie_word_embeddings=False,
        )
    )


def qwen3_moe(**sizes):
    config = {"hidden_size": 24, "moe_intermediate_size": 20, **sizes}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=96,
            num_experts=3,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            **config,
        )
    )


def save_base(model, directory, dtype=torch.float32):
    """Save the base model with random values, under the names of the live model."""
    models.draw(model).to(dtype)
    directory.mkdir(exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    head = getattr(model.config, "tie_word_embeddings", False)
    state = {
        k: v.clone() for k, v in model.state_dict().items() if not (head and k == "lm_head.weight")
    }
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    return directory


def adapt(model, form):
    """Return the model with an adapter whose values are all random; the base keeps its values."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **form))
    torch.manual_seed(4)
    with torch.no_grad():
        for value in adapted.parameters():
            if value.requires_grad:
                value.normal_(std=0.1)
    return adapted


@pytest.fixture
def made(tmp_path):
    """Return (model, form) -> base, adapter, and the live adapted model."""

    def make(model, form, **how):
        base = tmp_path / "base"
        base.mkdir()
        save_base(model, base, **how)
        adapted = adapt(model, form)
        adapted.save_pretrained(tmp_path / "adapter")
        return base, tmp_path / "adapter", adapted

    return make


def merged(source, base, out, **options):
    report = reshard.merge(source, out, merge_lora=base, **options)
    return load_file(out / "model.safetensors"), report


def assert_close(got, adapted):
    """Compare with PEFT's ``merge_and_unload``; both must be within rounding of the exact sum.

    The bound is (rank + 3) roundings of fp32, relative to the sum of absolute values.
    """
    bounds = {}
    for name, module in adapted.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "scaling"):
            rank = max((*module.r.values(), 1))
            bounds[name.removeprefix("base_model.model.").replace(".base_layer", "")] = rank
    want = adapted.merge_and_unload().state_dict()
    assert {k for k in want if k != "lm_head.weight"} == {k for k in got if k != "lm_head.weight"}
    changed = 0
    for name, value in got.items():
        exact = name.rpartition(".")[0] not in bounds
        if exact:
            assert torch.equal(value, want[name]), name
        else:
            rank = bounds[name.rpartition(".")[0]]
            torch.testing.assert_close(value, want[name], rtol=0, atol=(rank + 3) * 2.0**-24 * 4)
            changed += 1
    assert changed >= len({*bounds})
    return want


def read_model(directory):
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_merge_equals_pefts(form, made, tmp_path):
    base, adapter, adapted = made(models.build("llama_biased"), FORMS[form])
    live = models.compute_logits(adapted)
    got, report = merged(adapter, base, tmp_path / "out")
    assert_close(got, adapted)
    assert sum(report.adapter["scales"].values()) == report.adapter["merged"] > 0
    loaded = read_model(tmp_path / "out")
    torch.testing.assert_close(models.compute_logits(loaded), live, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alpha", [8, -1])
def test_adalora_is_merged_with_the_ranks_that_it_kept(alpha, tmp_path):
    """The file has three, two, one and no ranks of the four; PEFT divides by four all the same."""
    base = save_base(models.build("llama_biased"), tmp_path / "base")
    names = [f"model.layers.{n}.self_attn.{part}_proj" for n in range(2) for part in "qv"]
    kept = {f"{name}.lora_E": [n < rank for n in range(4)] for rank, name in enumerate(names)}
    form = peft.AdaLoraConfig(
        init_r=4, lora_alpha=alpha, target_modules=["q_proj", "v_proj"], total_step=10
    )
    adapted = models.draw(peft.get_peft_model(read_model(base), form))
    for module in adapted.modules():
        if hasattr(module, "ranknum"):
            module.ranknum["default"].data.fill_(4.0)
    adapted.peft_config["default"].rank_pattern = kept
    adapted.save_pretrained(tmp_path / "adapter")
    got, report = merged(tmp_path / "adapter", base, tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(read_model(base), tmp_path / "adapter")
    want = loaded.merge_and_unload().state_dict()
    before = load_file(base / "model.safetensors")
    assert report.adapter["merged"] == 3
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=2.0**-20)
        changed = name.removesuffix(".weight") in names[1:]
        assert torch.equal(value, before[name]) != changed


def test_conv1d_with_square_weights(made, tmp_path):
    base, adapter, adapted = made(gpt2(), GPT2)
    live = models.compute_logits(adapted)
    got, _ = merged(adapter, base, tmp_path / "out")
    assert_close(got, adapted)
    loaded = read_model(tmp_path / "out")
    torch.testing.assert_close(models.compute_logits(loaded), live, rtol=1e-4, atol=1e-5)


def test_a_base_without_the_name_prefix_is_merged(made, tmp_path):
    base, adapter, adapted = made(gpt2(), GPT2)
    file = base / "model.safetensors"
    state = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    save_file(state, file, {"format": "pt"})
    got, _ = merged(adapter, base, tmp_path / "out")
    assert_close(got, adapted)


@pytest.mark.parametrize(
    "sizes", [{}, {"moe_intermediate_size": 12}, {"moe_intermediate_size": 24}]
)
def test_experts_are_stacked(sizes, made, tmp_path):
    form = {"r": 2, "target_modules": ["q_proj"], "target_parameters": EXPERTS}
    base, adapter, adapted = made(qwen3_moe(**sizes), form)
    live = models.compute_logits(adapted)
    got, report = merged(adapter, base, tmp_path / "out", names="module")
    assert report.adapter["merged"] == 6
    assert_close(got, adapted)
    loaded = read_model(tmp_path / "out")
    torch.testing.assert_close(models.compute_logits(loaded), live, rtol=1e-4, atol=1e-5)


def test_a_head_that_files_call_otherwise_is_replaced(tmp_path):
    """GPT-NeoX's head is lm_head in memory, and embed_out in files."""
    model = models.draw(gpt_neox())
    model.save_pretrained(tmp_path / "base")
    form = {"r": 3, "target_modules": ["query_key_value"], "modules_to_save": ["lm_head"]}
    adapted = adapt(model, form)
    adapted.save_pretrained(tmp_path / "adapter")
    live = models.compute_logits(adapted)
    got, _ = merged(tmp_path / "adapter", tmp_path / "base", tmp_path / "out")
    assert got.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
    loaded = read_model(tmp_path / "out")
    torch.testing.assert_close(models.compute_logits(loaded), live, rtol=1e-4, atol=1e-5)


def test_parameters_are_named_without_their_module(made, tmp_path):
    """PEFT writes these names for the experts of Mixtral if the program asks for all-linear."""
    names = [name.rpartition(".")[2] for name in EXPERTS]
    form = {"r": 2, "target_modules": ["q_proj"], "target_parameters": names}
    base, adapter, adapted = made(qwen3_moe(), form)
    got, report = merged(adapter, base, tmp_path / "out", names="module")
    assert report.adapter["merged"] == 6
    assert_close(got, adapted)


@pytest.mark.parametrize(("case", "source", "name", "place"), SHARDED_ADAPTERS)
def test_out_of_shards(case, source, name, place, library_case, tmp_path):
    """PEFT merges the same fp32 values; its own files have the dtype of training."""
    made = library_case(case)
    run, given = made / "ckpt" / source, {"adapter": name}
    if case == "peft_fsdp2":  # no configuration is beside it
        given["hf_dir"] = made / place
    got, report = merged(run, made / "base", tmp_path / "out", **given)
    reshard.merge(run, tmp_path / "adapter", dtype="fp32", **given)
    base = read_model(made / "base")
    before = models.compute_logits(base)
    assert_close(got, peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert report.adapter["adapter"] == name
    after = models.compute_logits(read_model(tmp_path / "out"))
    assert not torch.allclose(before, after, atol=1e-3)
    if name == "default":  # the other one was trained with biases that PEFT does not save with it
        wanted = read_expected(made)["logits"][name].float()
        torch.testing.assert_close(after, wanted, rtol=1e-2, atol=2e-3)


def test_a_run_of_another_base_is_refused(library_case, tmp_path):
    made = library_case("peft_fsdp2")
    save_base(models.build("llama"), other := tmp_path / "other")
    with pytest.raises(
        DifferentError, match=r"the values of .* differ from those of the adapter's run"
    ):
        merged(made / "ckpt/whole", other, tmp_path / "out", hf_dir=made / "saved")


TIED = {
    "head": {**PLAIN, "modules_to_save": ["lm_head"]},
    "embedding": {**PLAIN, "modules_to_save": ["embed_tokens"]},
    "tokens": {**PLAIN, "trainable_token_indices": [1, 5, 7]},
    "tied": {"r": 3, "target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
}


@pytest.mark.parametrize("form", TIED)
def test_a_tied_base(form, made, tmp_path):
    base, adapter, adapted = made(models.build("llama_tied"), TIED[form])
    live = models.compute_logits(adapted)
    merged(adapter, base, tmp_path / "out")
    loaded = read_model(tmp_path / "out")
    torch.testing.assert_close(models.compute_logits(loaded), live, rtol=1e-4, atol=1e-5)
    assert loaded.config.tie_word_embeddings is (form in ("tokens", "tied"))


@pytest.mark.parametrize(
    ("factory", "trained"),
    [("llama", "lm_head"), ("llama", "embed_tokens"), ("llama_tied", "embed_tokens")],
)
def test_resized_embeddings_are_written_once(factory, trained, tmp_path):
    """PEFT saves them without being asked, under all names of their live modules."""
    base = save_base(models.build(factory), tmp_path / "base")
    model = read_model(base)
    model.resize_token_embeddings(98, mean_resizing=False)
    adapted = adapt(model, {**PLAIN, "modules_to_save": [trained]})
    adapted.save_pretrained(tmp_path / "adapter")
    got, _ = merged(tmp_path / "adapter", base, tmp_path / "out")
    assert_close(got, adapted)
    assert read_model(tmp_path / "out").config.vocab_size == 98


@pytest.mark.parametrize("factory", ["llama", "llama_tied"])
def test_trained_tokens_alone(factory, tmp_path):
    """Check an adapter of rows of the embedding, which no LoRA matrices accompany."""
    base = save_base(models.build(factory), tmp_path / "base")
    config = peft.TrainableTokensConfig(
        task_type="CAUSAL_LM", token_indices=[7, 1, 5], target_modules=["embed_tokens"]
    )
    adapted = peft.get_peft_model(read_model(base), config)
    torch.manual_seed(4)
    with torch.no_grad():
        for value in adapted.parameters():
            if value.requires_grad:
                value.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    live = models.compute_logits(adapted)
    got, report = merged(tmp_path / "adapter", base, tmp_path / "out")
    assert report.adapter["token_rows"] == {"model.embed_tokens.weight": 3}
    want = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(value, want[name]) for name, value in got.items())
    loaded = read_model(tmp_path / "out")
    torch.testing.assert_close(models.compute_logits(loaded), live, rtol=1e-4, atol=1e-5)
    reshard.merge(tmp_path / "adapter", tmp_path / "alone", adapter="default")
    name = "adapter_model.safetensors"
    saved, written = (load_file(tmp_path / place / name) for place in ("adapter", "alone"))
    assert saved.keys() == written.keys()
    assert all(torch.equal(saved[fqn], written[fqn]) for fqn in saved)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_one_of_two_tied_weights_is_refused_or_untied(target, made, tmp_path):
    form = {"r": 3, "target_modules": ["q_proj", target]}
    base, adapter, adapted = made(models.build("llama_tied"), form)
    live = models.compute_logits(adapted)
    with pytest.raises(DifferentError, match="PEFT's own merge would change both"):
        merged(adapter, base, tmp_path / "out")
    merged(adapter, base, tmp_path / "out", tied="keep")
    loaded = read_model(tmp_path / "out")
    torch.testing.assert_close(models.compute_logits(loaded), live, rtol=1e-4, atol=1e-5)
    wrong = adapted.merge_and_unload()
    assert not torch.allclose(models.compute_logits(wrong), live, rtol=1e-4, atol=1e-5)


def test_an_untrained_adapter_is_refused(tmp_path):
    save_base(models.build("llama"), base := tmp_path / "base")
    adapted = peft.get_peft_model(models.build("llama"), peft.LoraConfig(**PLAIN))
    adapted.save_pretrained(tmp_path / "adapter")
    with pytest.raises(DifferentError, match="changes nothing"):
        merged(tmp_path / "adapter", base, tmp_path / "out")


def edit(adapter, **values):
    path = adapter / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"peft_type": "XLORA"}, "peft_type 'XLORA'"),
        ({"init_lora_weights": "pissa_niter_16"}, "changed the base model"),
        ({"init_lora_weights": "olora"}, "changed the base model"),
        ({"layer_replication": [[0, 2], [0, 2]]}, "repeated layers"),
        ({"alora_invocation_tokens": [1]}, "only after certain tokens"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"of_a_later_version": True}, "of_a_later_version"),
        ({"alpha_pattern": {"(a+)+q": 3}}, "does not run"),
    ],
)
def test_settings_that_change_the_sum_are_refused_by_name(values, text, made, tmp_path):
    base, adapter, _ = made(models.build("llama"), PLAIN)
    edit(adapter, **values)
    with pytest.raises(UnsupportedError, match=text):
        merged(adapter, base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "lost", "added", "error", "text"),
    [
        (
            {},
            "layers.1.self_attn.v_proj",
            "",
            IncompleteError,
            "no tensors of .*1.self_attn.v_proj",
        ),
        ({"modules_to_save": ["lm_head"]}, "", "", IncompleteError, "no lm_head.weight"),
        ({"layers_to_transform": [1]}, "", "", CorruptError, "layers_to_transform do not name"),
        ({"exclude_modules": ["v_proj"]}, "", "", CorruptError, "exclude_modules do not name"),
        ({}, "", "layers.0.mlp.up_proj", CorruptError, "target_modules do not name .*up_proj"),
        ({"target_modules": "all-linear"}, "", "", IncompleteError, "no tensors of .*down_proj"),
        ({"target_modules": ".*self_attn.*_proj"}, "", "", IncompleteError, "of .*k_proj"),
        ({}, "", "norm.weight", CorruptError, "modules_to_save and bias do not name model.norm"),
    ],
)
def test_an_adapter_of_other_layers_than_its_config_is_refused(
    values, lost, added, error, text, made, tmp_path
):
    base, adapter, _ = made(models.build("llama"), PLAIN)
    edit(adapter, **values)
    file, root = adapter / "adapter_model.safetensors", "base_model.model.model."
    tensors = {k: v for k, v in load_file(file).items() if not lost or lost not in k}
    if added.endswith("proj"):
        tensors |= {f"{root}{added}.lora_{side}.weight": torch.ones(3, 3) for side in "AB"}
    elif added:
        tensors[root + added] = torch.ones(3)
    if added:  # of the shapes of the base
        shapes = {k: v.shape for k, v in load_file(base / "model.safetensors").items()}
        name = f"model.{added.removesuffix('.weight')}.weight"
        for key in [key for key in tensors if added in key]:
            out, *rest = shapes[name]
            shape = {"A": (3, *rest), "B": (out, 3)}.get(key.split(".lora_")[-1][0], (out,))
            tensors[key] = torch.ones(shape)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(error, match=text):
        merged(adapter, base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_model_is_refused(made, tmp_path):
    _, adapter, _ = made(models.build("llama"), PLAIN)
    save_base(gpt2(), other := tmp_path / "other")
    with pytest.raises(UsageError, match="does not have the adapted layers"):
        merged(adapter, other, tmp_path / "out")
    with pytest.raises(UsageError, match="contains an adapter"):
        merged(adapter, adapter, tmp_path / "out")


def test_dora_of_conv1d_is_refused(made, tmp_path):
    base, adapter, _ = made(gpt2(), {**GPT2, "use_dora": True})
    with pytest.raises(UnsupportedError, match="DoRA"):
        merged(adapter, base, tmp_path / "out")


def test_a_published_base_with_one_tensor_for_each_expert(tmp_path):
    form = {"r": 2, "target_modules": ["q_proj"], "target_parameters": EXPERTS}
    model = models.draw(qwen3_moe())
    model.save_pretrained(tmp_path / "base")
    adapted = adapt(model, form)
    adapted.save_pretrained(tmp_path / "adapter")
    live = models.compute_logits(adapted)
    got, report = merged(tmp_path / "adapter", tmp_path / "base", tmp_path / "out")
    adapted.merge_and_unload().save_pretrained(tmp_path / "want")
    want = load_file(tmp_path / "want" / "model.safetensors")
    assert report.adapter["merged"] == 6
    assert got.keys() == want.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        models.compute_logits(read_model(tmp_path / "out")), live, rtol=1e-4, atol=1e-5
    )
    in_memory, _ = merged(
        tmp_path / "adapter", tmp_path / "base", tmp_path / "module", names="module"
    )
    assert in_memory["model.layers.0.mlp.experts.down_proj"].shape == (3, 24, 20)


def test_experts_as_peft_0_18_stored_them(made, tmp_path):
    """There every 3-D weight is (experts, in, out): lora_A has the columns of the second dim."""
    form = {"r": 2, "target_modules": [], "target_parameters": EXPERTS}
    base, adapter, _ = made(qwen3_moe(), form)
    file = adapter / "adapter_model.safetensors"
    root = "base_model.model.model.layers.1.mlp.experts.lora_"
    state = load_file(file)
    rank = 2 * 3
    a, b = torch.randn(rank, 24), torch.randn(20, rank)
    save_file({**state, f"{root}A.weight": a, f"{root}B.weight": b}, file)
    got, _ = merged(adapter, base, tmp_path / "out", names="module")
    name = "model.layers.1.mlp.experts.down_proj"
    before = load_file(base / "model.safetensors")[name]
    product = torch.einsum("ore,eri->eio", b.reshape(20, 2, 3), a.reshape(3, 2, 24))
    torch.testing.assert_close(got[name], before + 8 / 2 * product, rtol=1e-6, atol=1e-5)


def test_ambiguous_square_experts_are_refused(made, tmp_path):
    form = {"r": 2, "target_modules": [], "target_parameters": ["experts.down_proj"]}
    base, adapter, _ = made(qwen3_moe(moe_intermediate_size=24), form)
    with pytest.raises(UnsupportedError, match="is square"):
        merged(adapter, base, tmp_path / "out")


def test_a_bf16_base_is_rounded_once(made, tmp_path):
    base, adapter, adapted = made(models.build("llama"), PLAIN, dtype=torch.bfloat16)
    got, report = merged(adapter, base, tmp_path / "out")
    assert report.dtypes == {"bfloat16": len(got)}
    whole, _ = merged(adapter, base, tmp_path / "fp32", dtype="fp32")
    assert all(torch.equal(whole[name].to(torch.bfloat16), got[name]) for name in got)
    assert_close(whole, adapted.float())


def test_the_bits_do_not_depend_on_threads_or_windows(made, tmp_path):
    base, adapter, _ = made(models.build("llama"), FORMS["deep"])
    script = (
        "import sys, reshard; base, adapter, out, workers, memory = sys.argv[1:];"
        "reshard.merge(adapter, out, merge_lora=base, workers=int(workers),"
        " max_memory_bytes=int(memory))"
    )
    outputs = []
    for threads, workers, memory in ((1, 1, 256 << 20), (4, 3, 1 << 20), (2, 2, 256 << 10)):
        out = tmp_path / f"out{threads}"
        subprocess.run(
            [sys.executable, "-c", script, base, adapter, out, str(workers), str(memory)],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            cwd=Path(__file__).parents[2],
        )
        outputs.append((out / "model.safetensors").read_bytes())
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_flipped_bit_of_an_adapter_in_a_zip_is_found(made, tmp_path):
    """The checksums of what a computed weight is made from are compared, too."""
    base, adapter, adapted = made(models.build("llama"), PLAIN)
    file = adapter / "adapter_model.safetensors"
    torch.save(load_file(file), adapter / "adapter_model.bin")
    file.unlink()
    got, _ = merged(adapter, base, tmp_path / "out")
    assert_close(got, adapted)
    path = adapter / "adapter_model.bin"
    data = bytearray(path.read_bytes())
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    at = bytes(data).index(torch.load(path)[name].numpy().tobytes())
    data[at + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="CRC-32"):
        merged(adapter, base, tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


def test_the_codes_of_qlora_are_named_and_not_compared(made, tmp_path):
    """A run of DeepSpeed or torch.save stores the base as bitsandbytes keeps it in memory."""
    base, adapter, adapted = made(models.build("llama"), PLAIN)
    state = adapted.state_dict()
    for name in [name for name in state if name.endswith(".base_layer.weight")]:
        state[name] = torch.zeros(state[name].numel() // 2, 1, dtype=torch.uint8)
        state[f"{name}.absmax"], state[f"{name}.quant_map"] = torch.rand(4), torch.rand(16)
        state[f"{name}.quant_state.bitsandbytes__nf4"] = torch.zeros(9, dtype=torch.uint8)
    run = tmp_path / "run"
    run.mkdir()
    torch.save(state, run / "model.pt")
    (run / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    got, _ = merged(run, base, tmp_path / "got")
    want, _ = merged(adapter, base, tmp_path / "want")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    report = reshard.merge(run, tmp_path / "codes")
    assert any("part of a quantised weight" in text for text in report.warnings)
    assert report.trained_in == "float32"
    refused = "part of a quantised weight: scales would be rounded, but not the codes"
    with pytest.raises(UsageError, match=refused):
        reshard.merge(run, tmp_path / "rounded", dtype="bf16")
    with pytest.raises(UsageError, match=refused):
        reshard.split(run, tmp_path / "rounded", to="dcp", weights_only=True, dtype="bf16")
    reshard.split(run, tmp_path / "kept", to="dcp", weights_only=True)


def test_a_quantised_base_is_dequantised_first(made, tmp_path):
    """Codes of fp8 in blocks of 16 x 16, as in DeepSeek V3; the sum has unrounded values."""
    base, adapter, _ = made(models.build("llama"), PLAIN)
    state, codes = load_file(base / "model.safetensors"), {}
    for name in [name for name in state if name.endswith("_proj.weight")]:
        value = state[name]
        scales = torch.rand(-(-value.shape[0] // 16), -(-value.shape[1] // 16)) * 1e-3
        codes[name] = (value / 1e-3).to(torch.float8_e4m3fn)
        codes[f"{name}_scale_inv"] = scales
        state[name] = scale_blocks(codes[name], scales, (16, 16))
    config = json.loads((base / "config.json").read_text())
    plain = write_model(tmp_path / "plain", state, None)
    settings = {**FP8, "weight_block_size": [16, 16]}
    quantised = write_model(tmp_path / "quantised", state | codes, settings)
    for directory, more in ((plain, {}), (quantised, {"quantization_config": settings})):
        (directory / "config.json").write_text(json.dumps({**config, **more}))
    want, _ = merged(adapter, plain, tmp_path / "want", dtype="fp32")
    got, report = merged(adapter, quantised, tmp_path / "out", dtype="fp32")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in got)
    assert any("dequantised from fp8" in text for text in report.changes)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_a_release_with_an_adapter_is_quantised_again(name, tmp_path):
    """Experts in MXFP4 and in fp8: PEFT's own sum, and codes of what did not change."""
    is_mxfp4 = name == "gpt_oss"
    base = gpt_oss(tmp_path) if is_mxfp4 else fp8_model(tmp_path, name)
    how = Mxfp4Config if is_mxfp4 else FineGrainedFP8Config
    reshard.merge(base, tmp_path / "values", dtype="fp32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "values", dtype=torch.float32)
    form = {"r": 2, "target_modules": ["o_proj"], "target_parameters": EXPERTS}
    adapted = adapt(model, form)
    adapted.save_pretrained(tmp_path / "adapter")
    reshard.merge(tmp_path / "adapter", tmp_path / "out", merge_lora=base, dtype="fp32")
    want = adapted.merge_and_unload().state_dict()
    got = read_model(tmp_path / "out").state_dict()
    assert got.keys() == want.keys()
    for fqn, value in want.items():
        torch.testing.assert_close(got[fqn], value, rtol=1e-5, atol=1e-5)
    reshard.merge(tmp_path / "adapter", tmp_path / "again", merge_lora=base, quantise_like=base)
    before, after = read_tensors(base), read_tensors(tmp_path / "again")
    assert after.keys() == before.keys()
    changed = {
        fqn for fqn in before if not torch.equal(as_bytes(after[fqn]), as_bytes(before[fqn]))
    }
    assert all("o_proj" in fqn or ".experts." in fqn for fqn in changed)
    assert len({fqn for fqn in changed if fqn.endswith(("_scales", "_scale_inv"))}) >= 4
    live = AutoModelForCausalLM.from_pretrained(
        tmp_path / "again", quantization_config=how(dequantize=True)
    )
    assert live.state_dict().keys() == want.keys()


def as_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"edits": Edits(exclude=["q_proj"])}, "adds the whole adapter"),
        ({"tied": "drop"}, "would leave out merged values"),
        ({"vocab_size": 90}, "has no effect with --merge-lora"),
        ({"fill_missing_from": Path("other")}, "has no effect with --merge-lora"),
    ],
)
def test_contradicting_options_of_merge_lora_are_refused(options, text, tmp_path):
    with pytest.raises(UsageError, match=text):
        merged(tmp_path, tmp_path, tmp_path / "out", **options)


def test_ranks_share_the_work(made, tmp_path):
    base, adapter, _ = made(models.build("llama"), FORMS["deep"])
    merged(adapter, base, tmp_path / "one")
    command = [str(adapter), str(tmp_path / "two"), "--merge-lora", str(base)]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "reshard", "merge"]
    subprocess.run([sys.executable, *launch, *command], check=True)
    files = [tmp_path / place / "model.safetensors" for place in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()
