"""Checkpoints that real PyTorch wrote, against what PyTorch itself reports of the same state."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict

import reshard
from tests.judged.expected import read_expected
from tests.judges import torch_judge, torch_models
from tests.judges.torch_cases import CASES
from tests.support.sample_tensors import same

READ = [name for name, case in CASES.items() if case.expect == "read"]
REFUSED = [name for name, case in CASES.items() if case.expect.startswith("refused")]
UNWRITABLE = [name for name, case in CASES.items() if not torch_judge.writable(case)]
OPTIMIZERS = [name for name in READ if CASES[name].moments]
REGROUPED = [name for name in OPTIMIZERS if CASES[name].moments.startswith("flattened")]
GROUPED = [name for name in OPTIMIZERS if name not in REGROUPED]
SEVERAL = [name for name in READ if CASES[name].files in ("several", "averaged")]


@pytest.fixture(scope="module")
def place(case, torch_made):
    return torch_made / case / "ckpt" / CASES[case].source


@pytest.fixture(scope="module")
def expected(case, torch_made):
    return read_expected(torch_made / case)


@pytest.fixture(scope="module")
def checkpoint(case, place):
    """Open a case once for all tests of it."""
    with reshard.open(place, **list_options(case)) as opened:
        yield opened


def list_options(case):
    """Return the options that the user passes beside the path."""
    case = CASES[case]
    said = {"model": case.model, "wrap": case.wrap, "key": case.key}
    return {word: value for word, value in said.items() if value is not None}


@pytest.mark.parametrize("case", READ, scope="module")
def test_weights_are_what_pytorch_reports(case, checkpoint, expected):
    weights = {**expected["params"], **expected["buffers"]}
    assert set(checkpoint) - set(expected["tied"]) == set(weights)
    for name, value in weights.items():
        assert same(checkpoint[name][...], value), name
    for alias, kept in expected["tied"].items():
        assert same(checkpoint[alias][...], weights[kept]), alias


@pytest.mark.parametrize("case", READ, scope="module")
def test_merge_keeps_every_bit(case, place, expected, tmp_path):
    out = tmp_path / "out.safetensors"
    report = reshard.merge(place, out, dtype="keep", **list_options(case))
    merged = load_file(out)
    weights = {**expected["params"], **expected["buffers"]}
    assert merged.keys() == weights.keys()
    for name, value in weights.items():
        assert same(merged[name], value), name
    assert report.verified
    assert report.dropped_aliases == expected["tied"]


@pytest.mark.parametrize("case", OPTIMIZERS, scope="module")
def test_optimizer_slots_are_what_pytorch_reports(case, checkpoint, expected):
    slots = {slot for held in expected["optimizer"].values() for slot in held}
    for slot in slots:
        wanted = {n: held[slot] for n, held in expected["optimizer"].items() if slot in held}
        found = checkpoint.optimizer(slot)
        assert found.keys() == wanted.keys(), slot
        for name, value in wanted.items():
            assert same(found[name][...], value), f"{slot} of {name}"


@pytest.mark.parametrize("case", OPTIMIZERS, scope="module")
def test_steps_are_what_pytorch_reports(case, checkpoint, expected):
    assert dict(checkpoint.manifest.train.optimizer_step) == expected["steps"]


@pytest.mark.parametrize("case", GROUPED, scope="module")
def test_parameter_groups_are_what_pytorch_reports(case, checkpoint, expected):
    groups = checkpoint.manifest.train.param_groups
    assert len(groups) == len(expected["groups"])
    for group, wanted in zip(groups, expected["groups"], strict=True):
        if CASES[case].moments == "rekeyed":  # ids are sorted: the model's order, not FSDP's
            assert sorted(group.fqns) == sorted(wanted["params"])
        else:
            assert list(group.fqns) == wanted["params"]
        hyper = {key: value for key, value in wanted.items() if key != "params"}
        assert dict(group.hyper) == hyper


@pytest.mark.parametrize("case", REGROUPED, scope="module")
def test_flattened_optimizer_keeps_what_holds_for_each_parameter(case, checkpoint, expected):
    """Which parameters were grouped is lost there; their settings are not."""
    groups = checkpoint.manifest.train.param_groups
    found = [(name, dict(group.hyper)) for group in groups for name in group.fqns]
    hypers = [{k: v for k, v in g.items() if k != "params"} for g in expected["groups"]]
    wanted = [
        (name, hyper)
        for group, hyper in zip(expected["groups"], hypers, strict=True)
        for name in group["params"]
    ]
    assert len(found) == len(wanted)
    assert dict(found) == dict(wanted)


@pytest.mark.parametrize("case", SEVERAL, scope="module")
def test_other_models_of_the_file_are_found_by_key(case, place, expected):
    for key, weights in expected["keys"].items():
        with reshard.open(place, key=key) as checkpoint:
            assert set(checkpoint) == set(weights)
            for name, value in weights.items():
                assert same(checkpoint[name][...], value), name


STEMS = ["{}_{}.pt", "{}-{}.bin", "{}{}.pth", "{}-{:05}-of-00002.pt", "rank{1}_{0}.pt"]
STEMS += ["{}_rank_{}_world_size_2.pt", "{}_rank{}of2.pt"]


@pytest.mark.parametrize("stem", STEMS)
def test_ranks_are_counted_by_shards_if_no_file_states_them(stem, torch_made, tmp_path):
    source = torch_made / "fsdp2_ranks" / "ckpt"
    for path in source.glob("*_rank*.pt"):
        kind, rank = path.stem.split("_rank")
        shutil.copy(path, tmp_path / stem.format(kind, int(rank)))
    expected = read_expected(source.parent)
    for given in (tmp_path, tmp_path / stem.format("model", 1)):  # a rank's file stands for all
        with reshard.open(given) as checkpoint:
            for name, value in expected["params"].items():
                assert same(checkpoint[name][...], value), name
            assert checkpoint.manifest.has_optimizer


def test_a_model_tells_which_members_of_several_groups_are_frozen(tmp_path):
    """Freeze the last of three blocks of the same shapes, which then has no state."""
    model = torch_models.mlp_frozen()
    matrices, others = [], []
    for parameter in model.parameters():
        (matrices if parameter.ndim > 1 else others).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.arange(8).view(2, 4)).backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "checkpoint.pt")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with reshard.open(tmp_path, model="tests.judges.torch_models:mlp_frozen") as checkpoint:
        found = checkpoint.optimizer("exp_avg")
        assert found.keys() == trained.keys()
        for name, parameter in trained.items():
            assert same(found[name][...], optimizer.state[parameter]["exp_avg"]), name


@pytest.mark.filterwarnings("ignore")
def test_a_state_dict_that_its_program_flattened_keeps_the_groups(tmp_path):
    """Keys are ``optimizer.param_groups.0.lr``, with the group's names under ``params``."""
    model = torch_models.mlp()
    named = list(model.named_parameters())
    groups = [{"params": named[:3]}, {"params": named[3:], "weight_decay": 0.3}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.arange(8).view(2, 4)).backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    flat, _ = flatten_state_dict({"model": weights, "optimizer": moments})
    dcp.save(flat, checkpoint_id=tmp_path, no_dist=True)
    with reshard.open(tmp_path) as checkpoint:
        found = checkpoint.optimizer("exp_avg")
        for name, parameter in named:
            assert same(found[name][...], optimizer.state[parameter]["exp_avg"]), name
        kept = checkpoint.manifest.train.param_groups
        assert [list(group.fqns) for group in kept] == [
            [name for name, _ in named[:3]],
            [name for name, _ in named[3:]],
        ]


