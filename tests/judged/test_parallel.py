"""Model-parallel checkpoints of real DeepSpeed, against what its ranks gathered in training."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import reshard
from reshard.commands.split.command import split
from reshard.commands.split.options import SplitOptions
from reshard.errors import DifferentError, IncompleteError, ReshardError, UnsupportedError
from reshard.formats.deepspeed.write import pipeline
from tests.judged.conftest import KEPT
from tests.judged.damage import edit_file
from tests.judged.expected import read_expected
from tests.judged.test_split_experts import list_differing
from tests.judges.parallel_cases import CASES, EXPERT_COUNTS

pytestmark = pytest.mark.slow

SLOTS = ("exp_avg", "exp_avg_sq")
WORDS = 29  # of `parallel_models`, which pads them to 32


@pytest.fixture(scope="session")
def made(checkpoints):
    """Return a directory with a folder for each case: ``run/`` and ``expected.pt``."""
    from tests.judges import parallel_judge

    return checkpoints(parallel_judge.make_all, list(CASES), "parallel")


def assert_all_values(checkpoint, expected):
    """Assert that all values of the ranks are in the output, bitwise, and nothing else."""
    full = {**expected["live"], **expected["buffers"], **expected["params"]}
    assert set(checkpoint) - checkpoint.manifest.tied.keys() == set(full)
    for name, value in full.items():
        got = checkpoint[name][...]
        assert got.shape == value.shape, name
        assert torch.equal(got.to(value.dtype), value), name
    for slot in SLOTS:
        held = checkpoint.optimizer(slot)
        assert set(held) == set(expected[slot]), slot
        for name, value in expected[slot].items():
            assert torch.equal(held[name][...], value), f"{slot} of {name}"


@pytest.mark.parametrize("case", CASES)
def test_the_state_of_the_ranks_is_read(case, made):
    expected = read_expected(made / case)
    with reshard.open(made / case / "run") as checkpoint:
        assert_all_values(checkpoint, expected)
        state, mesh = checkpoint.manifest.train, checkpoint.manifest.origin.mesh
        frozen = checkpoint.manifest.frozen
    row = CASES[case]
    assert (mesh["tp"], mesh["pp"], mesh["dp"]) == (row.tp, row.pp, row.dp)
    if row.kind == "experts":
        assert (mesh["ep"], mesh["etp"]) == (row.ep, row.tp if row.cuts_experts else 1)
    assert state.step == len(expected["losses"])
    (first,) = state.updates_at_start
    assert set(state.optimizer_step.values()) == {float(state.step + first)}
    trained = [fqn for group in state.param_groups for fqn in group.fqns]
    assert sorted(trained) == sorted(n for n, value in expected["params"].items() if value.numel())
    assert frozen == expected["live"].keys() - expected["params"].keys()
    for group, wanted in zip(state.param_groups, expected["groups"], strict=True):
        assert group.hyper["weight_decay"] == wanted["weight_decay"]


def test_megatron_deepspeeds_own_checkpoint_is_read():
    """Compare a tied GPT of Megatron-DeepSpeed with what ds_to_universal made of it.

    The padding of the vocabulary is cut off there.
    """
    place = KEPT / "megatron_deepspeed" / "tp2pp2dp2"
    expected = read_expected(place)
    with reshard.open(place / "run") as checkpoint:
        assert set(checkpoint) == set(expected["params"])
        for name, value in expected["params"].items():
            assert torch.equal(checkpoint[name][: len(value)], value), name
        for slot in SLOTS:
            for name, value in expected[slot].items():
                assert torch.equal(checkpoint.optimizer(slot)[name][: len(value)], value), name
        manifest = checkpoint.manifest
    assert manifest.origin.mesh == {"world": 8, "dp": 2, "tp": 2, "pp": 2}
    (told,) = [text for text in manifest.warnings if "position_embeddings" in text]
    assert "is taken from the first stage" in told


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case].kind == "autotp"])
def test_the_merge_is_deepspeeds_own_of_autotp(case, made, tmp_path):
    from safetensors.torch import load_file

    run = made / case / "run"
    report = reshard.merge(run, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    wanted = read_expected(made / case)["consolidated"]
    with reshard.open(run) as checkpoint:
        assert found.keys() == wanted.keys() - checkpoint.manifest.tied.keys(), report
    for name, value in found.items():
        assert value.dtype == wanted[name].dtype
        assert torch.equal(value, wanted[name]), name


def test_dcp_loads_what_autotp_ranks_held(made, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    place = made / "autotp4_headless"
    reshard.split(place / "run", tmp_path / "out", to="dcp", world_size=3)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "out.pt")
    loaded, expected = torch.load(tmp_path / "out.pt"), read_expected(place)
    for name, value in expected["params"].items():
        assert torch.equal(loaded["model"][name], value), name
        for slot in SLOTS:
            assert torch.equal(loaded["optim"]["state"][name][slot], expected[slot][name]), name


RULES = """
parameters:
  0.word_embeddings.weight: vocab
  0.position_embeddings.weight: replicated
  "{i}.input_norm.{p}": replicated
  "{i}.dense.weight": row
  "{i}.dense.bias": replicated
  "{i}.gate_up.weight": gated
  "{i}.down.weight": row
  "{i}.down.bias": replicated
  "{i}.{p}": replicated
  6.lm_head.weight: vocab
