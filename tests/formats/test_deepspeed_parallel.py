"""DeepSpeed's model-parallel files for other grids, from one that Megatron-DeepSpeed wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import reshard
from reshard.commands.split.command import split
from reshard.commands.split.options import SplitOptions
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed.cuts import Cuts
from reshard.layouts.model_parallel.shards import REPLICATED, Split
from tests.judged.alike import assert_same_tensors, list_tensors

SAMPLE = Path(__file__).parents[1] / "data/megatron_deepspeed/tp2pp2dp2"
GRIDS = [(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4)]
BLOCK = "2.self_attention.query_key_value.weight"


@pytest.fixture(scope="module")
def held():
    """Return every tensor of the sample, by kind and name."""
    return list_tensors(SAMPLE / "run")


@pytest.mark.parametrize("grid", [*GRIDS[:4], GRIDS[8]], ids=str)  # each leads to another one
def test_a_state_goes_to_any_grid_and_on_to_the_next(grid, held, tmp_path):
    tp, pp = grid
    split(SAMPLE / "run", tmp_path / "one", SplitOptions(tp=tp, pp=pp, dp=3))
    assert_same_tensors(list_tensors(tmp_path / "one"), held)
    after, stages = GRIDS[(GRIDS.index(grid) + 4) % len(GRIDS)]
    split(tmp_path / "one", tmp_path / "two", SplitOptions(tp=after, pp=stages, dp=2))
    with reshard.open(tmp_path / "two") as checkpoint:
        mesh = checkpoint.manifest.origin.mesh
    assert mesh == {"world": 2 * after * stages, "dp": 2, "tp": after, "pp": stages}
    assert_same_tensors(list_tensors(tmp_path / "two"), held)


def test_the_grid_it_came_from_has_the_files_it_came_from(tmp_path):
    pytest.importorskip("deepspeed")  # the files hold pickled objects of its classes
    split(SAMPLE / "run", tmp_path / "same", SplitOptions())
    first, again = SAMPLE / "run/global_step3", tmp_path / "same/global_step3"
    names = sorted(path.name for path in first.iterdir())
    assert sorted(path.name for path in again.iterdir()) == names
    for name in names:
        a, b = (torch.load(p / name, weights_only=False) for p in (first, again))
        if name.startswith("layer_"):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[key], b[key]) for key in a), name
        elif "optim" not in name:
            assert a["param_shapes"] == b["param_shapes"]
            assert a["checkpoint_parallel_dimensions"] == b["checkpoint_parallel_dimensions"]


def test_a_scripts_own_tensors_are_in_the_file_of_every_rank(tmp_path):
    """But for the random states, of which each model-parallel rank has its own."""
    run = shutil.copytree(SAMPLE.parent.parent / "gpt_neox/tp2pp2/run", tmp_path / "run")
    own = torch.arange(3.0)
    for path in run.glob("*/mp_rank_*_model_states.pt"):
        states = torch.load(path, weights_only=False)
        assert "torch_rng_state" in states
        torch.save({**states, "own": own}, path)
    report = split(run, tmp_path / "out", SplitOptions(tp=1, pp=2, dp=1))
    files = sorted((tmp_path / "out").glob("*/mp_rank_*_model_states.pt"))
    assert len(files) == 2
    for path in files:
        states = torch.load(path, weights_only=False)
        assert torch.equal(states["own"], own)
        assert "torch_rng_state" not in states
    assert any("torch_rng_state" in text for text in report.notes)


def test_the_vocabulary_is_padded_for_the_new_grid(held, tmp_path):
    options = SplitOptions(tp=4, pp=1, dp=1, make_vocab_size_divisible_by=40)
    report = split(SAMPLE / "run", tmp_path / "out", options)
    assert any("160 rows, 122 of them without padding" in note for note in report.notes)
    words = ("weight", "tied_modules.embed.word_embeddings.weight")
    got = list_tensors(tmp_path / "out")[words]
    assert got.shape == (160, 32)
    assert torch.equal(got[:128], held[words])
    assert not got[128:].any()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tp": 3, "pp": 1, "dp": 1}, "tensor-parallel size 3"),
        ({"ep": 2}, r"--ep 2: .* contains no experts of deepspeed\.moe"),
        ({"pp": 16, "dp": 1}, "--pp 16: is more than the 7 layers"),
        ({"pp": 2, "stage_layers": "1,2"}, "does not share 8 layers among 2 stages"),
        ({"zero_stage": 3}, "DeepSpeed supports ZeRO stages 0 and 1 in pipelines"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(options, problem, tmp_path):
    with pytest.raises(UsageError, match=problem):
        split(SAMPLE / "run", tmp_path / "out", SplitOptions(**options))
    assert not (tmp_path / "out").exists()


def cuts(info, *names, shapes=None, **given):
    found = dict.fromkeys(names, (8, 8)) | (shapes or {})
    return Cuts("here", info, found, ranks=2, **given)


def test_layers_of_other_shapes_than_matrices_are_not_gated():
    shapes = {"0.mlp.dense_h_to_4h.weight": (4,), "0.mlp.dense_4h_to_h.weight": (2,)}
    assert not Cuts("run", {}, shapes, ranks=1).are_known


def test_a_model_that_nothing_describes_is_not_cut():
    with pytest.raises(UsageError, match=r"'0\.weight': matches no rule"):
        cuts({}, "0.weight", "2.weight").find_split("0.weight", (8, 8))


def test_llama_of_autotp_before_it_stated_cuts_is_known_by_its_names():
    layer = "model.layers.0."
    wanted = {
        f"{layer}self_attn.q_proj.bias": Split(0),
        f"{layer}mlp.down_proj.weight": Split(1),
        "model.embed_tokens.weight": REPLICATED,
        "lm_head.weight": REPLICATED,
    }
    found = cuts({}, *wanted)
    assert {name: found.find_split(name, (8, 8)) for name in wanted} == wanted
    assert any("AutoTP before 0.19" in note for note in found.notes)
    with pytest.raises(UsageError, match=r"'h\.0\.attn\.weight': matches no rule .*'autotp'"):
        cuts({}, *wanted, "h.0.attn.weight").find_split("h.0.attn.weight", (8, 8))


def test_names_tell_columns_from_whole_parameters_where_only_rows_are_listed():
    rows = {"parameter_with_row_parallelism_patterns": [r"^model\.layers\.0\.mlp\.fc2\.weight$"]}
    wanted = {
        "model.layers.0.mlp.fc1.weight": Split(0),
        "model.layers.0.mlp.fc2.weight": Split(1),
        "model.layers.0.input_layernorm.weight": REPLICATED,
        "model.embed_tokens.weight": REPLICATED,
    }
    found = cuts(rows, *wanted)
    assert {name: found.find_split(name, (8, 8)) for name in wanted} == wanted
    other = cuts(rows, *wanted, "visual.patch_embed.weight")
    with pytest.raises(UnsupportedError, match=r"(?s)'visual\.patch.* is not known.*--rules FILE"):
        other.find_split("visual.patch_embed.weight", (8, 8))


def test_a_users_rules_are_heard_when_a_run_is_read(tmp_path):
    run = shutil.copytree(SAMPLE / "run", tmp_path / "run")
    for path in run.glob("*/mp_rank_*"):
        states = torch.load(path, weights_only=False)
        del states["universal_checkpoint_info"]
        torch.save(states, path)
    name = "{i}.mlp.dense_4h_to_h.weight"
    (tmp_path / "r.yaml").write_text(f"parameters: {{'{name}': column}}")
    shapes = []
    for rules in (None, tmp_path / "r.yaml"):
        with reshard.open(run, rules=rules) as checkpoint:
            shapes.append(checkpoint[name.format(i=3)].shape)
    assert shapes == [(32, 64), (64, 32)]
    options = SplitOptions(to="ds-universal", rules=tmp_path / "r.yaml")
    split(run, tmp_path / "out", options)
    (told,) = (tmp_path / "out").glob(f"*/zero/{name.format(i=3)}/fp32.pt")
    assert torch.load(told)["cat_dim"] == 0


def test_a_pattern_that_finds_nothing_leaves_the_rest_unsaid():
    info = {"tp_replicated_parameter_patterns": ["tied_modules.embed.positions.weight"]}
    with pytest.raises(UnsupportedError, match="matches no parameter, and no pattern that"):
        cuts(info, "0.positions.weight").find_split("0.positions.weight", (8, 8))


def test_megatron_deepspeeds_untied_positions_are_whole_on_every_rank():
    info = {"tp_replicated_parameter_patterns": ["tied_modules.embed.position_embeddings.weight"]}
    mine = cuts(info, BLOCK, "1.position_embeddings.weight")
    assert mine.find_split("1.position_embeddings.weight", (8, 8)) == REPLICATED
    (note,) = mine.notes
    assert (
        "ds_to_universal would join it along dim 0; reshard reads it as whole on every rank" in note
    )


@pytest.mark.parametrize(
    ("block", "last", "head"),
    [
        ("2.self_attention.", "3.weight", "4.lm_head.weight"),
        ("3.self_attention.", "5.weight", None),
        ("2.attention.", "4.norm.weight", "5.final_linear.weight"),
    ],
)
def test_the_table_knows_who_numbers_layers_how(block, last, head):
    shapes = {
        f"{block}query_key_value.weight": (12, 8),
        f"{block}dense.weight": (8, 4),
        f"{block[0]}.mlp.dense_h_to_4h.weight": (32, 8),
        f"{block[0]}.mlp.dense_4h_to_h.weight": (8, 16),
        last: (8,),
    } | ({head: (16, 8)} if head else {})
    mine = cuts({}, shapes=shapes)
    found = [mine.find_split(name, shape) for name, shape in shapes.items()]
    wanted = [Split(0), Split(1), Split(0, (1, 1)), Split(1), REPLICATED]
    assert found == wanted + ([Split(0, padded=True)] if head else [])


def test_fused_parameters_have_the_widths_that_the_checkpoint_says():
    info = {
        "parameter_with_sub_params": [{"patterns": ["qkv"], "shape": [(6, 3)], "partition_dim": 0}],
        "sub_param_shard_widths": {"qkv": [[4, 2], [2, 1]]},
    }
    assert cuts(info, "qkv").find_split("qkv", (6,)) == Split(0, (2, 1), widths=((4, 2), (2, 1)))


@pytest.mark.parametrize("grid", [{}, {"tp": 1, "pp": 1, "dp": 1}, {"tp": 4, "pp": 3, "dp": 1}])
def test_a_tied_pipeline_without_its_optimizer_keeps_its_names(grid, tmp_path):
    """Only the list of parameters names layers that share a module: their file does not."""
    split(SAMPLE / "run", tmp_path / "weights", SplitOptions(weights_only=True, **grid))
    assert not list((tmp_path / "weights").rglob("*optim_states.pt"))
    report = reshard.diff(SAMPLE / "run", tmp_path / "weights", kinds=["weight"], dtype="bf16")
    assert report.same, list(report.lines())
    assert report.equal == 52
