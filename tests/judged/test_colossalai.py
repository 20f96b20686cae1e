"""ColossalAI's own files: whole tensors in shards, an optimizer by number beside them.

``tests/data/colossalai`` says how they were made.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import reshard
from reshard.errors import CorruptError, IncompleteError, UnsupportedError
from reshard.formats.colossalai import writer
from tests.judged.expected import read_expected
from tests.judges.colossalai_judge import MEGABYTES
from tests.support.same_objects import is_same

KEPT = Path(__file__).parents[1] / "data" / "colossalai"
CASES = ("plain", "safetensors", "pipeline")


@pytest.fixture
def copied(tmp_path):
    def copy(case):
        return Path(shutil.copytree(KEPT / case / "ckpt", tmp_path / "ckpt"))

    return copy


@pytest.mark.parametrize("case", CASES)
def test_weights_and_moments_are_those_of_the_live_objects(case):
    expected = read_expected(KEPT / case)
    with reshard.open(KEPT / case / "ckpt") as checkpoint:
        assert set(checkpoint) == set(expected["weights"])
        for fqn, held in expected["weights"].items():
            assert torch.equal(torch.as_tensor(checkpoint[fqn][...]), held), fqn
        for fqn, slots in expected["state"].items():
            for slot in ("exp_avg", "exp_avg_sq"):
                found = torch.as_tensor(checkpoint.optimizer(slot)[fqn][...])
                assert torch.equal(found, slots[slot]), (slot, fqn)
        train = checkpoint.manifest.train
        assert [list(group.fqns) for group in train.param_groups] == expected["groups"]
        assert set(train.optimizer_step.values()) == {3.0}


def test_the_step_within_an_epoch_is_not_the_step_of_the_run():
    with reshard.open(KEPT / "plain" / "ckpt") as checkpoint:
        train = checkpoint.manifest.train
    assert train.step is None
    assert train.client["running_states.json"]["sample_start_index"] == 12
    assert train.scheduler["last_epoch"] == 3


def test_stages_of_a_pipeline_are_counted_and_ordered(copied):
    run = copied("pipeline")
    index = run / "pytorch_model.bin.index.json"
    about = json.loads(index.read_text())
    about["weight_map"] = dict(sorted(about["weight_map"].items(), key=lambda item: item[1][::-1]))
    index.write_text(json.dumps(about))  # as another order of os.listdir would have it
    with reshard.open(run) as checkpoint:
        assert checkpoint.manifest.origin.mesh == {"world": 2, "pp": 2}
        names = list(checkpoint)
    assert names.index("embed.weight") < names.index("down.weight")


@pytest.mark.parametrize("case", CASES)
def test_the_state_goes_to_other_layouts_and_stays_the_same(case, tmp_path):
    reshard.split(KEPT / case / "ckpt", tmp_path / "out", to="dcp", world_size=2)
    report = reshard.diff(KEPT / case / "ckpt", tmp_path / "out", kinds=["weight", "optimizer"])
    assert report.same, list(report.lines())


def test_weights_alone_are_a_hugging_face_directory(tmp_path):
    expected = read_expected(KEPT / "plain")["weights"]
    reshard.merge(KEPT / "plain" / "ckpt" / "modeling", tmp_path / "whole.pt")
    merged = torch.load(tmp_path / "whole.pt")
    assert all(torch.equal(merged[fqn], held) for fqn, held in expected.items())


@pytest.mark.parametrize(
    "name", ["pytorch_optim-00002.bin", "pytorch_optim_group.bin", "pytorch_model-00002.bin"]
)
def test_a_missing_file_is_named(copied, name):
    run = copied("plain")
    next(run.rglob(name)).unlink()
    with pytest.raises(IncompleteError, match=name):
        reshard.open(run)


@pytest.mark.parametrize("part", ["", "optimizer", "optimizer/pytorch_optim.bin.index.json"])
def test_the_optimizers_folder_is_a_part_whatever_that_of_the_weights_is_called(copied, part):
    """Read the weights where their folder sorts behind the optimizer's, whose index lists none."""
    run = copied("plain")
    (run / "modeling").rename(run / "weights")
    found, kept = reshard.inspect(run / part).manifest, reshard.inspect(KEPT / "plain" / "ckpt")
    assert found.entries.keys() == kept.manifest.entries.keys()
    shutil.rmtree(run / "weights")
    if part:
        with pytest.raises(IncompleteError, match="optimizer but no weights"):
            reshard.open(run / part)


def test_a_number_that_no_shard_contains_is_reported(copied):
    run = copied("plain")
    index = run / "optimizer" / "pytorch_optim.bin.index.json"
    about = json.loads(index.read_text())
    about["weight_map"]["99"] = "pytorch_optim-00001.bin"
    index.write_text(json.dumps(about))
    with pytest.raises(CorruptError, match="parameter 99"):
        reshard.open(run)


def test_an_optimizer_saved_asynchronously_is_refused(copied):
    run = copied("plain")
    index = run / "optimizer" / "pytorch_optim.bin.index.json"
    index.rename(index.with_name("optimizer.safetensors.index.json"))
    with pytest.raises(UnsupportedError, match="asynchronously"):
        reshard.open(run)


# Written


