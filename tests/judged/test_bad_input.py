"""Every way in which an input is bad has its own message, its exit code, and leaves nothing."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.judges import server

OPTIM0 = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
OPTIM1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def merge(source, destination, *options: str):
    return run_forked("merge", source, destination, *options)


def run_forked(*words):
    """Run the command line in a fork of a process that has imported it, which is quicker."""
    python = server.fork_python("reshard.commands.merge.command")
    command = [*python, "-m", "reshard", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def refused(tmp_path):
    """Assert that a merge fails as it should and that nothing was written or left behind."""

    def check(source, code: int, *words: str, destination: Path | None = None, options=()):
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        target = destination or out / "x.safetensors"
        before = sorted(path.name for path in target.parent.iterdir())
        done = merge(source, target, *options)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
        for word in words:
            assert word in done.stderr
        assert sorted(path.name for path in target.parent.iterdir()) == before
        return done.stderr

    return check


def tag_of(run: Path) -> Path:
    return run / (run / "latest").read_text().strip()


def test_missing_optimizer_rank(copied, refused):
    run = copied("z2_bf16")
    (tag_of(run) / OPTIM1).unlink()
    refused(run, 1, str(tag_of(run)), "2 ranks", OPTIM1, "missing")


def test_missing_model_rank_of_stage3(copied, refused):
    run = copied("z3_bf16")
    (tag_of(run) / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    refused(run, 1, "zero_pp_rank_1_mp_rank_00_model_states.pt", "missing")


def test_missing_rank_zero_of_stage3(copied, refused):
    run = copied("z3_bf16")
    (tag_of(run) / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    refused(run, 1, "zero_pp_rank_0_mp_rank_00_model_states.pt", "missing")


def test_no_optimizer_files_at_all(copied, refused):
    run = copied("z2_bf16")
    for path in tag_of(run).glob("*_optim_states.pt"):
        path.unlink()
    refused(run, 1, "*_optim_states.pt", "--from torch")


def test_the_remedy_for_missing_optimizer_files_works(copied, tmp_path):
    run = copied("z2_bf16")
    model = tag_of(run) / MODEL
    done = merge(model, tmp_path / "x.safetensors", "--from", "torch")
    assert done.returncode == 0, done.stderr
    assert "weights as stored" in done.stdout


@pytest.mark.parametrize("name", [OPTIM1, MODEL])
@pytest.mark.parametrize("keep", [0.5, 0.98])
def test_truncated_zip(copied, refused, name, keep):
    run = copied("z2_bf16")
    path = tag_of(run) / name
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    refused(run, 3, str(path), "zip directory", "fetch it again")


def test_empty_rank_file(copied, refused):
    run = copied("z2_bf16")
    (tag_of(run) / OPTIM0).write_bytes(b"")
    refused(run, 3, OPTIM0, "empty")


def test_flipped_byte_in_a_tensor(copied, refused):
    run = copied("z2_bf16")
    path = tag_of(run) / OPTIM1
    flip(path, largest_member(path, "/data/"), at=0.4)
    refused(run, 3, str(path), "CRC-32", "altered")


def test_flipped_byte_in_a_pickle(copied, refused):
    run = copied("z2_bf16")
    path = tag_of(run) / MODEL
    flip(path, largest_member(path, "data.pkl"), at=0.5)
    refused(run, 3, str(path), "data.pkl", "CRC-32")


def largest_member(path: Path, part: str) -> tuple[int, int]:
    """Return (data offset, size) of the largest member with ``part`` in its name.

    Of equals it is the last: in optimizer states, the moments come before the fp32 weights, which a
    merge reads.
    """
    with zipfile.ZipFile(path) as archive:
        named = [m for m in reversed(archive.infolist()) if part in m.filename]
        member = max(named, key=lambda m: m.file_size)
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)
        name, extra = struct.unpack("<2H", file.read(4))
    return member.header_offset + 30 + name + extra, member.file_size


def flip(path: Path, place: tuple[int, int], at: float) -> None:
    offset = place[0] + int(place[1] * at)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_missing_latest(copied, refused):
    run = copied("z2_bf16")
    tag = tag_of(run).name
    (run / "latest").unlink()
    refused(run, 2, "latest", tag, "--tag")


def test_tag_replaces_latest(copied, tmp_path):
    run = copied("z2_bf16")
    tag = tag_of(run).name
    (run / "latest").unlink()
    assert merge(run, tmp_path / "x.safetensors", "--tag", tag).returncode == 0


def test_latest_names_a_missing_tag(copied, refused):
    run = copied("z2_bf16")
    tag = tag_of(run).name
    (run / "latest").write_text("global_step999")
    refused(run, 2, "global_step999", tag)


def test_latest_that_leaves_the_directory(copied, refused):
    run = copied("z2_bf16")
    (run / "latest").write_text("../../etc")
    refused(run, 3, "latest", "not a tag")


def test_a_directory_of_several_runs_names_them(copied, refused):
    run = copied("z2_bf16")
    for name in (".copy", "copy"):
        (run.parent / name).mkdir()
        shutil.copy(run / "latest", run.parent / name)
        shutil.copytree(tag_of(run), run.parent / name / tag_of(run).name)
    refused(run.parent, 2, f"several runs: {run.parent / 'copy'}, {run}\n", f"e.g. {run}")


def test_not_a_checkpoint(tmp_path, refused):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "notes.txt").write_text("hello")
    refused(tmp_path / "src", 2, "not a recognized checkpoint")


def test_no_such_path(tmp_path, refused):
    refused(tmp_path / "nowhere", 2, "does not exist")


def test_stale_extra_rank(copied, refused):
    run = copied("z2_bf16")
    extra = OPTIM1.replace("rank_1", "rank_2")
    shutil.copy(tag_of(run) / OPTIM1, tag_of(run) / extra)
    refused(run, 3, extra, "left over from another run")


def test_stale_prefix_of_another_run(copied, refused):
    run = copied("z2_bf16")
    shutil.copy(tag_of(run) / OPTIM1, tag_of(run) / OPTIM1.removeprefix("bf16_"))
    refused(run, 3, "two runs")


def test_two_steps_mixed(copied, made, refused):
    run = copied("z2_bf16")
    path = tag_of(run) / OPTIM1
    state = torch.load(path, weights_only=False)
    state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 5
    torch.save(state, path)
    refused(run, 3, OPTIM1, "optimizer step", "mixed")


def test_two_steps_mixed_at_stage3(copied, refused):
    run = copied("z3_bf16")
    path = tag_of(run) / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    state["global_steps"] += 1
    torch.save(state, path)
    refused(run, 3, path.name, "global_steps", "mixed")


def test_two_world_sizes_mixed(copied, made, refused):
    run = copied("z2_bf16")
    other = made / "z2_bf16_ws4" / "run"
    shutil.copy(tag_of(other) / OPTIM1, tag_of(run) / OPTIM1)
    refused(run, 3, OPTIM1, "train_micro_batch_size_per_gpu of ds_config is 3, but 6 in")


def test_weights_of_size_0_are_reported_with_their_real_files(copied, refused):
    run = copied("z3_bf16")
    state = torch.load(
        tag_of(run) / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False
    )
    torch.save(state["module"], run / "pytorch_model.bin")
    refused(run / "pytorch_model.bin", 1, "size 0", str(tag_of(run)))
    module = {fqn: value.clone() for fqn, value in state["module"].items()}
    save_file(module, run / "model.safetensors")
    refused(run / "model.safetensors", 1, "size 0", str(tag_of(run)))


@pytest.fixture
def without_shared_params(copied):
    """Save without a record of two names of one weight.

    ``torch.load`` gives every empty placeholder of stage 3 a storage of its own.
    """
    run = copied("hf_z3_tied")
    for path in tag_of(run).glob("*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        del state["shared_params"]
        torch.save(state, path)
    return run


def test_a_name_without_a_value_is_never_dropped_silently(without_shared_params, refused):
    (without_shared_params / "config.json").unlink()
    refused(without_shared_params, 1, "'lm_head.weight'", "no rank holds a value", "--exclude")


def test_a_head_that_the_config_ties_needs_no_value(without_shared_params, tmp_path):
    done = merge(without_shared_params, tmp_path / "x.safetensors")
    assert done.returncode == 0, done.stderr
    assert "lm_head.weight = model.embed_tokens.weight" in done.stdout


def test_a_tied_name_with_a_copy_that_differs(copied, refused, tmp_path):
    run = copied("hf_z2_tied")
    for path in tag_of(run).glob("*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        alias, kept = next(iter(state["shared_params"].items()))
        state["module"][alias] = state["module"][kept].clone()
        state["module"][alias].view(-1)[5] += 1
        torch.save(state, path)
    refused(run, 1, alias, f"is tied to {kept!r}", "element 5", "--tied drop")
    done = merge(run, tmp_path / "kept.safetensors", "--exclude", f"^{kept}$")
    assert done.returncode == 1, done.stderr
    assert f"{alias}: is tied to" in done.stderr
    for number, options in enumerate((["--tied", "drop"], ["--exclude", f"^{alias}$"])):
        done = merge(run, tmp_path / f"{number}.safetensors", *options)
        assert done.returncode == 0, done.stderr


class Attack:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_pickle_that_would_run_code(copied, refused):
    run = copied("z2_bf16")
    path = tag_of(run) / MODEL
    state = torch.load(path, weights_only=False)
    torch.save(state | {"attack": Attack()}, path)
    refused(run, 5, str(path), "posix.system", "would run code")
    assert not Path("pwned").exists()


def test_inspect_refuses_a_pickle_that_would_run_code(tmp_path):
    torch.save({"w": torch.ones(2), "attack": Attack()}, tmp_path / "x.pt")
    done = run_forked("inspect", tmp_path / "x.pt")
    assert done.returncode == 5
    assert "would run code" in done.stderr


class Config:
    """A class of the user's own, as client states hold."""

    def __init__(self):
        self.lr = 3


