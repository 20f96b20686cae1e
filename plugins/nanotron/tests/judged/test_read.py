"""nanotron's own files, read and merged; compared with one process that has whole tensors.

``tests/data/README.md`` says how they were made: TP x PP x DP, ZeRO-1, fp32 masters, tied weights.
"""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import reshard
from plugins.nanotron.tests.judged.samples import CASES, KEPT, SLOTS
from reshard.errors import CorruptError, IncompleteError
from reshard_nanotron.optimizer import compute_piece
from tests.judged.expected import read_expected
from tests.support.edited_files import edit_safetensors_header


@pytest.mark.parametrize("case", CASES)
def test_weights_masters_and_moments_are_those_of_the_whole_model(case):
    expected = read_expected(KEPT / case)
    with reshard.open(KEPT / case / "ckpt") as checkpoint:
        assert set(checkpoint) == set(expected["weights"])
        for fqn in expected["weights"]:
            for slot in SLOTS:
                held = torch.as_tensor(checkpoint.optimizer(slot)[fqn][...])
                assert torch.equal(held, expected[slot][fqn]), (slot, fqn)
            if expected["masters"]:
                held = torch.as_tensor(checkpoint.optimizer("master")[fqn][...])
                assert torch.equal(held, expected["masters"][fqn])
        train = checkpoint.manifest.train
    assert (train.step, train.samples) == (3, 24)
    assert set(train.optimizer_step.values()) == {3.0}


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_bitwise_those_of_the_whole_model(case, tmp_path):
    expected = read_expected(KEPT / case)["weights"]
    report = reshard.merge(KEPT / case / "ckpt", tmp_path / "whole.pt")
    merged = torch.load(tmp_path / "whole.pt")
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[fqn], held) for fqn, held in expected.items())
    assert any("random states" in text for text in report.warnings)


def test_a_sample_without_metadata_is_read_as_it_is(tmp_path):
    sample = KEPT / "tp2dp2"
    expected = read_expected(sample)["model"]
    reshard.merge(sample / "ckpt", tmp_path / "whole.pt")
    merged = torch.load(tmp_path / "whole.pt")
    assert list(merged) == list(expected)  # one param group keeps the model's order
    assert all(torch.equal(merged[fqn], held) for fqn, held in expected.items())


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_state_goes_to_fsdp_and_stays_the_same(ranks, tmp_path):
    case = KEPT / "zero_tp2pp2dp2"
    reshard.split(case / "ckpt", tmp_path / "out", to="dcp", world_size=ranks)
    report = reshard.diff(case / "ckpt", tmp_path / "out", kinds=["weight", "optimizer"])
    assert report.same, list(report.lines())
    assert report.equal == 24


def test_groups_of_pipeline_stages_with_equal_settings_are_one():
    with reshard.open(KEPT / "zero_tp2pp2dp2" / "ckpt") as checkpoint:
        (group,) = checkpoint.manifest.train.param_groups
        assert set(group.fqns) == set(checkpoint)
    with reshard.open(KEPT / "zero_fp32_tp2dp3_groups" / "ckpt") as checkpoint:
        decays = [g.hyper["weight_decay"] for g in checkpoint.manifest.train.param_groups]
        assert decays == [0.1, 0.0]


def test_a_file_stands_for_its_checkpoint():
    files = sorted((KEPT / "zero_tp2pp2dp2").rglob("model_weight*tp-rank-1-of-2.safetensors"))
    with reshard.open(files[0]) as one, reshard.open(KEPT / "zero_tp2pp2dp2" / "ckpt") as run:
        assert one.manifest.entries.keys() == run.manifest.entries.keys()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model_weight*tp-rank-1-of-2.safetensors", r"has no [\w.]+\.weight file of rank tp 1"),
        ("optimizer_*_dp-1*", r"has no optimizer file of rank pp \d, dp 1, tp \d"),
    ],
)
def test_a_missing_rank_is_named(copied, name, says):
    run = copied("zero_tp2pp2dp2")
    next(run.rglob(name)).unlink()
    with pytest.raises(IncompleteError, match=says):
        reshard.open(run)


def test_a_weight_without_a_file_is_reported(copied):
    run = copied("zero_tp2pp2dp2")
    next(run.rglob("tiny/model_weight.safetensors")).unlink()
    with pytest.raises(IncompleteError, match="but model/ has no weights"):
        reshard.open(run)


def test_another_grid_among_the_files_is_refused(copied):
    run = copied("zero_tp2pp2dp2")
    file = next(run.rglob("model_weight*tp-rank-1-of-2.safetensors"))
    file.rename(file.with_name(file.name.replace("1-of-2.", "1-of-4.")))
    with pytest.raises(CorruptError, match="to a grid of"):
        reshard.open(run)


