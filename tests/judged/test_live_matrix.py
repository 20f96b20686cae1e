"""Live loads of real DeepSpeed engines: N ranks to M ranks, N and M of 1 to 4, at each stage."""

from __future__ import annotations

import itertools

import pytest

from tests.judged.resumed import Resumed, assert_goes_on
from tests.judges import deepspeed_judge
from tests.judges.deepspeed_cases import Case, ds_config
from tests.support.combinations import choose_combinations

pytestmark = pytest.mark.slow

JUDGE = deepspeed_judge.JUDGE
SIZES = (1, 2, 3, 4)
STAGES = (0, 1, 2, 3)
LOADS = choose_combinations(itertools.product(STAGES, SIZES, SIZES))


def describe_job(stage, ranks, **told):
    """Return what `Judge.run` needs for a run, or for one that loads."""
    return ranks, {"case": Case(f"z{stage}_fp32", ranks, ds_config(stage, "fp32")), **told}


@pytest.fixture(scope="module")
def saved(made, tmp_path_factory):
    """Return (stage, number of ranks) -> the directory of a run; two ranks are judged cases."""
    place = tmp_path_factory.mktemp("saved")
    others = {(stage, n): f"{stage}-{n}" for stage in STAGES for n in SIZES if n != 2}
    found = JUDGE.run(place, {name: describe_job(*run) for run, name in others.items()})
    assert all(isinstance(seen, dict) for seen in found.values()), found
    cases = {(stage, 2): made / f"z{stage}_fp32" for stage in STAGES}
    return cases | {run: place / name for run, name in others.items()}


@pytest.fixture(scope="module")
def loaded(saved, tmp_path_factory):
    told = {"steps": 2, "how": {"live": True}}
    jobs = {
        f"{stage}-{n}-{m}": describe_job(stage, m, load=saved[stage, n] / "run", **told)
        for stage, n, m in LOADS
    }
    return JUDGE.run(tmp_path_factory.mktemp("loaded"), jobs)


@pytest.mark.parametrize(("stage", "n", "m"), LOADS)
def test_the_state_has_the_same_bits_and_training_goes_on(stage, n, m, saved, loaded):
    source = saved[stage, n]
    run = Resumed(source.name, f"z{stage}_fp32", m, stage)
    assert_goes_on(run, loaded[f"{stage}-{n}-{m}"], source.parent)
