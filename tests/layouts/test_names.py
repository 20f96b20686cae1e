"""Names of the other side: tensors of real Hugging Face models, judged by a GPT after Megatron."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from reshard import formats
from reshard.core.manifest import ParamGroup, TrainState, check
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from reshard.layouts.model_parallel import families, fields, fused_tensors, moves
from reshard.layouts.model_parallel.architecture import Architecture
from reshard.layouts.model_parallel.fields import parse_field
from reshard.layouts.model_parallel.names import rename_from_hf, rename_to_hf
from reshard.layouts.model_parallel.rules import add_user_rules
from reshard.layouts.model_parallel.spellings import Spellings
from reshard.layouts.model_parallel.traits import Traits
from reshard.tensors.lazy import Checkpoint
from tests.judges.megatron_gpt import Gpt
from tests.layouts.test_model_parallel import built, stored

SIZES = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GQA = {**SIZES, "num_key_value_heads": 2}
ROPE = {"rope_theta": 500.0, "rope_type": "default"}
GATED = Gpt(4, 2, theta=500.0, eps=1e-6)
PLAIN = {"rms": False, "gated": False}
SPARSE = {**GQA, "num_experts": 4, "moe_intermediate_size": 24}
BIASED = {**GQA, "rope_parameters": ROPE, "attention_bias": True, "mlp_bias": True}
SHARED = {**SPARSE, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 28}
OLD = {"vocab_size": 53, "n_layer": 2, "n_head": 4}
SHORT = {**OLD, "n_embd": 32, "n_positions": 32, "n_inner": 40}
# -> its config, and what Megatron would be told of it. The proofs of families in tests/judged, and
# the merges of real Megatron-LM, have mistral, qwen2, qwen3, qwen3_moe, and other forms of llama.
MODELS = {
    "llama": (transformers.LlamaConfig(**GQA, rope_parameters=ROPE), GATED),
    "llama_mqa": (transformers.LlamaConfig(**SIZES, num_key_value_heads=1), Gpt(4, 1, eps=1e-6)),
    "llama_biased": (transformers.LlamaConfig(**BIASED), GATED),
    "qwen2": (transformers.Qwen2Config(**GQA, rope_parameters=ROPE), GATED),
    "mixtral": (
        transformers.MixtralConfig(**GQA, num_local_experts=3, rms_norm_eps=1e-6),
        Gpt(4, 2, theta=1e6, eps=1e-6, top_k=2),
    ),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig(**SHARED),
        Gpt(4, 2, eps=1e-6, top_k=3, pre_softmax=True),
    ),
    "gpt2": (
        transformers.GPT2Config(**SHORT),
        Gpt(4, 4, tanh=True, positions="learned", **PLAIN),
    ),
    "gpt_bigcode": (
        transformers.GPTBigCodeConfig(**SHORT),
        Gpt(4, 1, tanh=True, positions="learned", **PLAIN),
    ),
    "gpt_neox": (
        transformers.GPTNeoXConfig(**SIZES),
        Gpt(4, 4, rotary=0.25, parallel=True, **PLAIN),
    ),
    "bloom": (
        transformers.BloomConfig(**OLD, hidden_size=32),
        Gpt(4, 4, tanh=True, positions="alibi", **PLAIN),
    ),
}
TOKENS = torch.tensor([[1, 5, 9, 52, 7, 0, 11], [3, 3, 2, 1, 50, 51, 30]])


def numbers_of(config):
    """Return the config values that rules need, with every default filled in."""
    _family, traits = families.read_config(config, "config.json")
    return traits.make_architecture()


def made(config):
    """Return a model with random values in every parameter, norms and biases too."""
    torch.manual_seed(sum(map(ord, config.model_type)))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name or ".ln_" in name else 0.0, 0.2)
    return model.eval()


def read(directory):
    config = json.loads((directory / "config.json").read_text())
    return formats.read(directory), numbers_of(config), config


def tensors(manifest):
    """Return every tensor of a manifest, proved and read."""
    check(manifest)
    with Checkpoint(manifest) as held:
        return {name: held[name][...].clone() for name in held}


def table(config):
    return families.get_families(config["model_type"])[0].table


@pytest.mark.parametrize("name", MODELS)
def test_a_hugging_face_model_is_megatron_s_under_its_names(name, tmp_path):
    config, judge = MODELS[name]
    model = made(config)
    model.save_pretrained(tmp_path / "hf")
    manifest, numbers, saved = read(tmp_path / "hf")
    fused = rename_from_hf(manifest, table(saved), numbers).manifest
    with torch.no_grad():
        wanted, found = model(TOKENS).logits, judge.logits(tensors(fused), TOKENS)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

    back = rename_to_hf(fused, table(saved), numbers).manifest
    once, again = tensors(manifest), tensors(back)
    assert once.keys() == again.keys()
    assert all(torch.equal(once[key], again[key]) for key in once)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_neox", "llama", "gpt2"])
def test_names_in_memory_are_read_as_those_on_disk(name, tmp_path):
    """In memory, transformers 5 has all experts of a layer in one tensor, as training runs do."""
    model = made(MODELS[name][0])
    model.save_pretrained(tmp_path / "hf")
    manifest, numbers, saved = read(tmp_path / "hf")
    save_file({k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "m.safetensors")
    memory = rename_from_hf(
        formats.read(tmp_path / "m.safetensors"), table(saved), numbers
    ).manifest
    disk = tensors(rename_from_hf(manifest, table(saved), numbers).manifest)
    held = tensors(memory)
    if "output_layer.weight" not in disk:
        held.pop("output_layer.weight")  # a state dict has both names of a tied weight
    assert held.keys() == disk.keys()
    assert all(torch.equal(held[key], disk[key]) for key in disk)


def test_files_of_a_base_model_lack_its_prefix(tmp_path):
    model = made(MODELS["gpt2"][0])
    model.transformer.save_pretrained(tmp_path / "hf")
    manifest, numbers, saved = read(tmp_path / "hf")
    assert "h.0.attn.c_attn.weight" in {entry.fqn for entry in manifest.entries.values()}
    fused = tensors(rename_from_hf(manifest, table(saved), numbers).manifest)
    assert fused["decoder.layers.0.self_attention.linear_qkv.weight"].shape == (96, 32)


# Geometry, judged by torch's own reshapes


def fused_qkv(q, k, v, heads, groups):
    """Return Megatron's order: for every group its queries, its key, its value."""
    size = k.shape[0] // groups
    per = heads // groups
    rows = []
    for group in range(groups):
        rows.append(q[group * per * size : (group + 1) * per * size])
        rows.append(k[group * size : (group + 1) * size])
        rows.append(v[group * size : (group + 1) * size])
    return torch.cat(rows)


