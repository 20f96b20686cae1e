"""``reshard verify --history``: valid runs pass, and each kind of damage fails its check."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import reshard
from reshard.checks import names as single
from reshard.checks.history import checks as names
from reshard.core.manifest import WEIGHT_KINDS
from reshard.errors import UnrecognisedError, UsageError
from reshard.html import check_pages
from reshard.system.files import SourceFiles
from reshard.tensors.lazy import read_block
from tests.judged.sequences import RUNS
from tests.support.programs import run_reshard

# The loss does not reach these; the check says so.
UNUSED = {"z2_menagerie": "extras.unused"}
WEIGHT, SLOT = "weight", "slot"


@pytest.fixture
def run(sequences_made, tmp_path):
    """Run -> a private, writable copy of it."""

    def copy(name):
        return shutil.copytree(sequences_made / name / "run", tmp_path / name)

    return copy


def list_statuses(report, *wanted):
    """Return the checks that failed or warned."""
    return {c.name: [*c.failures, *c.warnings] for c in report.checks if c.status in wanted}


def failed(path, **options):
    return list_statuses(reshard.verify(path, history=True, **options), "failed")


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_no_false_alarm(sequences_made, name, deep):
    report = reshard.verify(sequences_made / name / "run", history=True, deep=deep)
    said = list_statuses(report, "failed", "warned")
    unused = said.pop(single.ZEROS, [])
    assert all("exp_avg, exp_avg_sq of extras.unused: zero after" in line for line in unused)
    assert report.exit_code == 0, list(report.lines())
    if name not in UNUSED:
        assert not said
    else:
        assert list(said) == [names.UNCHANGED]
        assert f"1 trained weight never changed: {UNUSED[name]}" in said[names.UNCHANGED][0]
    assert all(tag["moved"] is not None for tag in report.tags[1:])


def read_manifest(path):
    """Return the manifest of a checkpoint."""
    with reshard.open(path) as checkpoint:
        return checkpoint.manifest


def is_part(entry, part):
    if part == WEIGHT:
        return entry.kind in WEIGHT_KINDS
    return entry.kind not in WEIGHT_KINDS


def write(path, offset, data):
    with Path(path).open("r+b") as file:
        file.seek(offset)
        file.write(data)


def transplant(source, target, parts, only=lambda _fqn, _file: True):
    """Overwrite some tensors of a checkpoint by those of another."""
    before, now = read_manifest(source), read_manifest(target)
    count = 0
    with SourceFiles() as pool:
        for key, entry in now.entries.items():
            if not any(is_part(entry, part) for part in parts):
                continue
            for chunk in entry.chunks:
                if only(entry.fqn, chunk.file) and chunk.box.volume:
                    assert chunk.is_dense
                    data = read_block(pool, before.entries[key], chunk.box)
                    write(chunk.file, chunk.byte_offset, data)
                    count += 1
    assert count


def alter(path, fqn, change, at=5):
    """Change one element of a weight, everywhere it is stored."""
    manifest = read_manifest(path)
    for kind in WEIGHT_KINDS:
        entry = manifest.entries.get((kind, fqn))
        for chunk in () if entry is None else entry.chunks:
            assert chunk.is_dense
            first, numel = chunk.box.origin[0] * math.prod(entry.shape[1:]), chunk.box.volume
            if first <= at < first + numel and str(entry.dtype) == "float32":
                place = chunk.byte_offset + 4 * (at - first)
                with SourceFiles() as pool:
                    (value,) = np.frombuffer(pool.read(chunk.file, place, 4), "<f4")
                write(chunk.file, place, np.float32(change(value)).tobytes())


ALL = (WEIGHT, SLOT)
TAGS = {"z": "global_step{}", "d": "step-{}", "h": "checkpoint-{}"}


def tag(path, step):
    return path / TAGS[path.name[0]].format(step)


def save_state_of_4_again(path):
    """Save as an asynchronous saver that did not wait for the copy to host memory."""
    transplant(tag(path, 4), tag(path, 6), ALL)


def write_the_weights_of_4_again(path):
    transplant(tag(path, 4), tag(path, 6), [WEIGHT])


def write_the_moments_of_4_again(path):
    transplant(tag(path, 4), tag(path, 6), [SLOT])


def write_one_weight_of_4_again(path):
    transplant(
        tag(path, 4), tag(path, 6), [WEIGHT], lambda fqn, _: fqn.endswith("1.mlp.up_proj.weight")
    )


def write_one_rank_of_4_again(path):
    (file,) = {
        chunk.file
        for entry in read_manifest(tag(path, 6)).entries.values()
        if entry.kind in ("exp_avg", "momentum_buffer")
        for chunk in entry.chunks
        if "rank_1_" in chunk.file or "__1_0" in chunk.file
    }
    transplant(tag(path, 4), tag(path, 6), ALL, lambda _, of: of == file)


def copy_the_directory(path):
    shutil.rmtree(tag(path, 6))
    shutil.copytree(tag(path, 4), tag(path, 6))


def exchange(path, kinds):
    """Give two weights of equal shape, above and below each other, one another's slots."""
    one, other = (f"model.layers.{number}.mlp.up_proj.weight" for number in (0, 1))
    values = {}
    with reshard.open(tag(path, 6)) as checkpoint:
        for kind in kinds:
            slots = checkpoint.optimizer(kind)
            values[kind, one] = slots[other][...].numpy()
            values[kind, other] = slots[one][...].numpy()
    for key, value in values.items():
        put(checkpoint.manifest.entries[key], value)


