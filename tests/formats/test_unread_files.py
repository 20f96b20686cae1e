"""Files of a checkpoint that no reader uses: reported by every command, and compared."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

import reshard

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def save_slime(path, last_epoch=2, average=1.0):
    """Save as slime and miles: a folder of DCP for each part, numbers in a document."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save(weights, checkpoint_id=path / "model")
    dcp.save(states, checkpoint_id=path / "optimizer")
    scheduler = {"lr_scheduler_state": {"lr_scheduler": {"last_epoch": last_epoch}}}
    dcp.save(scheduler, checkpoint_id=path / "lr_scheduler")
    dcp.save({"ema": {"w": torch.full((3,), average)}}, checkpoint_id=path / "ema")
    (path / "meta.json").write_text(json.dumps({"iteration": 5}))
    (path / "events.out.tfevents.1").write_text("log")
    return path


def save_olmo(path, step=3):
    """Save as OLMo-core's Checkpointer: DCP below the directory, the trainer beside it."""
    dcp.save({"model": {"w": torch.ones(4)}}, checkpoint_id=path / "model_and_optim")
    (path / "train").mkdir()
    torch.save({"global_step": step}, path / "train/rank0.pt")
    (path / ".metadata.json").write_text("{}")
    return path


def save_sentences(path):
    save_file({"w": torch.ones(4)}, path / "model.safetensors")
    for folder in ("1_Pooling", "2_Dense"):
        (path / folder).mkdir()
        (path / folder / "config.json").write_text("{}")
    save_file({"linear.weight": torch.ones(2)}, path / "2_Dense/model.safetensors")
    (path / "modules.json").write_text("[]")
    return path


@pytest.mark.parametrize(
    ("save", "listed"),
    [
        (save_slime, ["ema/ (2 files)", "meta.json"]),
        (save_olmo, ["train/rank0.pt"]),
        (save_sentences, ["1_Pooling/config.json", "2_Dense/ (2 files)", "modules.json"]),
    ],
)
def test_every_command_lists_the_files_that_were_not_read(tmp_path, save, listed):
    source = tmp_path / "source"
    source.mkdir()
    save(source)
    split = {"to": "torch", "world_size": 1, "init_optimizer": "none"}
    reports = [
        reshard.inspect(source),
        reshard.verify(source),
        reshard.merge(source, tmp_path / "model.safetensors"),
        reshard.split(source, tmp_path / "out", **split),
    ]
    for report in reports:
        (line,) = (line for line in report.lines() if "not part of the output" in line)
        assert all(name in line for name in listed)
        assert "events" not in line


def test_links_do_not_change_what_was_not_read(tmp_path, monkeypatch):
    """Follow links of the parts to another disk, and pass over those to what has a name here."""
    source = save_olmo(tmp_path / "step3")
    part, disk = source / "model_and_optim", tmp_path / "disk"
    monkeypatch.chdir(part)
    for link, target in (("again", part.name), ("train/copy.pt", "rank0.pt"), ("whole", ".")):
        (source / link).symlink_to(target)

    def assert_same(path):
        manifest = reshard.inspect(path).manifest
        assert list(manifest.unread_files) == [".metadata.json", "train/rank0.pt"]
        assert manifest.train.step == 3

    for path in (source, part, "."):
        assert_same(path)
    part.rename(disk)
    part.symlink_to(disk)
    for path in (source, part):
        assert_same(path)
    source.rename(tmp_path / "moved")
    source.symlink_to(tmp_path / "moved")
    assert_same(source)


def test_a_split_carries_a_scheduler_of_dcp(tmp_path):
    source = save_slime(tmp_path / "source")
    reshard.split(source, tmp_path / "out", to="torch", world_size=1)
    assert reshard.inspect(source).manifest.train.scheduler == {"last_epoch": 2}
    assert torch.load(tmp_path / "out/checkpoint.pt")["scheduler"] == {"last_epoch": 2}


