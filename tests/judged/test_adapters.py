"""LoRA adapters out of training checkpoints, against what PEFT itself saves and loads."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import LlamaForCausalLM

import reshard
from reshard.core.keys import Edits
from reshard.errors import CorruptError, IncompleteError, UnsupportedError, UsageError
from tests.judged.expected import read_expected
from tests.judges import library_models as models
from tests.judges.library_cases import SHARDED_ADAPTERS

peft = pytest.importorskip("peft")

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PLAIN = {"r": 3, "target_modules": ["q_proj", "v_proj"]}
FORMS = {  # every form that PEFT saves otherwise
    "plain": PLAIN,
    "dora": {**PLAIN, "use_dora": True},
    "head": {**PLAIN, "modules_to_save": ["lm_head"]},
    "ranks": {**PLAIN, "rank_pattern": {"layers.0.self_attn.q_proj": 5}},
    "pattern": {"r": 3, "target_modules": r".*\.(q|v)_proj", "rank_pattern": {r"\d.*q_proj": 5}},
    "bias": {**PLAIN, "bias": "lora_only"},
    "biases": {**PLAIN, "bias": "all"},
    "lora_bias": {**PLAIN, "lora_bias": True},
    "embedding": {"r": 3, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "tokens": {**PLAIN, "trainable_token_indices": [1, 5, 7]},
    "parameters": {"r": 3, "target_modules": [], "target_parameters": ["q_proj.weight"]},
    "all_linear": {"r": 3, "target_modules": "all-linear"},
}

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT and transformers warn about each other


def adapted(form=PLAIN, factory="llama"):
    """Return a model with adapters, all of whose values are random."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", **form)
    return models.draw(peft.get_peft_model(models.build(factory), config))


@pytest.fixture
def peft_adapter(tmp_path):
    """Return the directory for the adapter that PEFT itself saves."""
    return tmp_path / "want"


@pytest.fixture
def saved(tmp_path, peft_adapter):
    """Return a function that saves a model as a script does, and configurations as PEFT does."""

    def save(model, **more):
        run = tmp_path / "run"
        model.save_pretrained(peft_adapter)
        run.mkdir(exist_ok=True)
        torch.save({"model": model.state_dict(), **more}, run / "model.pt")
        for config in peft_adapter.rglob(CONFIG):
            beside = run / config.relative_to(peft_adapter)
            beside.parent.mkdir(exist_ok=True)
            shutil.copy(config, beside)
        return run / "model.pt"

    return save


def edit(path, **values):
    """Return another configuration; None takes a value out."""
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def assert_same_directory(got, peft_adapter):
    for name in (WEIGHTS, CONFIG):
        assert (got / name).read_bytes() == (peft_adapter / name).read_bytes()


@pytest.mark.parametrize(
    ("form", "factory"),
    [
        *((form, "llama_biased") for form in FORMS),
        *((form, "llama_tied") for form in ("head", "embedding", "tokens")),
    ],
)
def test_the_file_is_the_one_that_peft_saves(form, factory, saved, peft_adapter, tmp_path):
    report = reshard.merge(
        saved(adapted(FORMS[form], factory)), tmp_path / "out", adapter="default"
    )
    assert_same_directory(tmp_path / "out", peft_adapter)
    assert report.warnings == []


@pytest.mark.parametrize(("case", "source", "name", "place"), SHARDED_ADAPTERS)
def test_out_of_shards_it_is_what_peft_saves_when_all_is_gathered(
    case, source, name, place, library_case, tmp_path
):
    made = library_case(case)
    given = {"hf_dir": made / place} if case == "peft_fsdp2" else {}  # which has none beside it
    reshard.merge(made / "ckpt" / source, tmp_path / "out", adapter=name, **given)
    assert_same_directory(tmp_path / "out", made / place)


@pytest.mark.parametrize(("case", "source", "name", "place"), SHARDED_ADAPTERS[:2])
def test_a_model_with_it_says_what_the_trained_one_said(
    case, source, name, place, library_case, tmp_path
):
    made = library_case(case)
    reshard.merge(made / "ckpt" / source, tmp_path / "out", adapter=name, hf_dir=made / place)
    wanted = read_expected(made)["logits"][name]
    base = LlamaForCausalLM.from_pretrained(
        made / "base", dtype=wanted.dtype, attn_implementation="eager"
    )
    assert not torch.equal(models.compute_logits(base), wanted)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out", autocast_adapter_dtype=False)
    assert torch.equal(models.compute_logits(loaded), wanted)


