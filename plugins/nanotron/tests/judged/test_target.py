"""``--to nanotron`` writes nanotron's own files, and the same state for other ranks.

At the grid of the source every file is held against the one that nanotron's savers wrote; at
another, against what one process over whole tensors has, and against what nanotron saved there.
"""

from __future__ import annotations

import shutil
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file

import reshard
from plugins.nanotron.tests.judged.samples import CASES, KEPT, SLOTS, list_files, load_file
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from tests.judged.expected import read_expected
from tests.support.edited_files import edit_safetensors_header
from tests.support.same_objects import is_same


def read_without_header(path):
    """Return the bytes of a safetensors file without its header, whose texts have no order."""
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


@pytest.mark.parametrize("case", CASES)
def test_at_the_source_s_grid_every_file_is_nanotron_s_own(case, tmp_path):
    report = reshard.split(KEPT / case / "ckpt", tmp_path / "out")
    wanted, found = list_files(KEPT / case / "ckpt"), list_files(tmp_path / "out")
    assert list(found) == list(wanted)
    for name, path in wanted.items():
        if path.suffix == ".safetensors":
            assert path.stat().st_size == found[name].stat().st_size, name
            assert read_without_header(path) == read_without_header(found[name]), name
        assert is_same(load_file(found[name]), load_file(path)), name
    assert any("not copied: random" in text for text in report.notes)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("tp", "dp", "zero"), [(1, 1, 0), (1, 2, 1), (2, 5, 1), (2, 1, 0)])
def test_on_other_ranks_it_is_the_state_of_the_whole_model(case, tp, dp, zero, tmp_path):
    expected = read_expected(KEPT / case)
    reshard.split(KEPT / case / "ckpt", tmp_path / "out", tp=tp, dp=dp, zero_stage=zero)
    reshard.merge(tmp_path / "out", tmp_path / "whole.pt")
    merged = torch.load(tmp_path / "whole.pt")
    assert all(torch.equal(merged[fqn], held) for fqn, held in expected["weights"].items())
    with reshard.open(tmp_path / "out") as checkpoint:
        for kind in (*SLOTS, *(["masters"] if expected["masters"] else [])):
            slot = checkpoint.optimizer(kind.removesuffix("s"))
            for fqn, wanted in expected[kind].items():
                assert torch.equal(torch.as_tensor(slot[fqn][...]), wanted), (kind, fqn)
        mesh = checkpoint.manifest.origin.mesh
        assert (mesh.get("tp", 1), mesh.get("dp", 1)) == (tp, dp)
    report = reshard.diff(KEPT / case / "ckpt", tmp_path / "out", kinds=["weight", "optimizer"])
    assert report.same, list(report.lines())


@pytest.mark.parametrize(
    ("source", "grid"), [("zero_tp2pp2dp2", (1, 3)), ("zero_tp1pp2dp3", (2, 2))]
)
def test_on_other_ranks_every_file_is_what_nanotron_saved_there(source, grid, tmp_path):
    """Both runs made the same updates; at one rank, too, nanotron says what is cut."""
    tp, dp = grid
    reshard.split(KEPT / source / "ckpt", tmp_path / "out", tp=tp, dp=dp)
    wanted, found = (
        list_files(KEPT / f"zero_tp{tp}pp2dp{dp}" / "ckpt"),
        list_files(tmp_path / "out"),
    )
    assert list(found) == list(wanted)
    assert all(is_same(load_file(found[name]), load_file(path)) for name, path in wanted.items())


def test_there_and_back_again_the_files_are_the_first_ones(tmp_path):
    steps = [KEPT / "tp2dp2" / "ckpt", *(tmp_path / name for name in "abc")]
    grids = [(4, 1, 1), (1, 3, 1), (2, 2, 0)]
    for (before, after), (tp, dp, zero) in zip(pairwise(steps), grids, strict=True):
        reshard.split(before, after, tp=tp, dp=dp, zero_stage=zero)
    first, last = list_files(steps[0]), list_files(steps[-1] / "1")
    assert list(last) == list(first)
    assert all(is_same(load_file(last[name]), load_file(path)) for name, path in first.items())


