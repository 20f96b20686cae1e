"""LoRA adapters out of training checkpoints, against what PEFT itself saves and loads."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import reshard
from reshard.core.keys import Edits
from reshard.errors import CorruptError, IncompleteError, UnsupportedError, UsageError
from tests.judged.expected import read_expected
from tests.judges import library_models as models
from tests.judges.library_cases import SHARDED_ADAPTERS, SHARDED_METHODS

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


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_is_checked_against_its_base(form, tmp_path):
    """It lacks the weights of its base, which are in another place."""
    adapted(FORMS[form]).save_pretrained(tmp_path)
    base, small = (f"tests.judges.library_models:{name}" for name in ("llama", "llama_small"))
    (check,) = [c for c in reshard.verify(tmp_path, model=base).checks if c.name == "model"]
    assert (check.status, check.failures) == ("passed", [])
    (check,) = [c for c in reshard.verify(tmp_path, model=small).checks if c.name == "model"]
    assert check.failures


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


@pytest.mark.parametrize("name", ["default", "polite"])
def test_the_configuration_stays_with_a_split(name, saved, peft_adapter, tmp_path):
    """A split for other ranks has it where PEFT stores it, and the tokenizer beside it."""
    model = adapted()
    model.add_adapter("polite", model.peft_config["default"])
    source = saved(models.draw(model)).parent
    (source / "tokenizer.json").write_text("{}")
    reshard.split(source, tmp_path / "ranks", to="dcp", world_size=2, weights_only=True)
    assert (tmp_path / "ranks" / "tokenizer.json").read_text() == "{}"
    reshard.merge(tmp_path / "ranks", tmp_path / "out", adapter=name)
    want = peft_adapter / name if name == "polite" else peft_adapter
    assert_same_directory(tmp_path / "out", want)


LAYERS = {"target_modules": ["q_proj", "o_proj"]}
METHODS = {  # of PEFT beside LoRA, in all forms of their tensors
    "boft": ("BOFT", {"boft_block_size": 4, "bias": "boft_only"}),
    "c3a": ("C3A", {"block_size": 4}),
    "fourierft": ("FOURIERFT", {"n_frequency": 10}),
    "hra": ("HRA", {"r": 4}),
    "ia3": ("IA3", {"feedforward_modules": ["o_proj"], "modules_to_save": ["lm_head"]}),
    "loha": ("LOHA", {"r": 4, "rank_pattern": {"layers.0.self_attn.q_proj": 2}}),
    "lokr": ("LOKR", {"r": 2, "decompose_both": True}),
    "lokr_whole": ("LOKR", {"r": 16}),
    "miss": ("MISS", {"r": 4}),
    "oft": ("OFT", {"r": 0, "oft_block_size": 4}),
    "prefix": ("PREFIX_TUNING", None),
    "prompt": ("PROMPT_TUNING", None),
    "road": ("ROAD", {"group_size": 4}),
    "vera": ("VERA", {"r": 4}),
    "vera_alone": ("VERA", {"r": 4, "save_projection": False}),
}


def of_method(name, factory="llama_biased"):
    """Return a model with an adapter of a method, with random values of both."""
    method, values = METHODS[name]
    values = {"num_virtual_tokens": 5} if values is None else {**LAYERS, **values}
    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[method](task_type="CAUSAL_LM", **values)
    model = peft.get_peft_model(models.draw(models.build(factory)), config)
    for value in model.parameters():
        if value.requires_grad:
            torch.nn.init.normal_(value, std=0.1)
    return model


@pytest.mark.parametrize("name", METHODS)
def test_adapters_of_other_methods_are_those_that_peft_saves(name, saved, peft_adapter, tmp_path):
    model = of_method(name)
    report = reshard.merge(saved(model), tmp_path / "out", adapter="default")
    assert_same_directory(tmp_path / "out", peft_adapter)
    assert report.warnings == []
    base = models.draw(models.build("llama_biased"))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out", autocast_adapter_dtype=False)
    assert torch.equal(models.compute_logits(loaded), models.compute_logits(model))
    reshard.merge(tmp_path / "out", tmp_path / "again", adapter="default")  # from PEFT's own file
    assert_same_directory(tmp_path / "again", peft_adapter)


@pytest.mark.parametrize(("case", "source", "name", "place"), SHARDED_ADAPTERS + SHARDED_METHODS)
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
    with pytest.raises(UsageError, match=r"--adapter mine: .* has 2 adapters: default, other"):
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


def test_adapters_that_transformers_added_itself(tmp_path, monkeypatch):
    # transformers 5.24 asks for PEFT 0.22, which was not released with it.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.18.0")
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
    "unsaved": (
        {"modules_to_save": ["norm", "lm_head"]},
        IncompleteError,
        "modules_to_save name norm",
    ),
    "lost": ({"modules_to_save": []}, CorruptError, "modules_to_save do not name .*lm_head"),
    "alpha": ({"lora_alpha": 0}, CorruptError, "has lora_alpha 0, which disables every adapter"),
    "no_alpha": ({"lora_alpha": None}, CorruptError, "has no 'lora_alpha', and the tensors"),
    "text": ({"r": "3"}, CorruptError, "r is '3', expected a number of at least 0"),
    "method": ({"peft_type": "IA3"}, CorruptError, "'IA3', but the tensors are those of LORA"),
    "kind": ({"peft_type": "XLORA"}, UnsupportedError, "has peft_type 'XLORA'"),
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


UNKNOWN = {
    "adalora": (
        peft.AdaLoraConfig(**{**PLAIN, "r": 8}, total_step=10, task_type="CAUSAL_LM"),
        "is that of AdaLoRA, whose file has only the ranks that PEFT chose",
    ),
    "projected": (
        peft.PrefixTuningConfig(
            num_virtual_tokens=5, prefix_projection=True, task_type="CAUSAL_LM"
        ),
        r"prompt_encoder.default.transform.0.weight.*: not known parts of a PEFT adapter",
    ),
    "vblora": (
        peft.VBLoRAConfig(
            r=2, num_vectors=10, vector_length=4, target_modules=["q_proj"], task_type="CAUSAL_LM"
        ),
        "has peft_type 'VBLORA'; --adapter supports LORA",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_the_advice_about_an_unknown_adapter_leads_to_what_peft_saves(
    name, saved, peft_adapter, tmp_path
):
    config, text = UNKNOWN[name]
    model = models.draw(peft.get_peft_model(models.build("llama"), config))
    source = saved(model)
    with pytest.raises(UnsupportedError, match=text) as caught:
        reshard.merge(source, tmp_path / "out", adapter="default")
    assert "reshard merge SOURCE all.safetensors" in caught.value.remedy
    reshard.merge(source, tmp_path / "all.safetensors")
    fresh = peft.get_peft_model(models.build("llama"), config)
    fresh.load_state_dict(load_file(tmp_path / "all.safetensors"), strict=False)
    fresh.save_pretrained(tmp_path / "out")
    assert_same_directory(tmp_path / "out", peft_adapter)


@pytest.mark.parametrize("name", ["loha", "vera"])
def test_an_adapted_layer_with_some_of_its_tensors_is_refused(name, saved, tmp_path):
    lost = {"loha": r"1\.self_attn\.q_proj\.hada_w2_b", "vera": r"0\.self.*o_proj\.vera_lambda_d"}
    with pytest.raises(IncompleteError, match=r"1 adapted layer .* without (hada_w1_a|vera_lamb)"):
        reshard.merge(
            saved(of_method(name)),
            tmp_path / "out",
            adapter="default",
            edits=Edits(exclude=[lost[name]]),
        )


def test_only_lora_is_added_to_a_base(saved, tmp_path):
    models.build("llama_biased").save_pretrained(tmp_path / "base")
    with pytest.raises(UnsupportedError, match="'IA3', but --merge-lora supports only LORA"):
        reshard.merge(saved(of_method("ia3")), tmp_path / "out", merge_lora=tmp_path / "base")


@pytest.mark.parametrize("name", ["ia3", "loha", "oft", "prefix", "road", "vera"])
def test_the_base_names_a_numbered_optimizer_of_any_adapter(name, tmp_path):
    model = of_method(name, "llama")
    trained = {fqn: value for fqn, value in model.named_parameters() if value.requires_grad}
    optimizer = torch.optim.AdamW(trained.values())
    for value in trained.values():
        value.grad = torch.randn_like(value)
    optimizer.step()
    model.save_pretrained(tmp_path / "run")
    torch.save(optimizer.state_dict(), tmp_path / "run" / "optimizer.pt")
    models.build("llama").save_pretrained(tmp_path / "base")
    with reshard.open(tmp_path / "run", model=tmp_path / "base") as found:
        slots = found.optimizer("exp_avg")
        assert set(slots) == set(trained)
        for fqn, value in trained.items():
            assert torch.equal(torch.as_tensor(slots[fqn][...]), optimizer.state[value]["exp_avg"])


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
    assert "Pass --merge-lora BASE to add an adapter to its base model" in text
    assert "--adapter default to write one for PeftModel.from_pretrained" in text


def test_a_base_that_is_frozen_beside_its_adapter_stays_with_it(saved, peft_adapter, tmp_path):
    """Verl's ranks have the base and the adapter, and ``lora_adapter`` a copy of the adapter.

    FSDP and torch.optim list the trained parameters alone, so that nothing calls others frozen.
    """
    model = adapted()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values())
    for value in trained.values():
        value.grad = torch.ones_like(value)
    optimizer.step()
    run = saved(model, optimizer=optimizer.state_dict()).parent
    (run / CONFIG).unlink()
    shutil.copytree(peft_adapter, run / "lora_adapter")
    report = reshard.merge(run, tmp_path / "out", adapter="default")
    assert_same_directory(tmp_path / "out", peft_adapter)
    assert any("lora_adapter is assumed to be a copy" in text for text in report.warnings)
    model.base_model.model.config.save_pretrained(run)
    report = reshard.merge(run, tmp_path / "whole")
    assert report.load_line.startswith("reshard.open")  # transformers knows none of PEFT's names
    for stage in (2, 3):
        out = tmp_path / f"stage{stage}"
        report = reshard.split(run, out, to="deepspeed", zero_stage=stage, world_size=2)
        assert not any("frozen parameters are not in the source" in note for note in report.notes)
        with reshard.open(out) as checkpoint:
            assert all(
                torch.equal(torch.as_tensor(checkpoint[name][...]), value)
                for name, value in model.state_dict().items()
            )


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
    with pytest.raises(UsageError, match="contains no PEFT adapter"):
        reshard.merge(tmp_path / "plain.pt", tmp_path / "out", adapter="default")