@pytest.mark.parametrize(
    "change",
    [
        {"names": None},
        {"state": [1]},
        {"state": {0: 3}},
        {"param_groups": 7},
        {"param_groups": [7]},
        {"gradient_accumulator": 5},
        {"names": {}},
    ],
)
def test_an_optimizer_of_another_structure_is_refused(copied, change):
    run = copied("zero_tp2pp2dp2")
    file = next(run.rglob("optimizer_pp-1*.pt"))
    saved = torch.load(file, weights_only=False)
    torch.save({**saved, **change}, file)
    with pytest.raises(CorruptError, match=r"optimizer_pp-1.* expected|names no parameter"):
        reshard.open(run)


def test_ranks_at_two_steps_are_refused(copied):
    run = copied("zero_tp2pp2dp2")
    file = next(run.rglob("optimizer_pp-1*dp-1*.pt"))
    saved = torch.load(file, weights_only=False)
    saved["state"][0]["step"] += 1
    torch.save(saved, file)
    with pytest.raises(CorruptError, match="the optimizer's step of"):
        reshard.open(run)


def test_a_moment_of_another_size_than_its_weight_is_refused(copied):
    run = copied("zero_tp2pp2dp2")
    file = next(run.rglob("optimizer_pp-1*dp-1*.pt"))
    saved = torch.load(file, weights_only=False)
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"][:-1].clone()
    torch.save(saved, file)
    with pytest.raises(
        CorruptError, match=r"the exp_avg of .* has shape .*, but its weights imply"
    ):
        reshard.open(run)


def test_a_moment_of_another_dtype_on_one_rank_is_refused(copied):
    run = copied("zero_tp2pp2dp2")
    file = next(run.rglob("optimizer_pp-1*dp-1*.pt"))
    saved = torch.load(file, weights_only=False)
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].bfloat16()
    torch.save(saved, file)
    with pytest.raises(CorruptError, match=r"the exp_avg of .* is bfloat16, but float32 in"):
        reshard.open(run)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda held: {"data": held.half()}, "is float16 .*, but float32 .* in"),
        (lambda held: {"data": held, "more": torch.ones(2)}, r"contains \['data', 'more'\]"),
        (lambda held: {"weight": held}, r"contains \['weight'\]"),
    ],
)
def test_a_rank_s_weight_of_another_shape_or_dtype_is_refused(made, says, copied):
    run = copied("zero_tp2pp2dp2")
    file = next(run.rglob("embed/**/model_weight*tp-rank-1-of-2.safetensors"))
    with safe_open(file, framework="pt") as held:
        tensor, said = held.get_tensor("data"), held.metadata()
    save_file(made(tensor), file, said)
    with pytest.raises(CorruptError, match=says):
        reshard.open(run)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("unsharded_shape", "(many, 6)", "is not a size"),
        ("unsharded_shape", "(12,)", "is not a shape"),
        ("local_global_slices_pairs", "None,None,None#0,6,None", "does not state its part"),
        ("local_global_slices_pairs", "None,None,2|None,None,None#0,6,2|0,6,None", "a step of 2"),
        ("local_global_slices_pairs", "0,6,None|0,6,None#0,99,None|0,6,None", "is not a slice"),
        ("local_global_slices_pairs", "0,6,None|0,6,None#0,5,None|0,6,None", "differ in size"),
        ("local_global_slices_pairs", "0,5,None|0,6,None#0,5,None|0,6,None", "do not cover"),
        ("local_global_slices_pairs", "0,6,None|0,6,None#6,12,None|0,6,None", "contain 36 of 72"),
    ],
)
def test_a_header_that_is_wrong_is_refused(copied, key, value, says):
    run = copied("zero_tp2pp2dp2")
    file = next(run.rglob("embed/**/model_weight*tp-rank-0-of-2.safetensors"))
    edit_safetensors_header(file, lambda header: header["__metadata__"].update({key: value}))
    with pytest.raises(reshard.ReshardError, match=says):
        reshard.open(run)


@pytest.mark.parametrize(("numel", "ranks"), [(10, 4), (1, 3), (12, 4), (7, 7), (5, 8)])
def test_zero_pieces_are_numpys(numel, ranks):
    """As ``_partition_parameters`` counts: the last pieces are shorter by one."""
    size = (numel - 1) // ranks + 1
    sizes = [size - (rank >= ranks - (size * ranks - numel)) for rank in range(ranks)]
    held = [compute_piece(numel, ranks, rank) for rank in range(ranks)]
    assert [stop - start for start, stop in held] == sizes
    assert [start for start, _ in held] == [sum(sizes[:rank]) for rank in range(ranks)]
