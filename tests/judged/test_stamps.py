"""Every rank file that `split` writes states its rank and save, by archive name and stamp."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

import reshard
from reshard.containers import torch_reader
from reshard.errors import CorruptError
from tests.support.directories import read_files

# target -> the DeepSpeed case, options, (files of ranks, files that cannot have a stamp)
TARGETS = {
    "deepspeed 1": ("z2_bf16", {"to": "deepspeed", "zero_stage": 1}, 4, ()),
    "deepspeed 2": ("z2_bf16", {"to": "deepspeed", "zero_stage": 2}, 4, ()),
    "deepspeed 3": ("z2_bf16", {"to": "deepspeed", "zero_stage": 3}, 6, ()),
    "deepspeed 3 frozen": ("z3_full", {"to": "deepspeed"}, 6, ()),
    "fsdp2": ("z2_bf16", {"to": "fsdp2"}, 7, ()),
    "verl": ("z2_bf16", {"to": "verl"}, 9, ()),
    "fsdp full": ("z2_bf16", {"to": "fsdp", "state_dict_type": "full"}, 2, ("scheduler", "scaler")),
    "accelerate ranks": ("z2_bf16", {"to": "accelerate", "rank_files": True}, 6, ("scheduler",)),
    "hf-trainer": (
        "z2_bf16",
        {"to": "hf-trainer", "state_dict_type": "unsharded"},
        1,
        ("scheduler",),
    ),
    "torch": ("z2_bf16", {"to": "torch"}, 1, ()),
    "ds-universal": ("z2_bf16", {"to": "ds-universal"}, 3, ("fp32", "exp_avg", "step")),
}


def opened(directory):
    suffixes = (".pt", ".bin", ".pkl", ".pth")
    return {
        path.relative_to(directory).as_posix(): torch_reader.read(path)
        for path in sorted(Path(directory).rglob("*"))
        if path.suffix in suffixes
    }


@pytest.mark.parametrize("target", TARGETS)
def test_every_file_of_a_rank_states_its_rank_and_save(target, made, tmp_path):
    case, options, count, without = TARGETS[target]
    source, out = made / case / "run", tmp_path / "out"
    reshard.split(source, out, world_size=3, **options)
    stamps = []
    for name, file in opened(out).items():
        with zipfile.ZipFile(out / name) as archive:
            assert {each.partition("/")[0] for each in archive.namelist()} == {Path(name).stem}
        if file.stamp is None:
            assert Path(name).stem.startswith(without), name
            continue
        stamps.append(file.stamp)
        assert file.stamp.file == Path(name).name
        ranked = name.replace("rank_", "rank").replace("states_", "rank")
        assert f"rank{file.stamp.rank}" in ranked or not file.stamp.rank
    assert len(stamps) >= count
    assert len({(stamp.save_id, stamp.step) for stamp in stamps}) == 1
    with reshard.open(source) as checkpoint:
        assert stamps[0].step == checkpoint.manifest.train.step
    assert {stamp.world_size for stamp in stamps} == {1 if target == "torch" else 3}


def test_a_stamp_belongs_to_one_save_and_is_never_copied(made, tmp_path):
    def split(source, name, ranks):
        reshard.split(source, tmp_path / name, to="deepspeed", zero_stage=3, world_size=ranks)
        return tmp_path / name

    def ids(directory):
        return {file.stamp.save_id for file in opened(directory).values()}

    source = made / "z3_bf16" / "run"
    first, again, other = split(source, "a", 2), split(source, "b", 2), split(source, "c", 3)
    assert read_files(first) == read_files(again)
    back = split(other, "d", 2)
    assert len(ids(first) | ids(other) | ids(back)) == 3
    assert reshard.diff(source, back).same
    with reshard.open(source) as one, reshard.open(back) as two:
        assert two.manifest.train.client == one.manifest.train.client
        assert two.manifest.train.opaque.keys() == one.manifest.train.opaque.keys()


def test_eleven_ranks_whose_names_are_not_of_one_length(made, tmp_path):
    """Storages of ranks begin at other places where names or ranks have more digits."""
    source = made / "z3_bf16" / "run"
    reshard.split(source, tmp_path / "out", to="deepspeed", zero_stage=3, world_size=11)
    stamps = [file.stamp for file in opened(tmp_path / "out").values()]
    assert sorted(stamp.rank for stamp in stamps) == sorted([*range(11), *range(11)])
    assert reshard.diff(source, tmp_path / "out").same


@pytest.mark.parametrize("target", ["deepspeed 3", "fsdp2", "verl"])
def test_a_swap_in_our_own_output_is_refused(target, made, tmp_path):
    case, options, _, _ = TARGETS[target]
    out = tmp_path / "out"
    reshard.split(made / case / "run", out, world_size=2, **options)
    reshard.merge(out, tmp_path / "sound")
    optimizer = sorted(path for path in out.rglob("*optim*") if path.is_file())
    first, second = optimizer[:2]
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with pytest.raises(CorruptError):
        reshard.merge(out, tmp_path / "swapped")
