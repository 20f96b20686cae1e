"""Checkpoints that real Megatron-core wrote, against what its models on one rank hold."""

from __future__ import annotations

import shutil
from argparse import Namespace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

import reshard
from reshard.errors import CorruptError, IncompleteError
from tests.judged.expected import read_expected
from tests.judges.megatron_judge import CASES

FORMS = [(name, form) for name, case in CASES.items() for form in case.forms]
EXPERTS, HIDDEN = 4, 32
STATED = (  # the arguments that Megatron-LM compares, and the grid
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "hidden_size"),
    *("num_attention_heads", "max_position_embeddings"),
)


def separate(tensors):
    """Separate the experts that Megatron's GroupedMLP keeps side by side, as it views them."""
    found = {}
    for name, tensor in tensors.items():
        prefix, side_by_side, number = name.partition(".mlp.experts.weight")
        if not side_by_side:
            found[name] = tensor
            continue
        shape = (EXPERTS, HIDDEN, -1) if number == "1" else (EXPERTS, -1, HIDDEN)
        for expert, matrix in enumerate(tensor.view(shape)):
            own = f"{prefix}.mlp.experts.local_experts.{expert}.linear_fc{number}.weight"
            found[own] = matrix.T
    return found


def change_states(run, change):
    """Save every file of a run that has arguments again, after ``change`` of its state."""
    paths = [*run.rglob("model_optim_rng.pt"), *run.rglob("common.pt")]
    assert paths
    for path in paths:
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)


def keep_args(names, state):
    state["args"] = Namespace(**{name: getattr(state["args"], name) for name in names})