@given(
    groups=st.integers(1, 3),
    per=st.integers(1, 3),
    size=st.integers(1, 3),
    tail=st.sampled_from([(), (2,), (3, 2)]),
    stacked=st.booleans(),
)
def test_query_key_and_value_are_fused_by_groups_of_heads(groups, per, size, tail, stacked):
    heads = groups * per
    model = Architecture(source="test", heads=heads, groups=groups, head_dim=size)
    q, k, v = (torch.rand(n * size, *tail) for n in (heads, groups, groups))
    wanted = fused_qkv(q, k, v, heads, groups)
    parts, name = ([torch.cat([q, k, v])], "qkv_stacked") if stacked else ([q, k, v], "qkv")
    assert_both_ways(name, parts, wanted, model)


@given(heads=st.integers(1, 3), half=st.integers(1, 3), tail=st.sampled_from([(), (2,)]))
def test_rows_of_the_rotation_in_pairs_are_those_in_halves(heads, half, tail):
    """As transformers' conversion script of Llama permutes them."""
    rows = torch.rand(heads * half * 2, *tail)
    hf = rows.view(heads, half, 2, *tail).transpose(1, 2).reshape(rows.shape)
    model = Architecture(source="test", head_dim=half * 2)
    assert_both_ways("rope", [hf], rows, model)