def put(entry, value):
    """Overwrite a tensor, wherever it is stored."""
    for chunk in entry.chunks:
        assert chunk.is_dense
        box = tuple(slice(o, o + n) for o, n in zip(chunk.box.origin, chunk.box.shape, strict=True))
        write(chunk.file, chunk.byte_offset, np.ascontiguousarray(value[box]).tobytes())


def exchange_the_moments_of_two_weights(path):
    exchange(path, ("exp_avg", "exp_avg_sq"))


def exchange_the_first_moments_of_two_weights(path):
    exchange(path, ("exp_avg",))


def zero_the_moments_of_a_weight(path):
    entries = read_manifest(tag(path, 6)).entries
    for kind in ("exp_avg", "exp_avg_sq"):
        entry = entries[kind, "model.layers.0.mlp.up_proj.weight"]
        put(entry, np.zeros(entry.shape, "<f4"))


def leave_the_modules_weights_behind(path):
    """Write the 16-bit weights of step 4 again, beside the masters of step 6."""
    before, now = (read_manifest(tag(path, step)) for step in (4, 6))
    with SourceFiles() as pool:
        for key, entry in now.entries.items():
            for chunk in entry.chunks if key[0] == "param" else ():
                write(
                    chunk.file,
                    chunk.byte_offset,
                    read_block(pool, before.entries[key], chunk.box),
                )


def name_a_missing_tag(path):
    (path / "latest").write_text("global_step8")


def swap_the_directories(path):
    tag(path, 4).rename(path / "other")
    tag(path, 6).rename(tag(path, 4))
    (path / "other").rename(tag(path, 6))


def move_one_weight_too_far(path):
    alter(tag(path, 6), "model.norm.weight", lambda value: value + 1)


def put_nan_into_a_weight(path):
    alter(tag(path, 6), "model.norm.weight", lambda _: math.nan)


def truncate_a_file(path):
    file = max(tag(path, 6).rglob("*.*"), key=lambda each: each.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)


def lose_a_tensor(path):
    state = load_file(tag(path, 6) / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, tag(path, 6) / "model.safetensors", {"format": "pt"})