def test_weights_that_another_adapter_trained_are_named(library_case, tmp_path):
    made = library_case("peft_fsdp2")  # default trained biases, and PEFT saves none with other
    report = reshard.merge(
        made / "ckpt" / "whole", tmp_path / "out", adapter="other", hf_dir=made / "saved"
    )
    (text,) = report.warnings
    assert text.startswith("2 trained weights of the base model (base_model.model.model.layers.0")
    assert (
        "q_proj.base_layer.bias) left out, because PEFT does not save them with this adapter"
        in text
    )


def test_an_empty_adapter_is_filled_from_the_shards_beside_it(library_case, tmp_path):
    made = library_case("peft_zero3")
    run = shutil.copytree(made / "ckpt" / "checkpoint-2", tmp_path / "run")
    shutil.copy(made / "ckpt" / "hollow" / WEIGHTS, run / WEIGHTS)
    report = reshard.merge(run, tmp_path / "out", adapter="default")
    assert_same_directory(tmp_path / "out", made / "saved")
    assert any(f"{WEIGHTS} contains no values (13 tensors of size 0)" in t for t in report.warnings)
    with pytest.raises(IncompleteError, match="13 of 13 weights have size 0") as caught:
        reshard.merge(run / WEIGHTS, tmp_path / "none", adapter="default")
    assert caught.value.remedy == f"merge {run / 'global_step2'}"


def test_one_of_several_adapters_is_chosen_by_name(saved, peft_adapter, tmp_path):
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"]))
    source = saved(models.draw(model))
    with pytest.raises(UsageError, match=r"--adapter mine: .* are default, other"):
        reshard.merge(source, tmp_path / "out", adapter="mine")
    for name, place in (("default", peft_adapter), ("other", peft_adapter / "other")):
        reshard.merge(source, tmp_path / name, adapter=name)
        assert_same_directory(tmp_path / name, place)


@pytest.mark.parametrize("wrapper", ["module.", "lightning.model.", "_orig_mod."])
def test_prefixes_of_wrappers_are_removed(wrapper, saved, peft_adapter, tmp_path):
    source = saved(adapted())
    state = torch.load(source)["model"]
    torch.save({f"{wrapper}{name}": value for name, value in state.items()}, source)
    reshard.merge(source, tmp_path / "out", adapter="default")
    assert_same_directory(tmp_path / "out", peft_adapter)


def test_adapters_that_transformers_added_itself(tmp_path):
    model = models.build("llama")
    model.add_adapter(peft.LoraConfig(**PLAIN))
    models.draw(model).save_pretrained(tmp_path / "want")
    (tmp_path / "run").mkdir()
    torch.save(model.state_dict(), tmp_path / "run" / "model.pt")
    shutil.copy(tmp_path / "want" / CONFIG, tmp_path / "run")
    reshard.merge(tmp_path / "run" / "model.pt", tmp_path / "out", adapter="default")
    assert_same_directory(tmp_path / "out", tmp_path / "want")


def test_pefts_own_file_is_read_under_any_name(peft_adapter, tmp_path):
    adapted({**PLAIN, "modules_to_save": ["lm_head"]}).save_pretrained(peft_adapter)
    reshard.merge(peft_adapter, tmp_path / "out", adapter="mine")
    assert_same_directory(tmp_path / "out", peft_adapter)


def test_a_missing_configuration_is_an_error_that_states_its_content(saved, tmp_path):
    source = saved(adapted(FORMS["ranks"]))
    (source.parent / CONFIG).unlink()
    with pytest.raises(IncompleteError) as caught:
        reshard.merge(source, tmp_path / "out", adapter="default")
    assert "tensors do not reveal lora_alpha" in caught.value.problem
    text = caught.value.remedy.partition(f"{CONFIG} by hand: ")[2].partition(" (use_rslora")[0]
    by_hand = json.loads(text.replace("...", "16"))
    (tmp_path / "hand").mkdir()
    (tmp_path / "hand" / CONFIG).write_text(json.dumps(by_hand))
    reshard.merge(source, tmp_path / "out", adapter="default", hf_dir=tmp_path / "hand")
    assert peft.PeftConfig.from_pretrained(tmp_path / "out").lora_alpha == 16