@given(half=st.integers(1, 4))
def test_gate_and_up_stand_one_above_the_other(half):
    gate, up = torch.rand(half, 3), torch.rand(half, 3)
    assert_both_ways("gate_up", [gate, up], torch.cat([gate, up]), Architecture(source="test"))


def assert_both_ways(name, parts, fused, model):
    cut = list(fused_tensors.make_form(name, fused.shape[0], model).cut(tuple(fused.shape)))
    assert len(cut) == len(parts)
    for part, (shape, taken) in zip(parts, cut, strict=True):
        entry = replace(
            stored(fused), shape=shape, chunks=tuple(moves.apply_moves(stored(fused).chunks, taken))
        )
        assert torch.equal(built(entry, {"f": fused.flatten()}), part)
    form = fused_tensors.make_form_of_parts(name, [part.shape[0] for part in parts], model)
    held = [stored(part, str(n)) for n, part in enumerate(parts)]
    chunks = [
        chunk
        for entry, taken in zip(held, form.fuse(tuple(fused.shape[1:])), strict=True)
        for chunk in moves.apply_moves(entry.chunks, taken)
    ]
    entry = replace(stored(fused), chunks=tuple(chunks))
    assert torch.equal(built(entry, {str(n): p.flatten() for n, p in enumerate(parts)}), fused)


def test_a_model_that_cannot_have_a_fused_tensor_is_told_so():
    with pytest.raises(
        UsageError, match=r"4 heads and 2 key-value heads of 8 rows, but the fused .* have 48"
    ):
        fused_tensors.make_form("qkv", 48, Architecture(source="c", heads=4, groups=2, head_dim=8))
    with pytest.raises(UsageError, match="number of heads"):
        fused_tensors.make_form("qkv", 48, Architecture(source="c"))


# What a manifest says besides


def trained(tmp_path, name="qwen2"):
    """Return a manifest with an Adam for a real model; its moments are more weights of the file."""
    model = made(MODELS[name][0])
    state = dict(model.named_parameters())
    held = {k: v.detach().clone() for k, v in state.items()}
    moments = {
        f"{slot}:{k}": torch.rand_like(v)
        for k, v in held.items()
        for slot in ("exp_avg", "exp_avg_sq")
    }
    save_file({**held, **moments}, tmp_path / "state.safetensors")
    manifest = formats.read(tmp_path / "state.safetensors")
    entries = []
    for entry in manifest.entries.values():
        kind, _, fqn = entry.fqn.rpartition(":")
        entries.append(replace(entry, kind=kind or "param", fqn=fqn))
    entries.sort(key=lambda entry: list(held).index(entry.fqn))
    decayed = tuple(k for k, v in held.items() if v.dim() > 1)
    groups = (
        ParamGroup({"weight_decay": 0.1}, decayed),
        ParamGroup({"weight_decay": 0.0}, tuple(k for k in held if k not in decayed)),
    )
    train = TrainState(step=7, optimizer_step=dict.fromkeys(held, 7.0), param_groups=groups)
    manifest = replace(
        manifest.with_entries(entries),
        train=train,
        frozen=frozenset(),
        trained_dtypes=dict.fromkeys(held, entries[0].dtype),
    )
    return manifest, numbers_of(model.config.to_dict()), table(model.config.to_dict())


def slots(manifest, kind):
    check(manifest)
    with Checkpoint(manifest) as held:
        return {k: t[...].clone() for k, t in held.optimizer(kind).items()}


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "llama_mqa"])
def test_the_optimizer_goes_there_and_back(name, tmp_path):
    manifest, numbers, rules = trained(tmp_path, name)
    fused = rename_from_hf(manifest, rules, numbers).manifest
    back = rename_to_hf(fused, rules, numbers).manifest
    for kind in ("exp_avg", "exp_avg_sq"):
        once, again = slots(manifest, kind), slots(back, kind)
        assert once.keys() == again.keys()
        assert all(torch.equal(once[key], again[key]) for key in once)
    assert back.train == manifest.train
    assert back.trained_dtypes == manifest.trained_dtypes
    assert not back.ordered