def change_a_shape(path):
    state = load_file(tag(path, 6) / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"][:-1].clone()
    save_file(state, tag(path, 6) / "model.safetensors", {"format": "pt"})


SHARDED = ("z1_bf16", "z3_bf16", "dcp")
MUTATIONS = [
    *((name, save_state_of_4_again, names.IDENTICAL) for name in (*SHARDED, "z1_sgd", "hf")),
    *((name, write_the_weights_of_4_again, names.WEIGHTS) for name in (*SHARDED, "dcp_lora")),
    *((name, write_the_moments_of_4_again, names.MOMENTS) for name in (*SHARDED, "z1_sgd")),
    *((name, write_one_weight_of_4_again, names.WEIGHTS) for name in SHARDED),
    *((name, write_one_rank_of_4_again, names.SHARDS) for name in (*SHARDED, "z1_sgd")),
    *((name, copy_the_directory, names.STEPS) for name in (*SHARDED, "z3_tied")),
    *((name, copy_the_directory, names.IDENTICAL) for name in ("z1_bf16", "hf_tied")),
    *((name, swap_the_directories, names.STEPS) for name in SHARDED),
    *((name, move_one_weight_too_far, names.UPDATES) for name in SHARDED),
    *((name, put_nan_into_a_weight, names.FINITE) for name in (*SHARDED, "hf")),
    *((name, truncate_a_file, names.READABLE) for name in (*SHARDED, "hf")),
    *((name, exchange_the_moments_of_two_weights, names.MOMENTS) for name in SHARDED),
    *((name, exchange_the_first_moments_of_two_weights, names.MOMENTS) for name in SHARDED),
    *((name, zero_the_moments_of_a_weight, names.MOMENTS) for name in SHARDED),
    ("z1_bf16", leave_the_modules_weights_behind, single.MASTERS),
    ("z1_bf16", name_a_missing_tag, names.READABLE),
    ("hf", lose_a_tensor, names.TENSORS),
    ("hf", change_a_shape, names.TENSORS),
]


@pytest.mark.parametrize(
    ("name", "mutate", "check"),
    [pytest.param(*row, id=f"{row[1].__name__}-{row[0]}") for row in MUTATIONS],
)
def test_damage_is_detected_by_its_check(run, name, mutate, check):
    path = run(name)
    mutate(path)
    found = failed(path, deep=check == single.MASTERS)
    assert check in found, found
    if mutate not in (truncate_a_file, name_a_missing_tag):  # one checkpoint less is compared
        assert any("6" in text for text in found[check])


@pytest.mark.parametrize("parts", [ALL, [WEIGHT]])
def test_the_weights_of_another_run(run, sequences_made, parts):
    path = run("dcp_slow")
    transplant(sequences_made / "dcp_other/run/step-4", tag(path, 4), parts)
    found = failed(path)
    assert names.UPDATES in found
    assert "weights of step-4 are more than" in found[names.CONTENT][0]


def test_the_content_of_another_run_of_weights_alone(sequences_made, tmp_path):
    """Models without steps or optimizer: only their distances are known."""
    for step in (2, 4, 6):
        reshard.merge(sequences_made / f"dcp_slow/run/step-{step}", tmp_path / f"checkpoint-{step}")
    assert not failed(tmp_path)
    source = sequences_made / "dcp_other/run/step-4"
    reshard.merge(source, tmp_path / "checkpoint-4", overwrite=True)
    assert "weights of checkpoint-4 are more than" in failed(tmp_path)[names.CONTENT][0]


def test_weights_of_two_dtypes_move_by_the_rounding_of_the_narrow_one(tmp_path):
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4)
    for step, dtype in enumerate((torch.bfloat16, torch.float32), 1):
        layer(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        (tmp_path / f"checkpoint-{step}").mkdir()
        weights = {name: value.to(dtype) for name, value in layer.state_dict().items()}
        state = {"model": weights, "optimizer": optimizer.state_dict(), "global_step": step}
        torch.save(state, tmp_path / f"checkpoint-{step}" / "state.pt")
    assert not failed(tmp_path)


@pytest.mark.parametrize(
    ("betas", "last", "found"),
    [
        ((torch.tensor(0.9), torch.tensor(0.999)), 2.0, []),
        (None, 2.0, []),
        ((0.9, 0.999), math.nan, [single.STEPS, single.SLOTS]),
        ((0.9, 0.999), math.inf, [single.STEPS, single.SLOTS]),
    ],
)
def test_settings_and_steps_that_give_no_bound(tmp_path, betas, last, found):
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(layer.parameters())
    for number, step in enumerate((1.0, last), 1):
        layer(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        saved = optimizer.state_dict()
        saved["param_groups"][0]["betas"] = betas
        for slots in saved["state"].values():
            slots["step"] = torch.tensor(step)
        (tmp_path / f"checkpoint-{number}").mkdir()
        state = {"model": layer.state_dict(), "optimizer": saved, "global_step": number}
        torch.save(state, tmp_path / f"checkpoint-{number}" / "state.pt")
    assert list(failed(tmp_path)) == found


def test_only_deep_sees_one_element(run):
    path = run("dcp")
    fqn = "model.embed_tokens.weight"
    with reshard.open(tag(path, 6)) as checkpoint:
        numel = math.prod(checkpoint[fqn].shape)
    assert numel > 4000
    caught = dict.fromkeys((False, True), 0)
    for at in (numel // 3, numel - 2):
        alter(tag(path, 6), fqn, lambda value: value + 1, at)
        for deep in caught:
            caught[deep] += names.UPDATES in failed(path, deep=deep)
    assert caught[True] == 2
    assert caught[False] < 2


def test_a_weight_that_never_changes(run):
    path = run("dcp")
    for step in (4, 6):
        transplant(tag(path, 2), tag(path, step), ALL, lambda fqn, _: fqn == "model.norm.weight")
    report = reshard.verify(path, history=True)
    said = list_statuses(report, "warned")
    assert "1 trained weight never changed: model.norm.weight" in said[names.UNCHANGED][0]
    assert "same bits in step-2 and step-4: model.norm.weight" in said[names.IDENTICAL][0]
    assert report.exit_code == 0


def test_an_interrupted_save_is_a_warning(run):
    path = run("z1_bf16")
    (path / "global_step8").mkdir()
    report = reshard.verify(path, history=True)
    assert "step 8: its directory has no complete" in report.check(names.READABLE).warnings[0]
    assert report.exit_code == 0


def test_an_unsafe_checkpoint_is_not_read(run):
    path = run("hf")
    (tag(path, 4) / "model.safetensors").unlink()
    torch.save({"weight": torch.ones(3), "x": Stranger()}, tag(path, 4) / "pytorch_model.bin")
    report = reshard.verify(path, history=True)
    assert "no known framework writes" in report.check(names.READABLE).failures[0]
    assert report.exit_code == 5


class Stranger:
    """A class that no framework has."""


def test_the_sample_is_the_same_every_time(sequences_made):
    path = sequences_made / "z3_bf16/run"
    a, b = (reshard.verify(path, history=True, workers=n) for n in (1, 3))
    assert (a.tags, a.groups) == (b.tags, b.groups)


def test_the_numbers_are_those_of_torch(sequences_made):
    """Of all elements: what moved, how far, and the change relative to the weights."""
    report = reshard.verify(sequences_made / "dcp/run", history=True, deep=True)
    found = torch.load(sequences_made / "dcp/found.pt")
    change = {n: found[4][n].double() - found[2][n].double() for n in found[2]}
    largest = max(float(value.abs().max()) for value in change.values())
    squares = sum(float(value.square().sum()) for value in change.values())
    size = sum(float(value.double().square().sum()) for value in found[4].values())
    row = report.tags[1]
    assert row["largest"] == largest
    assert row["change"] == pytest.approx((squares / size) ** 0.5, rel=1e-9)
    assert row["lr"] == 1e-2
    assert row["updates"] == 4
    assert {"model.embed_tokens", "model.layers.0", "model.layers.1"} <= report.groups.keys()


def test_the_command(run, tmp_path):
    path, page = run("z3_bf16"), tmp_path / "page.html"
    done = run_reshard("verify", path, "--history", "--html", page)
    assert done.returncode == 0, done.stderr
    assert "passed the sampled history checks" in done.stdout
    assert "passed the sampled history checks" in page.read_text()
    save_state_of_4_again(path)
    done = run_reshard("verify", path, "--history", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert [each["name"] for each in found["checkpoints"]][-1] == "global_step6"
    assert not found["passed"]


def test_what_is_refused(sequences_made, tmp_path):
    with pytest.raises(UsageError, match="has 0 checkpoints"):
        reshard.verify(sequences_made / "dcp/run/step-4", history=True)
    with pytest.raises(UsageError, match="no effect with --history"):
        reshard.verify(sequences_made / "dcp/run", history=True, against=tmp_path / "x")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Lightning, about the machine
def test_the_files_of_a_lightning_run(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Line(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(8, 8)

        def training_step(self, batch, _index):
            return self.line(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    place = tmp_path / "run" / "checkpoints"
    save = lightning.callbacks.ModelCheckpoint(place, save_top_k=-1, every_n_train_steps=1)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=3, callbacks=[save], **quiet)
    trainer.fit(Line(), torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=2))
    files = [place / f"epoch=0-step={step}.ckpt" for step in (1, 2, 3)]
    report = reshard.verify(tmp_path / "run", history=True, deep=True)
    assert report.passed
    assert [each["name"] for each in report.tags] == [f"checkpoints/{f.name}" for f in files]
    assert [each["updates"] for each in report.tags] == [1, 2, 3]
    reshard.average(tmp_path / "run", tmp_path / "mean.safetensors", last=2)
    a, b = (torch.load(file)["state_dict"]["line.weight"].double() for file in files[1:])
    mean = load_file(tmp_path / "mean.safetensors")["line.weight"]
    assert torch.equal(mean, ((a + b) / 2).float())
    shutil.copy(files[1], files[2])
    assert "steps" in failed(tmp_path / "run")
    shutil.copy(files[1], place / "epoch=0-step=2-v1.ckpt")
    with pytest.raises(UnrecognisedError, match="two checkpoints of step 2"):
        reshard.verify(tmp_path / "run", history=True)


@pytest.fixture
def several(sequences_made, tmp_path):
    """Write a run in the layout of verl, which trains an actor and a critic."""
    for step in (2, 4, 6):
        for model, name in (("actor", "dcp"), ("critic", "dcp_slow")):
            place = tmp_path / "run" / f"global_step_{step}" / model
            place.parent.mkdir(parents=True, exist_ok=True)
            reshard.split(sequences_made / name / f"run/step-{step}", place, to="verl")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("6")
    return tmp_path / "run"


def test_each_model_of_a_run_has_a_history(several):
    report = reshard.verify(several, history=True)
    assert not list_statuses(report, "failed", "warned")
    assert [each["name"] for each in report.tags] == [
        f"global_step_{step}/{model}" for model in ("actor", "critic") for step in (2, 4, 6)
    ]
    assert {each.partition(": ")[0] for each in report.groups} == {"actor", "critic"}
    chart, *_ = check_pages.build_history_page(report.to_dict()).sections
    assert [(each.name, each.steps) for each in chart.runs] == [
        (name, [4, 6]) for name in report.groups
    ]
    critic = several / "global_step_{}/critic"
    transplant(str(critic).format(4), str(critic).format(6), [WEIGHT])
    found = failed(several)
    assert found.keys() == {names.WEIGHTS}
    assert all(text.startswith("critic: ") for text in found[names.WEIGHTS])


def test_a_model_that_was_not_saved_once(several):
    shutil.rmtree(several / "global_step_4/critic")
    report = reshard.verify(several, history=True)
    (warning,) = report.check(names.READABLE).warnings
    assert warning.startswith("critic: step 4: its directory has no complete checkpoint")
    assert report.exit_code == 0


def test_a_history_of_one_of_several_models_is_not_averaged(several, tmp_path):
    with pytest.raises(UnrecognisedError, match="several models: actor and critic"):
        reshard.average(several, tmp_path / "mean", last=2)


@pytest.fixture(params=["torch", "torch_dist"])
def iterations(request, sequences_made, tmp_path):
    """Return a run in the directories of Megatron, with two tensor-parallel ranks."""
    source, run = sequences_made / "dcp/run", tmp_path / "run"
    run.mkdir()
    for step in (2, 4, 6):
        made = tmp_path / f"made{step}"
        options = {"ckpt_format": request.param, "tp": 2, "world_size": 2}
        reshard.split(
            source / f"step-{step}", made, to="megatron", model=source / "config.json", **options
        )
        (made / f"iter_000000{step}").rename(run / f"iter_000000{step}")
    return run


def test_the_history_of_a_megatron_run(iterations):
    for deep in (False, True):
        report = reshard.verify(iterations, history=True, deep=deep)
        assert not list_statuses(report, "failed", "warned"), list(report.lines())
        assert [each["updates"] for each in report.tags] == [2, 4, 6]
        assert report.check(names.SHARDS).status == "passed"
    before, now = (iterations / f"iter_000000{step}" for step in (4, 6))
    ranks = {chunk.file for entry in read_manifest(now).entries.values() for chunk in entry.chunks}
    second = next(file for file in ranks if "mp_rank_01" in file or "__1_0" in file)
    transplant(before, now, ALL, lambda _, file: file == second)
    found = failed(iterations)
    assert any("mp_rank_01" in text or "__1_0" in text for text in found[names.SHARDS])