@pytest.mark.parametrize("case", REFUSED, scope="module")
def test_refused(case, place, tmp_path):
    with pytest.raises(reshard.ReshardError):
        reshard.merge(place, tmp_path / "out.safetensors", **list_options(case))
    assert list(tmp_path.iterdir()) == []


def test_pytorch_still_refuses_to_write_what_the_table_says(tmp_path):
    with pytest.raises(torch_judge.JudgeError) as refusal:
        torch_judge.make_all(tmp_path, UNWRITABLE)
    for name in UNWRITABLE:
        assert CASES[name].expect.removeprefix("cannot be written: ") in str(refusal.value), name
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_items_of_ranks_are_told_from_other_numbers(torch_made, tmp_path):
    """As torch_checkpointing 0.1 names them; the first file by name has no tensors."""
    for path in (torch_made / "fsdp2_ranks" / "ckpt").iterdir():
        shutil.copy(path, tmp_path / path.name.replace("rank", ""))
    for rank in range(2):
        torch.save({"last_epoch": 3}, tmp_path / f"lr_scheduler_{rank}.pt")
    wanted = read_expected(torch_made / "fsdp2_ranks")
    with reshard.open(tmp_path) as checkpoint:
        for name, value in wanted["params"].items():
            assert same(checkpoint[name][...], value), name
        assert checkpoint.manifest.has_optimizer
