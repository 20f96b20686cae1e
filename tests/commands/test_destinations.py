"""Where output goes: through links, into named checkpoints, and what is said of it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard.errors import ExistsError, UnrecognisedError, UsageError


@pytest.fixture
def plain(tmp_path):
    torch.save({"model.norm.weight": torch.ones(4)}, tmp_path / "plain.pt")
    return tmp_path / "plain.pt"


def trained(path):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, path)
    return path


@pytest.mark.parametrize("target", ["blob", "snapshots"])
def test_a_link_to_a_file_is_replaced_and_its_target_stays(plain, tmp_path, target):
    """As in Hugging Face's cache, where snapshots link to blobs without a suffix."""
    blob, link = tmp_path / "blobs" / target, tmp_path / "snapshots" / "main" / "model.safetensors"
    for path in (blob, link):
        path.parent.mkdir(parents=True)
    blob.write_bytes(b"of another snapshot")
    link.symlink_to(f"../../blobs/{target}")
    reshard.merge(plain, link, overwrite=True)
    assert blob.read_bytes() == b"of another snapshot"
    assert not link.is_symlink()
    assert load_file(link).keys() == {"model.norm.weight"}
    assert [path.name for path in blob.parent.iterdir()] == [target]


def test_a_name_that_is_too_long_for_the_partial_output_is_refused(plain, tmp_path):
    with pytest.raises(UsageError, match="name that is too long: 9 characters are added"):
        reshard.merge(plain, tmp_path / ("a" * 250))
    assert list(tmp_path.iterdir()) == [plain]


@pytest.mark.parametrize("name", ["loop", "loop/x", "loop.safetensors"])
def test_links_that_form_a_loop_are_refused(plain, tmp_path, name):
    for link in ("loop", "loop.safetensors"):
        (tmp_path / link).symlink_to(link)
    for options in ({}, {"overwrite": True}):
        with pytest.raises((ExistsError, UsageError), match=r"exists and is not|no directory"):
            reshard.merge(plain, tmp_path / name, **options)
    with pytest.raises((ExistsError, UsageError), match=r"exists and is not|no directory"):
        reshard.merge(plain, tmp_path / "out", html=tmp_path / name)


def test_a_number_of_ranks_that_no_run_has_is_refused(plain, tmp_path):
    ranks = 1 << 21
    with pytest.raises(UsageError, match="from 1 to 1048576 ranks"):
        reshard.split(plain, tmp_path / "out", to="fsdp2", init_optimizer="none", world_size=ranks)


@pytest.mark.parametrize(
    ("name", "inside"), [("checkpoint-3", "."), ("checkpoint-7", "."), ("run", "checkpoint-3")]
)
def test_a_destination_called_checkpoint_n_is_the_checkpoint(tmp_path, name, inside):
    source = trained(tmp_path / "x.pt")
    options = {"to": "hf-trainer", "world_size": 1, "state_dict_type": "unsharded"}
    reshard.split(source, tmp_path / name, **options)
    place = tmp_path / name / inside
    assert json.loads((place / "trainer_state.json").read_text())["global_step"] == 3
    assert (place / "optimizer.pt").is_file()
    assert not list((tmp_path / name).glob("*/checkpoint-*"))
    assert bool(list((tmp_path / name).glob("checkpoint-*"))) == (inside != ".")
    assert reshard.inspect(tmp_path / name).manifest.train.step == 3


@pytest.mark.parametrize(
    ("to", "format_name", "more"),
    [
        ("dcp", "dcp", {}),
        ("fsdp", "accelerate", {"state_dict_type": "sharded"}),
        ("fsdp2", "fsdp", {}),
        ("verl", "verl", {}),
        ("torch", "torch", {}),
    ],
)
def test_a_copied_trainer_state_does_not_make_a_run_of_the_trainer(tmp_path, to, format_name, more):
    """Name the layout that was written, and keep it in a second split."""
    options = {"to": "hf-trainer", "world_size": 2, "state_dict_type": "full"}
    reshard.split(trained(tmp_path / "x.pt"), tmp_path / "run", **options)
    assert reshard.inspect(tmp_path / "run").manifest.origin.format == "hf-trainer"
    reshard.split(tmp_path / "run", tmp_path / "out", to=to, world_size=2, **more)
    assert (tmp_path / "out" / "trainer_state.json").is_file()
    assert reshard.inspect(tmp_path / "out").manifest.origin.format == format_name
    if to != "torch":  # which needs --to
        reshard.split(tmp_path / "out", tmp_path / "again", world_size=1)
        assert not list((tmp_path / "again").glob("checkpoint-*"))


def test_a_directory_without_a_config_is_told_of(plain, tmp_path):
    report = reshard.merge(plain, tmp_path / "out")
    assert any("--hf-dir" in text and "config.json" in text for text in report.warnings)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["X"]}')
    report = reshard.merge(plain, tmp_path / "again")
    assert not any("--hf-dir" in text for text in report.warnings)


def test_a_stray_file_beside_runs_is_not_taken_for_the_model(plain, tmp_path):
    for name in ("torch", "other"):
        (tmp_path / name / "checkpoint-3").mkdir(parents=True)
        torch.save({}, tmp_path / name / "checkpoint-3" / "optimizer.pt")
        torch.save({"w": torch.ones(2)}, tmp_path / name / "checkpoint-3" / "pytorch_model.bin")
    with pytest.raises(UnrecognisedError, match=r"plain\.pt.*other, .*torch") as caught:
        reshard.inspect(tmp_path)
    assert "pass one of them" in caught.value.remedy
    assert reshard.inspect(plain).manifest.entries
    assert reshard.inspect(tmp_path / "torch").manifest.entries


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("model.safetensor", "did you mean .*model.safetensors"),
        ("model.savetensors", "did you mean .*model.safetensors"),
        ("model.gguf", "convert_hf_to_gguf.py"),
        ("model.ckpt", "write a file of torch.save: model.pt"),
        ("model.h5", "write model.safetensors"),
    ],
)
def test_a_name_like_that_of_one_file_does_not_become_a_directory(plain, tmp_path, name, advice):
    with pytest.raises(UsageError, match=f"(?s)which reshard does not write.*{advice}"):
        reshard.merge(plain, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_dot_in_the_name_of_a_directory_is_no_suffix(plain, tmp_path):
    reshard.merge(plain, tmp_path / "Llama-3.2")
    assert (tmp_path / "Llama-3.2" / "model.safetensors").is_file()


def test_a_split_that_changes_nothing_says_how_to_choose_ranks(tmp_path):
    source = trained(tmp_path / "x.pt")
    reshard.split(source, tmp_path / "run", to="deepspeed", world_size=2)
    same = reshard.split(tmp_path / "run", tmp_path / "same")
    assert any("--world-size N chooses" in text for text in same.warnings)
    other = reshard.split(tmp_path / "run", tmp_path / "other", world_size=1)
    assert not any("--world-size" in text for text in other.warnings)
