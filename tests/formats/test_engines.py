"""The table of known defects of engines: which checkpoints a row is told of."""

from __future__ import annotations

from importlib import metadata

import pytest

from reshard.formats import engines
from reshard.formats.engines import LoadedForm

SHARDED = ("out/pytorch_model_fsdp_0/.metadata", "out/optimizer_0/.metadata")


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (LoadedForm("accelerate", SHARDED, has_optimizer=True), "restore no Adam state"),
        (LoadedForm("hf-trainer", SHARDED, has_optimizer=True), "restore no Adam state"),
        (LoadedForm("accelerate", SHARDED, has_optimizer=False), ""),
        (LoadedForm("accelerate", ("optimizer.bin", "model.safetensors"), has_optimizer=True), ""),
        (LoadedForm("dcp", (".metadata",), has_optimizer=True), ""),
        (
            LoadedForm("fsdp", ("pytorch_model_fsdp_rank0.bin",), has_optimizer=True),
            "weights_only=True",
        ),
    ],
)
def test_a_defect_is_told_of_the_form_that_it_concerns(form, said, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: "1.15.0")
    told = engines.describe_defects(form)
    assert len(told) == bool(said)
    assert all(said in text for text in told)


def test_a_defect_that_was_fixed_is_told_of_older_versions_alone(monkeypatch):
    form = LoadedForm("accelerate", SHARDED, has_optimizer=True)
    monkeypatch.setattr(metadata, "version", lambda _: "1.12.0")
    assert any("under FSDP 2" in text for text in engines.describe_defects(form))
    monkeypatch.setattr(metadata, "version", lambda _: "1.16.0.dev0+cpu")
    assert not any("under FSDP 2" in text for text in engines.describe_defects(form))


@pytest.mark.parametrize(
    ("fsdp", "told"), [(None, {1, 2}), (1, {1}), (2, {2})], ids=["unknown", "FSDP 1", "FSDP 2"]
)
def test_a_running_program_is_told_of_its_own_version_of_fsdp(fsdp, told, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: "1.12.0")
    defects = engines.describe_defects(
        LoadedForm("hf-trainer", SHARDED, has_optimizer=True, fsdp=fsdp)
    )
    for version in (1, 2):
        assert any(f"under FSDP {version} " in text for text in defects) == (version in told)


def test_every_row_says_what_to_do_and_who_found_it():
    for row in engines.TABLE:
        assert row.engine
        assert row.checked
        assert row.effect
        assert row.remedy
        assert row.source