def test_each_fused_part_is_cut_by_itself(tmp_path):
    whole = read_expected(KEPT / "tp2dp2")["model"]["qkv_proj.weight"]
    reshard.split(KEPT / "tp2dp2" / "ckpt", tmp_path / "out", tp=4, dp=1)
    query, key, value = whole.split([16, 8, 8])
    for rank in range(4):
        path = next((tmp_path / "out").rglob(f"qkv_proj/*tp-rank-{rank}-of-4.safetensors"))
        mine = torch.cat([part.chunk(4)[rank] for part in (query, key, value)])
        assert torch.equal(load_file(path)["data"], mine)


@pytest.mark.parametrize("zero", [0, 1])
def test_parts_that_are_fused_along_the_last_dim_are_cut_row_by_row(copied, zero, tmp_path):
    """As a layer of experts is: none of a rank's parts is contiguous in its file."""
    run = copied("tp2dp2")
    cut = sorted((run / "model" / "down_proj").iterdir())
    whole = torch.cat([load_file(path)["data"] for path in cut], 1)
    for rank, path in enumerate(cut):
        mine = torch.cat([part.chunk(2, 1)[rank] for part in whole.split([16, 8], 1)], 1)
        every = "None,None,None"
        pairs = ";".join(
            f"{every}|{start // 2},{(start + size) // 2},None"
            f"#{every}|{start + rank * size // 2},{start + (rank + 1) * size // 2},None"
            for start, size in ((0, 16), (16, 8))
        )
        said = {**dict(load_file(path)["said"]), "local_global_slices_pairs": pairs}
        save_file({"data": mine.contiguous()}, path, said)
    reshard.split(run, tmp_path / "out", tp=4, dp=2, zero_stage=zero)
    for rank in range(4):
        path = next((tmp_path / "out").rglob(f"down_proj/*tp-rank-{rank}-of-4.safetensors"))
        mine = [part.chunk(4, 1)[rank] for part in whole.split([16, 8], 1)]
        assert torch.equal(load_file(path)["data"], torch.cat(mine, 1))
    report = reshard.diff(run, tmp_path / "out", kinds=["weight", "optimizer"])
    assert report.same, list(report.lines())


def test_weights_alone_and_another_dtype(tmp_path):
    case = KEPT / "fp32_tp2pp2"
    expected = read_expected(case)["masters"]
    reshard.split(case / "ckpt", tmp_path / "out", tp=1, weights_only=True, dtype="fp32")
    assert {name.split("/")[1] for name in list_files(tmp_path / "out") if "/" in name} == {
        "model",
        "checkpoint_metadata.json",
    }
    with reshard.open(tmp_path / "out") as checkpoint:
        assert all(torch.equal(torch.as_tensor(checkpoint[n][...]), t) for n, t in expected.items())
    with pytest.raises(IncompleteError, match=r"write only the weights$"):  # no new Adam to advise
        reshard.split(tmp_path / "out", tmp_path / "again", tp=2)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"pp": 1, "dp": 2}, "assigns layers to stages by"),
        ({"tp": 4}, "does not divide 10 of dim 0"),
        ({"zero_stage": 2}, "nanotron, which supports 0 and 1"),
        ({"init_optimizer": "zeros"}, "are not supported by --to nanotron"),
        ({"ep": 2, "dp": 2}, "does not support expert-parallel or context-parallel ranks"),
    ],
)
def test_options_that_nanotron_s_files_cannot_support_are_refused(asked, says, tmp_path):
    with pytest.raises(UsageError, match=says):
        reshard.split(KEPT / "zero_tp2pp2dp2" / "ckpt", tmp_path / "out", to="nanotron", **asked)