WRONG = {
    "rank": ({"r": 4}, CorruptError, "r is 4, but base_model.model.model.layers.0"),
    "target": ({"target_modules": ["q_proj"]}, CorruptError, "target_modules do not name"),
    "dora": ({"use_dora": True}, CorruptError, "use_dora is True, but its tensors are missing"),
    "unsaved": ({"modules_to_save": ["norm"]}, CorruptError, "which has no trained copy"),
    "lost": ({"modules_to_save": []}, CorruptError, "modules_to_save do not name .*lm_head"),
    "alpha": ({"lora_alpha": 0}, CorruptError, "has lora_alpha 0, which disables every adapter"),
    "no_alpha": ({"lora_alpha": None}, CorruptError, "has no 'lora_alpha', and the tensors"),
    "text": ({"r": "3"}, CorruptError, "r is '3', expected a number of at least 0"),
    "kind": ({"peft_type": "IA3"}, UnsupportedError, "has peft_type 'IA3'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_the_configuration_of_another_adapter_is_refused(wrong, saved, tmp_path):
    values, error, text = WRONG[wrong]
    source = saved(adapted(FORMS["head"]))
    edit(source.parent / CONFIG, **values)
    with pytest.raises(error, match=text):
        reshard.merge(source, tmp_path / "out", adapter="default")
    assert not (tmp_path / "out").exists()


def test_a_layer_without_one_of_its_matrices_is_refused(saved, tmp_path):
    source = saved(adapted())
    with pytest.raises(IncompleteError, match=r"1 adapted layer \(.*1.self_attn.q_proj\) with"):
        reshard.merge(
            source,
            tmp_path / "out",
            adapter="default",
            edits=Edits(exclude=[r"1\.self_attn\.q_proj\.lora_B"]),
        )


def test_unknown_tensors_of_a_lora_layer_are_refused(tmp_path):
    config = peft.AdaLoraConfig(**{**PLAIN, "r": 8}, total_step=10, task_type="CAUSAL_LM")
    model = peft.get_peft_model(models.build("llama"), config)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with pytest.raises(
        UnsupportedError, match=r"lora_E.default.*: not known parts of a LoRA adapter"
    ):
        reshard.merge(tmp_path / "model.pt", tmp_path / "out", adapter="default")


def test_a_file_beside_the_checkpoint_that_cannot_be_read_is_named(saved, peft_adapter, tmp_path):
    source = saved(adapted())
    (source.parent / "adapter_model.bin").write_bytes(b"not a pickle")
    (text,) = reshard.merge(source, tmp_path / "out", adapter="default").warnings
    assert text.startswith(f"{source.parent / 'adapter_model.bin'} was not read: ")
    assert_same_directory(tmp_path / "out", peft_adapter)


def test_adapters_that_were_not_trained_are_named(saved, tmp_path):
    model = adapted()
    layers = model.base_model.model.model.layers
    torch.nn.init.zeros_(layers[0].self_attn.q_proj.lora_B["default"].weight)
    (text,) = reshard.merge(saved(model), tmp_path / "out", adapter="default").warnings
    assert text.startswith("1 of 4 lora_B are all zero (base_model.model.model.layers.0")
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.zeros_(value)
    (text,) = reshard.merge(saved(model), tmp_path / "all", adapter="default").warnings
    assert text.endswith("the adapter has no effect")


def test_trained_weights_of_the_base_model_are_named(saved, tmp_path):
    model = adapted()
    norm = model.base_model.model.model.norm.weight.requires_grad_()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values())
    for value in trained.values():
        value.grad = torch.ones_like(value)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"] = dict(zip(trained, state["state"].values(), strict=True))
    state["param_groups"][0]["params"] = list(trained)
    report = reshard.merge(
        saved(model, optimizer=state), tmp_path / "out", adapter="default", key="model"
    )
    assert norm.requires_grad
    assert any(
        text.startswith("1 trained weight of the base model (base_model.model.model.norm.weight)")
        for text in report.warnings
    )


def test_a_merge_of_all_weights_says_how_to_have_the_adapter(saved, tmp_path):
    (text,) = reshard.merge(saved(adapted()), tmp_path / "out.safetensors").warnings
    assert "Pass --adapter default to write one adapter for PeftModel.from_pretrained" in text


def test_a_source_without_adapter_or_a_file_as_output_is_refused(saved, tmp_path):
    source = saved(adapted())
    with pytest.raises(
        UsageError, match="the name has the suffix of a file, but --adapter writes a directory"
    ):
        reshard.merge(source, tmp_path / "out.safetensors", adapter="default")
    for option, value in (("tied", "keep"), ("fill_missing_from", source), ("family", "llama")):
        words = f"--{option.replace('_', '-')}: has no effect with --adapter"
        with pytest.raises(UsageError, match=words):
            reshard.merge(source, tmp_path / "out", adapter="default", **{option: value})
    with pytest.raises(UsageError, match=f"has no {CONFIG}"):
        reshard.merge(source, tmp_path / "out", adapter="default", hf_dir=tmp_path)
    torch.save(models.build("llama").state_dict(), tmp_path / "plain.pt")
    with pytest.raises(UsageError, match="contains no LoRA adapter"):
        reshard.merge(tmp_path / "plain.pt", tmp_path / "out", adapter="default")
