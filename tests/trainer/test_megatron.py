"""Megatron-LM's own directory: the real one is read, ours has its form, and runs go on from it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.trainer import worlds
from trainer.checkpoint import foreign, fsdp, megatron_read, megatron_rules
from trainer.checkpoint.contents import write_all
from trainer.errors import CheckpointError, SettingsError
from trainer.resolve import resolve

REAL = Path(__file__).resolve().parents[1] / "data" / "megatron" / "llama_tp2pp2"
MODEL = {  # of the real checkpoint, but for its vocabulary
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
HALF, END = 2, 3
COMMON = {
    "state_dict_type": "megatron",
    "seq_len": 8,
    "global_batch": 4,
    "micro_batch": 1,
    "steps": END,
    "save_every": HALF,
}
ONE = {"strategy": "fsdp2", "tp": 1, "pp": 1, "ep": 1, "precision": "fp32"}
GRIDS = {
    "one": (1, ONE),
    "dp2": (2, ONE),
    "tp2 tied": (2, {**ONE, "tp": 2, "tie_embeddings": True}),
    "tp2 pp2": (4, {**ONE, "tp": 2, "pp": 2}),
    "tp2 dp2 bf16": (4, {**ONE, "strategy": "ddp", "tp": 2, "precision": "bf16"}),
    "pp2 fp16": (2, {**ONE, "pp": 2, "precision": "fp16", "initial_scale_power": 12}),
    "pp2 single": (2, {**ONE, "pp": 2, "param_groups": "single"}),
    "ep2 pp2": (4, {**ONE, "model": "tiny-mixtral", "ep": 2, "pp": 2}),
}
ELSEWHERE = (
    ("one", "tp2 pp2"),
    ("tp2 pp2", "dp2"),
    ("tp2 tied", "one tied"),
    ("ep2 pp2", "tp2 experts"),
)
OTHER = {
    "one tied": (1, {**ONE, "tie_embeddings": True}),
    "tp2 experts": (2, {**ONE, "model": "tiny-mixtral", "tp": 2}),
}
NOISE = 1e-6  # relative

pytestmark = pytest.mark.judge


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("megatron")
    (place / "model").mkdir()
    (place / "model" / "config.json").write_text(json.dumps(MODEL))
    return place


def at(place, *grids):
    return place / "-to-".join(grids).replace(" ", "_")


@pytest.fixture(scope="module")
def runs(place):
    """Return grid -> the unbroken run; (from, to) -> the second half at the other grid."""
    jobs = {}
    for grid, (ranks, chosen) in GRIDS.items():
        run = at(place, grid)
        job = {**COMMON, "model": str(place / "model"), **chosen}
        jobs[grid] = ranks, {**job, "save": str(run), "log": f"{run}.jsonl"}
    found = worlds.trained(jobs)
    jobs = {}
    for source, target in (*((grid, grid) for grid in GRIDS), *ELSEWHERE):
        ranks, chosen = {**GRIDS, **OTHER}[target]
        run = at(place, source, target)
        begin = {"resume": str(at(place, source)), "tag": f"global_step{HALF}"}
        end = {"save": str(run), "log": f"{run}.jsonl", "is_saved": False}
        jobs[source, target] = ranks, {**begin, **chosen, **end}
    return found | worlds.trained(jobs)


def content(file):
    """Return a file as any reader without Megatron-LM gets it."""
    return megatron_read._load(file)


def files(directory):
    (iteration,) = directory.glob("iter_*")
    return {path.parent.name: path for path in sorted(iteration.glob("*/model_optim_rng.pt"))}


def form(value):
    """Return keys, types, dtypes and shapes, but not the number of a vocabulary's rows."""
    if isinstance(value, torch.Tensor):
        rows = (
            ["vocabulary", *value.shape[1:]]
            if value.ndim == 2 and len(value) in (64, 256)
            else [*value.shape]
        )
        return str(value.dtype), rows
    if isinstance(value, dict):
        return type(value).__name__, {key: form(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and len(value) < 20:
        return type(value).__name__, [form(each) for each in value]
    return type(value).__name__


def test_real_files_are_what_megatron_lm_itself_makes_of_them():
    from transformers import AutoConfig

    config = AutoConfig.for_model(**{**MODEL, "vocab_size": 128})
    saved = megatron_read.Saved(REAL / "ckpt", config)
    whole = megatron_rules.derive_sizes(config, padded_vocab=128, tp=1, ep=1)
    rules = list(megatron_rules.list_rules(whole, range(4), first=True, last=True))
    found = dict(saved.iterate_tensors({name for rule in rules for name in rule.names}))
    expected = json.loads((REAL / "expected.json").read_text())
    assert {rule.keys[0] for rule in rules} == set(expected)
    for rule in rules:
        (key,) = rule.keys
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            (tensor,) = rule.cut([found[name][kind] for name in rule.names], 0, 0)
            digest = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
            assert digest == expected[key][kind], (key, kind)


def test_the_files_have_the_form_of_real_ones(runs, place):
    ours = files(at(place, "tp2 pp2") / f"global_step{END}")
    theirs = files(REAL / "ckpt")
    assert [*ours] == [*theirs]
    for name, file in ours.items():
        own, real = content(file), content(theirs[name])
        arguments, known = vars(own.pop("args")), vars(real.pop("args"))
        assert form(own) == form(real)
        assert [*own["model"]] == [*real["model"]]  # in their order, which numbers the optimizer
        assert set(arguments) <= set(known)
        assert [
            key
            for key, value in arguments.items()
            if type(value) is not type(known[key]) and None not in (value, known[key])
        ] == []
        sizes = (
            "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups "
            "group_query_attention kv_channels swiglu normalization position_embedding_type "
            "untie_embeddings_and_output_weights tensor_model_parallel_size num_experts "
            "pipeline_model_parallel_size expert_model_parallel_size params_dtype "
            "expert_tensor_parallel_size add_qkv_bias add_bias_linear rotary_base bf16"
        )
        assert {n: arguments[n] for n in sizes.split()} == {n: known[n] for n in sizes.split()}


def test_the_directory_is_what_load_of_megatron_lm_takes(runs, place):
    saved = at(place, "tp2 pp2") / f"global_step{END}"
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(END)
    assert {path.name for path in saved.glob("iter_*")} == {f"iter_{END:07d}"}
    assert [*files(at(place, "one") / f"global_step{END}")] == ["mp_rank_00"]
    assert [*files(at(place, "tp2 dp2 bf16") / f"global_step{END}")] == ["mp_rank_00", "mp_rank_01"]


def test_the_vocabulary_is_padded_with_rows_of_zeros(runs, place):
    saved = files(at(place, "tp2 pp2") / f"global_step{END}")
    first, second = (content(saved[f"mp_rank_0{tp}_000"]) for tp in (0, 1))
    assert first["args"].padded_vocab_size == 512
    key = "embedding.word_embeddings.weight"
    assert len(first["model"][key]) == len(second["model"][key]) == 256
    assert second["model"][key][0].any()
    assert not second["model"][key][1:].any()
    assert not second["optimizer"]["state"][0]["exp_avg_sq"][1:].any()


def test_a_bf16_model_is_the_cast_of_its_masters(runs, place):
    for file in files(at(place, "tp2 dp2 bf16") / f"global_step{END}").values():
        saved = content(file)
        assert set(saved["optimizer"]) == {"optimizer", "fp32_from_fp16_params"}
        masters = [m for group in saved["optimizer"]["fp32_from_fp16_params"] for m in group]
        weights = [value for value in saved["model"].values() if value is not None]
        in_order = sorted(weights, key=lambda weight: weight.ndim, reverse=True)
        assert len(masters) == len(in_order) == len(saved["optimizer"]["optimizer"]["state"])
        for master, weight in zip(masters, in_order, strict=True):
            assert master.dtype == torch.float32
            assert weight.dtype == torch.bfloat16
            assert torch.equal(master.bfloat16(), weight)


def test_each_expert_rank_has_its_experts_and_an_optimizer_of_theirs(runs, place):
    saved = files(at(place, "ep2 pp2") / f"global_step{END}")
    assert [*saved] == [f"mp_rank_00_00{pp}_00{ep}" for pp in (0, 1) for ep in (0, 1)]
    first, second = (content(saved[f"mp_rank_00_000_00{ep}"]) for ep in (0, 1))
    assert first["args"].num_experts == 4
    experts = [
        f"decoder.layers.0.mlp.experts.local_experts.{number}.linear_fc{which}.weight"
        for number in (0, 1)
        for which in (1, 2)
    ]
    shapes = [tuple(first["model"][key].shape) for key in experts]
    assert shapes == [(176, 64), (64, 88)] * 2
    for key, value in first["model"].items():
        if value is not None and not key.endswith("_extra_state"):
            assert torch.equal(value, second["model"][key]) == (key not in experts), key
    dense, apart = first["optimizer"]
    assert [group["is_expert_parallel"] for group in apart["param_groups"]] == [True]
    assert [tuple(state["exp_avg"].shape) for state in apart["state"].values()] == shapes
    assert len(dense["state"]) + len(experts) == sum(v is not None for v in first["model"].values())


def test_fp16_has_its_scaler(runs, place):
    saved = content(files(at(place, "pp2 fp16") / f"global_step{END}")["mp_rank_00_000"])
    scaler = saved["optimizer"]["grad_scaler"]
    assert scaler["scale"].tolist() == [runs["pp2 fp16"].scales[-1]]
    assert scaler["growth_tracker"] == END


@pytest.mark.parametrize("grid", GRIDS)
def test_the_same_grid_goes_on_bit_by_bit(runs, grid):
    run, second = runs[grid], runs[grid, grid]
    assert second.losses == run.losses[HALF:]
    assert second.norms == run.norms[HALF:]
    assert second.digest == run.digest


@pytest.mark.parametrize(("source", "target"), ELSEWHERE)
def test_another_grid_goes_on_within_noise(runs, source, target):
    rest = runs[source].values()[HALF:]
    assert runs[source, target].values() == pytest.approx(rest, rel=NOISE)


def test_progress_is_told_by_the_files_alone(runs, place, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(at(place, "tp2 pp2") / f"global_step{HALF}", copy)
    (copy / "trainer_state.json").unlink()
    run = at(tmp_path, "run")
    job = {**COMMON, **GRIDS["tp2 pp2"][1], "model": str(place / "model"), "resume": str(copy)}
    (reported, *_) = worlds.train_on(4, [{**job, "save": str(run), "log": f"{run}.jsonl"}])
    assert reported[0].losses == runs["tp2 pp2"].losses[HALF:]
    assert reported[0].digest == runs["tp2 pp2"].digest


def try_to_read(ranks, cases):
    """Return the result or the error of each checkpoint's reader."""
    from trainer.engines import build_engine

    messages = []
    for chosen, directory in cases:
        try:
            engine = build_engine(resolve(chosen, ranks.world), ranks)
            fsdp.read(Path(directory), engine)
            messages.append("read")
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_read_is_refused_by_name(runs, place, tmp_path):
    source = at(place, "tp2 pp2") / f"global_step{END}"
    iteration = f"iter_{END:07d}"
    chosen = {**ONE, "model": str(place / "model"), "seq_len": 8}

    def damaged(name, change):
        shutil.copytree(source, tmp_path / name)
        change(tmp_path / name)
        return str(tmp_path / name)

    def with_args(**changes):
        def change(directory):
            file = files(directory)["mp_rank_00_000"]
            saved = content(file)
            saved["args"] = Namespace(**{**vars(saved["args"]), **changes})
            file.unlink()  # what was read is mapped from it
            torch.save(saved, file, pickle_module=foreign)

        return change

    lost = f"{iteration}/mp_rank_01_001/model_optim_rng.pt"
    cases = {
        "mp_rank_01_001.*is missing": (chosen, damaged("lost", lambda d: (d / lost).unlink())),
        "saved with a distributed optimizer": (
            chosen,
            damaged("distributed", with_args(use_distributed_optimizer=True)),
        ),
        "saved with interleaved stages": (
            chosen,
            damaged("vpp", with_args(virtual_pipeline_model_parallel_size=2)),
        ),
        "no mp_rank_00": (chosen, damaged("none", lambda d: shutil.rmtree(d / iteration))),
        "has 'release'": (
            chosen,
            damaged(
                "release",
                lambda d: (d / "latest_checkpointed_iteration.txt").write_text("release"),
            ),
        ),
        "FSDP 1 has no parameters to fill": (
            {**chosen, "strategy": "fsdp", "state_dict_type": "sharded"},
            str(source),
        ),
        "not in Megatron-LM's torch format: (KeyError|ValueError)": (
            {**chosen, "model": "tiny-llama"},
            str(source),
        ),
    }
    (reported,) = worlds.run(1, try_to_read, list(cases.values()))
    for message, why in zip(reported, cases, strict=True):
        assert re.search(why, message), (why, message)


def written(ranks, chosen, directory):
    from trainer.engines import build_engine

    try:
        engine = build_engine(resolve(chosen, ranks.world), ranks)
        nothing = {"step": 0, "skipped": 0, "samples": 0, "updates": 0}
        write_all(Path(directory), fsdp.collect(engine, nothing), ranks)
    except CheckpointError as error:
        return str(error)
    return "written"


def test_stages_of_other_sizes_are_refused_by_name(place, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 3}))
    chosen = {**COMMON, **ONE, "pp": 2, "model": str(tmp_path)}
    for message in worlds.run(2, written, chosen, str(tmp_path)):
        assert "pp 2 does not divide 3" in message
        assert "--state-dict-type sharded" in message


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({"strategy": "fsdp"}, "FSDP 1 flattens"),
        ({"strategy": "fsdp2", "freeze": ("embed",)}, "--freeze"),
    ],
)
def test_what_does_not_go_together_is_refused(chosen, why):
    with pytest.raises(SettingsError, match=why):
        resolve({"state_dict_type": "megatron", **chosen}, 2)
