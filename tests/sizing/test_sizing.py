"""Forecasts against textbook figures, the ZeRO paper, DeepSpeed's estimators and transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from reshard.errors import UsageError
from reshard.sizing.families import UnknownSizesError, count_config
from reshard.sizing.rank_share import take_share
from reshard.sizing.setup import Cluster, Training, count_accumulation, parse_gpus
from reshard.sizing.sources import count_parameters, count_shapes, find_model
from reshard.sizing.strategies import forecast
from reshard.sizing.strategy_choice import advise, choose, choose_named, find_nodes
from tests.support.model_configs import GPT2_MEDIUM, LLAMA_1B

GB = 10**9
CONFIGS = json.loads((Path(__file__).parents[1] / "data/published_configs.json").read_text())
LLAMA_2_7B, MIXTRAL = CONFIGS["Llama-2-7b"], CONFIGS["Mixtral-8x7B-v0.1"]
DEEPSEEK_V3 = CONFIGS["DeepSeek-V3 (bf16)"]
# Parameters that the authors of the models publish, or that safetensors' index of the Hub shows.
PUBLISHED = {
    "Llama-2-7b": 6_738_415_616,
    "Llama-3.1-8B": 8_030_261_248,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "DeepSeek-V3 (bf16)": 671_026_404_352,
    "gpt2": 124_439_808,
}


def rows_of(model, cluster, **settings):
    rows = forecast(model, cluster, Training(**settings))
    return {row.strategy.name: row for row in rows}


@pytest.mark.parametrize("name", PUBLISHED)
def test_formulas_count_published_models(name):
    assert count_config(CONFIGS[name], "config.json").numel == PUBLISHED[name]


def test_the_figure_of_the_zero_paper():
    """7.5B parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB (Rajbhandari et al., figure 1)."""
    rows = rows_of(count_parameters("7.5B"), Cluster(8, 80 * GB, nodes=8))
    names = ("ddp", "zero1", "zero2", "zero3")
    found = [round(rows[name].states / GB, 1) for name in names]
    assert found == [120.0, 31.4, 16.6, 1.9]
    one = rows["ddp"].states
    factors = [one / rows[name].states for name in names[1:]]
    assert [round(factor) for factor in factors] == [4, 7, 64]  # 4x, 8x and 64x without bound on N
    assert one / rows_of(count_parameters("7.5B"), Cluster(8, GB, nodes=10**6))[
        "zero2"
    ].states == pytest.approx(8, rel=1e-3)


def test_communication_is_that_of_the_zero_paper():
    """2P elements for stages 0 to 2 and 3P for stage 3 (section 7), 2 bytes each."""
    rows = rows_of(count_parameters("1B"), Cluster(8, 80 * GB, nodes=128))
    sent = {name: row.sent / (2 * 10**9) for name, row in rows.items()}
    assert sent["zero1"] == pytest.approx(2, rel=2e-3)
    assert sent["zero2"] == pytest.approx(2, rel=2e-3)
    assert sent["zero3"] == pytest.approx(3, rel=2e-3)
    assert sent["ddp"] == pytest.approx(4, rel=2e-3)  # gradients in float32


def test_offload_moves_masters_moments_and_parameters_to_the_host():
    rows = rows_of(count_parameters("1B"), Cluster(4, 80 * GB))
    optimizer, everything = rows["zero3-offload-optimizer"], rows["zero3-offload"]
    assert (optimizer.masters, optimizer.moments, optimizer.gradients) == (0, 0, 0)
    assert optimizer.host == (12 + 4 + 2) * GB
    assert everything.parameters == 0
    assert everything.host == optimizer.host + 2 * GB


def test_tensor_pipeline_and_expert_ranks_divide_a_model():
    model = count_config(MIXTRAL, "mixtral")
    whole = take_share(model, Training())
    assert whole.numel == model.numel
    cut = take_share(model, Training(tp=2))
    assert cut.numel == pytest.approx(model.numel / 2, rel=1e-3)
    assert cut.saved_bytes < whole.saved_bytes
    experts = take_share(model, Training(ep=8))
    assert experts.expert_trained * 8 == whole.expert_trained
    assert experts.trained == whole.trained
    stages = take_share(model, Training(pp=4))
    assert stages.numel == pytest.approx(model.numel / 4, rel=0.02)


def test_the_logits_of_the_last_stage_count_if_another_stage_has_more_parameters():
    model, cluster = count_config(GPT2_MEDIUM, "gpt2"), Cluster(2, 80 * GB)
    cut = rows_of(model, cluster, pp=2)["ddp"]  # the position embedding is on the first stage
    assert cut.logits == rows_of(model, cluster)["ddp"].logits > 0


def test_experts_are_sharded_over_their_replicas():
    """With 8 expert-parallel ranks of 8, an expert has one replica, with all of its state."""
    model = count_config(MIXTRAL, "mixtral")
    share = take_share(model, Training(ep=8))
    row = rows_of(model, Cluster(8, 80 * GB), ep=8)["zero3"]
    assert row.moments == 8 * (-(-share.trained // 8) + share.expert_trained)


def test_hsdp_shards_within_a_node():
    rows = rows_of(count_parameters("7B"), Cluster(8, 80 * GB, nodes=4))
    assert rows["hsdp"].states == pytest.approx(4 * rows["fsdp"].states, rel=1e-6)
    assert rows["hsdp"].sent < rows["fsdp"].sent + 4 * 2 * 7 * GB
    assert "hsdp" not in rows_of(count_parameters("7B"), Cluster(8, 80 * GB))


def test_lora_trains_only_the_adapters():
    model = count_config(LLAMA_2_7B, "llama")
    share = take_share(model, Training(lora_rank=16, lora_targets=("q_proj", "v_proj")))
    assert share.trained == 32 * 2 * 16 * (4096 + 4096)  # peft: 8,388,608
    row = rows_of(model, Cluster(1, 24 * GB), lora_rank=16)["zero2"]
    assert row.parameters > 13 * GB
    assert row.gradients + row.masters + row.moments < 0.6 * GB


def test_lora_of_a_number_of_parameters_trains_the_adapters_of_a_llama():
    model = count_parameters("7B")
    assert model.numel == 7 * 10**9
    row = rows_of(model, Cluster(1, 80 * GB), lora_rank=16)["zero2"]
    known = rows_of(count_config(LLAMA_2_7B, "llama"), Cluster(1, 80 * GB), lora_rank=16)["zero2"]
    assert row.moments == pytest.approx(known.moments, rel=0.1)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_training_of_nothing_is_refused_by_the_option_that_causes_it(stages):
    model, cluster = count_parameters("7B"), Cluster(2, 80 * GB)
    with pytest.raises(UsageError, match="--lora-targets nosuch: names no matrix"):
        rows_of(model, cluster, pp=stages, lora_rank=8, lora_targets=("nosuch",))
    with pytest.raises(UsageError, match=r"--freeze \.\*: matches every parameter"):
        rows_of(model, cluster, pp=stages, freeze=".*")
    frozen = replace(model, frozen=frozenset(name for name, _ in model.named_tensors()))
    with pytest.raises(UsageError, match="--params 7B: all parameters are frozen"):
        rows_of(frozen, cluster, pp=stages)


@pytest.mark.parametrize(
    ("name", "stages", "problem"),
    [("hsdp", 1, "needs several nodes"), ("zero3", 2, "cannot be combined with pipeline stages")],
)
def test_a_strategy_that_the_cluster_does_not_allow_is_refused(name, stages, problem):
    cluster = Cluster(8, 80 * GB)
    rows = forecast(count_parameters("7B"), cluster, Training(pp=stages))
    with pytest.raises(UsageError, match=f"--strategy {name}: {problem}"):
        choose_named(rows, name, cluster)


def test_frozen_parameters_have_no_gradients_or_moments():
    model = count_config(LLAMA_2_7B, "llama")
    row = rows_of(model, Cluster(1, 80 * GB), freeze=r"\.mlp\.")["zero1"]
    trained = model.numel - 32 * 3 * 4096 * 11008
    assert row.moments == 8 * trained
    assert row.parameters == 2 * model.numel


def test_activations_grow_with_tokens_and_shrink_with_checkpointing():
    model = count_config(LLAMA_2_7B, "llama")
    one, two = (take_share(model, Training(micro_batch=n, seq_len=1024)) for n in (1, 2))
    assert two.saved_bytes == 2 * one.saved_bytes
    assert one.recomputed_bytes < one.saved_bytes / 10


def test_names_and_shapes_give_the_same_as_the_config():
    model = count_config(DEEPSEEK_V3, "deepseek")
    shapes = {name: tensor.shape for name, tensor in model.named_tensors()}
    again = count_shapes(shapes, "checkpoint", DEEPSEEK_V3)
    for settings in (Training(), Training(tp=4), Training(ep=8)):
        assert take_share(again, settings).saved_bytes == take_share(model, settings).saved_bytes
        assert take_share(again, settings).numel == pytest.approx(
            take_share(model, settings).numel, rel=1e-3
        )
    unknown = take_share(count_shapes(shapes, "checkpoint", {"num_experts_per_tok": 8}), Training())
    assert unknown.saved_bytes == pytest.approx(take_share(model, Training()).saved_bytes, rel=0.5)


def test_a_model_without_numbered_layers_is_one_block():
    shapes = {"up.weight": (64, 16), "down.weight": (16, 64)}
    sizes = count_shapes(shapes, "checkpoint", LLAMA_2_7B, frozen=["up.weight"])
    assert [name for name, _ in sizes.named_tensors()] == ["up.weight", "down.weight"]
    assert take_share(sizes, Training()).trained == take_share(sizes, Training()).frozen == 1024
    assert take_share(sizes, Training(seq_len=10)).saved_bytes > 10 * 2 * 160


def test_blocks_in_another_order_keep_their_own_activations():
    model = count_config(DEEPSEEK_V3, "deepseek")
    shapes = {name: tensor.shape for name, tensor in model.named_tensors()}
    again = count_shapes(dict(sorted(shapes.items())), "checkpoint", DEEPSEEK_V3)
    saved = {block.name: block.saved for block in again.blocks}
    assert saved == {block.name: block.saved for block in model.blocks}


def test_the_first_strategy_that_fits_is_recommended():
    model, single = count_config(LLAMA_2_7B, "llama"), Cluster(1, 24 * GB)
    for cluster, name, checkpointing in (
        (Cluster(8, 80 * GB), "fsdp", False),
        (Cluster(8, 24 * GB), "fsdp", True),
        (single, "zero2-offload", True),
    ):
        choice = choose(forecast(model, cluster, Training()), cluster)
        found = (choice.row.strategy.name, choice.checkpointing, choice.fits)
        assert found == (name, checkpointing, True)
    host = replace(single, host_bytes=40 * GB)
    choice = choose(forecast(model, host, Training()), host)
    assert not choice.fits
    assert (choice.word, choice.row.list_lacks(host, checkpointing=True)) == ("none fits", ["host"])
    assert "of 40 GB of host memory on each node" in choice.reason
    assert not advise(model, host, Training(), choice)  # nothing that saves memory of a GPU helps
    nodes, name = find_nodes(model, host, Training())
    assert (nodes, name) == (4, "zero2-offload")
    again = replace(host, nodes=nodes)
    assert choose(forecast(model, again, Training()), again).fits
    assert find_nodes(model, Cluster(1, GB), Training()) is None


def test_advice_saves_memory_and_starts_with_what_costs_least():
    model, cluster = count_config(LLAMA_2_7B, "llama"), Cluster(4, 24 * GB)
    training = Training(micro_batch=2)
    rows = forecast(model, cluster, training)
    advice = advise(model, cluster, training, replace(choose(rows, cluster), checkpointing=False))
    assert all(each.saved > 0 for each in advice)
    texts = [each.what for each in advice]
    assert texts[0].startswith("compute the loss in chunks")
    assert texts.index("turn on activation checkpointing") < texts.index(
        "halve the micro batch and double the accumulation"
    )
    assert texts[-1] == "use twice as many nodes"


def test_a_strategy_that_is_refused_is_not_advised():
    model = count_parameters("13B")
    for host_bytes in (None, 128 * GB, 250 * GB):
        cluster = Cluster(1, 24 * GB, host_bytes=host_bytes)
        rows = rows_of(model, cluster)
        for name in rows:
            choice = choose_named(list(rows.values()), name, cluster)
            for each in advise(model, cluster, Training(), choice):
                words = each.what.split()
                assert (
                    words[0] != "use"
                    or words[1] not in rows
                    or rows[words[1]].fits(cluster, checkpointing=choice.checkpointing)
                )


def test_the_batch_must_be_divisible():
    cluster = Cluster(8, 80 * GB)
    assert count_accumulation(cluster, Training(global_batch=512, micro_batch=4)) == 16
    with pytest.raises(UsageError, match="use --global-batch 8 or 16"):
        count_accumulation(cluster, Training(global_batch=12))
    with pytest.raises(UsageError, match="not a multiple of tp 3"):
        rows_of(count_parameters("1B"), cluster, tp=3)
    with pytest.raises(UsageError, match="--ep 3"):
        rows_of(count_parameters("1B"), cluster, ep=3)


@pytest.mark.parametrize("text", ["8", "x80GB", "0x80GB", "00x80GB", "8x", "8x80 apples"])
def test_gpus_that_are_not_gpus_are_refused(text):
    with pytest.raises(UsageError):
        parse_gpus(text)


@pytest.mark.parametrize("text", ["7X", "B", "", "-3B", "0"])
def test_a_count_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match="not a number of parameters"):
        count_parameters(text)


def test_a_model_that_is_nowhere_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="nothing is downloaded"):
        find_model("someone/model")
    for wrong in (
        {"model_type": "llama", "hidden_size": 8},
        {**LLAMA_2_7B, "num_attention_heads": 0},
        {**LLAMA_2_7B, "hidden_size": float("inf")},
    ):
        with pytest.raises(UnknownSizesError):
            count_config(wrong, "config.json")


def test_a_cached_model_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--meta--llama"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(LLAMA_2_7B))
    assert find_model("meta/llama").numel == 6_738_415_616


PEAKS = [  # of the backward pass on an H100, in GB: benchmarks/gpu_memory.py
    (LLAMA_1B, "ddp", {"seq_len": 4096}, 24.1),
    (LLAMA_1B, "fsdp", {"seq_len": 2048, "micro_batch": 4}, 28.2),
    (LLAMA_1B, "ddp", {"seq_len": 2048, "precision": "fp32"}, 29.7),
    (LLAMA_1B, "fsdp", {"seq_len": 2048, "precision": "fp32"}, 30.4),
    (GPT2_MEDIUM, "ddp", {"seq_len": 1024, "micro_batch": 4}, 17.6),
    (GPT2_MEDIUM, "fsdp", {"seq_len": 1024, "micro_batch": 4}, 14.2),
]


@pytest.mark.parametrize(("config", "strategy", "settings", "peak"), PEAKS)
def test_the_forecast_is_near_the_peak_on_a_gpu(config, strategy, settings, peak):
    row = rows_of(count_config(config, "config"), Cluster(1, 80 * GB), **settings)[strategy]
    total = row.count_total(checkpointing=False) - row.margin
    assert total / GB == pytest.approx(peak, rel=0.07)


def test_grouped_heads_cost_scores_in_fp32_only():
    alone = LLAMA_1B | {"num_key_value_heads": 32}
    for precision, factor in (("bf16", 1), ("fp32", 2)):
        grouped, each = (
            take_share(
                count_config(config, "config"), Training(seq_len=8192, precision=precision)
            ).saved_bytes
            for config in (LLAMA_1B, alone)
        )
        assert (grouped > factor * each) == (precision == "fp32")