@pytest.mark.parametrize("case", CASES)
def test_the_output_equals_what_the_savers_wrote(case, tmp_path, monkeypatch):
    """Shard by shard, at the judge's size of one; its stages of a pipeline are one here."""
    monkeypatch.setattr(writer, "_SHARD_BYTES", int(MEGABYTES * (1 << 20)))
    report = reshard.split(KEPT / case / "ckpt", tmp_path / "out")
    assert report.target == "colossalai"
    theirs, ours = _files(KEPT / case / "ckpt"), _files(tmp_path / "out")
    if case == "plain":
        assert ours.keys() == theirs.keys()
    states = [name for name in theirs if name.startswith("pytorch_optim-")]
    if case == "pipeline":
        assert is_same(_united(ours), _united(theirs))
        states = []
    models = [name for name in theirs if name.startswith("pytorch_model-") and case == "plain"]
    for name in (*states, *models):
        mine, saved = torch.load(ours[name]), torch.load(theirs[name])
        assert is_same(_plain(mine), _plain(saved)), name
    for name in ("pytorch_optim.bin.index.json", "pytorch_model.bin.index.json"):
        if name in theirs and case != "pipeline":
            mine, saved = json.loads(ours[name].read_text()), json.loads(theirs[name].read_text())
            assert mine == saved
    groups = torch.load(ours["pytorch_optim_group.bin"])
    for mine, saved in zip(groups, torch.load(theirs["pytorch_optim_group.bin"]), strict=True):
        assert {key: mine[key] for key in saved} == saved
        assert set(mine) - set(saved) <= {"param_names"}
    if "lr_scheduler" in theirs:
        assert torch.load(ours["lr_scheduler"]) == torch.load(theirs["lr_scheduler"])
        assert ours["running_states.json"].read_text() == theirs["running_states.json"].read_text()


def _files(place):
    return {path.name: path for path in place.rglob("*") if path.is_file()}


def _united(held):
    shards = (torch.load(held[name]) for name in sorted(held) if name.startswith("pytorch_optim-"))
    return {number: _plain(state) for shard in shards for number, state in shard.items()}


def _plain(held):
    return {key: _plain(value) if isinstance(value, dict) else value for key, value in held.items()}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_state_of_the_live_objects(case, tmp_path):
    expected = read_expected(KEPT / case)
    reshard.split(KEPT / case / "ckpt", tmp_path / "dcp", to="dcp", world_size=2)
    reshard.split(tmp_path / "dcp", tmp_path / "out", to="colossalai")
    (weights,) = (tmp_path / "out" / "modeling").glob("*.bin")
    held = torch.load(weights)
    assert held.keys() == expected["weights"].keys()
    assert all(torch.equal(held[fqn], value) for fqn, value in expected["weights"].items())
    (states,) = (tmp_path / "out" / "optimizer").glob("pytorch_optim-*.bin")
    held, names = torch.load(states), [fqn for group in expected["groups"] for fqn in group]
    assert list(held) == [*range(len(names))]
    for number, fqn in enumerate(names):
        for slot, value in expected["state"][fqn].items():
            assert torch.equal(held[number][slot], value), (fqn, slot)


def test_weights_alone_have_no_optimizer_beside(tmp_path):
    reshard.split(KEPT / "plain" / "ckpt", tmp_path / "out", weights_only=True, dtype="bf16")
    index, weights = "pytorch_model.bin.index.json", tmp_path / "out" / "pytorch_model-00001.bin"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {index, weights.name}
    assert torch.load(weights)["up.weight"].dtype == torch.bfloat16


def test_the_names_of_one_tensor_are_in_one_shard(tmp_path, monkeypatch):
    tied = torch.nn.Linear(8, 8, bias=False)
    model = torch.nn.ModuleDict({"one": tied, "two": torch.nn.Linear(8, 8), "three": tied})
    torch.save({"model": model.state_dict()}, tmp_path / "model.pt")
    monkeypatch.setattr(writer, "_SHARD_BYTES", 1)
    reshard.split(tmp_path / "model.pt", tmp_path / "out", to="colossalai", weights_only=True)
    index = tmp_path / "out" / "pytorch_model.bin.index.json"
    places = json.loads(index.read_text())["weight_map"]
    assert places["one.weight"] == places["three.weight"]
    held = torch.load(index.with_name(places["one.weight"]))
    assert held["one.weight"].data_ptr() == held["three.weight"].data_ptr()


def test_a_shard_that_the_index_does_not_list_is_noted(copied):
    run = copied("plain")
    shard = next(run.rglob("pytorch_model-00001.bin"))
    shutil.copy(shard, shard.with_name("pytorch_model-00099.bin"))
    with reshard.open(run) as checkpoint:
        warnings = checkpoint.manifest.warnings
    assert any("which were not read: pytorch_model-00099.bin" in text for text in warnings)


def test_the_index_names_the_shard_of_a_state_that_two_shards_have(copied):
    run = copied("plain")
    index = next(run.rglob("pytorch_optim.bin.index.json"))
    shards = json.loads(index.read_text())["weight_map"]
    number, last = min(shards, key=int), index.with_name(max(shards.values()))
    assert shards[number] != last.name
    with reshard.open(run) as checkpoint:
        before = {fqn: held[...] for fqn, held in checkpoint.optimizer("exp_avg").items()}
    saved = torch.load(last)
    copy = torch.load(index.with_name(shards[number]))[int(number)]
    saved[int(number)] = copy | {"exp_avg": copy["exp_avg"] + 1}
    torch.save(saved, last)
    with reshard.open(run) as checkpoint:
        for fqn, held in checkpoint.optimizer("exp_avg").items():
            assert (held[...] == before[fqn]).all(), fqn
