"""How many ranks a split is for: sizes of tensor, pipeline, expert and data parallelism."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from reshard.commands.split.options import SplitOptions
from reshard.commands.split.request import choose_writer, resolve_request
from reshard.core.manifest import Manifest, Origin
from reshard.errors import UsageError
from reshard.formats import registry
from reshard.layouts.model_parallel.sizes import Sizes, choose_world_size

PARALLEL = ["tp", "pp", "ep", "dp"]
WRITERS = registry.list_built_in_writers()
WITHOUT_TP = [name for name, writer in WRITERS.items() if "tp" not in writer.options]
SOURCE = Manifest(
    Origin("deepspeed", "run", mesh={"world": 8, "dp": 2, "tp": 2, "pp": 2}),
    entries={},
    files={},
    ordered=True,
)


def asked(**options):
    options = SplitOptions(**options)
    return resolve_request(SOURCE, None, choose_writer(SOURCE, options), options)


def test_without_options_a_source_keeps_its_sizes():
    request = asked()
    assert (request.world_size, request.parallel) == (8, Sizes(tensor=2, pipeline=2))
    assert request.data_parallel == 2


@pytest.mark.parametrize(
    ("options", "ranks", "data"),
    [
        ({"tp": 4}, 8, 1),
        ({"tp": 1, "pp": 1}, 8, 8),
        ({"tp": 4, "pp": 4, "dp": 3}, 48, 3),
        ({"pp": 1, "world_size": 12}, 12, 6),
        ({"dp": 4, "ep": 4}, 16, 4),
    ],
)
def test_what_is_not_asked_for_follows(options, ranks, data):
    request = asked(**options)
    assert (request.world_size, request.data_parallel) == (ranks, data)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"tp": 4, "pp": 4},
            r"8 ranks: are not a multiple of 16.*\n.*pass --world-size 16$",
        ),
        ({"tp": 8}, r"\n.*pass --pp 1 as well, or --world-size 16$"),
        ({"world_size": 7}, r"\n.*pass --pp 1 --tp 1 as well, or --world-size 8$"),
        ({"dp": 2, "world_size": 6}, "is not --dp 2 x 4 model-parallel ranks"),
        ({"ep": 4}, "does not divide the 2 data-parallel ranks"),
        ({"tp": 0}, "tp=0: must be at least 1"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(options, problem):
    with pytest.raises(UsageError, match=problem):
        asked(**options)


@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.parametrize("to", WITHOUT_TP)
def test_a_target_without_model_parallelism_refuses_its_sizes(name, to):
    with pytest.raises(UsageError, match=f"--{name}: has no effect with --to {to}"):
        asked(**{name: 2}, to=to)


def test_another_layout_has_none_of_the_sources_sizes():
    request = asked(to="fsdp2")
    assert (request.world_size, request.parallel.is_one) == (8, True)


def test_every_choice_of_sizes_is_one_of_the_commands():
    assert set(PARALLEL) <= {field.name for field in fields(SplitOptions)}
    assert choose_world_size(replace(Sizes(), tensor=3), None, 2, 1) == 6