"""


@pytest.mark.parametrize("case", ["mpu2_z0", "mpu2_z2_fp32"])
def test_rules_of_the_user_describe_an_undescribed_run(case, made, tmp_path):
    run = shutil.copytree(made / case / "run", tmp_path / "run")
    for path in run.glob("*/*model_states.pt"):
        states = torch.load(path, weights_only=False)
        info = states["universal_checkpoint_info"]
        kept = {"parameter_with_sub_params": info["parameter_with_sub_params"]}
        torch.save({**states, "universal_checkpoint_info": kept}, path)
    (tmp_path / "r.yaml").write_text(RULES)
    with reshard.open(run, rules=tmp_path / "r.yaml") as checkpoint:
        assert_all_values(checkpoint, read_expected(made / case))


def test_no_parameter_of_a_layer_of_experts_is_joined_by_guess(made, tmp_path):
    """Megatron-DeepSpeed's patterns name none; its dense layers match all of them."""
    run = shutil.copytree(made / "experts2_z1" / "run", tmp_path / "run")
    keys = ("tp_replicated_parameter_patterns", "parameter_with_row_parallelism_patterns")
    for path in run.glob("*/*model_states.pt"):
        edit_file(path, lambda root: [forget_experts(root, key) for key in keys])
    with pytest.raises(UnsupportedError, match=r"mlp.*, which is in a layer of experts"):
        reshard.open(run)
    rules = tmp_path / "rules.yaml"
    parts = (f'  "{{i}}.moe.mlp.{part}.{{p}}": replicated' for part in ("up", "down"))
    rules.write_text("\n".join(["parameters:", *parts]))
    with reshard.open(run, rules=rules) as checkpoint:
        assert_all_values(checkpoint, read_expected(made / "experts2_z1"))


def forget_experts(root, key):
    info = root.get("universal_checkpoint_info") or {}
    if key in info:
        kept = [text for text in info[key] if "moe" not in text]
        info[key] = [text.replace("(dense|down)", "dense") for text in kept]


POSITIONS = "tied_modules.embed.position_embeddings.weight"
UNTIED = "1.position_embeddings.weight"
MEGATRON_DEEPSPEED = KEPT / "megatron_deepspeed" / "tp2pp2dp2"


def converted(run, *, strict):
    """Convert a run with DeepSpeed's own converter."""
    from deepspeed.checkpoint import ds_to_universal

    source = run / (run / "latest").read_text()
    out = run / f"{source.name}_universal"
    told = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    told |= {"inject_missing_state": False, "strict": strict}
    ds_to_universal.main(SimpleNamespace(input_folder=source, output_folder=out, **told))
    return out