def test_moments_are_fused_as_their_weight_is(tmp_path):
    manifest, numbers, rules = trained(tmp_path)
    fused = rename_from_hf(manifest, rules, numbers).manifest
    moments = slots(manifest, "exp_avg")
    q, k, v = (moments[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv")
    found = slots(fused, "exp_avg")["decoder.layers.1.self_attention.linear_qkv.weight"]
    assert torch.equal(found, fused_qkv(q, k, v, 4, 2))
    weights, biases = fused.train.param_groups
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in weights.fqns
    assert "decoder.layers.0.self_attention.linear_qkv.bias" in biases.fqns
    assert len(weights.fqns) == len(set(weights.fqns))
    assert fused.train.optimizer_step["decoder.layers.0.mlp.linear_fc1.weight"] == 7


def test_parts_that_differ_in_what_is_one_for_the_whole_are_refused(tmp_path):
    manifest, numbers, rules = trained(tmp_path)
    key = "model.layers.0.self_attn.k_proj.weight"
    first, second = manifest.train.param_groups
    apart = (
        replace(first, fqns=tuple(f for f in first.fqns if f != key)),
        replace(second, fqns=(*second.fqns, key)),
    )
    grouped = replace(manifest, train=replace(manifest.train, param_groups=apart))
    with pytest.raises(UsageError, match=r"linear_qkv.*q_proj.*k_proj.*param group: 0 and 1"):
        rename_from_hf(grouped, rules, numbers)
    steps = {**manifest.train.optimizer_step, key: 6.0}
    stepped = replace(manifest, train=replace(manifest.train, optimizer_step=steps))
    with pytest.raises(UsageError, match=r"differ in their step: 7.0 and 6.0"):
        rename_from_hf(stepped, rules, numbers)
    with pytest.raises(UsageError, match="differ in their frozen"):
        rename_from_hf(replace(manifest, frozen=frozenset([key])), rules, numbers)


def test_a_missing_part_is_named(tmp_path):
    manifest, numbers, rules = trained(tmp_path)
    rest = [e for e in manifest.entries.values() if "layers.0.mlp.up_proj" not in e.fqn]
    with pytest.raises(IncompleteError, match=r"gate_proj.weight'.* not of .*up_proj.weight'"):
        rename_from_hf(manifest.with_entries(rest), rules, numbers)


def test_state_of_another_shape_is_carried_where_the_parameter_stays_whole(tmp_path):
    manifest, numbers, rules = trained(tmp_path)

    def flattened(fqn):
        entry = manifest.entries["exp_avg", fqn]
        row = replace(stored(torch.zeros(1)), fqn=fqn, kind="exp_avg")
        held = {**manifest.entries, entry.key: replace(row, chunks=entry.chunks[:0])}
        return replace(manifest, entries=held)

    kept = rename_from_hf(
        flattened("model.layers.0.self_attn.o_proj.weight"), rules, numbers
    ).manifest
    assert kept.entries["exp_avg", "decoder.layers.0.self_attention.linear_proj.weight"].shape == (
        1,
    )
    with pytest.raises(UnsupportedError, match="so how the state is cut"):
        rename_from_hf(flattened("model.layers.0.self_attn.q_proj.weight"), rules, numbers)


def padded(tmp_path, rows):
    """Return a tied Megatron-like state whose vocabulary has padding rows."""
    model = made(MODELS["gpt2"][0])
    model.save_pretrained(tmp_path / "hf")
    manifest, numbers, saved = read(tmp_path / "hf")
    fused = tensors(rename_from_hf(manifest, table(saved), numbers).manifest)
    name = "embedding.word_embeddings.weight"
    fused[name] = torch.cat([fused[name], torch.full((rows, 32), 9.0)])
    fused["decoder.layers.0.self_attention._extra_state"] = torch.zeros(1)
    save_file(fused, tmp_path / "megatron.safetensors")
    held = formats.read(tmp_path / "megatron.safetensors")
    return replace(held, tied={"output_layer.weight": name}), numbers, table(saved), manifest


def test_padding_of_the_vocabulary_is_taken_off_and_said(tmp_path):
    held, numbers, rules, wanted = padded(tmp_path, 11)
    named = rename_to_hf(held, rules, numbers)
    assert "removed padding rows 53 to 63 of the vocabulary" in named.notes
    assert any("_extra_state" in note for note in named.notes)
    assert named.manifest.tied == {"lm_head.weight": "transformer.wte.weight"}
    once = tensors(wanted)
    assert all(torch.equal(tensors(named.manifest)[key], once[key]) for key in once)

    kept = rename_to_hf(held, rules, numbers, keep_padding=True)
    assert kept.manifest.entries["param", "transformer.wte.weight"].shape == (64, 32)
    unknown = rename_to_hf(held, rules, replace(numbers, vocab=None))
    assert unknown.manifest.entries["param", "transformer.wte.weight"].shape == (64, 32)
    assert any("--vocab-size" in note for note in unknown.notes)
    with pytest.raises(UsageError, match=r"vocabulary of 65, but .* has 64 rows"):
        rename_to_hf(held, rules, replace(numbers, vocab=65))


# Tables


def test_unknown_names_are_told_with_the_nearest_ones(tmp_path):
    manifest, numbers, rules = trained(tmp_path)
    odd = [replace(e, fqn=e.fqn.replace("q_proj", "query_proj")) for e in manifest.of_kind("param")]
    with pytest.raises(UsageError, match=r"query_proj.weight'.*nearest are .*self_attn\.\w_proj"):
        rename_from_hf(manifest.with_entries(odd), rules, numbers)
    with pytest.raises(UsageError, match=r"--rules FILE"):
        rename_to_hf(manifest, rules, numbers)


def test_a_user_s_line_counts_before_the_family_s(tmp_path):
    manifest, numbers, rules = trained(tmp_path)
    odd = [replace(e, fqn=e.fqn.replace("o_proj", "out")) for e in manifest.of_kind("param")]
    file = tmp_path / "my.yaml"
    file.write_text(
        "hf:\n  'decoder.layers.{i}.self_attention.linear_proj.{p}':"
        " 'model.layers.{i}.self_attn.out.{p}'\n"
    )
    rules = add_user_rules(rules, file)
    manifest = replace(manifest.with_entries(odd), train=TrainState(), trained_dtypes={})
    fused = rename_from_hf(manifest, rules, numbers).manifest
    assert ("param", "decoder.layers.1.self_attention.linear_proj.weight") in fused.entries
    assert ("param", "model.layers.1.self_attn.out.weight") in rename_to_hf(
        fused, rules, numbers
    ).manifest.entries


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("'a.{i}': 'b'", "'b' does not contain the fields"),
        ("'a.{i}': {form: sideways, names: ['b.{i}']}", "form 'sideways' does not exist"),
        ("'a.{i}': {form: qkv, names: ['b.{i}']}", "form qkv takes 3 names, but 1 are stated"),
        ("'a.{i}': {names: ['b.{i}'], turned: true}", "'turned' is not a known key"),
        ("'a.{i}': 3", "no list of names"),
    ],
)
def test_a_line_that_does_not_work_in_both_directions_is_refused(line, problem, tmp_path):
    manifest, numbers, rules = trained(tmp_path)
    file = tmp_path / "my.yaml"
    file.write_text(f"hf: {{{line}}}")
    with pytest.raises(UsageError, match=problem):
        rename_from_hf(manifest, add_user_rules(rules, file), numbers)


def test_every_table_s_lines_say_what_they_need():
    known_forms = {"", *fields.FORMS, *fields.FORMS_OF_LAYERS}
    for family in families.load_families().values():
        known = {name for name in dir(Traits) if not name.startswith("_")}
        stated = [*filter(None, map(parse_field, family.args.values()))]
        known |= {field.own for field in stated}
        asked = [*filter(None, map(parse_field, family.config.values())), *stated]
        assert {*family.when, *(field.trait for field in asked)} <= known, family.name
        assert {field.form for field in asked} <= known_forms, family.name
        assert all(
            fused_tensors.NAMES.count(line.form) for line in Spellings(family.table, {}).lines
        )
