"""Programs for reinforcement learning resume from `split` without ``--to`` at other sizes."""

from __future__ import annotations

import pytest

import reshard
from reshard.errors import UsageError
from tests.judges import programs
from tests.judges import rl_worker as worker
from tests.trainer import worlds

pytestmark = pytest.mark.slow
PRESENT = {
    name: kind
    for name, kind in worker.KINDS.items()
    if not kind.package or (programs.FOLDER / kind.package).is_dir()
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return paths and what each program found there, by the number of ranks."""
    top = tmp_path_factory.mktemp("rl")
    found = {}
    for ranks in (2, 1, 3):
        paths = {name: top / name / str(ranks) / kind.place for name, kind in PRESENT.items()}
        for name, kind in PRESENT.items() if found else ():
            source, out = found[2][0][name] / kind.read, paths[name] / kind.read
            out.parent.mkdir(parents=True)
            report = reshard.split(source, out, world_size=ranks)
            assert not any("not read" in line for line in report.lines())
        found[ranks] = paths, worlds.run(ranks, worker.run, paths, ranks == 2)[0]
    return found


@pytest.mark.parametrize("name", worker.KINDS)
def test_programs_resume_at_other_sizes(name, ran):
    if name not in PRESENT:
        pytest.skip(f"{programs.FOLDER / worker.KINDS[name].package} is missing: run ./dev install")
    paths, seen = ran[2]
    state, losses = seen[name]
    with reshard.open(paths[name] / PRESENT[name].read) as checkpoint:
        parts = [checkpoint, *map(checkpoint.optimizer, worker.SLOTS)]
        names = [f"{layer}.{name}" for layer in range(3) for name in ("weight", "bias")]
        assert [[part[name][...].tolist() for name in names] for part in parts] == state
    for ranks in (1, 3):
        assert ran[ranks][1][name] == (state, pytest.approx(losses, rel=1e-6))


def test_rolls_model_names_the_folder_with_its_optimizer(ran):
    place = ran[2][0]["Roll"]
    with pytest.raises(UsageError) as told:
        reshard.split(place, place.with_name("out"))
    assert told.value.remedy.startswith(f"pass {place / 'dcp'} for its state; ")