def untied(run):
    """Name the position embedding as Megatron-DeepSpeed does where the embedding is not tied."""
    stages = "pipeline_replicated_parameter_patterns"
    for path in run.glob("*/*_states.pt"):
        states = torch.load(path, weights_only=False)
        found = states.get("param_shapes") or []
        if "optim_states" in path.name:
            found = states["optimizer_state_dict"]["param_slice_mappings"]
        for number, group in enumerate(found):
            found[number] = type(group)((UNTIED if n == POSITIONS else n, group[n]) for n in group)
        if info := states.get("universal_checkpoint_info"):
            info[stages] = [UNTIED if n == POSITIONS else n for n in info[stages]]
        torch.save(states, path)


def test_copies_that_ds_to_universal_joined_are_detected(tmp_path):
    """Its pattern names the tied module, the parameter is of a layer: --no_strict goes past it."""
    run = shutil.copytree(MEGATRON_DEEPSPEED / "run", tmp_path / "run")
    untied(run)
    wrong = converted(run, strict=False)
    expected = read_expected(MEGATRON_DEEPSPEED)["params"][POSITIONS]
    held = torch.load(wrong / "zero" / UNTIED / "fp32.pt", weights_only=False)
    assert held["param"].shape == (2 * len(expected), expected.shape[1])
    with reshard.open(wrong) as checkpoint:
        assert torch.equal(checkpoint[UNTIED][...], expected)
        (told,) = [text for text in checkpoint.manifest.warnings if "stored 2 times" in text]
    assert UNTIED in told
    held["param"].data[-1] += 1
    torch.save(held, wrong / "zero" / UNTIED / "fp32.pt")
    with pytest.raises(DifferentError, match=r"transformer\.wpe\.weight: differs"):
        reshard.merge(wrong, tmp_path / "merged")


GOES_ON = [  # case, the grid to go on with, options; the loss may differ by the reduction order
    ("tp2pp2", {}, {}, 0.0),
    ("tp2pp2", {"tp": 1, "dp": 2}, {}, 2e-2),
    ("tp2pp2_untied", {"tp": 4, "pp": 1}, {}, 2e-2),
    ("pp4_tied", {"tp": 2, "pp": 2}, {}, 2e-2),
    ("tp2dp2", {"pp": 2, "dp": 1}, {"stage_layers": "4,3"}, 1e-5),
    ("mpu2_z3", {"tp": 1, "dp": 2}, {}, 2e-2),
    ("mpu2_z0", {"dp": 2, "stage": 3}, {}, 1e-5),
    ("pp2_z0_fp32", {"tp": 2, "pp": 1}, {}, 1e-5),
    ("autotp2_z1", {"tp": 1, "dp": 2}, {}, 2e-2),
    ("experts_pp2_z0", {"pp": 1}, {}, 2e-2),
    ("experts_pp2_z1", {"pp": 1, "dp": 4, "ep": 4}, {"ep": 4}, 2e-2),
    ("autotp2_uneven", {}, {}, 0.0),  # 3 key-value heads and 29 words on 2 ranks
    ("autotp4_headless", {}, {}, 0.0),  # and on 4: one has no head
    ("pp2_odd", {}, {}, 0.0),
    ("pp2_odd", {"pp": 3}, {}, 1e-5),
    ("pp1_odd", {"pp": 2, "dp": 1}, {}, 2e-2),
    ("pp4_odd_tied", {}, {}, 0.0),  # two shared modules, on stages 0 and 3, and 0, 2 and 3
    ("pp4_odd_tied", {"pp": 2}, {}, 1e-5),
    ("pp2_lone", {"pp": 3}, {}, 1e-5),
    ("experts2_z1", {"tp": 4, "dp": 1, "ep": 4}, {"ep": 4}, 2e-2),
    ("experts2_z1", {"tp": 1, "dp": 2}, {}, 2e-2),
    ("experts4_z2", {"dp": 1, "ep": 2, "stage": 0}, {"ep": 2}, 1e-5),
    ("experts2_frozen_z0", {}, {}, 0.0),
    ("experts2_frozen_z1", {}, {}, 0.0),
    ("cut_experts2_z0", {"stage": 1}, {}, 0.0),
    ("cut_experts2_z1", {"tp": 4, "dp": 1, "ep": 1}, {"ep": 1}, 2e-2),
]


