"""The geometry and the tables of model parallelism, judged by torch on real bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.core.box import Box, row_major, whole
from reshard.core.chunks import Chunk
from reshard.core.dtypes import FLOAT32
from reshard.core.manifest import Entry, Manifest, Origin, index_entries
from reshard.core.views import Permute
from reshard.errors import CorruptError, IncompleteError, UsageError
from reshard.layouts.model_parallel import combine, moves
from reshard.layouts.model_parallel.moves import Move
from reshard.layouts.model_parallel.patterns import Pattern
from reshard.layouts.model_parallel.rules import add_user_rules, load_table, parse_document
from reshard.layouts.model_parallel.shards import Split, gather, list_blocks
from tests.support.sample_tensors import built


def stored(tensor, file="f", name="w"):
    """Return an entry of a contiguous tensor whose file holds it at byte 0."""
    strides = row_major(tensor.shape, 4)
    chunk = Chunk(whole(tensor.shape), file, 0, strides, FLOAT32)
    return Entry(name, "param", FLOAT32, tuple(tensor.shape), (chunk,))


@given(
    ranks=st.integers(1, 5),
    parts=st.sampled_from([(1,), (1, 1), (2, 1, 1), (3, 1)]),
    dim=st.integers(0, 2),
    unit=st.integers(1, 3),
)
def test_what_ranks_hold_is_gathered_again(ranks, parts, dim, unit):
    shape = [2, 3, 4]
    shape[dim] = ranks * unit * sum(parts)
    full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    split = Split(dim, parts)
    # torch's own way: cut each fused part by itself, give every rank its pieces
    cut = [p.chunk(ranks, dim) for p in full.split([w * unit * ranks for w in parts], dim)]
    held = [torch.cat([p[rank] for p in cut], dim).contiguous() for rank in range(ranks)]

    entry = gather([stored(t, str(rank)) for rank, t in enumerate(held)], split)
    files = {str(rank): t.flatten() for rank, t in enumerate(held)}
    assert torch.equal(built(entry, files), full)

    for rank, wanted in enumerate(held):
        local, pairs = list_blocks("w", tuple(shape), split, ranks, rank)
        chunks = moves.apply_moves(stored(full).chunks, [Move(a, b.origin) for a, b in pairs])
        piece = Entry("w", "param", FLOAT32, local, tuple(chunks))
        assert torch.equal(built(piece, {"f": full.flatten()}), wanted)


def test_pieces_of_uneven_ranks_are_gathered():
    full = torch.arange(35.0).reshape(7, 5)
    held = [full[:3].clone(), full[3:5].clone(), full[5:].clone()]
    entry = gather([stored(t, str(i)) for i, t in enumerate(held)], Split(0))
    assert torch.equal(built(entry, {str(i): t.flatten() for i, t in enumerate(held)}), full)


def test_pieces_that_do_not_fit_together_are_refused():
    with pytest.raises(CorruptError, match="first tensor-parallel rank"):
        gather([stored(torch.zeros(2, 3)), stored(torch.zeros(2, 4))], Split(0))
    with pytest.raises(UsageError, match="does not divide dim 0 of 'w', which is 6 of 2 parts"):
        list_blocks("w", (6, 2), Split(0, (1, 1)), 2, 0)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_rows_apart_become_neighbours_and_go_back(heads, half, width):
    """The rotary permutation, as transformers' conversion script of Llama has it."""
    rows = heads * half * 2
    meta = torch.arange(float(rows * width)).reshape(rows, width)
    hf = meta.view(heads, half, 2, width).transpose(1, 2).reshape(rows, width).contiguous()
    runs = [
        (h * 2 * half + j, h * 2 * half + j * half, half) for h in range(heads) for j in range(2)
    ]
    shape = (rows, width)
    out = moves.apply_moves(stored(meta).chunks, moves.make_row_moves(shape, runs, step=2))
    assert torch.equal(
        built(Entry("w", "param", FLOAT32, shape, tuple(out)), {"f": meta.flatten()}), hf
    )


def test_a_slice_of_a_stack_and_a_transpose_are_the_same_bytes():
    full = torch.arange(24.0).reshape(4, 2, 3)
    one = tuple(moves.take_slice(stored(full).chunks, 2))
    assert torch.equal(
        built(Entry("w", "param", FLOAT32, (2, 3), one), {"f": full.flatten()}), full[2]
    )
    turned = tuple(Permute((1, 0)).apply(one))
    assert torch.equal(
        built(Entry("w", "param", FLOAT32, (3, 2), turned), {"f": full.flatten()}), full[2].T
    )
    again = tuple(moves.put_in_stack(one, 1))
    assert again[0].box == Box((1, 0, 0), (1, 2, 3))


def test_a_pattern_matches_numbers_words_and_shifts():
    pattern = Pattern("{i+2}.mlp.dense.{p}")
    assert pattern.match("5.mlp.dense.bias", {}) == {"i": 3, "p": "bias"}
    assert pattern.match("1.mlp.dense.bias", {}) is None
    assert pattern.fill({"i": 3, "p": "bias"}) == "5.mlp.dense.bias"
    last = Pattern("{layers+2}.{p}")
    assert last.match("6.weight", {"layers": 4}) == {"p": "weight"}
    assert last.match("7.weight", {"layers": 4}) is None