def test_unknown_class_is_refused_until_allowed(copied, refused, tmp_path):
    run = copied("z2_bf16")
    path = tag_of(run) / MODEL
    state = torch.load(path, weights_only=False)
    torch.save(state | {"mine": Config()}, path)
    name = f"{Config.__module__}.Config"
    refused(run, 5, name, f"--allow-pickle {name}")
    done = merge(run, tmp_path / "y.safetensors", "--allow-pickle", name)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", ".."]
)
def test_index_that_points_outside(tmp_path, refused, name):
    source = tmp_path / "hf"
    source.mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    index = {"metadata": {}, "weight_map": {"w": name}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(source, 5, name, "outside")


def test_index_with_a_missing_shard(tmp_path, refused):
    source = tmp_path / "hf"
    source.mkdir()
    index = {"metadata": {}, "weight_map": {"w": "model-00001-of-00002.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(source, 1, "model-00001-of-00002.safetensors", "missing")


def test_shards_whose_index_is_lost(made, tmp_path, refused):
    """As transformers writes them: all of them say which tensors there are, some do not."""
    source, config = tmp_path / "hf", made / "hf_z3/run/config.json"
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(config)
    )
    model.save_pretrained(source, max_shard_size="100KB")
    (source / "model.safetensors.index.json").unlink()
    done = merge(source, tmp_path / "y.safetensors")
    assert done.returncode == 0, done.stderr
    assert "no model.safetensors.index.json" in done.stdout
    held = load_file(tmp_path / "y.safetensors")
    assert held.keys() == model.state_dict().keys()
    assert all(torch.equal(held[fqn], value) for fqn, value in model.state_dict().items())
    max(source.glob("*.safetensors")).unlink()
    refused(source, 1, "but no index")


def test_stale_shard_beside_the_index(tmp_path, refused):
    source = tmp_path / "hf"
    source.mkdir()
    save_file({"w": torch.ones(2), "old": torch.ones(3)}, source / "model-1.safetensors")
    index = {"metadata": {}, "weight_map": {"w": "model-1.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(source, 3, "'old'", "stale")


def test_header_that_claims_more_than_the_file(tmp_path, refused):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-40])
    refused(path, 3, str(path), "end")


def test_header_length_beyond_the_file(tmp_path, refused):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    refused(path, 3, "header states")


def test_full_disk(copied, refused, tiny_disk):
    refused(
        copied("z2_bf16"),
        4,
        "free",
        destination=tiny_disk / "x.safetensors",
        options=["--dtype=fp32"],
    )


@pytest.fixture
def tiny_disk(tmp_path):
    place = tmp_path / "tiny"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_disk_that_fills_up_midway(copied, tiny_disk, monkeypatch):
    import reshard
    from reshard.engine.move import journal

    monkeypatch.setattr(journal, "check_space", lambda *_: None)
    with pytest.raises(reshard.errors.ResourceError, match="disk is full"):
        reshard.merge(copied("z2_bf16"), tiny_disk / "x.safetensors", dtype="fp32")
    assert list(tiny_disk.iterdir()) == []


def test_existing_destination(copied, refused, tmp_path):
    target = tmp_path / "mine.safetensors"
    target.write_bytes(b"precious")
    refused(copied("z2_bf16"), 2, "exists", "--overwrite", destination=target)
    assert target.read_bytes() == b"precious"


def test_existing_directory_that_is_not_empty(copied, refused, tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "model-00009-of-00009.safetensors").write_bytes(b"old")
    refused(copied("z2_bf16"), 2, "not empty", destination=target)


def test_overwrite_never_deletes_files_that_are_not_an_export(copied, refused, tmp_path):
    target = tmp_path / "home"
    (target / "photos").mkdir(parents=True)
    refused(copied("z2_bf16"), 2, "photos", destination=target, options=["--overwrite"])
    assert (target / "photos").is_dir()


def test_overwrite_leaves_no_stale_shard(copied, tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "model-00009-of-00009.safetensors").write_bytes(b"old")
    assert merge(copied("z2_bf16"), target, "--overwrite").returncode == 0
    assert not (target / "model-00009-of-00009.safetensors").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "run"]


@pytest.mark.parametrize("inside", ["out.safetensors", "global_step2/out.safetensors"])
def test_destination_inside_the_source(copied, refused, inside):
    run = copied("z2_bf16")
    inside = inside.replace("global_step2", tag_of(run).name)
    refused(run, 2, "inside the source", destination=run / inside)


def test_destination_that_is_the_source(copied, refused):
    run = copied("z2_bf16")
    refused(run, 2, "inside the source", destination=run, options=["--overwrite"])


def test_destination_without_a_parent(copied, refused, tmp_path):
    done = merge(copied("z2_bf16"), tmp_path / "no" / "x.safetensors")
    assert done.returncode == 2
    assert "no directory" in done.stderr


def test_overflow_to_infinity(tmp_path, refused):
    save_file({"w": torch.tensor([1.0, 1e5, -1e6]), "v": torch.ones(2)}, tmp_path / "x.safetensors")
    text = refused(
        tmp_path / "x.safetensors",
        1,
        "2 finite values",
        "w (2)",
        "--on-overflow",
        options=["--dtype", "fp16"],
    )
    assert "v (" not in text


@pytest.mark.parametrize(
    "options",
    [
        ["--dtype", "int8"],
        ["--dtype", "nonsense"],
        ["--max-shard-size", "lots"],
        ["--rename", "no-equals"],
        ["--rename", "(=x"],
        ["--include", "nothing_has_this_name"],
        ["--keep-fp32", "nothing_has_this_name"],
        ["--workers", "-3"],
    ],
)
def test_contradicting_options_are_refused(copied, refused, options):
    refused(copied("z2_bf16"), 2, options=options)


def test_colliding_names(copied, refused):
    refused(
        copied("z2_bf16"), 2, "would get this name", options=["--rename", r"layers\.\d+=layers.0"]
    )


def test_legacy_pickle_attack(tmp_path, refused):
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    head = path.read_bytes()
    body = pickle.dumps(Attack(), protocol=2)
    path.write_bytes(head[: head.index(b".", 200) + 1] + body)
    refused(path, 5, "would run code")


def test_a_model_parallel_rank_without_its_model_states_is_incomplete(copied, refused):
    run = copied("z2_bf16")
    name = "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
    shutil.copy(tag_of(run) / OPTIM0, tag_of(run) / name)
    refused(run, 1, "mp_rank_01_model_states.pt", "is missing")