@pytest.fixture(scope="module")
def continued(made, tmp_path_factory):
    """Continue each run with real DeepSpeed."""
    from tests.judges import parallel_judge

    runs = []
    for number, (case, grid, options, _) in enumerate(GOES_ON):
        place = tmp_path_factory.mktemp("grids") / str(number)
        row = replace(CASES[case], **grid)
        sizes = {"tp": row.tp, "pp": row.pp, "dp": row.dp, "zero_stage": row.stage}
        split(made / case / "run", place, SplitOptions(**sizes, **options))
        runs.append((place, case, grid))
    return parallel_judge.load_all(runs, steps=2)


@pytest.mark.parametrize("number", range(len(GOES_ON)))
def test_deepspeed_continues_on_another_grid(number, made, continued):
    case, _, _, noise = GOES_ON[number]
    expected, found = read_expected(made / case), continued[number]
    for kind in ("params", *SLOTS):
        for name, value in expected[kind].items():
            assert torch.equal(found["loaded"][kind][name], value), f"{kind} of {name}"
    for loss, wanted in zip(found["losses"], expected["next"]["losses"], strict=True):
        assert loss == pytest.approx(wanted, abs=noise)


EXPERTS = [  # DeepSpeed need not load what equals its own files
    name for name, row in CASES.items() if row.kind == "experts" and row.pp == 1 and not row.frozen
]


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_on_the_same_grid_give_the_files_that_deepspeed_wrote(case, made, tmp_path):
    split(made / case / "run", tmp_path / "out", SplitOptions())
    differing = list_differing(tmp_path / "out", made / case / "run")
    # The keys of the model states stand in another order.
    assert set(map(tuple, differing.values())) == {("{}",)}
    assert {name.startswith("mp_rank_") for name in differing} == {True}


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("experts2_z1", {"ep": 1}, "does not save all files of the experts"),
        ("experts2_z1", {"tp": 4, "dp": 1}, "does not save all files of the experts"),
        ("experts2_z1", {"to": "ds-universal"}, "no universal layout"),
        ("experts2_z1", {"pp": 2}, "does not write for several pipeline stages"),
        ("experts_pp2_z1", {}, "pass --pp 1"),
    ],
)
def test_grids_that_deepspeed_does_not_load_are_refused(case, options, message, made, tmp_path):
    with pytest.raises(ReshardError, match=message):
        split(made / case / "run", tmp_path / "out", SplitOptions(**options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stages", "gone", "named"), [(4, (10,), "gain"), (2, (9, 10), "embed, gain")]
)
def test_uses_of_shared_modules_without_a_file_are_refused(stages, gone, named, made, tmp_path):
    """With a ``forward_fn``, no file shows that a layer uses a shared module."""
    run = tmp_path / "run"
    split(made / "pp4_odd_tied" / "run", run, SplitOptions(pp=stages))
    for layer in gone:
        (run / "global_step3" / f"layer_{layer:02d}-model_00-model_states.pt").unlink()
    with pytest.raises(UnsupportedError, match=rf"uses without a file \({named}\)"):
        split(run, tmp_path / "out", SplitOptions(pp=2))
    split(run, tmp_path / "one", SplitOptions(pp=1))
    split(run, tmp_path / "universal", SplitOptions(to="ds-universal"))


def test_a_run_whose_last_stage_has_unnamed_states_is_refused(made, tmp_path):
    run = shutil.copytree(made / "pp2_z0_fp32" / "run", tmp_path / "run")
    (run / "global_step3" / "layer_06-model_states.pt").unlink()
    with pytest.raises(IncompleteError, match="12 parameters, more than the 11 of"):
        split(run, tmp_path / "out", SplitOptions(pp=1, zero_stage=1))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["mpu2_z0", "mpu2_z1", "experts2_z0", "cut_experts2_z1"])
