"""``--auto``: the first strategy that fits the memory of the ranks, and why."""

from __future__ import annotations

import json

import pytest

from trainer import auto, cli
from trainer.errors import SettingsError

GB = 10**9


@pytest.fixture
def memory(monkeypatch):
    """Set the bytes of a rank; the ranks are CPUs unless ``gpus`` is true."""

    def set_memory(nbytes, *, gpus=False):
        monkeypatch.setattr(auto, "_list_gpus", lambda: [int(nbytes)] * 8 if gpus else [])
        monkeypatch.setattr(auto, "_read_available", lambda: int(nbytes) * 2)
        monkeypatch.setattr(auto, "_read_limit", lambda _path: None)

    return set_memory


@pytest.fixture
def model(tmp_path):
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def pick(model, nproc=2, **chosen):
    return auto.pick({"model": model, **chosen}, chosen, nproc)


def test_more_memory_means_a_faster_strategy(model, memory):
    found = []
    for gigabytes in (2.0, 0.55, 0.42, 0.35, 0.29):
        memory(gigabytes * GB)
        found.append(pick(model, seq_len=128).values["strategy"])
    assert found == sorted(found)
    assert found[0] == "ddp"
    assert found[-1] == "zero3"


def test_the_reason_names_what_did_not_fit(model, memory):
    memory(0.35 * GB)
    reason = pick(model, seq_len=128).reason
    assert "is the first that fits" in reason
    assert "ddp needs" in reason


def test_long_samples_need_activation_checkpointing(model, memory):
    memory(1.0 * GB)
    values = pick(model, seq_len=2048, micro_batch=2).values
    assert values["activation_checkpointing"]


def test_offload_is_for_gpus_only(model, memory):
    memory(0.2 * GB)
    with pytest.raises(SettingsError, match="no strategy fits"):
        pick(model, seq_len=128)
    memory(0.2 * GB, gpus=True)
    assert pick(model, seq_len=128, device="cuda").values["offload_optimizer"] == "cpu"


def test_what_the_user_states_is_kept(model, memory):
    memory(2 * GB)
    assert pick(model, strategy="zero2", seq_len=128).values["strategy"] == "zero2"
    with pytest.raises(SettingsError, match="chooses among ddp"):
        pick(model, strategy="fsdp2", seq_len=128)


def test_a_launcher_has_started_the_ranks_too_early(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["--auto"]) == 2
    assert "before the ranks start" in capsys.readouterr().err


def test_the_choice_is_in_the_settings(memory, capsys):
    memory(2 * GB)
    assert cli.main(["--auto", "--nproc", "2", "--print-config"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["strategy"] == "ddp"
    assert json.loads(said.out)["origins"]["strategy"] == "--auto"
    assert said.err.startswith("auto: ddp is the first that fits")


def test_the_states_of_the_forecast_are_those_of_report_memory(model, memory):
    from trainer.memory import predict
    from trainer.resolve import resolve

    settings = resolve({"model": model, "strategy": "zero2", "seq_len": 128}, 2)
    sizes = auto._measure(settings)
    state = predict(settings, sizes.numel)
    rest = auto._forecast(settings, sizes, 0) - (state.parameters + state.gradients)
    assert rest - state.optimizer == sizes.saved + 128 * 512 * (2 + 12)


def test_the_memory_of_this_machine_is_found(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    limit.write_text("1000000\n")
    monkeypatch.setattr(auto, "_LIMITS", (limit, tmp_path / "absent"))
    assert auto.find_memory("cpu", 4) == 250_000
    limit.write_text("max\n")
    assert auto.find_memory("cpu", 1) > 1_000_000
    monkeypatch.setattr(auto, "_MEMORY", tmp_path / "absent")
    with pytest.raises(SettingsError, match="not known"):
        auto.find_memory("cpu", 1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_reshard_plan_and_report_memory_have_the_same_states(model, strategy, precision):
    from reshard.sizing.setup import Cluster, Training
    from reshard.sizing.sources import find_model
    from reshard.sizing.strategies import forecast
    from trainer.memory import predict
    from trainer.resolve import resolve

    sizes = find_model(model)
    settings = {"model": model, "strategy": strategy, "precision": precision}
    for accumulated, nbytes in ((precision, 2), ("fp32", 4)):
        state = predict(resolve({**settings, "grad_dtype": accumulated}, 4), sizes.numel)
        training = Training(precision=precision, gradient_bytes=nbytes)
        rows = {row.strategy.name: row for row in forecast(sizes, Cluster(4, GB), training)}
        row = rows[strategy]
        assert (row.parameters, row.gradients) == (state.parameters, state.gradients)
        assert row.masters + row.moments == state.optimizer


@pytest.mark.parametrize("visible", ["", " "])
def test_a_program_that_may_use_no_gpu_has_none(visible, monkeypatch):
    """CUDA hides every device then, and nvidia-smi would list all of them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(auto.subprocess, "run", lambda *_, **__: pytest.fail("asked nvidia-smi"))
    assert auto._list_gpus() == []
