"""Which ranks share which experts, and the param groups that DeepSpeed makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reshard.commands.output import check_overlaps, check_skeleton
from reshard.core.dtypes import FLOAT32
from reshard.core.manifest import (
    Entry,
    Manifest,
    Origin,
    ParamGroup,
    SourceFile,
    TrainState,
    index_entries,
)
from reshard.errors import UnsupportedError, UsageError
from reshard.formats.deepspeed import write
from reshard.formats.deepspeed.experts import layout
from reshard.formats.deepspeed.experts.layout import parse_expert_name
from reshard.formats.deepspeed.write import expert_groups, experts
from reshard.formats.deepspeed.write.grid import DeepSpeedTarget
from reshard.training.state import build_writable_state

LAYERS = ("0.deepspeed_moe.", "1.deepspeed_moe.")
GATES = [f"{layer}gate.wg.weight" for layer in LAYERS]


def names(*numbers, layers=LAYERS):
    """Return the parameters of each layer's experts, in the model's order."""
    return [
        f"{layer}experts.deepspeed_experts.{number}.{rest}"
        for layer in layers
        for number in numbers
        for rest in ("weight", "bias")
    ]


def of_experts(fqns, ranks, **hyper):
    return ParamGroup({"lr": 0.1, "name": f"ep_size_{ranks}", "moe": True, **hyper}, tuple(fqns))


def state(*groups, count=4, tied=None):
    """Return a run of two layers of ``count`` experts; weights have 4 elements and biases 2."""
    held = [*GATES, *names(*range(count))]
    entries = [
        Entry(fqn, kind, FLOAT32, (2,) if fqn.endswith("bias") else (2, 2), ())
        for fqn in held
        for kind in ("master", "exp_avg")
    ]
    steps = dict.fromkeys(held, 3.0)
    train = TrainState(step=3, samples=6, optimizer_step=steps, param_groups=groups)
    origin = Origin("deepspeed", "run", mesh={"world": 4, "dp": 4, "ep": 2}, precision="float32")
    found = Manifest(
        origin,
        index_entries(entries),
        {"f": SourceFile("f", 1)},
        train=train,
        tied=tied or {},
        ordered=True,
    )
    return build_writable_state(found)


REST = ParamGroup({"lr": 0.1, "name": "rest"}, tuple(GATES))


def regrouped(made, ranks):
    mixed = experts.make_mixture(made, DeepSpeedTarget(world_size=4, experts=ranks))
    assert mixed is not None
    return [(group.hyper.get("name"), group.fqns) for group in mixed.state.groups], mixed.notes


def test_groups_of_other_ranks_have_their_name():
    made = state(REST, of_experts(names(0, 1, 2, 3), 2))
    assert regrouped(made, 4) == ([("rest", GATES), ("ep_size_4", names(0, 1, 2, 3))], ())
    assert regrouped(made, None) == ([("rest", GATES), ("ep_size_2", names(0, 1, 2, 3))], ())


def test_a_group_is_cut_where_a_ranks_part_of_it_would_be_too_large(monkeypatch):
    monkeypatch.setattr(expert_groups, "_LARGEST", 12)  # two experts of 6 elements
    made = state(REST, of_experts(names(0, 1, 2, 3), 4))
    found, notes = regrouped(made, 2)
    first, second = (names(0, 1, 2, 3, layers=[layer]) for layer in LAYERS)
    assert found == [("rest", GATES), ("ep_size_2", first), ("ep_size_2", second)]
    assert len(notes) == 1
    assert "1 param group of experts becomes 2" in notes[0]
    again = state(REST, of_experts(first, 2), of_experts(second, 2))
    assert regrouped(again, 4)[0] == [("rest", GATES), ("ep_size_4", names(0, 1, 2, 3))]


def test_groups_of_two_of_the_users_stay_apart():
    first, second = (names(0, 1, 2, 3, layers=[layer]) for layer in LAYERS)
    alike = state(REST, of_experts(first, 2), of_experts(second, 2))
    assert regrouped(alike, 4)[0][1:] == [("ep_size_4", first), ("ep_size_4", second)]
    other = state(REST, of_experts(first, 2), of_experts(second, 2, lr=0.2))
    assert regrouped(other, 4)[0][1:] == [("ep_size_4", first), ("ep_size_4", second)]


def test_layers_over_different_ranks_become_one_group():
    first, second = (names(0, 1, 2, 3, layers=[layer]) for layer in LAYERS)
    made = state(REST, of_experts(second, 4), of_experts(first, 1))
    assert regrouped(made, 2)[0][1:] == [("ep_size_2", names(0, 1, 2, 3))]
    kept, notes = regrouped(made, None)
    assert kept[1:] == [("ep_size_4", second), ("ep_size_1", first)]
    assert "PYTHONHASHSEED" in notes[0]


def test_an_order_that_is_not_the_models_stays_on_the_same_ranks_alone():
    turned = [*names(1, 0), *names(3, 2)]  # rank by rank
    made = state(REST, of_experts(turned, 2))
    assert regrouped(made, None)[0][1] == ("ep_size_2", turned)
    with pytest.raises(UnsupportedError, match="that is not in the model's order"):
        regrouped(made, 4)


@pytest.mark.parametrize("trained", [(1, 2, 3), (0, 1, 2)])
def test_ranks_that_would_train_different_experts_are_refused(trained):
    made = state(REST, of_experts(names(0, 1, 2, 3), 4))
    rest, group = made.groups
    kept = tuple(m for m in group.members if parse_expert_name(m.fqn).number in trained)
    made = replace(made, groups=(rest, replace(group, members=kept)))
    with pytest.raises(UnsupportedError, match="on 1 of 2 expert-parallel ranks"):
        regrouped(made, 2)
    assert regrouped(made, 4)[0][1][1] == [member.fqn for member in kept]


def test_experts_among_other_parameters_are_refused():
    together = ParamGroup({"lr": 0.1}, (*GATES, *names(0, 1, 2, 3)))
    with pytest.raises(UnsupportedError, match="groups that contain only experts"):
        regrouped(state(together), None)


@pytest.mark.parametrize(("ranks", "world"), [(3, 3), (4, 6)])
def test_ranks_that_cannot_share_them_evenly_are_refused(ranks, world):
    made = state(REST, of_experts(names(0, 1, 2, 3), 2))
    with pytest.raises(UsageError, match=r"does not divide the 4 experts|not a multiple of the 4"):
        experts.make_mixture(made, DeepSpeedTarget(world_size=world, experts=ranks))


def test_a_rank_has_its_experts_under_its_own_names():
    made = state(
        REST,
        of_experts(names(0, 1, 2, 3), 2),
        tied={name.replace("bias", "again"): name for name in names(0, 3) if "bias" in name},
    )
    mixed = experts.make_mixture(made, DeepSpeedTarget(world_size=4))
    assert mixed is not None
    held = mixed.select_rank(3)
    assert held is mixed.select_rank(1)
    assert [weight.fqn for weight in held.state.weights] == [*GATES, *names(0, 1)]
    assert [held.names[fqn] for fqn in names(0, 1)] == names(2, 3)
    again = {name.replace("bias", "again"): name for name in names(1) if "bias" in name}
    assert held.state.manifest.tied == again
    files = dict(mixed.list_files())
    assert list(files) == [
        f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"
        for layer in range(2)
        for number in range(4)
    ]
    last = names(3, layers=LAYERS[1:])
    alias = last[1].replace("bias", "again")
    assert files["layer_1_expert_3_mp_rank_00_model_states.pt"] == {
        last[0]: last[0],
        last[1]: last[1],
        alias: last[1],
    }


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("world", "ranks"), [(1, 1), (2, 2), (4, 2), (8, 4), (12, 4), (6, 1)])
def test_every_part_has_its_place(world, ranks, stage):
    made = state(REST, of_experts(names(0, 1, 2, 3), 2))
    target = DeepSpeedTarget(world_size=world, zero_stage=stage, experts=ranks)
    skeleton = write.lay_out(made, target).skeleton
    check_skeleton(skeleton)
    check_overlaps(skeleton)
    optimizers = [file for file in skeleton.files if file.name.endswith("optim_states.pt")]
    assert len(optimizers) == (world if stage else ranks)


@pytest.mark.parametrize("config", [{}, {"use_data_before_expert_parallelism": True}])
def test_every_rank_has_one_place(config):
    for size in (1, 2, 3, 6):
        owners = layout.list_expert_data_ranks(6, size, config)
        assert sorted(rank for ranks in owners for rank in ranks) == list(range(6))
        for rank in range(6):
            number, at = layout.locate_rank(6, size, config, rank)
            assert owners[number][at] == rank