def test_the_files_of_one_tensor_parallel_rank_are_no_model(case, made, tmp_path):
    run = shutil.copytree(made / case / "run", tmp_path / "run")
    for path in run.rglob("*mp_rank_01*"):
        path.unlink()
    with pytest.raises(IncompleteError, match="saved by 2 model-parallel ranks"):
        reshard.merge(run, tmp_path / "out.safetensors")


def test_a_run_of_which_deepspeed_saves_a_part_is_refused(tmp_path):
    """Fewer ranks share the experts than there are tensor-parallel ranks, which have them whole."""
    from tests.judges import parallel_judge

    row = replace(CASES["experts2_z1"], ep=1)
    parallel_judge.JUDGE.run(tmp_path, {"partial": (row.world, {"case": row})})
    with pytest.raises(IncompleteError, match="mp_rank_01_model_states") as raised:
        reshard.merge(tmp_path / "partial" / "run", tmp_path / "out.safetensors")
    assert "DeepSpeed does not save them at all" in str(raised.value)


def test_an_expert_of_another_rank_order_is_refused(made, tmp_path):
    """In other orders of ranks, other ranks share the optimizer state of an expert."""
    run = shutil.copytree(made / "experts4_z2" / "run", tmp_path / "run")
    for path in sorted(run.rglob("*_expert_*")):
        number = int(path.name.split("_")[3]) * 4 // EXPERT_COUNTS[int(path.name.split("_")[1])]
        name = path.name.split("_mp_rank_")[0] + f"_mp_rank_{number // 2:02d}_model_states.pt"
        path.rename(path.with_name(name))
    with pytest.raises(UnsupportedError, match="consecutive numbers in each tensor-parallel group"):
        reshard.merge(run, tmp_path / "out.safetensors")


ONLY_WEIGHTS = [  # layers that share a module: only the list of parameters has their names
    ("pp2dp2", {}),
    ("pp2_fp16", {"tp": 2, "dp": 1}),
    ("tp2pp2", {"tp": 1, "dp": 2}),
    ("experts4_z2", {"dp": 1, "ep": 2}),
    ("cut_experts2_z1", {"tp": 1, "dp": 2}),
]


@pytest.fixture(scope="module")
def weights_loaded(made, tmp_path_factory):
    """Return the directories, and the values that real DeepSpeed loads from each."""
    from tests.judges import parallel_judge

    runs = []
    for number, (case, grid) in enumerate(ONLY_WEIGHTS):
        place = tmp_path_factory.mktemp("weights") / str(number)
        row = replace(CASES[case], **grid)
        sizes = {"tp": row.tp, "pp": row.pp, "dp": row.dp}
        if row.kind == "experts":
            sizes["ep"] = row.ep
        split(made / case / "run", place, SplitOptions(weights_only=True, **sizes))
        runs.append((place, case, grid))
    return runs, parallel_judge.load_all(runs, steps=1, load_module_only=True)


@pytest.mark.parametrize("number", range(len(ONLY_WEIGHTS)))
def test_deepspeed_loads_weights_without_their_optimizer(number, made, weights_loaded):
    runs, found = weights_loaded
    place, case, _ = runs[number]
    live = read_expected(made / case)["live"]
    with reshard.open(place) as checkpoint:
        assert set(live) <= set(checkpoint)
        for name, value in live.items():
            assert torch.equal(found[number]["loaded"]["live"][name], value), name
            assert torch.equal(checkpoint[name][...], value), name
        assert not checkpoint.manifest.train.param_groups


def test_stages_equal_those_of_deepspeed():
    from deepspeed.runtime import utils

    chance = random.Random(5)
    for _ in range(200):
        weights = [chance.choice([0, 1, 1, 7, 100]) for _ in range(chance.randint(1, 12))]
        count = chance.randint(1, 6)
        for stages, wanted in (
            (pipeline.balance(weights, count), utils.partition_balanced(weights, count)),
            (
                pipeline.share_uniformly(len(weights), count),
                utils.partition_uniform(len(weights), count),
            ),
        ):
            assert [stage.start for stage in stages] + [stages[-1].stop] == list(wanted)


