"""Live loads of real FSDP 1 and FSDP 2: N ranks to M ranks, N and M of 1 to 4.

The script of a user: `torch.distributed.checkpoint.load` with `reshard.dcp.StorageReader`. Each
number of ranks is started once to save and once to load.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

import reshard
from tests.judges import deepspeed_judge
from tests.judges import split_worker as worker
from tests.judges.deepspeed_cases import Case, ds_config
from tests.judges.ranks import run_in_turn
from tests.support.combinations import choose_combinations
from tests.trainer import worlds

pytestmark = pytest.mark.slow

SIZES = (1, 2, 3, 4)
FORMS = ("dcp", "full.pt")
KINDS = {  # the wrapper and its model -> numbers of ranks
    "fsdp2": ("menagerie_tied_frozen", SIZES),
    "fsdp1 mesh": ("menagerie_tied", SIZES),
    # Without a mesh torch neither saves nor loads a parameter of which a rank has no row.
    "fsdp1": ("menagerie_tied", SIZES[:3]),
}
LOADS = choose_combinations(
    (kind, n, m, form)
    for kind, (_, sizes) in KINDS.items()
    for n, m, form in itertools.product(sizes, sizes, FORMS)
)
ZERO3 = Case("z3_fp32", 3, ds_config(3, "fp32"), model="llama_tied")
FROM_ZERO3 = list(itertools.product(("fsdp2", "fsdp1"), SIZES))


@dataclass(frozen=True)
class Saved:
    """The runs of a directory, and what each lost in its next steps."""

    place: Path
    losses: dict[tuple[str, int], list[str]]

    def find(self, kind, n):
        return self.place / f"{kind}-{n}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save runs of every kind and number of ranks, in shards and in one file."""
    saved = Saved(tmp_path_factory.mktemp("saved"), {})
    for n in SIZES:
        jobs = []
        for kind, (build, sizes) in KINDS.items():
            if n in sizes:
                saved.find(kind, n).mkdir()
                save = worker.save_sharded_and_whole
                jobs.append((kind, save, kind, build, saved.find(kind, n)))
        losses = worlds.run(n, run_in_turn, jobs)[0]
        assert all(isinstance(found, list) for found in losses.values()), losses
        saved.losses.update({(kind, n): found for kind, found in losses.items()})
    return saved


@pytest.fixture(scope="module")
def zero3(tmp_path_factory):
    """Return a ZeRO 3 run of three ranks, and DeepSpeed's step and next losses."""
    place = tmp_path_factory.mktemp("zero3")
    found = deepspeed_judge.JUDGE.run(place, {"zero3": (ZERO3.world, {"case": ZERO3})})["zero3"]
    assert isinstance(found, dict), found
    return place / "zero3" / "run", found["train"]["step"], found["next"]["losses"]


@pytest.fixture(scope="module")
def loaded(saved, zero3, tmp_path_factory):
    """Return (kind, source, ranks) -> what each rank found, live and after a split.

    As many ranks as saved repeat the losses of the saved run: none of these is split.
    """
    place, found = tmp_path_factory.mktemp("split"), {}
    for m in SIZES:
        jobs = [*_list_fsdp_jobs(saved, m, place), *_list_zero3_jobs(zero3, m, place)]
        for rank in worlds.run(m, run_in_turn, jobs):
            for name, result in rank.items():
                found.setdefault((*name, m), []).append(result)
    return found


def _list_fsdp_jobs(saved, m, place):
    loads = [(kind, n, form) for kind, n, ranks, form in LOADS if ranks == m]
    for kind, n, form in loads:
        run, (build, _) = saved.find(kind, n), KINDS[kind]
        yield (kind, n, form), worker.resumed, kind, build, "live", run / form, run
    for kind, n in dict.fromkeys((kind, n) for kind, n, _ in loads if n != m):
        run, (build, _) = saved.find(kind, n), KINDS[kind]
        copy = place / f"{kind}-{n}-{m}"
        reshard.split(run / "dcp", copy, to="dcp", world_size=m)
        yield (kind, n, "split"), worker.resumed, kind, build, "dcp", copy, run


def _list_zero3_jobs(zero3, m, place):
    run, step, _ = zero3
    copy = place / f"zero3-{m}"
    reshard.split(run, copy, to="dcp", world_size=m)
    for kind in ("fsdp2", "fsdp1"):
        for form, source in (("live", run), ("dcp", copy)):
            name = (kind, "zero3", "split" if form == "dcp" else form)
            yield name, worker.from_deepspeed, source, run, step, 2, kind, form


@pytest.mark.parametrize(("kind", "n", "m", "form"), LOADS)
def test_the_state_has_the_same_bits_and_losses_are_as_after_split(kind, n, m, form, loaded, saved):
    live = loaded[kind, n, form, m]
    if n == m:
        assert_loaded(live)
        assert live[0]["losses"] == saved.losses[kind, n]
    else:
        assert_same_results(live, loaded[kind, n, "split", m])
    wanted = [float.fromhex(loss) for loss in saved.losses[kind, n]]
    assert [float.fromhex(x) for x in live[0]["losses"]] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("kind", "m"), FROM_ZERO3)
def test_fsdp_continues_a_zero3_run(kind, m, loaded, zero3):
    live = loaded[kind, "zero3", "live", m]
    assert_same_results(live, loaded[kind, "zero3", "split", m])
    assert live[0]["losses"] == pytest.approx(zero3[2], rel=2e-6)


def assert_same_results(live, split):
    assert_loaded(live)
    assert_loaded(split)
    assert [result["losses"] for result in live] == [result["losses"] for result in split]


def assert_loaded(results):
    for result in results:
        assert result.get("at") is None, result["at"]
        assert result["differing"] == []