def test_another_framework_s_checkpoint_of_no_known_model_is_refused(tmp_path):
    reshard.split(KEPT / "tp2dp2" / "ckpt", tmp_path / "dcp", to="dcp", world_size=1)
    with pytest.raises(UsageError, match="no file states which Hugging Face model"):
        reshard.split(tmp_path / "dcp", tmp_path / "out", to="nanotron")


def test_a_cut_that_nanotron_does_not_use_is_refused(copied, tmp_path):
    run = copied("zero_tp2pp2dp2")
    ranks = sorted((run / "3").rglob("embed/**/*.safetensors"))
    for path, there in zip(ranks, ("6,12", "0,6"), strict=True):  # the ranks changed places
        local = "None,None,None|None,None,None"
        pairs = {"local_global_slices_pairs": f"{local}#{there},None|None,None,None"}
        edit_safetensors_header(path, lambda held, own=pairs: held["__metadata__"].update(own))
    with pytest.raises(UnsupportedError, match="the headers of 'model"):
        reshard.split(run, tmp_path / "out", tp=1)


def _with_optimizers(run, change):
    for path in run.rglob("optimizer_*.pt"):
        saved = torch.load(path)
        change(saved)
        torch.save(saved, path)


def test_a_parameter_without_state_is_refused(copied, tmp_path):
    run = copied("fp32_tp2pp2")
    _with_optimizers(run, lambda saved: (saved["state"].pop(0), saved["names"].pop(0)))
    with pytest.raises(UnsupportedError, match="2 parameters were never stepped"):
        reshard.split(run, tmp_path / "out", tp=1)


@pytest.mark.parametrize("lost", ["exp_avg_sq", "step"])
def test_half_a_state_is_refused(lost, copied, tmp_path):
    run = copied("fp32_tp2pp2")
    _with_optimizers(run, lambda saved: saved["state"][1].pop(lost))
    with pytest.raises(IncompleteError, match=f"optimizer .*no {lost}"):
        reshard.split(run, tmp_path / "out", tp=1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("zero", [0, 1])
def test_an_optimizer_without_steps_survives_a_round_trip(zero, copied, tmp_path):
    """As torch's SGD: one slot, no step, a None where there is no momentum yet."""
    run = copied("fp32_tp2pp2")

    def as_sgd(saved):
        for number, slots in saved["state"].items():
            saved["state"][number] = {"momentum_buffer": slots["exp_avg"], "last": None}

    _with_optimizers(run, as_sgd)
    reshard.split(run, tmp_path / "one", tp=1, dp=3 if zero else 1, zero_stage=zero)
    reshard.split(tmp_path / "one", tmp_path / "two", tp=2, dp=1, zero_stage=0)
    first, last = list_files(run), list_files(tmp_path / "two")
    assert list(last) == list(first)
    assert all(is_same(load_file(last[name]), load_file(path)) for name, path in first.items())


def test_a_bias_of_the_first_rank_alone_is_refused(copied, tmp_path):
    run, old, new = copied("tp2dp2"), "norm.bias", "o_proj.bias"
    (run / "model/norm/model_bias.safetensors").rename(run / "model/o_proj/model_bias.safetensors")

    def renamed(saved):
        saved["names"] = {n: new if fqn == old else fqn for n, fqn in saved["names"].items()}

    _with_optimizers(run, renamed)
    with pytest.raises(UnsupportedError, match="only the first tensor-parallel rank has"):
        reshard.split(run, tmp_path / "out", tp=1)
    reshard.split(run, tmp_path / "out", tp=1, weights_only=True)
    assert reshard.diff(run, tmp_path / "out", kinds=["weight"]).same


def test_a_run_in_which_nothing_is_cut_has_one_rank(copied, tmp_path):
    run = copied("fp32_tp2pp2")
    shutil.rmtree(run / "3" / "optimizer")
    for path in (run / "3" / "model").rglob("*_pp-rank-*.safetensors"):
        path.unlink()
    with pytest.raises(UsageError, match="no parameter of the source states"):
        reshard.split(run, tmp_path / "out", tp=2, to="nanotron", weights_only=True)
