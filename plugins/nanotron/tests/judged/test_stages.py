"""``--to nanotron --pp`` writes what nanotron's own models have at that number of stages.

``judge_pipeline.py`` made the runs with nanotron's models, ``build_model`` and
optimizers: runs of one model made the same updates.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import reshard
from plugins.nanotron.tests.judged.samples import KEPT, list_files, load_file
from reshard.errors import UnsupportedError, UsageError
from reshard_nanotron import stages
from tests.support.same_objects import is_same

GRIDS = {
    "qwen_tp2": {"tp": 2, "pp": 1, "dp": 1},
    "qwen_pp3dp2": {"tp": 1, "pp": 3, "dp": 2},
    "llama_pp2": {"tp": 1, "pp": 2, "dp": 1},
    "llama_tp2pp3": {"tp": 2, "pp": 3, "dp": 1},
}


PAIRS = [(one, two) for one in GRIDS for two in GRIDS if one.split("_")[0] == two.split("_")[0]]


@pytest.mark.parametrize(("source", "wanted"), PAIRS)
def test_every_file_is_what_nanotron_saved_there(source, wanted, tmp_path):
    """Tied embeddings on two stages, a param group and a scheduler's value each, ZeRO-1, fp32."""
    report = reshard.split(KEPT / source / "ckpt", tmp_path / "out", **GRIDS[wanted])
    theirs, ours = list_files(KEPT / wanted / "ckpt"), list_files(tmp_path / "out")
    assert list(ours) == list(theirs)
    assert all(is_same(load_file(ours[name]), load_file(path)) for name, path in theirs.items())
    assert not any("model_config" in text for text in report.notes)


def test_each_block_is_on_the_stage_that_build_model_gives_it():
    models = json.loads((KEPT / "stages.json").read_text())
    assert len(models) == 120
    for model in models:
        cost = stages.list_costs(model["config"])
        made = dict(zip(cost, stages.assign_stages([*cost.values()], model["pp"]), strict=True))
        assert made == {block: model["stages"][block] for block in cost}, model
    assert len({max(model["stages"].values()) for model in models}) > 3


def test_a_trainer_s_groups_keep_the_model_s_order_whatever_the_stages(tmp_path):
    with reshard.open(KEPT / "qwen_pp3dp2" / "ckpt") as checkpoint:
        manifest = checkpoint.manifest
    assert manifest.ordered
    names = [*checkpoint]
    assert names[0].startswith("model.token_position_embeddings")
    assert [len(group.fqns) for group in manifest.train.param_groups] == [1] * len(names)
    assert len(manifest.train.scheduler["base_lrs"]) == len(names)


def _configured(run, change):
    path = run / "3" / "model_config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "pp", "error", "says"),
    [
        (dict.clear, 1, UsageError, "model_config.json of a Llama"),
        (
            lambda said: said.update(vocab_size=100000),
            2,
            UnsupportedError,
            "differs from the stage",
        ),
        (lambda said: said.update(num_hidden_layers=2), 1, UnsupportedError, "none of the blocks"),
        (lambda said: said.update(num_hidden_layers=4), 1, UnsupportedError, "has no parameter of"),
        (lambda _said: None, 6, UsageError, "without a parameter"),
    ],
)
def test_stages_without_a_known_order_are_refused(change, pp, error, says, copied, tmp_path):
    run = copied("qwen_pp3dp2")
    _configured(run, change)
    with pytest.raises(error, match=says):
        reshard.split(run, tmp_path / "out", pp=pp, dp=2)
    assert not (tmp_path / "out").exists()


def test_stages_whose_schedulers_are_at_other_steps_are_refused(copied, tmp_path):
    run = copied("llama_pp2")
    path = next(run.rglob("lr_scheduler_pp-1-*"))
    saved = torch.load(path)
    torch.save({**saved, "last_epoch": saved["last_epoch"] + 1}, path)
    with pytest.raises(UnsupportedError, match="at different steps") as refused:
        reshard.split(run, tmp_path / "out", pp=1, dp=1)
    assert refused.value.remedy == "keep the source's --pp"


def test_weights_alone_go_to_other_stages(tmp_path):
    reshard.split(
        KEPT / "llama_pp2" / "ckpt", tmp_path / "out", pp=3, tp=2, dp=1, weights_only=True
    )
    theirs, ours = list_files(KEPT / "llama_tp2pp3" / "ckpt"), list_files(tmp_path / "out")
    assert {name for name in theirs if "/model/" in name} < set(ours)
    assert all(is_same(load_file(ours[name]), load_file(theirs[name])) for name in ours)


def test_weights_beside_schedulers_alone_go_to_other_stages(copied, tmp_path):
    run = copied("llama_pp2")
    for folder in run.rglob("optimizer"):
        shutil.rmtree(folder)
    with reshard.open(run) as checkpoint:
        assert checkpoint.manifest.train.scheduler["last_epoch"] == 3
    reshard.split(run, tmp_path / "out", pp=1, dp=1, weights_only=True)
    assert reshard.diff(run, tmp_path / "out", kinds=["weight"]).same


def test_a_run_without_schedulers_goes_to_other_stages_too(copied, tmp_path):
    run = copied("qwen_pp3dp2")
    shutil.rmtree(run / "3" / "lr_scheduler")
    reshard.split(run, tmp_path / "out", **GRIDS["qwen_tp2"])
    theirs, ours = list_files(KEPT / "qwen_tp2" / "ckpt"), list_files(tmp_path / "out")
    assert list(ours) == [name for name in theirs if "lr_scheduler" not in name]
    assert all(is_same(load_file(path), load_file(theirs[name])) for name, path in ours.items())


def test_stages_whose_groups_differ_are_refused(copied, tmp_path):
    run = copied("llama_pp2")
    path = next(run.rglob("optimizer_pp-1-*.pt"))
    saved = torch.load(path)
    saved["param_groups"][0]["weight_decay"] += 0.5
    torch.save(saved, path)
    with pytest.raises(UnsupportedError, match="its stages have different param groups"):
        reshard.split(run, tmp_path / "out", pp=1, dp=1)


def test_weights_alone_on_stages_of_another_rule_are_refused(copied, tmp_path):
    run = copied("qwen_pp3dp2")
    shutil.rmtree(run / "3" / "optimizer")
    shutil.rmtree(run / "3" / "lr_scheduler")
    _configured(run, lambda said: said.update(vocab_size=100000))
    with pytest.raises(UnsupportedError, match="weights are on other stages"):
        reshard.split(run, tmp_path / "out", pp=2, weights_only=True)