UNIVERSAL = ["tp2pp2", "tp2pp2_untied", "tp2dp2", "tp4", "pp4_tied", "mpu2_z1", "mpu2_z2_fp32"]


@pytest.mark.parametrize("case", [*UNIVERSAL, "megatron_deepspeed"])
def test_the_universal_form_is_that_of_ds_to_universal(case, made, tmp_path):
    """File by file, key by key; of the rest no loader asks for how the source was cut."""
    kept = made / case / "run" if case in UNIVERSAL else MEGATRON_DEEPSPEED / "run"
    run = shutil.copytree(kept, tmp_path / "run")
    split(run, tmp_path / "out", SplitOptions(to="ds-universal"))
    theirs = converted(run, strict=True)
    ours = tmp_path / "out" / theirs.name
    found = {path.relative_to(theirs) for path in theirs.rglob("*.pt")}
    held = {name for name in found if name.parent.suffix != ".scale"}  # buffers: nobody loads them
    assert {path.relative_to(ours) for path in ours.rglob("*.pt")} == held
    for name in held:
        found, wanted = (torch.load(place / name, weights_only=False) for place in (ours, theirs))
        if "zero" not in name.parts:
            check_model_states(found, wanted)
        elif name.stem == "optimizer_state":
            assert found["param_groups"] == wanted["param_groups"]
        elif name.stem == "step":
            assert found == wanted
        else:
            assert torch.equal(found.pop("param"), wanted.pop("param")), name
            assert list(found.items()) == list(wanted.items()), name


def check_model_states(found, wanted):
    assert wanted.keys() == found.keys()
    if "args" in wanted:  # of Megatron-DeepSpeed, whose loader takes the counters from them
        ours, theirs = (vars(states["args"]) for states in (found, wanted))
        for name in ("consumed_train_samples", "num_layers", "hidden_size"):
            assert ours[name] == theirs[name]
    told = {"param_shapes", "checkpoint_parallel_dimensions", "universal_checkpoint_info"}
    counted = {"global_steps", "global_samples", "dp_world_size", "mp_world_size", "iteration"}
    for key in (told | counted) & found.keys():
        assert found[key] == wanted[key], key
    theirs, ours = (states["module"] or {} for states in (wanted, found))
    assert theirs.keys() <= ours.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def count_words(name):
    """Return how many rows of a vocabulary are not padding; None for other tensors."""
    return WORDS if "word_embeddings" in name or "lm_head" in name else None


@pytest.mark.parametrize("case", UNIVERSAL)
def test_the_universal_form_is_read_back(case, made, tmp_path):
    split(made / case / "run", tmp_path / "out", SplitOptions(to="ds-universal"))
    expected = read_expected(made / case)
    with reshard.open(tmp_path / "out") as checkpoint:
        full = {**expected["live"], **expected["buffers"], **expected["params"]}
        assert set(checkpoint) == set(full)
        for name, value in full.items():
            assert torch.equal(checkpoint[name][...].to(value.dtype), value[: count_words(name)]), (
                name
            )


ANY_GRID = [
    ("tp2pp2", {}, 0.0),
    ("tp2pp2_untied", {"tp": 4, "pp": 1}, 2e-2),
    ("mpu2_z2_fp32", {"tp": 1, "dp": 4}, 1e-5),
    ("autotp2_uneven", {}, 0.0),
    ("autotp2_uneven", {"tp": 4, "dp": 1}, 2e-2),  # a rank without a key-value head
    ("autotp2_uneven", {"tp": 1, "dp": 2}, 2e-2),
]


@pytest.fixture(scope="module")
def continued_universally(made, tmp_path_factory):
    """Continue from the universal form with real DeepSpeed, on one grid and another."""
    from tests.judges import parallel_judge

    runs = []
    for number, (case, grid, _) in enumerate(ANY_GRID):
        place = tmp_path_factory.mktemp("universal") / str(number)
        split(made / case / "run", place, SplitOptions(to="ds-universal"))
        runs.append((place, case, {"universal": True, **grid}))
    return parallel_judge.load_all(runs, steps=2)