def test_a_file_that_a_split_copies_is_not_said_to_be_left_out(tmp_path):
    report = reshard.split(save_slime(tmp_path / "source"), tmp_path / "out", world_size=2)
    assert (tmp_path / "out/meta.json").is_file()
    assert [line for line in report.lines() if "meta.json" in line] == [
        "kept        meta.json: copied byte for byte"
    ]


def test_a_split_keeps_the_folders_that_olmo_core_needs(tmp_path):
    source, out = save_olmo(tmp_path / "source"), tmp_path / "out"
    (source / "train/rank1.pt").symlink_to(tmp_path / "elsewhere.pt")
    (tmp_path / "elsewhere.pt").write_bytes(b"of another run")
    report = reshard.split(source, out, world_size=2)
    names = [".metadata.json", "train/rank0.pt"]
    assert f"{', '.join(names)}: copied byte for byte" in report.kept
    assert all((out / name).read_bytes() == (source / name).read_bytes() for name in names)
    assert (out / "model_and_optim/.metadata").is_file()
    assert [line for line in report.lines() if "not read" in line] == [
        "warning     train/rank1.pt: not read, and not part of the output"
    ]
    assert any("read train/rank0.pt" in note for note in report.notes)
    assert reshard.inspect(out).manifest.origin.path == str(out / "model_and_optim")


@pytest.mark.parametrize(
    ("changed", "name"),
    [({"last_epoch": 3}, "scheduler"), ({"average": 2.0}, "ema/ema/w")],
)
def test_a_diff_compares_folders_of_dcp(tmp_path, changed, name):
    one, two = save_slime(tmp_path / "one"), save_slime(tmp_path / "two")
    assert reshard.diff(one, two).same
    report = reshard.diff(one, save_slime(tmp_path / "three", **changed))
    assert [*(v.name for v in report.train), *(each.fqn for each in report.unequal)] == [name]
    assert reshard.diff(two, one).same


def test_a_diff_compares_files_and_names_those_of_one_side(tmp_path):
    one, two = save_olmo(tmp_path / "one"), save_olmo(tmp_path / "two")
    assert reshard.diff(one, two).same
    (two / "train/rank0.pt").unlink()
    torch.save({"global_step": 4}, two / "train/rank0.pt")
    (value,) = reshard.diff(one, two).train
    assert value.name == "train/rank0.pt"
    reshard.split(one, tmp_path / "out", to="dcp", world_size=1, init_optimizer="none")
    report = reshard.diff(one, tmp_path / "out")
    assert [value.name for value in report.train] == ["train/rank0.pt"]
    assert any(".metadata.json" in note for note in report.notes)


@pytest.mark.parametrize("change", [lambda state: state["tail"].add_(1), lambda _state: None])
def test_a_diff_compares_the_tensors_of_a_file_without_checksums(tmp_path, change):
    paths = [save_olmo(tmp_path / name) for name in ("one", "two")]
    for path in paths:
        state = {"head": torch.ones(3), "tail": torch.zeros(3)}
        if path == paths[1]:
            change(state)
        torch.save(state, path / "train/rank0.pt", _use_new_zipfile_serialization=False)
    assert reshard.diff(*paths).same == (state["tail"].sum() == 0)


@pytest.mark.parametrize("other", [lambda table: table[1], lambda table: table[:, 0]])
def test_a_diff_distinguishes_parts_of_one_buffer(tmp_path, other):
    paths = [save_olmo(tmp_path / name) for name in ("one", "two")]
    table = torch.arange(9.0).view(3, 3)
    for path, part in zip(paths, (table[0], other(table)), strict=True):
        torch.save({"average": part}, path / "train/rank0.pt")
    assert [value.name for value in reshard.diff(*paths).train] == ["train/rank0.pt"]


def test_a_diff_compares_the_bytes_of_files_that_cannot_be_read(tmp_path):
    paths = [save_olmo(tmp_path / name) for name in ("one", "two")]
    for path in paths:
        (path / "train/loader.json").write_text("{" + path.name)
    assert [value.name for value in reshard.diff(*paths).train] == ["train/loader.json"]
