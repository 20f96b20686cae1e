"""``reshard diff`` on what real frameworks wrote, and on the same state in another layout."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from tests.support.programs import run_reshard

RICH = ("deepspeed", "ds-universal", "dcp", "fsdp2", "torch")  # have a place for everything
SOURCES = {
    "deepspeed 2": ("made", "z2_fp16_overflow/run"),
    "deepspeed 3": ("made", "hf_z3_tied/run"),
    "groups": ("made", "z1_groups_decay/run"),
    "dcp": ("torch_made", "fsdp2_dcp_groups/ckpt"),
    "trainer": ("libraries", "trainer_single/ckpt"),
}


@pytest.fixture
def source(request, name):
    fixture, path = SOURCES[name]
    return request.getfixturevalue(fixture) / path


@pytest.mark.parametrize("name", SOURCES)
def test_a_checkpoint_is_the_same_as_itself(name, source):
    report = reshard.diff(source, source)
    assert report.same
    assert report.equal


@pytest.mark.parametrize("to", RICH)
@pytest.mark.parametrize("name", ["deepspeed 2", "deepspeed 3", "groups", "dcp"])
def test_another_layout_is_the_same_training_state(name, to, source, tmp_path):
    told = {"model": "tests.judges.torch_models:menagerie"} if name == "dcp" else {}
    reshard.split(source, tmp_path / "out", to=to, world_size=3, **told)
    report = reshard.diff(source, tmp_path / "out", ignore=["^rng$"])
    assert report.same, list(report.lines())
    assert not report.only_a


def test_differences_of_two_runs_are_located(made):
    report = reshard.diff(made / "z2_fp32/run", made / "z3_fp32/run")
    assert report.exit_code == 1
    with reshard.open(made / "z2_fp32/run") as a, reshard.open(made / "z3_fp32/run") as b:
        for each in report.unequal:
            if each.kind != "weight":
                continue
            left, right = a[each.fqn][...], b[each.fqn][...]
            assert each.count == int((left != right).sum())
            assert tuple((left != right).nonzero()[0].tolist()) == each.at
            assert each.max_abs == float((left.double() - right.double()).abs().max())
        named = {each.fqn for each in report.unequal if each.kind == "weight"}
        assert named == {n for n in a if n in b and not torch.equal(a[n][...], b[n][...])}


def test_merged_weights_are_those_of_the_run_as_if_cast(made, tmp_path):
    source, out = made / "z3_bf16/run", tmp_path / "m.safetensors"
    reshard.merge(source, out, dtype="bf16")
    assert reshard.diff(source, out, kinds=["weight"], dtype="bf16").same
    strict = reshard.diff(source, out, kinds=["weight"])
    assert {each.what for each in strict.unequal} == {"dtype"}
    assert not reshard.diff(source, out).same, "the optimizer is missing"


def test_a_head_that_merge_did_not_write_twice_is_compared_with_the_embedding(libraries, tmp_path):
    """A full state dict of FSDP has both, and no file beside it says that they are tied."""
    source, out = libraries / "acc_fsdp1_full/ckpt", tmp_path / "m.safetensors"
    reshard.merge(source, out)
    for sides in ((source, out), (out, source)):
        report = reshard.diff(*sides, kinds=["weight"])
        assert report.same, list(report.lines())
    weights = load_file(out)
    weights["llama.model.embed_tokens.weight"][2, 1] += 1
    save_file(weights, out)
    report = reshard.diff(source, out, kinds=["weight"])
    names = {each.fqn for each in report.unequal}
    assert names == {"llama.model.embed_tokens.weight", "llama.lm_head.weight"}


def test_a_part_of_the_model_called_module_is_no_difference(libraries, tmp_path):
    """Accelerate removes DDP's ``module`` itself; a file of weights alone does not say so."""
    source, out = libraries / "acc_ddp/ckpt", tmp_path / "m.safetensors"
    reshard.merge(source, out)
    assert "module.count" in load_file(out)
    for sides in ((source, out), (out, source)):
        report = reshard.diff(*sides, kinds=["weight"])
        assert report.same, list(report.lines())


def test_a_difference_of_dtype_alone_is_explained(made, tmp_path):
    run = made / "z1_bf16" / "run"
    reshard.merge(run, tmp_path / "wide.safetensors", dtype="fp32")
    reshard.merge(run, tmp_path / "narrow.safetensors", dtype="bf16")
    sides = tmp_path / "wide.safetensors", tmp_path / "narrow.safetensors"
    found = reshard.diff(*sides)
    (note,) = found.notes
    assert note.startswith(f"{len(found.unequal)} of the unequal tensors differ only in dtype")
    assert note.endswith(
        "as bfloat16, their values are the same; --dtype bfloat16 compares them in this dtype"
    )
    again = reshard.diff(*sides, dtype="bfloat16")
    assert again.same
    assert not again.notes


def test_shapes_and_names(made, tmp_path):
    source, out = made / "z3_fp32/run", tmp_path / "m.safetensors"
    reshard.merge(source, out)
    tensors = load_file(out)
    first, second, *_ = [name for name, value in tensors.items() if value.dim() == 2]
    tensors[first] = tensors[first].T.contiguous()
    tensors["other"] = tensors.pop(second)
    save_file(tensors, tmp_path / "n.safetensors")
    report = reshard.diff(out, tmp_path / "n.safetensors")
    assert [(each.fqn, each.what) for each in report.unequal] == [(first, "shape")]
    assert report.only_a == [("weight", second)]
    assert report.only_b == [("weight", "other")]
    assert not reshard.diff(out, tmp_path / "n.safetensors", ignore=[f"^{second}$"]).same
    ignored = [f"^{name}$" for name in (first, second, "other")]
    assert reshard.diff(out, tmp_path / "n.safetensors", ignore=ignored).same


def test_hyper_parameters_and_steps(torch_made, tmp_path):
    source = torch_made / "plain_groups/ckpt"
    reshard.split(source, tmp_path / "a", to="torch", world_size=1)
    (path,) = (tmp_path / "a").glob("*.pt")
    state = torch.load(path, weights_only=False)
    state["optimizer"]["param_groups"][0]["lr"] *= 2
    state["optimizer"]["state"][0]["step"] += 1
    (tmp_path / "b").mkdir()
    torch.save(state, tmp_path / "b" / path.name)
    report = reshard.diff(tmp_path / "a", tmp_path / "b")
    assert not report.unequal
    assert [value.name.split(" of ")[0] for value in report.train] == [
        "step",
        "optimizer step",
        "lr",
    ]
    assert reshard.diff(tmp_path / "a", tmp_path / "b", kinds=["weight", "optimizer"]).same


def test_the_command(made):
    def run(*arguments):
        return run_reshard("diff", *arguments)

    a, b = made / "z2_fp32/run", made / "z3_fp32/run"
    same = run(a, a, "--json")
    assert same.returncode == 0
    assert json.loads(same.stdout)["same"] is True
    assert run(a, b).returncode == 1
    assert run(a, b, "--rtol", "1", "--atol", "1").returncode == 0
    assert run(a, b, "--exact", "--rtol", "1").returncode == 2
    assert run(a, b, "--kind", "nothing").returncode == 2
    assert run(a, "nowhere").returncode == 2
