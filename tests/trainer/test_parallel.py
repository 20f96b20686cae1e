"""A model cut by tensor and stage on real ranks, saved, and resumed on this grid and on others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.trainer import worlds
from trainer.core.data import Corpus
from trainer.errors import SettingsError
from trainer.resolve import resolve

HALF, END = 1, 2
COMMON = {
    "precision": "fp32",
    "seq_len": 16,
    "global_batch": 4,
    "micro_batch": 1,
    "steps": END,
    "save_every": HALF,
    "schedule_steps": END,
}
ONE = {"strategy": "fsdp2", "tp": 1, "pp": 1, "ep": 1, "pp_schedule": "1f1b"}
EXPERTS = {"model": "tiny-mixtral"}
RANKS, WHOLE, LOCAL = (
    {"sharded_files": "rank"},
    {"state_dict_type": "full"},
    {"state_dict_type": "local"},
)
GRIDS = {  # ranks, and flags of the trainer
    "one": (1, ONE),
    "dp2": (2, ONE),
    "tp2": (2, {**ONE, "tp": 2}),
    "pp2": (2, {**ONE, "pp": 2}),
    "pp2 gpipe": (2, {**ONE, "pp": 2, "pp_schedule": "gpipe"}),
    "tp2 tied": (2, {**ONE, "tp": 2, "tie_embeddings": True}),
    "tp2 whole": (2, {**ONE, **WHOLE, "tp": 2}),
    "tp2 recomputed": (2, {**ONE, "tp": 2, "activation_checkpointing": True}),
    "tp2 dp2": (4, {**ONE, "tp": 2}),
    "tp2 dp2 ddp": (4, {**ONE, "strategy": "ddp", "tp": 2}),
    "tp2 dp2 ranks": (4, {**ONE, **RANKS, "tp": 2}),
    "tp2 dp2 local": (4, {**ONE, **LOCAL, "tp": 2}),
    "pp2 tp2": (4, {**ONE, "pp": 2, "tp": 2}),
    "pp2 tp2 ranks": (4, {**ONE, **RANKS, "pp": 2, "tp": 2}),
    "experts": (1, {**ONE, **EXPERTS}),
    "ep2": (2, {**ONE, **EXPERTS, "ep": 2}),
    "ep2 dp2": (4, {**ONE, **EXPERTS, "ep": 2}),
    "ep2 tp2 ddp": (4, {**ONE, **EXPERTS, "strategy": "ddp", "ep": 2, "tp": 2}),
    "ep2 pp2 ranks": (4, {**ONE, **EXPERTS, **RANKS, "ep": 2, "pp": 2}),
    "pp2 dp2 bf16": (4, {**ONE, "strategy": "ddp", "pp": 2, "precision": "bf16"}),
    "pp2 dp2 fp16": (
        4,
        {**ONE, "pp": 2, "precision": "fp16", "initial_scale_power": 17, "hysteresis": 1},
    ),
}
ELSEWHERE = (  # from -> to
    ("tp2 dp2", "one"),
    ("tp2 dp2 ddp", "pp2"),
    ("pp2 tp2", "dp2"),
    ("pp2 tp2", "tp2"),
    ("tp2 whole", "pp2"),
    ("dp2", "pp2 tp2"),
    ("pp2", "tp2 dp2"),
    ("ep2 dp2", "experts"),
    ("ep2 tp2 ddp", "ep2"),
    ("experts", "ep2 dp2"),
)
NOISE = 1e-6  # relative: matrix products of other shapes, sums in another order
BITWISE = ("pp2", "pp2 gpipe")  # stages alone change neither products nor sums

pytestmark = pytest.mark.judge


def name_of(text):
    return text.replace(" ", "_")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("grids")


@pytest.fixture(scope="module")
def runs(place):
    """Return grid -> the unbroken run."""
    jobs = {}
    for grid, (ranks, chosen) in GRIDS.items():
        run = place / name_of(grid)
        jobs[grid] = ranks, {**COMMON, **chosen, "save": str(run), "log": f"{run}.jsonl"}
    return worlds.trained(jobs)


@pytest.fixture(scope="module")
def resumed(runs, place):
    """Return (from, to) -> the second half, at the other grid."""
    jobs = {}
    for source, target in (*((grid, grid) for grid in GRIDS), *ELSEWHERE):
        run = place / f"{name_of(source)}-to-{name_of(target)}"
        ranks, chosen = GRIDS[target]
        jobs[source, target] = (
            ranks,
            {
                "resume": str(place / name_of(source)),
                "tag": f"global_step{HALF}",
                "state_dict_type": "sharded",
                **chosen,
                "save": str(run),
                "log": f"{run}.jsonl",
                "is_saved": False,
            },
        )
    return worlds.trained(jobs)


@pytest.mark.parametrize("grid", [g for g in GRIDS if not re.search("16|tied|experts", g)])
def test_every_grid_trains_as_one_rank_does(runs, grid):
    run, one = runs[grid], runs["experts" if "ep2" in grid else "one"]
    assert run.values() == pytest.approx(one.values(), rel=NOISE)
    norms, expected = ([float.fromhex(norm) for norm in each.norms] for each in (run, one))
    assert norms == pytest.approx(expected, rel=NOISE)
    if grid in BITWISE:
        assert run == one


@pytest.mark.parametrize("grid", GRIDS)
def test_the_same_grid_goes_on_bit_by_bit(runs, resumed, grid):
    run, second = runs[grid], resumed[grid, grid]
    assert second.losses == run.losses[HALF:]
    assert second.norms == run.norms[HALF:]
    assert second.scales == run.scales[HALF:]
    assert second.digest == run.digest


def test_a_pipeline_scales_the_loss_of_fp16(runs):
    assert any(runs["pp2 dp2 fp16"].skipped)
    assert not all(runs["pp2 dp2 fp16"].skipped)


@pytest.mark.parametrize(("source", "target"), ELSEWHERE)
def test_another_grid_goes_on_within_noise(runs, resumed, source, target):
    rest = runs[source].values()[HALF:]
    assert resumed[source, target].values() == pytest.approx(rest, rel=NOISE)


@pytest.mark.parametrize(
    "grid", ["tp2", "tp2 tied", "tp2 dp2", "pp2 tp2", "ep2 dp2", "ep2 tp2 ddp"]
)
def test_the_whole_model_in_plain_transformers_has_the_same_loss(runs, place, grid, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    saved = place / name_of(grid) / f"global_step{HALF}"
    dcp_to_torch_save(saved / "pytorch_model_fsdp_0", tmp_path / "whole.pt")
    weights = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    if "tied" in grid:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(saved), dtype=torch.float32)
    model.load_state_dict(weights)
    size = COMMON["global_batch"]
    tokens = Corpus(None, COMMON["seq_len"], 0).get_samples(HALF * size, size)
    with torch.no_grad():
        loss = sum(float(model(input_ids=row, labels=row).loss) for row in tokens[:, None]) / size
    assert runs[grid].values()[HALF] == pytest.approx(loss, rel=2e-7)


def test_a_rank_file_has_what_tensor_and_data_parallelism_leave_of_each_parameter(runs, place):
    saved = place / "pp2_tp2_ranks" / f"global_step{END}"
    stages = []
    for rank in range(4):
        weights = torch.load(saved / f"pytorch_model_fsdp_0_rank{rank}.bin", weights_only=True)
        stages.append(sorted(weights))
        matrix = weights[f"model.layers.{rank // 2}.self_attn.q_proj.weight"]
        assert [type(how).__name__ for how in matrix.placements] == ["_StridedShard", "Shard"]
        assert matrix.device_mesh.mesh_dim_names == ("dp_shard", "tp")
        assert matrix.to_local().shape == (32, 64)
    first, _, last, _ = stages
    assert stages == [first, first, last, last]
    assert "model.embed_tokens.weight" in first
    assert "lm_head.weight" in last
    assert not set(first) & set(last)


def test_a_rank_file_has_some_experts_of_each_layer(runs, place):
    saved = place / "ep2_pp2_ranks" / f"global_step{END}"
    for rank in range(4):
        weights = torch.load(saved / f"pytorch_model_fsdp_0_rank{rank}.bin", weights_only=True)
        stack = weights[f"model.layers.{rank // 2}.mlp.experts.gate_up_proj"]
        assert stack.shape == (4, 176, 64)
        assert stack.to_local().shape == (2, 176, 64)
        assert stack.device_mesh.mesh_dim_names == ("dp_shard", "ep")


REFUSED = (
    ({"tp": 2, "strategy": "zero3"}, "flat partitions.*fsdp2"),
    ({"pp": 2, "strategy": "zero1"}, "zero1 does not support tp 1 x pp 2"),
    ({"tp": 2, "strategy": "fsdp"}, "FSDP 1 flattens"),
    ({"tp": 2, "strategy": "ddp", "engine": "deepspeed"}, "supports data parallelism only"),
    ({"tp": 2, "strategy": "ddp", "reduction": "canonical"}, "--reduction canonical.*--tp 1"),
    ({"tp": 3}, "4 ranks are not a multiple of tp 3"),
    ({"tp": 0}, "tp is 0"),
    ({"pp": 2, "state_dict_type": "full"}, "no rank has all layers"),
    ({"pp": 4, "accumulation": 2}, "1f1b schedule of 4 stages.*gpipe"),
    ({"tp": 2, "fsdp_cpu_ram_efficient_loading": True}, "whole modules"),
    ({"tp": 2, "global_batch": 3}, "data-parallel ranks"),
)


@pytest.mark.parametrize(("chosen", "why"), REFUSED)
def test_what_does_not_go_together_is_refused_by_name(chosen, why):
    with pytest.raises(SettingsError) as refused:
        resolve({"strategy": "fsdp2", "accumulation": 4, **chosen}, 4)
    assert_says(str(refused.value), why)


UNFIT = (
    (2, {"tp": 2, "model": "tiny-gpt2", "dropout": 0}, "no rule for transformer.wte"),
    (2, {"pp": 2, "model": "tiny-gpt2", "dropout": 0}, "no model.embed_tokens"),
    (2, {"tp": 2, "model": "tiny-gpt2", "dropout": 0.1}, "resid_pdrop 0.1|dropout 0.1"),
    (2, {"pp": 2, "tie_embeddings": True}, "embeddings are tied.*--no-tie-embeddings"),
    (2, {"ep": 2}, "--ep is 2, and LlamaForCausalLM has no layers with stacked experts"),
    (4, {"ep": 4, "model": "tiny-llama"}, "no layers with stacked experts"),
    (4, {"tp": 4}, "tp 4 does not divide num_key_value_heads 2"),
    (4, {"pp": 4}, "--pp is 4, and the model has 2 layers"),
)


def refusals(ranks, cases):
    from trainer.engines import build_engine

    messages = []
    for chosen in cases:
        settings = resolve({"strategy": "fsdp2", "accumulation": 4, **chosen}, ranks.world)
        try:
            build_engine(settings, ranks)
        except SettingsError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("world", [2, 4])
def test_a_model_that_cannot_be_cut_so_is_refused_by_name(world):
    cases = [(chosen, why) for ranks, chosen, why in UNFIT if ranks == world]
    everyone = worlds.run(world, refusals, [chosen for chosen, _ in cases])
    for messages in everyone:
        for message, (_, why) in zip(messages, cases, strict=True):
            assert_says(message, why)


def assert_says(message, why):
    assert re.search(why, message, re.DOTALL), message


def test_a_run_directory_from_before_model_parallelism_goes_on(tmp_path):
    from trainer.checkpoint import state

    job = {**COMMON, "strategy": "ddp", "save": str(tmp_path / "run"), "log": str(tmp_path / "log")}
    worlds.train_on(1, [job])
    file = Path(tmp_path / "run" / f"global_step{END}" / "trainer_state.json")
    document = json.loads(file.read_text())
    for name in state.SINCE_FORMAT_1:
        del document["settings"][name]
    file.write_text(json.dumps(document))
    assert resolve(state.read_inherited(str(tmp_path / "run"), None), 2).grid.dp == 2