def test_a_table_knows_a_parameter_by_each_of_its_names():
    table = load_table("megatron")
    te = table.require("decoder.layers.3.mlp.linear_fc1.layer_norm_weight", {})
    assert te.name == "decoder.layers.3.pre_mlp_layernorm.weight"
    assert te.spell("layers", {}) == "5.post_attention_layernorm.weight"
    assert te.rule.split(gated=True).dim is None
    fc1 = table.require("decoder.layers.0.mlp.linear_fc1.weight", {}).rule
    assert (fc1.split(gated=True).parts, fc1.split(gated=False).parts) == ((1, 1), (1,))


def test_an_unknown_name_is_told_with_the_nearest_ones():
    with pytest.raises(UsageError, match=r"linear_fc3.*the nearest are .*linear_fc"):
        load_table("megatron").require("decoder.layers.0.mlp.linear_fc3.weight", {})


@pytest.mark.parametrize("lines", ["parameters: {'a.*.weight': row}", "hf: {'b.{p}': 'a.*.{p}'}"])
def test_a_star_is_refused_when_a_file_is_parsed(tmp_path, lines):
    (tmp_path / "my.yaml").write_text(lines)
    with pytest.raises(UsageError, match=r"'a\.\*.*' has a '\*', which matches nothing") as told:
        add_user_rules(load_table("megatron"), tmp_path / "my.yaml")
    assert told.value.remedy == "write {i} for a number and {p} for any last component of a name"


@pytest.mark.parametrize("text", ["\na: b: c", "\na: [1", "\n\ta: b"])
def test_the_line_of_a_fault_in_yaml_is_told(text):
    with pytest.raises(UsageError, match="is not valid YAML in line 2: "):
        parse_document(text, "rules.yaml")


def test_a_user_s_lines_count_before_the_table_s(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(
        "parameters:\n  'decoder.layers.{i}.mlp.linear_fc3.{p}': row\n"
        "  output_layer.weight: {cut: replicated}\n"
    )
    table = add_user_rules(load_table("megatron"), file)
    assert table.require("decoder.layers.7.mlp.linear_fc3.weight", {}).rule.cut == "row"
    assert table.require("output_layer.weight", {}).rule.cut == "replicated"
    file.write_text("parameters: {a: sideways}")
    with pytest.raises(UsageError, match="'a' has the unknown cut 'sideways'"):
        add_user_rules(load_table("megatron"), file)


@pytest.mark.parametrize("word", ["weight", "bias"])
@pytest.mark.parametrize("expert", [0, 9, 10, 27, 100])
def test_a_word_before_a_number_ends_where_the_number_begins(word, expert):
    found = load_table("megatron").find(
        f"decoder.layers.3.mlp.experts.linear_fc1.{word}{expert}", {}
    )
    assert found.name == f"decoder.layers.3.mlp.experts.local_experts.{expert}.linear_fc1.{word}"
    assert found.spell("te", {}) == f"decoder.layers.3.mlp.experts.linear_fc1.{word}{expert}"


@pytest.mark.parametrize("name", ["megatron", "llama", "gpt_neox", "qwen_moe", "meta"])
def test_the_rule_of_a_name_is_the_first_that_matches_it(name):
    """The table looks where the name may be; here every rule is tried, in order."""
    table = load_table(name)
    for rule in table.rules:
        for pattern in (rule.name, *(p for words in rule.others.values() for p in words)):
            made = pattern.fill(dict.fromkeys(pattern.fields, 12) | {"p": "weight"})
            first = next(
                each
                for each in table.rules
                if any(
                    p.match(made, {"layers": 12}) is not None
                    for p in (each.name, *(p for words in each.others.values() for p in words))
                )
            )
            assert table.find(made, {"layers": 12}).rule is first


@pytest.mark.parametrize("rows", [0, 2])
def test_a_rank_may_lack_the_state_of_a_part_that_is_empty_and_of_no_other(rows):
    """A rank without a key-value head has nothing to optimize there."""
    full = torch.arange(12.0).reshape(4, 3)
    parts = {"a": full[: 4 - rows].contiguous(), "b": full[4 - rows :].contiguous()}
    params = [stored(part, file) for file, part in parts.items()]
    master = Entry("w", "master", FLOAT32, params[0].shape, params[0].chunks)
    ranks = [
        Manifest(Origin("test", "/a"), index_entries([params[0], master]), {}, ordered=True),
        Manifest(Origin("test", "/b"), index_entries([params[1]]), {}, ordered=True),
    ]
    if rows:
        with pytest.raises(IncompleteError, match="/b: does not have the master 'w'"):
            combine.join_tensor_ranks(ranks, lambda _fqn, _shape: Split(0))
        return
    for order in (ranks, ranks[::-1]):
        made = combine.join_tensor_ranks(order, lambda _fqn, _shape: Split(0))
        assert torch.equal(built(made.entries["master", "w"], parts), full)
