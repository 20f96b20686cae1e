"""``reshard split`` and ``convert`` lose nothing of what real frameworks wrote."""

from __future__ import annotations

import itertools
import json

import pytest

import reshard
from reshard.errors import UsageError
from reshard.formats import registry
from tests.support.combinations import choose_combinations
from tests.support.sample_tensors import same

# fixture, and the path below it
SOURCES = {
    "deepspeed 1": ("made", "z1_bf16/run"),
    "deepspeed 2": ("made", "z2_groups_decay/run"),
    "deepspeed 3": ("made", "hf_z3_tied/run"),
    "fsdp 2": ("torch_made", "fsdp2_dcp_groups/ckpt"),
    "fsdp 1 local": ("torch_made", "fsdp1_local_flat_groups/ckpt"),
    "dtensor": ("torch_made", "fsdp2_ranks_hsdp_ws4/ckpt"),
    "one file": ("torch_made", "plain_groups/ckpt"),
    "accelerate": ("libraries", "acc_fsdp1_sharded/ckpt"),
    "trainer": ("libraries", "trainer_single/ckpt"),
}
TOLD = {
    "fsdp 1 local": {"model": "tests.judges.torch_models:menagerie", "wrap": "LlamaDecoderLayer"}
}
OF_TABLES = ("megatron", "meta")  # of models whose parameters a table knows
OWN = ("trainer",)  # which only a run of the trainer becomes again
NOT_HERE = ("fsdp2", "verl", *OF_TABLES, *OWN)
WRITABLE = [name for name in registry.list_built_in_writers() if name not in NOT_HERE]


@pytest.fixture
def source(request, name):
    fixture, path = SOURCES[name]
    return request.getfixturevalue(fixture) / path


def state_of(path, **told):
    """Return everything that must travel, by name."""
    with reshard.open(path, **told) as checkpoint:
        manifest = checkpoint.manifest
        weights = {fqn: checkpoint[fqn][...] for fqn in checkpoint}
        kinds = {entry.kind for entry in manifest.entries.values()} - {"param", "buffer", "master"}
        slots = {
            (kind, fqn): tensor[...]
            for kind in kinds
            for fqn, tensor in checkpoint.optimizer(kind).items()
        }
        groups = [(set(group.fqns), dict(group.hyper)) for group in manifest.train.param_groups]
        return weights, slots, dict(manifest.train.optimizer_step), groups


def check_same(before, after):
    """Compare values bit by bit; only wider dtypes may have been cut, and none here is."""
    for held, found in zip(before[:2], after[:2], strict=True):
        missing = [key for key in held if key not in found and held[key].numel()]
        assert missing == []
        for key, value in held.items():
            if value.numel():
                assert found[key].dtype == value.dtype, key
                assert same(found[key], value), key
    assert {fqn: step for fqn, step in after[2].items() if fqn in before[2]} == before[2]
    assert [fqns for fqns, _ in after[3]] == [fqns for fqns, _ in before[3]]
    for (_, new), (_, old) in zip(after[3], before[3], strict=True):
        assert {key: new.get(key) for key in ("lr", "weight_decay")} == {
            key: old[key] for key in ("lr", "weight_decay")
        }


@pytest.mark.parametrize(
    ("name", "to", "world"), choose_combinations(itertools.product(SOURCES, WRITABLE, (1, 3)))
)
def test_every_source_becomes_every_target(name, to, world, source, tmp_path):
    told = TOLD.get(name, {})
    before = state_of(source, **told)
    report = reshard.split(source, tmp_path / "out", to=to, world_size=world, **told)
    assert report.verified
    assert report.optimizer_tensors_in == report.optimizer_tensors_out
    check_same(before, state_of(tmp_path / "out"))


def test_only_a_run_of_the_trainer_is_written_as_one(made, tmp_path):
    with pytest.raises(UsageError, match="is not a run of python -m trainer"):
        reshard.split(made / "z2_bf16" / "run", tmp_path / "out", to="trainer")


def test_a_model_with_other_shapes_is_refused(made, tmp_path):
    config = json.loads((made / "hf_z2/run/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 128}))
    with pytest.raises(UsageError, match=r"'model\.embed_tokens\.weight' has shape \(97, 64\)"):
        reshard.split(made / "hf_z2/run", tmp_path / "out", model=tmp_path)


def test_a_dry_run_writes_nothing(made, tmp_path):
    report = reshard.split(made / "z2_bf16" / "run", tmp_path / "out", world_size=3, dry_run=True)
    assert not report.done
    assert report.files
    assert list(tmp_path.iterdir()) == []


def test_weights_only_says_what_it_drops(made, tmp_path):
    source = made / "z2_bf16" / "run"
    report = reshard.split(source, tmp_path / "out", to="dcp", world_size=2, weights_only=True)
    assert any("optimizer tensors" in text for text in report.dropped)
    with reshard.open(tmp_path / "out") as checkpoint:
        assert not checkpoint.manifest.has_optimizer


def test_the_same_bytes_whatever_the_workers(made, tmp_path):
    for workers in (1, 5):
        reshard.split(
            made / "z3_bf16/run", tmp_path / str(workers), to="dcp", world_size=3, workers=workers
        )
    for one in sorted((tmp_path / "1").iterdir()):
        assert one.read_bytes() == (tmp_path / "5" / one.name).read_bytes()


def test_the_global_batch_is_kept_where_it_can_be(made, tmp_path):
    report = reshard.split(made / "z2_bf16/run", tmp_path / "out", world_size=1)
    assert any("global batch" in text for text in report.derived)


@pytest.mark.parametrize("to", WRITABLE)
def test_state_that_is_not_written_is_reported(to, made, tmp_path):
    """Counters, scheduler, loss scaler, clipping, the script's own values: one run has them all."""
    source = made / "z2_fp16_overflow" / "run"
    report = reshard.split(source, tmp_path / "out", to=to)
    said = " | ".join([*report.derived, *report.dropped, *report.notes])
    found = reshard.diff(source, tmp_path / "out", kinds=["train"])
    untold = [v.name for v in found.train if v.name.removeprefix("client: ") not in said]
    assert untold == []
    with reshard.open(tmp_path / "out") as checkpoint:
        kept = checkpoint.manifest.train.config is not None
    lost = "configuration of the deepspeed run; set gradient clipping to 1" in said
    assert kept != lost