@pytest.mark.parametrize(("case", "form"), FORMS)
def test_every_tensor_is_megatron_s_own(megatron_case, case, form):
    folder = megatron_case(case)
    expected = read_expected(folder)
    with reshard.open(folder / form) as checkpoint:
        manifest = checkpoint.manifest
        weights = separate(expected["params"])
        slots = {}
        for name, held in expected["optimizer"].items():
            for slot, value in held.items():
                if slot != "step":
                    slots.setdefault("master" if slot == "fp32_param" else slot, {})[name] = value
        wanted = {("param", name): tensor for name, tensor in weights.items()}
        for slot, held in slots.items():
            wanted |= {(slot, name): tensor for name, tensor in separate(held).items()}
        assert set(manifest.entries) == set(wanted)
        for (kind, name), tensor in wanted.items():
            found = stored(checkpoint, kind, name)
            assert found.dtype == tensor.dtype, name
            assert torch.equal(found, tensor), (kind, name)
        assert manifest.train.step == expected["step"]
        frozen = {name: expected["params"][name] for name in expected["frozen"]}
        assert manifest.frozen == set(separate(frozen))
        assert sum("frozen" in note for note in manifest.warnings) == bool(frozen)
        grouped = {fqn for group in manifest.train.param_groups for fqn in group.fqns}
        assert grouped == set(weights) - manifest.frozen
        assert set(manifest.train.optimizer_step.values()) == set(expected["steps"].values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("case", "form", "lacking"),
    [
        ("llama_tp2pp2vpp2", "torch", None),
        ("mixtral_ep2", "torch", None),
        ("mixtral_pp2ep2", "torch", None),
        ("mixtral_grouped_ep2", "torch", None),
        ("latent_tp2pp2vpp2ep2_etp1", "torch", None),
        ("llama_distopt_tp2dp2", "torch", "swiglu"),
        ("llama_distopt_tp2dp2", "torch_dist", "swiglu"),
        ("gpt2_tp2pp2", "torch", None),
        ("gpt2_buckets_pp2dp2", "torch", "untie_embeddings_and_output_weights"),
        ("llama_mtp_distopt", "torch", "mtp_num_layers"),
        ("llama_mtp_distopt", "torch_dist", "mtp_num_layers"),
    ],
)
def test_folders_and_shapes_show_what_no_argument_states(
    megatron_case, tmp_path, case, form, lacking
):
    """Programs that call Megatron-core themselves save few arguments, or none."""
    folder = megatron_case(case)
    run = shutil.copytree(folder / form, tmp_path / "run")
    change_states(
        run,
        lambda state: delattr(state["args"], lacking) if lacking else state.pop("args"),
    )
    expected = read_expected(folder)
    with reshard.open(run) as checkpoint:
        weights = separate(expected["params"])
        assert {entry.fqn for entry in checkpoint.manifest.of_kind("param")} == set(weights)
        for name, tensor in weights.items():
            assert torch.equal(stored(checkpoint, "param", name), tensor), name
        moments = {name: held["exp_avg"] for name, held in expected["optimizer"].items()}
        for name, tensor in separate(moments).items():
            assert torch.equal(stored(checkpoint, "exp_avg", name), tensor), name
    if lacking:
        reshard.split(run, tmp_path / "out", to="megatron", tp=1)
        assert not reshard.diff(tmp_path / "out", run).unequal


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_a_program_that_states_few_arguments_keeps_what_the_files_show(
    megatron_case, tmp_path, form
):
    """Layers, optimizer and rows are not the defaults of Megatron-LM."""
    run = shutil.copytree(megatron_case("llama_distopt_tp2dp2") / form, tmp_path / "run")
    change_states(run, partial(keep_args, STATED))
    reshard.split(run, tmp_path / "out", to="megatron", ckpt_format="torch", tp=1, dp=1)
    (folder,) = (tmp_path / "out").rglob("mp_rank_00")
    assert (folder / "distrib_optim.pt").exists()
    weights = torch.load(folder / "model_optim_rng.pt", weights_only=False)["model"]
    assert len(weights["embedding.word_embeddings.weight"]) == 96
    if form == "torch":
        first = next(run.rglob("mp_rank_00")) / "model_optim_rng.pt"
        assert list(weights) == list(torch.load(first, weights_only=False)["model"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_config_describes_a_model_whose_run_saved_other_arguments(megatron_case, tmp_path):
    """Keep the arguments that Megatron-SWIFT (ms-swift 4.6) saves: the grid and the optimizer."""
    folder = megatron_case("llama_distopt_tp2dp2")
    run = shutil.copytree(folder / "torch_dist", tmp_path / "run")
    kept = (*STATED[:2], "use_distributed_optimizer", "bf16", "clip_grad")
    change_states(run, partial(keep_args, kept))
    expected = read_expected(folder)
    with reshard.open(run) as checkpoint:
        for name, held in expected["optimizer"].items():
            assert torch.equal(stored(checkpoint, "exp_avg", name), held["exp_avg"]), name
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    LlamaConfig(**sizes, **heads).save_pretrained(run)
    reshard.merge(run, tmp_path / "model")
    assert "model.layers.3.mlp.up_proj.weight" in load_file(tmp_path / "model/model.safetensors")
    reshard.split(run, tmp_path / "out", to="megatron", tp=1, dp=1)
    assert not reshard.diff(tmp_path / "out", run).unequal
    (path,) = (tmp_path / "out").rglob("common.pt")
    args = torch.load(path, weights_only=False)["args"]
    assert (args.hidden_size, args.swiglu, args.clip_grad) == (32, True, 1.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_an_optimizer_apart_from_the_weights_is_named(megatron_case, tmp_path, form):
    """mcore_adapter (ROLL) saves it as ``torch_dist`` beside weights without arguments."""
    made = megatron_case("llama_distopt_tp2dp2")
    saved = made / "torch_dist" / "iter_0000003"
    place = shutil.copytree(saved, tmp_path / "run" / "iter_0000001" / "dist_optimizer").parent
    if form == "torch":
        for path in (made / "torch" / "iter_0000003").rglob("model_optim_rng.pt"):
            (place / path.parent.name).mkdir()
            state = torch.load(path, weights_only=False)
            torch.save({"model": state["model"]}, place / path.parent.name / path.name)
    else:
        shutil.copytree(saved, place / "dist_model")
        torch.save({}, place / "dist_model" / "common.pt")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("1")
    torch.save({"num_steps": 3}, tmp_path / "run" / "scheduler.pt")
    manifest = reshard.inspect(tmp_path / "run").manifest
    assert len(list(manifest.of_kind("param"))) == len(read_expected(made)["params"])
    assert any("dist_optimizer is of mcore_adapter" in note for note in manifest.warnings)
    with pytest.raises(IncompleteError, match=r"mcore_adapter \(ROLL\), .*\n.*--weights-only"):
        reshard.split(tmp_path / "run", tmp_path / "out", to="dcp", world_size=2)


def test_ranks_that_older_versions_do_not_save_are_named(megatron_case, tmp_path):
    """Before 0.18, only the ranks with the first copy of the experts saved their weights."""
    run = shutil.copytree(megatron_case("mixtral_distopt_tp4ep2_etp1") / "torch", tmp_path / "run")
    for folder in ("mp_rank_02_000", "mp_rank_03_001"):
        (run / "iter_0000003" / folder / "model_optim_rng.pt").unlink()
    with pytest.raises(
        IncompleteError,
        match=r"(?s)lacks the weights of mp_rank_02_000, mp_rank_03_001: of the 4 ranks .* only 2.*"
        r"save with --ckpt-format torch_dist",
    ):
        reshard.open(run)


@pytest.mark.parametrize(
    ("case", "moved", "text"),
    [
        ("llama_uneven", {"0": "1", "1": "0"}, "first pipeline stage"),
        ("llama_uneven", {"1": "2", "2": "1"}, "last pipeline stage"),
        ("llama_mtp_pp4", {"0": "1", "1": "0"}, "first pipeline stage"),
        ("llama_uneven", {"1": "2"}, "checksums states that .* is mp_rank_00_001"),
    ],
)
def test_files_of_other_stages_are_refused(megatron_case, tmp_path, case, moved, text):
    """Without args.rank: a stage between the others has no embedding and no final norm."""
    saved = megatron_case(case) / "torch"
    run = shutil.copytree(saved, tmp_path / "run")
    for source, destination in moved.items():
        path = "iter_0000003/mp_rank_00_00{}/model_optim_rng.pt"
        shutil.copy(saved / path.format(source), run / path.format(destination))
    with pytest.raises(CorruptError, match=text):
        reshard.merge(run, tmp_path / "out")
    checks = {check.name: check for check in reshard.verify(run).checks}
    assert checks["ranks"].status == "failed"


def test_the_buffers_of_experts_are_not_left_out(megatron_case, tmp_path):
    run = shutil.copytree(megatron_case("mixtral_distopt_ep2dp4") / "torch", tmp_path / "run")
    (run / "iter_0000003" / "mp_rank_00_001" / "distrib_optim.pt").unlink()
    with pytest.raises(IncompleteError, match=r"mp_rank_00_001: distrib_optim.pt is missing"):
        reshard.open(run)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_the_argument_that_divides_the_buffers_of_experts_is_named(megatron_case, tmp_path):
    """A program that calls Megatron-core itself does not save all arguments."""
    case = megatron_case("mixtral_grouped_distopt_ep2dp2")
    run = shutil.copytree(case / "torch_dist", tmp_path / "run")
    change_states(run, lambda state: delattr(state["args"], "moe_use_legacy_grouped_gemm"))
    with pytest.raises(
        CorruptError,
        match=r"is not divided as in Megatron.s layout .*\n.*moe_use_legacy_grouped_gemm",
    ):
        reshard.open(run)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_whole_buffers_of_experts_are_left_out_if_no_argument_divides_them(megatron_case, tmp_path):
    """Their size is that of separate experts, and no piece ends at the edge of a parameter."""
    case = megatron_case("mixtral_grouped_distopt_ep2dp2")
    run = shutil.copytree(case / "torch_dist_gather_scatter", tmp_path / "run")
    change_states(run, lambda state: delattr(state["args"], "moe_use_legacy_grouped_gemm"))
    manifest = reshard.inspect(run).manifest
    assert not manifest.has_optimizer
    assert any("do not state moe_grouped_gemm and" in warning for warning in manifest.warnings)


def test_buffers_of_another_grid_are_refused(megatron_case, tmp_path):
    """Exchange the arguments: the buffers of the second stage would be left out, as if frozen."""
    run = shutil.copytree(
        megatron_case("llama_fp32_distopt_pp2dp2") / "torch_dist", tmp_path / "run"
    )
    other = megatron_case("llama_fp16_distopt_dp2") / "torch_dist"
    shutil.copy(other / "iter_0000003" / "common.pt", run / "iter_0000003" / "common.pt")
    with pytest.raises(CorruptError, match=r"buffers of group 1, .* state \(tp 1, pp 1, ep 1\)"):
        reshard.open(run)


def stored(checkpoint, kind, name):
    if kind == "param":
        entries = {entry.fqn: entry for entry in checkpoint.manifest.of_kind("param")}
        return reshard.tensors.lazy.LazyTensor(entries[name], checkpoint._pool)[...]
    return checkpoint.optimizer(kind)[name][...]


@pytest.mark.parametrize("case", CASES)
def test_all_forms_of_a_run_are_the_same(megatron_case, case):
    first, *others = CASES[case].forms
    for other in others:
        report = reshard.diff(megatron_case(case) / first, megatron_case(case) / other)
        assert report.same, other
