"""Live loads of real DeepSpeed engines: N ranks to M ranks, N and M of 1 to 4, at each stage."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.judged.resumed import Resumed, assert_goes_on
from tests.judges import deepspeed_judge
from tests.judges.deepspeed_cases import Case, ds_config
from tests.support.combinations import choose_combinations

pytestmark = pytest.mark.slow

JUDGE = deepspeed_judge.JUDGE
SIZES = (1, 2, 3, 4)
STAGES = (0, 1, 2, 3)
LOADS = choose_combinations(itertools.product(STAGES, SIZES, SIZES))


def make_job(place, stage, name, ranks, **told):
    case = Case(f"z{stage}_fp32", ranks, ds_config(stage, "fp32"))
    return JUDGE.job(name, place / name, place / "logs", ranks, case=case, **told)


def do(jobs):
    """Return the name of each job with what it wrote, or with the text of its failure."""
    by_name = {job.case: job for job in jobs}
    found = {}
    for report in JUDGE.ask(jobs):
        job = by_name[report.case]
        failed = report.missing or any(report.exits)
        found[report.case] = (
            JUDGE.failure(job, report)
            if failed
            else torch.load(job.out / "reference.pt", weights_only=False)
        )
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with ``STAGE-N/run`` for each stage and number of ranks."""
    place = tmp_path_factory.mktemp("saved")
    names = {f"{stage}-{n}": (stage, n) for stage in STAGES for n in SIZES}
    found = do([make_job(place, stage, name, n) for name, (stage, n) in names.items()])
    assert all(isinstance(seen, dict) for seen in found.values()), found
    return place


@pytest.fixture(scope="module")
def loaded(saved, tmp_path_factory):
    place = tmp_path_factory.mktemp("loaded")
    return do(
        [
            make_job(
                place,
                stage,
                f"{stage}-{n}-{m}",
                m,
                load=saved / f"{stage}-{n}" / "run",
                steps=2,
                how={"live": True},
            )
            for stage, n, m in LOADS
        ]
    )


@pytest.mark.parametrize(("stage", "n", "m"), LOADS)
def test_the_state_has_the_same_bits_and_training_goes_on(stage, n, m, saved, loaded):
    run = Resumed(f"{stage}-{n}", f"z{stage}_fp32", m, stage)
    assert_goes_on(run, loaded[f"{stage}-{n}-{m}"], saved)
