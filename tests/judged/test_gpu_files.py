"""Read and resume on a CPU what real frameworks wrote on a GPU (`tests/data/h100`)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import reshard
from tests.judged.conftest import KEPT
from tests.judges import deepspeed_judge
from tests.support.digests import compute_digest
from tests.support.directories import unpack

CASES = sorted(path.name.removesuffix(".tar.xz") for path in (KEPT / "h100").iterdir())
RESUMED = [  # what is resumed, on how many ranks, at which stage
    ("deepspeed_z3_bf16_fused", "bf16", 3, 2),
    ("deepspeed_z3_bf16_fused", "bf16", 2, 3),
    ("deepspeed_z1_fp16_fused", "fp16", 3, 1),
]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Return a directory with ``<case>/run`` and ``<case>/expected.json``."""
    place = tmp_path_factory.mktemp("h100")
    for case in CASES:
        unpack(KEPT / "h100" / f"{case}.tar.xz", place)
    return place


def read_expected(unpacked: Path, case: str):
    return json.loads((unpacked / case / "expected.json").read_text())


def assert_state(source: Path, expected) -> None:
    with reshard.open(source) as checkpoint:
        for name, value in expected["weights"].items():
            assert compute_digest(checkpoint[name][...]) == value, name
        for slot, values in expected["slots"].items():
            stored = checkpoint.optimizer(slot)
            assert stored.keys() == values.keys()
            assert {name: compute_digest(stored[name][...]) for name in values} == values, slot
        steps = set(checkpoint.manifest.train.optimizer_step.values())
    assert steps == set(expected["steps"])


@pytest.mark.parametrize("case", CASES)
def test_the_state_is_that_of_the_live_objects(case, unpacked):
    assert_state(unpacked / case / "run", read_expected(unpacked, case))


@pytest.mark.parametrize("case", CASES)
def test_deep_checks_pass(case, unpacked):
    assert reshard.verify(unpacked / case / "run", deep=True).exit_code == 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("to", ["dcp", "deepspeed"])
def test_a_split_holds_the_same_state(case, to, unpacked, tmp_path):
    out = tmp_path / "out"
    reshard.split(unpacked / case / "run", out, to=to, world_size=3)
    assert_state(out, read_expected(unpacked, case))


def read_device(source: Path) -> str:
    with reshard.open(source) as checkpoint:
        return checkpoint.manifest.origin.device


def test_the_mesh_of_a_split_has_the_device_of_the_source(unpacked, tmp_path):
    def split(source: Path, name: str, **options: str) -> Path:
        reshard.split(source, tmp_path / name, to="fsdp2", world_size=2, **options)
        return tmp_path / name

    gpu = unpacked / "fsdp2_dtensor" / "run"
    assert read_device(split(gpu, "gpu")) == "cuda"
    cpu = split(gpu, "chosen", device="cpu")
    assert read_device(cpu) == "cpu"
    assert read_device(split(cpu, "cpu")) == "cpu"
    plain = unpacked / "hf_trainer" / "run" / "checkpoint-4"
    assert read_device(plain) == ""
    assert read_device(split(plain, "plain")) == "cuda"


def test_deepspeed_goes_on_with_the_losses_of_the_gpu(unpacked, tmp_path):
    """FusedAdam trained on the GPU, and torch's AdamW goes on; sums have another order."""
    jobs = {}
    for case, precision, ranks, stage in RESUMED:
        name = f"{case}_{stage}"
        run = tmp_path / name
        reshard.split(unpacked / case / "run", run, zero_stage=stage, world_size=ranks)
        loader = replace(deepspeed_judge.CASES[f"z{stage}_{precision}"], groups="decay")
        jobs[name] = (ranks, {"case": loader, "load": run, "steps": 2, "compile_aio": False})
    results = deepspeed_judge.JUDGE.run(tmp_path / "out", jobs)
    for case, _, _, stage in RESUMED:
        expected = read_expected(unpacked, case)["next_losses"]
        found = results[f"{case}_{stage}"]
        assert isinstance(found, dict), found
        assert found["losses"] == pytest.approx(expected, rel=1e-3), case
