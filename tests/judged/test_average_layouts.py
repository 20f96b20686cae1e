"""``reshard average --to``: real frameworks load the mean from the layouts that `split` writes."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import reshard
from reshard.cli import cli
from reshard.errors import CorruptError, IncompleteError, UsageError
from reshard.formats.registry import list_built_in_writers
from tests.judged.test_average import MIXED, expected, mean_of, tag  # noqa: F401 - fixtures
from tests.judges import begin_worker as worker
from tests.judges import deepspeed_judge
from tests.judges.ranks import run_in_turn
from tests.support.sample_tensors import same
from tests.trainer import worlds

GROUPS = [{"lr": 1e-3, "weight_decay": 0.01}]
OF_A_RUN = ("trainer",)  # python -m trainer needs the settings of a run of its own


@pytest.fixture
def mixed(tag):  # noqa: F811
    """Return a checkpoint of one run of each framework."""
    return [tag(*each) for each in MIXED.items()]


@pytest.fixture
def mean(expected):  # noqa: F811
    """Return the mean of these checkpoints, as torch computes it in the stated arithmetic."""
    weights = [expected(*each) for each in MIXED.items()]
    return {name: mean_of(weights, name) for name in weights[0]}


@pytest.fixture
def groups(tmp_path):
    path = tmp_path / "groups.json"
    path.write_text(json.dumps(GROUPS))
    return path


def names_of(reader):
    return {name: reader[name][...] for name in reader}


@pytest.mark.parametrize("to", sorted(list_built_in_writers().keys() - {*OF_A_RUN}))
def test_every_layout_has_the_values_of_the_safetensors(mixed, tmp_path, groups, to):
    """Compare with two steps: average to a model's directory, then split it."""
    options = {"init_optimizer": "none"}
    if to == "ds-universal":
        options = {"init_optimizer": "zeros", "param_groups": groups}
    layout = {"to": to, "world_size": 2, **options}
    reshard.average(mixed, tmp_path / "mean", dtype="fp32")
    reshard.split(tmp_path / "mean", tmp_path / "two", **layout)
    report = reshard.average(mixed, tmp_path / "one", dtype="fp32", **layout)
    assert len(report.sources) == 4
    assert report.optimizer_tensors_left == 126
    with reshard.open(tmp_path / "one") as one, reshard.open(tmp_path / "two") as two:
        got, wanted = names_of(one), names_of(two)
        assert one.manifest.train.step == two.manifest.train.step
    assert got.keys() == wanted.keys()
    assert all(same(got[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_deepspeed_loads_the_mean(mixed, mean, tmp_path, groups):
    """Masters are the fp32 mean, the module's copy is its cast, and Adam begins."""
    anew = {"init_optimizer": "zeros", "param_groups": groups}
    alone = {"load_module_only": True}
    jobs = {
        "two": ("hf_z2", 2, anew, {}),
        "three": ("hf_z3", 3, anew, {}),
        "alone": ("hf_z2", 2, {"init_optimizer": "none"}, alone),
    }
    asked = {}
    for name, (case, ranks, options, how) in jobs.items():
        run, stage = tmp_path / f"{name}.run", int(case[-1])
        layout = {"to": "deepspeed", "zero_stage": stage, "world_size": ranks, **options}
        reshard.average(mixed, run, dtype="bf16", **layout)
        told = {"like": case, "load": run, "how": how, "steps": 2, "compile_aio": False}
        asked[name] = ranks, told
    for job, found in deepspeed_judge.JUDGE.run(tmp_path, asked).items():
        assert isinstance(found, dict), found
        loaded = found["loaded"]
        for name, value in mean.items():
            assert same(loaded["live"][name], value.bfloat16()), (job, name)
            if job != "alone":
                assert same(loaded["params"][name], value), (job, name)
        assert loaded["train"]["step"] == 0
        assert not any(t.any() for slot in loaded["slots"].values() for t in slot.values())


def test_the_module_keeps_the_dtype_in_which_it_was_trained(tag, tmp_path, groups):  # noqa: F811
    anew = {"to": "deepspeed", "init_optimizer": "zeros", "param_groups": groups}
    runs = [tmp_path / "a", tmp_path / "b"]
    for step, run in zip((2, 4), runs, strict=True):
        reshard.split(tag("hf", step), run, dtype="bf16", **anew)
    shutil.copy(tag("hf", 4) / "config.json", runs[1])
    reshard.average(runs, tmp_path / "out", **anew)
    reshard.average(runs, tmp_path / "mean.safetensors", dtype="fp32")
    (path,) = (tmp_path / "out").rglob("*model_states.pt")
    module = torch.load(path)["module"]
    assert {value.dtype for value in module.values()} == {torch.bfloat16}
    with reshard.open(tmp_path / "out") as got, reshard.open(tmp_path / "mean.safetensors") as mean:
        assert all(same(got[name][...], mean[name][...]) for name in mean)


@pytest.mark.slow
def test_fsdp_2_loads_the_mean(mixed, mean, tag, tmp_path):  # noqa: F811
    for to, options in (("dcp", {}), ("fsdp2", {"device": "cpu"})):
        reshard.average(mixed, tmp_path / to, dtype="fp32", to=to, world_size=2, **options)
    model = tag("hf", 2)
    jobs = [
        ("dcp", worker.weights_of_dcp, model, tmp_path / "dcp"),
        ("ranks", worker.weights_of_ranks, model, tmp_path / "fsdp2"),
    ]
    found = worlds.run(2, run_in_turn, jobs)[0]
    for name in ("dcp", "ranks"):
        assert found[name].keys() == mean.keys(), found[name]
        for fqn, value in mean.items():
            assert np.array_equal(found[name][fqn], value.numpy()), (name, fqn)


def test_transformers_loads_a_tied_mean(tag, expected, tmp_path):  # noqa: F811
    """From what HF Trainer resumes from, and as a plain state dict with both names."""
    cases = (("z3_tied", 4), ("dcp_tied", 6), ("hf_tied", 2))
    paths, weights = [tag(*each) for each in cases], [expected(*each) for each in cases]
    options = {"dtype": "fp32", "init_optimizer": "none"}
    reshard.average(paths, tmp_path / "model", to="hf-trainer", **options)
    reshard.average(paths, tmp_path / "model.pt", to="torch", **options)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model" / "checkpoint-0")
    other = LlamaForCausalLM(loaded.config)
    other.load_state_dict(torch.load(tmp_path / "model.pt")["model"])
    for model in (loaded, other):
        state = model.state_dict()
        for name in weights[0]:
            assert same(state[name], mean_of(weights, name)), name
        assert same(state["lm_head.weight"], state["model.embed_tokens.weight"])


LAYOUTS = {
    "deepspeed": {"zero_stage": 3, "world_size": 3},
    "dcp": {"world_size": 2},
    "megatron": {"tp": 2},
}


def files_of(folder):
    paths = folder.rglob("*")
    return {path.relative_to(folder): path.read_bytes() for path in paths if path.is_file()}


@pytest.mark.parametrize("to", LAYOUTS)
def test_order_and_workers_change_no_byte(mixed, tmp_path, to):
    options = {"to": to, "dtype": "bf16", "init_optimizer": "none", **LAYOUTS[to]}
    small = {"workers": 3, "max_memory_bytes": 1 << 19}
    reshard.average(mixed, tmp_path / "a", **options, workers=1)
    reshard.average(mixed[::-1], tmp_path / "b", **options, **small)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


@pytest.mark.parametrize("to", ["deepspeed", "megatron"])
def test_means_by_other_factors_are_another_save(mixed, tmp_path, to):
    """Their files have the same sources, names and sizes, but must not be mixed."""
    options = {"to": to, "dtype": "bf16", "init_optimizer": "none", **LAYOUTS[to]}
    reshard.average(mixed[:2], tmp_path / "a", **options)
    reshard.average(mixed[:2], tmp_path / "b", **options, weights="0.1,0.9")
    reshard.merge(tmp_path / "a", tmp_path / "merged")
    last = max(name for name in files_of(tmp_path / "a") if name.suffix == ".pt")
    shutil.copyfile(tmp_path / "b" / last, tmp_path / "a" / last)
    with pytest.raises(CorruptError, match="two saves are mixed"):
        reshard.merge(tmp_path / "a", tmp_path / "other")


def test_the_config_comes_along_and_the_progress_does_not(mixed, tag, tmp_path):  # noqa: F811
    """The mean is a model without steps, so HF Trainer must not skip data."""
    run = shutil.copytree(tag("hf", 4), tmp_path / "run")
    (run / "trainer_state.json").write_text(json.dumps({"global_step": 4}))
    (run / "tokenizer.json").write_text("{}")
    reshard.average([run, tag("hf", 2)], tmp_path / "out", to="dcp")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llama", "float32")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert not (tmp_path / "out" / "trainer_state.json").exists()


def test_what_is_refused_with_and_without_a_layout(tag, tmp_path):  # noqa: F811
    out, pair = tmp_path / "out", [tag("hf", 2), tag("hf", 4)]
    for problem, options in (
        ("--world-size: has no effect without --to", {"world_size": 2}),
        ("--zero-stage: has no effect without --to", {"zero_stage": 3}),
        ("--init-optimizer: has no effect without --to", {"init_optimizer": "zeros"}),
        ("--max-shard-size: has no effect with --to dcp", {"to": "dcp", "max_shard_bytes": 1}),
        ("--keep-fp32: has no effect with --to dcp", {"to": "dcp", "keep_fp32": ["norm"]}),
        ("--zero-stage: has no effect with --to dcp", {"to": "dcp", "zero_stage": 3}),
    ):
        with pytest.raises(UsageError, match=problem):
            reshard.average(pair, out, **options)
    with pytest.raises(IncompleteError, match="the mean: has no optimizer state"):
        reshard.average(pair, out, to="deepspeed")
    with pytest.raises(UsageError, match="no learning rate: the mean does not state"):
        reshard.average(pair, out, to="dcp", init_optimizer="zeros")
    assert not out.exists()


def test_the_command(sequences_made, tmp_path, capsys):
    options = ("--last", "3", "--ema", "0.5", "--to", "dcp", "--world-size", "2")
    words = ["average", str(sequences_made / "z1_bf16/run"), str(tmp_path / "dcp"), *options]
    page = tmp_path / "page.html"
    cli.main([*words, "--dry-run"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "would write" in shown
    assert "mean of 3 checkpoints" in shown
    cli.main([*words, "--json", "--html", str(page)], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert (found["command"], found["target"], found["ranks"]) == ("average", "dcp", 2)
    assert [each["given"] for each in found["sources"]] == ["1/4", "1/4", "1/2"]
    assert "global_step4" in page.read_text()
