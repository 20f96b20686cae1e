"""What is said of a global batch that another number of ranks does not divide."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from reshard.core.manifest import Manifest, Origin, TrainState
from reshard.training import batch as batches
from reshard.training.batch import (
    BATCH_BEFORE,
    Batch,
    LiveBatch,
    describe_misfit,
    rebalance_batch,
)


def manifest(ranks, **train):
    origin = Origin("deepspeed", "run", mesh={"world": ranks})
    return Manifest(origin, {}, {}, replace(TrainState(), **train), ordered=True)


def configured(ranks, micro, steps):
    config = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    return manifest(ranks, config=config)


@pytest.mark.parametrize(
    ("batch", "ways"),
    [
        ((12, 1, 5), "5 ranks x micro batch 1; use 10 or 15, or 2, 3, 4 or 6 ranks"),
        ((12, 1, 24), "24 ranks x micro batch 1; use 24, or 3, 4, 6 or 12 ranks"),
        ((7, 2, 1), "1 rank x micro batch 2; use 6 or 8"),
        ((2, 2, 3), "3 ranks x micro batch 2; use 6, or 1 rank"),
    ],
)
def test_the_advice_can_be_followed(batch, ways):
    total, _, _ = batch
    assert describe_misfit(*batch) == f"a global batch of {total} is not divisible by {ways}"


def test_deepspeeds_configuration_keeps_the_batch_or_takes_the_nearest():
    kept = rebalance_batch(configured(2, 1, 6), 3)
    assert kept.manifest.train.config["gradient_accumulation_steps"] == 4
    (said,) = kept.derived
    assert said.startswith(
        "gradient_accumulation_steps 6 -> 4 keeps the global batch of 12, if the"
    )
    assert kept.warnings == []
    changed = rebalance_batch(configured(2, 1, 6), 5)
    assert changed.manifest.train.config["train_batch_size"] == 10
    (warning,) = changed.warnings
    assert warning.startswith(describe_misfit(12, 1, 5))
    assert "has a global batch of 10" in warning


def test_ranks_that_share_a_sequence_count_once():
    """A batch of 8 on 4 ranks of 2 x 2: a pair of ranks has a sequence (Ulysses)."""
    source = configured(4, 2, 2)
    config = {**source.train.config, "train_batch_size": 8}
    source = replace(source, train=replace(source.train, config=config))
    halved = rebalance_batch(source, 2)
    assert halved.manifest.train.config["train_batch_size"] == 8
    assert halved.manifest.train.config["gradient_accumulation_steps"] == 4
    assert "gradient_accumulation_steps 2 -> 4 keeps the global batch of 8" in halved.derived[0]
    (warning,) = rebalance_batch(source, 3).warnings
    assert "2 ranks of the run share each sequence (a global batch of 8 on 4 ranks)" in warning


def test_the_size_of_deepspeeds_mesh_follows_the_ranks():
    source = configured(2, 2, 2)
    config = {**source.train.config, "data_parallel_size": 2, "sequence_parallel_size": 2}
    source = replace(source, train=replace(source.train, config=config))
    assert rebalance_batch(source, 4).manifest.train.config["data_parallel_size"] == 4


def test_hf_trainer_under_deepspeed_gets_its_own_batch_back():
    """Six of a rank at 2 ranks are four at 3, and six again at 2."""
    source = configured(2, 6, 1)
    source = replace(source, train=replace(source.train, trainer_state={"train_batch_size": 6}))
    there = rebalance_batch(source, 3).manifest
    there = replace(there, origin=replace(there.origin, mesh={"world": 3}))
    assert there.train.trainer_state["train_batch_size"] == 4
    back = rebalance_batch(there, 2).manifest
    assert back.train.trainer_state["train_batch_size"] == 6
    assert back.train.config["train_micro_batch_size_per_gpu"] == 6
    assert back.train.config["gradient_accumulation_steps"] == 1
    assert back.train.opaque == {}


def trained(ranks, micro, steps=None, **train):
    """Describe a run of HF Trainer, whose accumulation a record may state."""
    record = {"train_batch_size": micro, "world_size": ranks}
    record |= {} if steps is None else {"gradient_accumulation_steps": steps}
    opaque = {} if steps is None else {BATCH_BEFORE: record}
    return manifest(ranks, trainer_state={"train_batch_size": micro}, opaque=opaque, **train)


@pytest.mark.parametrize(
    ("batch", "after", "file", "said"),
    [
        ((2, 3, 1), 1, 6, "_size 6 and gradient_accumulation_steps 1 to the Trainer; .* is 3 "),
        ((2, 3, 1), 3, 2, "_size 2 and gradient_accumulation_steps 1 to the Trainer; .* is 9 "),
        ((4, 1, 3), 2, 2, "_size 2 and gradient_accumulation_steps 3 .* pass 1 and 6, and set"),
        ((2, 1, 3), 3, 1, "_size 1 and gradient_accumulation_steps 2 to the Trainer; .* is 9 "),
        ((2, 3, None), 1, 6, "_size 6 and the gradient_accumulation_steps of the source to"),
        (
            (2, 3, 1),
            4,
            3,
            "6 is not divisible by 4 ranks x micro batch 1; use 4 or 8, or .* it is 12",
        ),
        ((2, 3, None), 4, 3, "the data-parallel size changes from 2 to 4"),
    ],
)
def test_hf_trainer_is_told_its_arguments(batch, after, file, said):
    found = rebalance_batch(trained(*batch), after)
    assert found.manifest.train.trainer_state["train_batch_size"] == file
    (warning,) = found.warnings
    assert re.search(said, warning), warning


@pytest.mark.parametrize(("before", "after"), [(4, "2"), (2, "1"), (1, "")])
def test_rounds_of_generation_follow_only_in_whole_numbers(before, after):
    stated = batches._Stated(Batch(1, 4, 1), 1, {"steps_per_generation": before}, [])
    said = batches._describe_arguments(stated, Batch(1, 2, 2))
    assert said.partition("steps_per_generation, set it to ")[2] == after


@pytest.mark.parametrize(
    ("batch", "live", "reads_file", "file", "said"),
    [
        ((2, 3, 1), (3, 1, 1), False, 6, "was 6, and is 3 .*_size 6 and gradient_acc.*steps 1 to"),
        ((2, 3, 1), (3, 1, 1), True, 6, None),
        ((2, 3, 1), (3, 2, 1), False, 3, None),
        ((2, 3, 1), (1, 1, 4), False, 1, "was 6, and is 4 .* not divisible by 4 ranks"),
        ((2, 3, None), (3, 1, 1), False, 3, "was 6 x .*, and that of the Trainer is 3"),
        ((2, 3, None), (6, 1, 1), False, 6, None),
        ((2, 3, 1), (3, 1, 2), False, 3, None),
    ],
)
def test_a_running_trainer_is_compared_with_the_run(batch, live, reads_file, file, said):
    running = LiveBatch(Batch(*live), reads_file=reads_file)
    found = rebalance_batch(trained(*batch), live[2], running)
    assert found.manifest.train.trainer_state["train_batch_size"] == file
    assert bool(found.warnings) == bool(said)
    if said:
        assert re.search(said, found.warnings[0]), found


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 5), (3, 2)])
def test_an_unknown_batch_gets_a_rule_without_fractions(before, after):
    run = manifest(before)
    origin = replace(run.origin, mesh={"world": before, "dp": before})
    (said,) = rebalance_batch(replace(run, origin=origin), after).derived
    assert f"{before}/{after}" not in said
    if before % after == 0:
        assert f"by {before // after}" in said
    else:
        assert f"global batch / ({after} ranks x micro batch)" in said


def test_ranks_of_an_unknown_mesh_are_not_called_data_parallel():
    """A DCP directory of FSDP 2 with tensor parallelism states neither size."""
    (said,) = rebalance_batch(manifest(4), 8).derived
    assert "the number of ranks changes from 4 to 8" in said


@pytest.mark.parametrize(("micro", "steps"), [(0, 1), (-2, 1), (True, 1), (2, 0), (2, "auto")])
def test_a_batch_that_the_configuration_does_not_state_in_numbers_is_explained_by_the_rule(
    micro, steps
):
    source = configured(2, micro, steps)
    kept = rebalance_batch(source, 3)
    assert kept.manifest == source
    (text,) = kept.derived
    assert "to keep the global batch" in text