@pytest.mark.parametrize("number", range(len(ANY_GRID)))
def test_deepspeed_loads_the_universal_form_at_any_grid(number, made, continued_universally):
    case, _, noise = ANY_GRID[number]
    expected, found = read_expected(made / case), continued_universally[number]
    for kind in ("params", *SLOTS):
        for name, value in expected[kind].items():
            held = slice(count_words(name))
            assert torch.equal(found["loaded"][kind][name][held], value[held]), f"{kind} of {name}"
    for loss, wanted in zip(found["losses"], expected["next"]["losses"], strict=True):
        assert loss == pytest.approx(wanted, abs=noise)


@pytest.mark.parametrize("case", ["pp2dp2", "pp2_fp16", "pp4_tied", "tp2pp2"])
def test_a_copy_that_the_last_stage_does_not_use_is_no_padding(case, made):
    """The last stage trains a whole tied module, of which it uses the vocabulary alone."""
    report = reshard.verify(made / case / "run", deep=True)
    assert not [check.failures for check in report.checks if check.failures]


@pytest.mark.parametrize(
    ("name", "slots"), [("word_embeddings", ()), ("position_embeddings", ("exp_avg_sq",))]
)
def test_different_copies_of_two_stages_are_detected(name, slots, made, tmp_path):
    """Also those of which nothing but the moments says that the last stage trains its copy."""
    run = shutil.copytree(made / "pp2dp2" / "run", tmp_path / "run")
    fqn = f"tied_modules.embed.{name}.weight"
    (path,) = run.rglob("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt")

    def change(root):
        held = root["optimizer_state_dict"]
        start = held["param_slice_mappings"][0][fqn].start
        held["single_partition_of_fp32_groups"][0][start] += 1
        for slot in slots:
            held["base_optimizer_state"]["state"][0][slot][start] = 1

    edit_file(path, change)
    replicas = reshard.verify(run, deep=True).check("replicas")
    assert replicas.failures
    assert all(text.startswith(fqn) for text in replicas.failures)
    with pytest.raises(DifferentError, match=fqn):
        reshard.merge(run, tmp_path / "out.safetensors")


@pytest.mark.parametrize("case", ["pp1_odd", "pp2_odd"])
def test_different_copies_in_two_files_of_a_stage_are_detected(case, made, tmp_path):
    run = shutil.copytree(made / case / "run", tmp_path / "run")
    *_, last = sorted(p for p in run.rglob("layer_*") if [*torch.load(p)] == ["gain"])
    edit_file(last, lambda root: root["gain"].add_(1))
    replicas = reshard.verify(run, deep=True).check("replicas")
    assert [text.split(" ")[0] for text in replicas.failures] == ["tied_modules.gain.gain:"]


@pytest.mark.parametrize("has_buffer", [False, True])
def test_a_tied_pipelines_universal_checkpoint_is_read_again(has_buffer, made, tmp_path):
    """A buffer of the tied module is on two stages; the file of its layer is the first one's."""
    run = shutil.copytree(made / "pp2_fp16" / "run", tmp_path / "run")
    name = "tied_modules.embed.scale"
    if has_buffer:
        (layer,) = run.rglob("layer_00-model_states.pt")
        edit_file(layer, lambda root: root.update(scale=torch.tensor([1.0, 2.0, 3.0])))
        for path in run.rglob("mp_rank_*_model_states.pt"):
            edit_file(path, lambda root: root["buffer_names"].append(name))
    split(run, tmp_path / "universal", SplitOptions(to="ds-universal"))
    reshard.merge(tmp_path / "universal", tmp_path / "universal.safetensors", dtype="fp32")
    reshard.merge(run, tmp_path / "native.safetensors", dtype="fp32")
    ours, wanted = (load_file(tmp_path / f"{n}.safetensors") for n in ("universal", "native"))
    assert ours.keys() == wanted.keys()
    assert (name in wanted) == has_buffer
    words = "tied_modules.embed.word_embeddings.weight"
    wanted[words] = wanted[words][:WORDS]  # a universal checkpoint has no padding rows
    assert all(torch.equal(ours[fqn], value) for fqn, value in wanted.items())
