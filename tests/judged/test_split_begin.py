"""New optimizers and user-defined param groups: real engines continue as with their own.

Three sources of derived state, each judged by what the real framework does next: weights alone, an
Adam at step 0 (bitwise as a fresh run from the same weights), and groups that are split anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

import reshard
from reshard.errors import IncompleteError, UnsupportedError, UsageError
from tests.judged.expected import read_expected
from tests.judges import begin_worker as worker
from tests.judges import deepspeed_judge, deepspeed_models
from tests.judges.ranks import run_in_turn
from tests.support.sample_tensors import same
from tests.trainer import worlds

pytestmark = pytest.mark.slow

STEPS = 3
OF_CASES = {"lr": 1e-3, "weight_decay": 0.01}  # deepspeed_cases.ADAMW
DECAY = [  # deepspeed_models.param_groups(model, "decay")
    {"match": r"^(?!.*norm)(?!extras\.)", "weight_decay": 0.1},
    {"weight_decay": 0.0},
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict[bool, Path]:
    """Return tied or not -> a Hugging Face directory of a bf16 model."""
    place = tmp_path_factory.mktemp("weights")
    for tied in (False, True):
        torch.manual_seed(3)
        model = deepspeed_models.llama(tied=tied).bfloat16()
        model.save_pretrained(place / str(tied))
    return {tied: place / str(tied) for tied in (False, True)}


@pytest.fixture
def groups_file(tmp_path):
    """Return a function that writes a file of groups."""

    def write(*groups) -> Path:
        path = tmp_path / "groups.json"
        path.write_text(json.dumps(groups))
        return path

    return write


@pytest.fixture(scope="module")
def engines(weights, made, tmp_path_factory):
    """Run all jobs of DeepSpeed in one process, because its imports take long."""
    place = tmp_path_factory.mktemp("engines")
    one, decay = place / "one.json", place / "decay.json"
    one.write_text(json.dumps([OF_CASES]))
    decay.write_text(json.dumps(DECAY))
    jobs = []
    module = {"load_module_only": True}
    for stage, case, tied in ((2, "hf_z2", False), (3, "hf_z3_tied", True)):
        for name, options in (
            ("zeros", {"init_optimizer": "zeros", "param_groups": one}),
            ("none", {"init_optimizer": "none"}),
        ):
            out = place / f"{name}{stage}.run"
            reshard.split(
                weights[tied], out, to="deepspeed", zero_stage=stage, world_size=2, **options
            )
        parts = {**module, "load_optimizer_states": False} if stage == 3 else module
        jobs += [
            (f"fresh{stage}", case, 2, {"begin": weights[tied]}),
            (f"zeros{stage}", case, 2, {"load": place / f"zeros{stage}.run"}),
            (f"none{stage}", case, 2, {"load": place / f"none{stage}.run", "how": parts}),
        ]
    jobs.append(("none at 1", "hf_z0_tied", 1, {"load": place / "none0.run", "how": module}))
    reshard.split(weights[True], place / "none0.run", to="deepspeed", init_optimizer="none")
    reshard.split(made / "z2_bf16/run", place / "decay.run", param_groups=decay)
    jobs.append(("decay", "z2_groups_decay", 2, {"load": place / "decay.run"}))
    turns = {"world_size": 4, "dtype": "fp32"}
    reshard.split(made / "z2_round_robin/run", place / "turns.run", param_groups=decay, **turns)
    jobs.append(("turns", "z2_round_robin_groups_ws4", 4, {"load": place / "turns.run"}))
    told = {"steps": STEPS, "compile_aio": False}
    found = deepspeed_judge.JUDGE.run(
        place / "out",
        {name: (ranks, {"like": case, **told, **more}) for name, case, ranks, more in jobs},
    )
    for result in found.values():
        assert isinstance(result, dict), result
    return found


@pytest.mark.parametrize("how", ["zeros", "none"])
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_trains_as_a_fresh_engine(engines, how, stage):
    got, wanted = engines[f"{how}{stage}"], engines[f"fresh{stage}"]
    assert got["losses"] == wanted["losses"]
    for part in ("params", "live"):
        for name, value in wanted["loaded"][part].items():
            assert same(got["loaded"][part][name], value), name
    for name, value in wanted["params"].items():
        assert same(got["params"][name], value), name


def test_deepspeeds_stage_0_loads_the_same_weights(engines, weights):
    """Not compared with a fresh engine: in 16 bits that has made an update before the first."""
    loaded = engines["none at 1"]["loaded"]
    with reshard.open(weights[True]) as wanted:
        for name in wanted:
            assert same(loaded["live"][name], wanted[name][...]), name
            assert same(loaded["params"][name], wanted[name][...].float()), name


def test_deepspeed_loads_the_new_adam(engines):
    for stage in (2, 3):
        loaded = engines[f"zeros{stage}"]["loaded"]
        assert all(not t.any() for slot in loaded["slots"].values() for t in slot.values())
        assert set(loaded["optimizer_steps"].values()) == {0.0}
        assert loaded["train"]["step"] == 0


@pytest.mark.parametrize(("name", "source"), [("decay", "z2_bf16"), ("turns", "z2_round_robin")])
def test_deepspeed_has_each_parameters_state_in_its_new_group(name, source, engines, made):
    loaded = engines[name]["loaded"]
    wanted = read_expected(made / source)
    for fqn, value in wanted["params"].items():
        assert same(loaded["params"][fqn], value), fqn
    for slot, tensors in wanted["slots"].items():
        assert tensors.keys() == loaded["slots"][slot].keys()
        for fqn, value in tensors.items():
            assert same(loaded["slots"][slot][fqn], value), (slot, fqn)
    groups = loaded["train"]["param_groups"]
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(1e-3, 0.1), (1e-3, 0.0)]
    assert loaded["train"]["step"] == wanted["train"]["step"]
    if name == "decay":  # the other is of another precision
        assert engines[name]["losses"][0] == pytest.approx(wanted["next"]["losses"][0], abs=1e-6)


def test_fsdp_2_trains_as_a_fresh_run(weights, tmp_path, groups_file):
    options = {"init_optimizer": "zeros", "param_groups": groups_file(*worker.GROUPS)}
    for to in ("dcp", "fsdp2"):
        mesh = {"device": "cpu"} if to == "fsdp2" else {}
        reshard.split(weights[True], tmp_path / to, to=to, world_size=2, **mesh, **options)
    jobs = [
        ("fresh", worker.fresh, weights[True], STEPS),
        ("dcp", worker.from_dcp, weights[True], tmp_path / "dcp", STEPS),
        ("ranks", worker.from_ranks, weights[True], tmp_path / "fsdp2", STEPS),
    ]
    for found in worlds.run(2, run_in_turn, jobs):
        assert isinstance(found["fresh"], list), found["fresh"]
        assert found["dcp"] == found["fresh"]
        assert found["ranks"] == found["fresh"]


@pytest.mark.parametrize("thaws", [True, False])
def test_a_run_trains_more_or_fewer_parameters_from_then_on(thaws, weights, tmp_path, groups_file):
    """Wanted are the losses of a program that changed its optimizer in memory."""
    place, out = tmp_path / "run", tmp_path / "out"
    job = ("run", worker.regrouped, weights[False], place, STEPS, thaws)
    wanted = worlds.run(2, run_in_turn, [job])[0]["run"]
    norms, others = worker.GROUPS
    others = {**others, "betas": [0.9, 0.999]} if thaws else {}
    others |= {"match": "^(?!.*norm)", "frozen": not thaws}
    report = reshard.split(place, out, param_groups=groups_file(norms, others))
    assert (report.optimizer_tensors_out > report.optimizer_tensors_in) == thaws
    job = ("out", worker.from_regrouped, weights[False], out, STEPS, thaws)
    assert worlds.run(2, run_in_turn, [job])[0]["out"] == wanted
    assert isinstance(wanted, list), wanted


# What is said, and what is refused


def test_the_report_says_what_is_derived(weights, tmp_path, groups_file):
    report = reshard.split(
        weights[False],
        tmp_path / "out",
        to="dcp",
        init_optimizer="zeros",
        param_groups=groups_file({"match": "norm", "lr": 1e-3}, {"lr": 1e-3}),
    )
    said = "\n".join(report.derived)
    for text in ("Adam at step 0", "cast from bfloat16", "5 + 16", "torch.optim.AdamW's defaults"):
        assert text in said, said
    assert (report.optimizer_tensors_in, report.optimizer_tensors_out) == (0, 42)
    assert not any("exp_avg" in text for text in report.kept)


def test_an_optimizer_that_begins_anew_keeps_the_sources_groups(made, tmp_path):
    source = made / "z2_groups_decay/run"
    report = reshard.split(source, tmp_path / "out", world_size=3, init_optimizer="zeros")
    assert any("optimizer tensors (--init-optimizer zeros)" in text for text in report.dropped)
    with reshard.open(source) as before, reshard.open(tmp_path / "out") as after:
        old, new = before.manifest.train, after.manifest.train
        assert [g.hyper for g in new.param_groups] == [
            {"amsgrad": False, **g.hyper} for g in old.param_groups
        ]
        assert [set(g.fqns) for g in new.param_groups] == [set(g.fqns) for g in old.param_groups]
        assert all(same(after[name][...], before[name][...]) for name in before)
        assert not any(t[...].any() for t in after.optimizer("exp_avg").values())


def test_a_source_without_an_optimizer_names_both_choices(weights, tmp_path):
    for to in ("deepspeed", "accelerate", "hf-trainer"):
        with pytest.raises(IncompleteError, match=r"none(.|\n)*--init-optimizer zeros"):
            reshard.split(weights[False], tmp_path / "out", to=to)
    with pytest.raises(UsageError, match="no learning rate"):
        reshard.split(weights[False], tmp_path / "out", to="dcp", init_optimizer="zeros")
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_by_index_asks_for_the_model(libraries, tmp_path):
    """Not for one that begins: the source has one, and with the model it is carried."""
    with pytest.raises(IncompleteError, match="cannot be assigned to parameters") as caught:
        reshard.split(libraries / "acc_ddp/ckpt", tmp_path / "out", world_size=3)
    assert "--model" in caught.value.remedy
    assert "zeros" not in caught.value.remedy


def test_an_optimizer_needs_to_know_the_model(weights, tmp_path, groups_file):
    alone = tmp_path / "model.safetensors"
    alone.write_bytes((weights[False] / "model.safetensors").read_bytes())
    options = {"to": "dcp", "init_optimizer": "zeros", "param_groups": groups_file({"lr": 1.0})}
    with pytest.raises(IncompleteError, match="--model"):
        reshard.split(alone, tmp_path / "out", **options)
    with pytest.raises(UnsupportedError, match="one tensor in the model"):
        reshard.split(alone, tmp_path / "out", **options, model=str(weights[True]))
    other = "tests.judges.library_models:llama"
    with pytest.raises(UsageError, match="another model"):
        reshard.split(alone, tmp_path / "out", **options, model=other)
    reshard.split(alone, tmp_path / "out", **options, model=str(weights[False]))


def test_only_an_adam_can_be_started(made, tmp_path):
    with pytest.raises(UnsupportedError, match="another optimizer"):
        reshard.split(made / "z1_sgd/run", tmp_path / "out", init_optimizer="zeros")


def test_malformed_groups_are_refused(made, tmp_path, groups_file):
    source = made / "z2_groups_decay/run"
    for said, *groups in (
        ("no group for", {"match": "norm"}),
        ("several places", {"match": "norm"}, {"match": "weight|extras"}),
        ("matches no parameter", {"match": "absent"}, {}),
        ("which the source does not train", {"fqns": ["extras.frozen"]}, {}),
        ("does not state weight_decay", {"lr": 1e-3}),
        ("several groups without match", {}, {}),
        ("not a regular expression", {"match": "("}),
        ("has 'params'", {"params": [0]}),
        ("must be a list of groups",),
        ("frozen and has hyper-parameters", {"match": "norm", "frozen": True, "lr": 1.0}, {}),
        ("has a value of 'frozen'", {"match": "norm", "frozen": "yes"}, {}),
        ("a match that is neither a string nor a list", {"match": 3}, {}),
        ("not a JSON object", "norm"),
        ("name its parameters with match or fqns", {"frozen": False}),
    ):
        with pytest.raises(UsageError, match=said):
            reshard.split(source, tmp_path / "out", param_groups=groups_file(*groups))
    (tmp_path / "groups.json").write_text("{")
    with pytest.raises(UsageError, match="is not a JSON file"):
        reshard.split(source, tmp_path / "out", param_groups=tmp_path / "groups.json")
    with pytest.raises(UsageError, match="exclude each other"):
        reshard.split(source, tmp_path / "out", weights_only=True, param_groups=tmp_path)


def test_groups_of_a_torch_scheduler_follow(libraries, tmp_path, groups_file):
    source = libraries / "acc_fsdp2_sharded/ckpt"
    with reshard.open(source) as checkpoint:
        before = checkpoint.manifest.train
    report = reshard.split(
        source,
        tmp_path / "out",
        param_groups=groups_file(
            {"match": "norm", "weight_decay": 0.0},
            {"match": "embed", "weight_decay": 0.2},
            {"weight_decay": 0.1},
        ),
    )
    with reshard.open(tmp_path / "out") as checkpoint:
        train = checkpoint.manifest.train
    assert [group.hyper["weight_decay"] for group in train.param_groups] == [0.0, 0.2, 0.1]
    assert len(before.param_groups) != 3
    assert len(train.scheduler["base_lrs"]) == 3
    assert set(train.scheduler["base_lrs"]) == set(before.scheduler["base_lrs"])
    assert any("scheduler's lists" in text for text in report.derived)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_names_that_transformers_changes_as_it_loads_are_the_models(groups_file, tmp_path):
    """Nemotron-H is ``backbone...`` in files, as on the Hub, and ``model...`` in memory."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = NemotronHConfig(
        vocab_size=64,
        hidden_size=32,
        layers_block_type=["mamba", "attention", "mlp"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
    )
    model = NemotronHForCausalLM(config)
    model.save_pretrained(tmp_path / "hf")
    with reshard.open(tmp_path / "hf") as saved:
        assert "backbone.embeddings.weight" in saved
    options = {"init_optimizer": "zeros", "param_groups": groups_file({"lr": 1e-3})}
    reshard.split(tmp_path / "hf", tmp_path / "run", to="dcp", **options)
    expected = model.state_dict()
    loaded = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path / "run", no_dist=True)
    for name, value in expected.items():
        assert torch.equal(loaded["model"][name], value), name
    reshard.merge(tmp_path / "run", tmp_path / "merged")
    again = NemotronHForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(again[name], value) for name, value in expected.items())
