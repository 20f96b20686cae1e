"""What a program has loaded is compared with the source, by the names of its parameters."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import reshard.dcp
from reshard import formats
from reshard.core.manifest import MASTER
from reshard.errors import DifferentError
from reshard.live.comparison import Expected, LoadedBlock, compare
from reshard.live.memory import iterate_model, iterate_optimizer
from reshard.system.files import SourceFiles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SIZE = 40  # elements of a row: some are in no sample


class Net(nn.Module):
    """Two layers of one shape, and one that is never trained."""

    def __init__(self, *, is_tied=False):
        super().__init__()
        self.first, self.second, self.idle = (nn.Linear(SIZE, 8, bias=False) for _ in range(3))
        if is_tied:
            self.second.weight = self.first.weight

    def forward(self, rows):
        """Return a loss."""
        return (self.first(rows) * self.second(rows)).square().mean()


def build(*, seed, steps=2, **how):
    """Return a model, and its optimizer after a number of steps."""
    torch.manual_seed(seed)
    model = Net(**how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(torch.randn(3, SIZE)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(path, model, optimizer):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return formats.read(path)


def check(manifest, model, optimizer, trust="sampled"):
    with SourceFiles() as pool:
        blocks = [*iterate_model(model), *iterate_optimizer(model, optimizer)]
        compare(blocks, Expected(manifest.entries, manifest.tied), pool, trust)


def exchange(model, optimizer):
    states = [optimizer.state[layer.weight] for layer in (model.first, model.second)]
    states[0]["exp_avg"], states[1]["exp_avg"] = states[1]["exp_avg"], states[0]["exp_avg"]


def change_one(model, _optimizer):
    model.first.weight.data[0, 0] += 1  # in no sample


def lose(model, optimizer):
    del optimizer.state[model.first.weight]


def shorten(model, optimizer):
    state = optimizer.state[model.first.weight]
    state["exp_avg"] = state["exp_avg"][1:]


def move(model, optimizer):
    optimizer.state[model.idle.weight] = optimizer.state[model.first.weight]


CHANGES = {
    exchange: "'first.weight': has another exp_avg .*'second.weight' has these values",
    change_one: "'first.weight': has another weight in memory after the load",
    lose: "'first.weight': has no optimizer state in memory after the load",
    shorten: r"'first.weight': has a exp_avg of shape \(7, 40\)",
    move: "'idle.weight': has another exp_avg",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_difference_is_named(change, tmp_path):
    model, optimizer = build(seed=0)
    manifest = save(tmp_path / "run.pt", model, optimizer)
    check(manifest, model, optimizer, "full")
    change(model, optimizer)
    check(manifest, model, optimizer, "none")
    with pytest.raises(DifferentError, match=CHANGES[change]):
        check(manifest, model, optimizer, "full")
    if change is change_one:
        check(manifest, model, optimizer)
        return
    with pytest.raises(DifferentError, match=CHANGES[change]):
        check(manifest, model, optimizer)


def test_a_weight_of_16_bits_is_the_stored_one_or_a_cast_of_its_master(tmp_path):
    master = torch.linspace(0, 1, SIZE)
    stored = master.bfloat16().nextafter(torch.ones(()).bfloat16())
    torch.save({"w": stored, "m": master}, tmp_path / "run.pt")
    entries = formats.read(tmp_path / "run.pt").entries
    own, exact = (entry for entry in entries.values())
    expected = Expected({own.key: own, (MASTER, "w"): exact}, {})
    with SourceFiles() as pool:
        for values in (stored, master.bfloat16(), master):
            compare([whole_block(values)], expected, pool, "full")
        for values in (stored.float(), master.half() + 1):
            with pytest.raises(DifferentError, match="'w': has another weight"):
                compare([whole_block(values)], expected, pool, "full")


def whole_block(values):
    return LoadedBlock("w", "param", (SIZE,), reshard.core.box.whole((SIZE,)), values)


def test_what_is_not_compared_is_in_the_log(tmp_path, caplog):
    model, optimizer = build(seed=0)
    manifest = save(tmp_path / "run.pt", model, optimizer)
    model.register_parameter("another", nn.Parameter(torch.zeros(2)))
    with caplog.at_level(logging.INFO, "reshard"):
        check(manifest, model, optimizer)
    assert "not compared: parameters (1 place): the source does not have them" in caplog.text


# torch.distributed.checkpoint


def load_into(model, optimizer, source):
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=flat),
    }
    dcp.load(state, storage_reader=reshard.dcp.StorageReader(source), no_dist=True)
    return state


@pytest.mark.parametrize("differs", [False, True])
def test_two_values_for_tied_weights_are_refused(differs, tmp_path):
    model, _ = build(seed=0)
    if not differs:
        model.second.weight.data.copy_(model.first.weight)
    torch.save(model.state_dict(), tmp_path / "run.pt")
    tied = get_model_state_dict(Net(is_tied=True))
    reader = reshard.dcp.StorageReader(tmp_path / "run.pt", trust="none")
    if differs:
        with pytest.raises(CheckpointException, match=r"is one tensor with model\.first\.weight"):
            dcp.load({"model": tied}, storage_reader=reader, no_dist=True)
    else:
        dcp.load({"model": tied}, storage_reader=reader, no_dist=True)


SCHEDULERS = {
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5),
    "OneCycleLR": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 9),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scheduler_may_exist_before_the_load(scheduler, tmp_path):
    saved = build(seed=0)
    dcp.save(load_state(*saved), checkpoint_id=tmp_path / "run", no_dist=True)
    model, optimizer = build(seed=1, steps=0)
    SCHEDULERS[scheduler](optimizer)
    own = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    state = load_into(model, optimizer, tmp_path / "run")
    for name, value in own.items():
        if name.endswith("_lr"):
            assert state["optim"][f"param_groups.first.weight.{name}"] == value
    assert state["optim"]["param_groups.first.weight.lr"] == 1e-2


def load_state(model, optimizer):
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }


def test_names_that_the_config_ties_are_found_in_a_published_directory(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(
        vocab_size=32,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        max_position_embeddings=32,
    )
    published = transformers.BartForConditionalGeneration(config)
    published.save_pretrained(tmp_path)
    # Copies, as of a wrapper that breaks the ties: only the config says what belongs to the names.
    state = {name: torch.zeros_like(value) for name, value in published.state_dict().items()}
    dcp.load(state, storage_reader=reshard.dcp.StorageReader(tmp_path), no_dist=True)
    for name, value in published.state_dict().items():
        assert torch.equal(state[name], value), name


def test_a_value_that_the_program_made_infinite_is_an_error_unless_that_is_allowed(tmp_path):
    """As stage 3 of DeepSpeed casts fp32 masters to fp16: no file has the cast values."""
    model, optimizer = build(seed=1)
    model.first.weight.data[0, 0] = 1e6  # in no sample
    manifest = save(tmp_path / "saved.pt", model, optimizer)
    loaded = list(iterate_model(model.half()))
    with SourceFiles() as pool:
        with pytest.raises(DifferentError, match="element 0 is inf for 65504") as told:
            compare(loaded, Expected(manifest.entries, {}), pool, "sampled")
        compare(loaded, Expected(manifest.entries, {}, may_overflow=True), pool, "sampled")
    assert "on_overflow='allow'" in told.value.remedy
