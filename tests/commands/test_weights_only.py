"""Conversions without the optimizer: what they leave out beside it is in the report."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.errors import IncompleteError, UnsupportedError
from reshard.formats import registry

OWN = {"epoch": 3, "args": Namespace(seed=1, table=torch.ones(3)), "queue": [1, 2]}
VALUES = ["epoch", "args", "queue", "step", "scheduler", "loss scaler"]
NOT_FOR_ANY_MODEL = {"ds-universal", "megatron", "meta", "trainer"}
WRITERS = sorted(set(registry.list_built_in_writers()) - NOT_FOR_ANY_MODEL)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Write a script's checkpoint with values of its own."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    path = tmp_path_factory.mktemp("source") / "checkpoint.pt"
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "step": 1,
    }
    torch.save({**state, **OWN}, path)
    return path


def read_values(path):
    """Return the names of the values that a checkpoint has."""
    with reshard.open(path) as checkpoint:
        train = checkpoint.manifest.train
    found = {"step": train.step, "scheduler": train.scheduler, "loss scaler": train.scaler}
    return {*train.client, *(name for name, value in found.items() if value is not None)}


@pytest.mark.parametrize("to", WRITERS)
def test_every_value_is_written_or_reported(to, source, tmp_path):
    assert read_values(source) == set(VALUES)
    report = reshard.split(source, tmp_path / "out", to=to, weights_only=True)
    dropped = [line for line in report.dropped if line.endswith("(--weights-only)")]
    named = {name for line in dropped[1:] for name in line.split(" (")[0].split(", ")}
    kept = read_values(tmp_path / "out")
    if to == "hf-trainer":
        assert (tmp_path / "out" / "checkpoint-1").is_dir()
        kept.add("step")
    assert named == set(VALUES) - kept
    assert not [note for note in report.notes if note.startswith("not copied")]


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--weights-only", {"weights_only": True}),
        ("--init-optimizer none", {"init_optimizer": "none"}),
    ],
)
def test_the_report_names_the_option_that_was_given(option, given, source, tmp_path):
    report = reshard.split(source, tmp_path / "out", to="dcp", **given)
    assert report.dropped
    assert all(line.endswith(f"({option})") for line in report.dropped)


def test_one_error_states_all_that_a_source_of_weights_alone_needs(tmp_path):
    """Use the files that HF Trainer saves with ``save_only_model``."""
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    save_file({"weight": torch.ones(2, 2)}, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text('{"global_step": 2}')
    (folder / "config.json").write_text('{"model_type": "mine"}')
    with pytest.raises(IncompleteError, match="no random states, so --rng derive") as caught:
        reshard.split(folder, tmp_path / "out", world_size=2, rng="derive")
    assert "also pass --init-optimizer none" in str(caught.value)
    reshard.split(folder, tmp_path / "out", world_size=2, init_optimizer="none")


def test_slots_that_names_could_not_convert_are_left_out_first(tmp_path):
    """Adafactor keeps a sum for each row and column; Megatron's layers fuse the weights."""
    transformers = pytest.importorskip("transformers")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, vocab_size=8, max_position_embeddings=8, **heads
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    source = tmp_path / "source"
    config.save_pretrained(source)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, source / "checkpoint.pt")
    with pytest.raises(UnsupportedError, match="--weights-only"):
        reshard.split(source, tmp_path / "refused", to="megatron")
    report = reshard.split(source, tmp_path / "out", to="megatron", weights_only=True)
    assert report.optimizer_tensors_in > 0
    reshard.merge(source, tmp_path / "merged", names="hf")
    reshard.merge(tmp_path / "out", tmp_path / "again", hf_dir=source)
    assert reshard.diff(tmp_path / "merged", tmp_path / "again").same
