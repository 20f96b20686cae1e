"""Pipeline x data x tensor parallel training of torch: what its stages saved is one checkpoint."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import reshard
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from tests.judged.expected import read_expected
from tests.judges import pipeline_worker as worker
from tests.trainer import worlds

RUNS = {"three_axes": ((2, 2, 2), 1), "two_groups": ((2, 2, 1), 2), "four_stages": ((4, 1, 1), 1)}
SLOTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("pipelines")
    for run, (sizes, groups) in RUNS.items():
        (place / run).mkdir()
        world = sizes[0] * sizes[1] * sizes[2]
        worlds.run(world, worker.save, sizes, place / run, groups)
    return place


@pytest.mark.parametrize("form", worker.FORMS)
@pytest.mark.parametrize("run", RUNS)
def test_weights_and_moments_of_all_stages_are_bitwise_torchs(trained, run, form):
    told = read_expected(trained / run)
    with reshard.open(trained / run / form) as checkpoint:
        assert set(checkpoint) == set(told["weights"])
        for fqn, held in told["weights"].items():
            assert torch.equal(torch.as_tensor(checkpoint[fqn][...]), held), fqn
        for fqn, slots in told["state"].items():
            for slot in SLOTS:
                found = torch.as_tensor(checkpoint.optimizer(slot)[fqn][...])
                assert torch.equal(found, slots[slot]), (slot, fqn)
        assert set(checkpoint.manifest.train.optimizer_step.values()) == {float(worker.STEPS)}


@pytest.mark.parametrize("form", worker.FORMS)
@pytest.mark.parametrize("run", RUNS)
def test_groups_have_the_parameters_of_all_stages(trained, run, form):
    if (run, form) == ("two_groups", "dcp_by_group"):
        return  # see test_groups_that_dcp_cut_short_are_refused_where_there_are_several
    told = read_expected(trained / run)
    with reshard.open(trained / run / form) as checkpoint:
        groups = checkpoint.manifest.train.param_groups
        assert [set(group.fqns) for group in groups] == [set(fqns) for fqns in told["groups"]]
        decays = [group.hyper["weight_decay"] for group in groups]
    assert decays == [0.1, 0.0][: len(told["groups"])]


@pytest.mark.parametrize("form", worker.RANKS)
def test_rank_files_state_the_stages_and_keep_the_models_order(trained, form):
    with reshard.open(trained / "three_axes" / form) as checkpoint:
        assert checkpoint.manifest.origin.mesh == {"world": 8, "pp": 2}
        assert list(checkpoint) == list(read_expected(trained / "three_axes")["weights"])


def test_dcp_of_numbered_stages_keeps_its_keys(trained, tmp_path):
    source = trained / "three_axes" / "dcp_of_stages"
    reshard.split(source, tmp_path / "out", world_size=3)
    keys = [
        FileSystemReader(path).read_metadata().state_dict_metadata.keys()
        for path in (source, tmp_path / "out")
    ]
    assert keys[0] == keys[1]
    assert reshard.diff(source, tmp_path / "out").same


def test_folders_of_stages_are_joined_whichever_level_is_passed(trained, tmp_path):
    """Check that a stage alone is read with a warning, and that stages need names of their own."""
    run = tmp_path / "run" / "step_3"
    shutil.copytree(trained / "three_axes" / "stage_folders", run)
    torch.save({"lr_scheduler": {"last_epoch": 3}}, run / "extra.pt")
    with reshard.open(run.parent) as checkpoint:
        manifest = checkpoint.manifest
        assert (manifest.origin.format, manifest.origin.mesh) == ("dcp", {"world": 8, "pp": 2})
        assert manifest.train.step == 3
        assert manifest.train.scheduler == {"last_epoch": 3}
    with reshard.open(run / "pp1") as checkpoint:
        assert "head.weight" in checkpoint
        assert "embed.weight" not in checkpoint
        (warning,) = checkpoint.manifest.warnings
        assert warning == f"{run}/pp1 is one of 2 pipeline stages: pass {run} to read all of them"
    shutil.rmtree(run / "pp1")
    shutil.copytree(run / "pp0", run / "pp1")
    with pytest.raises(
        UnsupportedError, match=r"pp1: contains 'embed.*, and so does .*pp0: the na"
    ):
        reshard.open(run)
    (run / "pp1").rename(run / "pp2")
    with pytest.raises(
        IncompleteError, match="contains the pipeline stages pp0 and pp2, but not stage 1"
    ):
        reshard.open(run)


def test_the_report_says_that_a_group_was_cut_short(trained):
    inspection = reshard.inspect(trained / "three_axes" / "dcp_by_group")
    assert any("not listed in the only param group" in line for line in inspection.lines())


def test_groups_that_dcp_cut_short_are_refused_where_there_are_several(trained, tmp_path):
    """PyTorch 2.13 saves each group's list under one key for all stages: the last one stays."""
    with pytest.raises(IncompleteError, match="which is in no parameter group"):
        reshard.split(trained / "two_groups" / "dcp_by_group", tmp_path / "out", world_size=2)


@pytest.mark.parametrize(("run", "form"), [("three_axes", "numbered"), ("two_groups", "apart")])
def test_all_stages_go_to_fsdp_without_a_pipeline(trained, run, form, tmp_path):
    source = trained / run / form
    reshard.split(source, tmp_path / "out", to="dcp", world_size=3)
    report = reshard.diff(source, tmp_path / "out", kinds=["weight", "optimizer"])
    assert report.same, list(report.lines())
    assert report.equal == 3 * len(read_expected(trained / run)["weights"])


def test_stages_of_two_steps_are_refused(trained, tmp_path):
    copy = shutil.copytree(trained / "four_stages" / "numbered", tmp_path / "copy")
    path = copy / "state_rank_3.pt"
    saved = torch.load(path, weights_only=False)
    torch.save({**saved, "step": 7}, path)
    with pytest.raises(CorruptError, match=r"was saved at step 7, but state_rank_0\.pt at step 3"):
        reshard.open(copy)


def test_a_missing_rank_of_a_stage_is_named(trained, tmp_path):
    copy = shutil.copytree(trained / "three_axes" / "apart", tmp_path / "copy")
    (copy / "optim_rank_5.pt").unlink()
    with pytest.raises(IncompleteError, match=r"rank_5\.pt is missing"):
        reshard.open(copy)
