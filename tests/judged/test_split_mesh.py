"""Rank files for meshes of several axes: those of real PyTorch, and loaded by real PyTorch."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import reshard
from reshard.core import stamps
from reshard.errors import CorruptError, IncompleteError, UnsupportedError, UsageError
from tests.judged.alike import assert_alike, assert_same_state
from tests.judged.expected import read_expected
from tests.judges import mesh_worker as worker
from tests.judges.ranks import run_in_turn
from tests.judges.split_worker import EXPECTED
from tests.trainer import worlds

pytestmark = pytest.mark.slow

MODEL = "tests.judges.torch_models:mlp"
FLAT, TENSOR, HYBRID = "fsdp=4", "dp=2,tp=2", "ddp=2,fsdp=2"
RESUMED = (TENSOR, HYBRID)
MESHES = {  # as --mesh has it -> the ranks
    FLAT: 4,
    TENSOR: 4,
    HYBRID: 4,
    "dp_replicate=1,dp_shard=2,tp=2": 4,
    "tp=2": 2,
    "dp=1,tp=1": 1,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train on each mesh; return the checkpoints after three steps, and the next two losses.

    Each in processes of its own: torch numbers a mesh's groups from those that there are.
    """
    place, losses = tmp_path_factory.mktemp("meshes"), {}
    for mesh, world in MESHES.items():
        (place / mesh).mkdir()
        steps = 2 if mesh in (FLAT, *RESUMED) else 0
        losses[mesh] = worlds.run(world, worker.save, mesh, place / mesh, steps)[0]
    return place, losses


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(json.dumps(worker.PLAN))
    return path


def split(source, out, mesh, plan=None, **options):
    options = {"to": "fsdp2", "device": "cpu", **options}
    if plan and "tp" in mesh:
        options |= {"tp_plan": plan, "model": MODEL}
    return reshard.split(source, out, mesh=mesh, **options)


@pytest.mark.parametrize("mesh", MESHES)
def test_rank_files_hold_what_pytorch_itself_put_there(trained, plan, mesh, tmp_path):
    """From its DCP, which knows no mesh: the same values, specs and meshes, to the last field."""
    source = trained[0] / mesh
    report = split(source / "dcp", tmp_path / "out", mesh, plan, model=MODEL)
    assert any("must be on cpu (--device)" in note for note in report.notes)
    names = {f"{kind}_rank{rank}.pt" for kind in ("model", "optim") for rank in range(MESHES[mesh])}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in names:
        assert_alike(drop_stamp(tmp_path / "out" / name), torch.load(source / "ranks" / name))


@pytest.mark.parametrize("mesh", [FLAT, TENSOR, "tp=2"])
def test_rank_files_keep_their_cuts_and_the_name_of_a_single_axis(trained, mesh, tmp_path):
    source = trained[0] / mesh / "ranks"
    named = {} if mesh == FLAT else {"mesh": mesh}
    reshard.split(source, tmp_path / "out", to="fsdp2", model=MODEL, **named)
    for path in source.iterdir():
        assert_alike(drop_stamp(tmp_path / "out" / path.name), torch.load(path))


def test_rank_files_keep_the_dim_that_fsdp_cut(torch_made, tmp_path):
    source = torch_made / "fsdp2_ranks_columns" / "ckpt"
    model = "tests.judges.torch_models:menagerie"
    reshard.split(source, tmp_path / "out", to="fsdp2", model=model)
    for path in source.iterdir():
        assert_alike(drop_stamp(tmp_path / "out" / path.name), torch.load(path))


def test_buffers_beside_weights_that_both_axes_cut_stay_plain(torch_made, tmp_path):
    source = torch_made / "fsdp2_dcp_2d_ws4" / "ckpt"
    reshard.split(source, tmp_path / "out", to="fsdp2", world_size=2)
    weights = torch.load(tmp_path / "out" / "model_rank0.pt")
    plain = {name for name, tensor in weights.items() if not isinstance(tensor, DTensor)}
    assert plain - {stamps.KEY} == {"running", "count"}


def test_one_file_names_parameters_if_a_buffer_has_the_same_shape(torch_made, tmp_path):
    source = torch_made / "fsdp2_ranks_ignored" / "ckpt"
    reshard.split(source, tmp_path / "out.pt", to="torch")
    assert reshard.diff(source, tmp_path / "out.pt").same


def test_the_report_names_parameters_that_the_new_run_must_ignore(torch_made, tmp_path):
    source = torch_made / "fsdp2_ranks_ignored" / "ckpt"
    report = reshard.split(source, tmp_path / "out", to="fsdp2", world_size=3)
    (note,) = [note for note in report.notes if "plain tensors" in note]
    assert note.startswith("odd, llama.lm_head.weight: ")


@pytest.mark.parametrize(("mesh", "told"), [(FLAT, 0), (HYBRID, 1), (TENSOR, 1)])
def test_the_report_tells_of_a_mesh_that_is_not_kept(trained, mesh, told, tmp_path):
    report = reshard.split(trained[0] / mesh / "ranks", tmp_path / "out", world_size=4, model=MODEL)
    axes = ",".join(f"{axis.split('=')[0]}=N" for axis in mesh.split(","))
    assert sum(f"needs --mesh, e.g. --mesh {axes}" in note for note in report.notes) == told


def drop_stamp(path):
    """Return the content of a rank file without the stamp, which names source and layout."""
    state = torch.load(path)
    state.pop(stamps.KEY, None)
    return state


@pytest.fixture(scope="module")
def loaded(trained, plan, made, tmp_path_factory):
    """Load each output with real PyTorch; return what every rank found."""
    place, out = trained[0], tmp_path_factory.mktemp("split")
    jobs = []
    for mesh in RESUMED:  # the same mesh, and from one of a single axis
        for source in (mesh, FLAT):
            name = f"{source} to {mesh}"
            split(place / source / "ranks", out / name, mesh, plan)
            jobs.append((name, worker.resumed, mesh, "pair", out / name, place / source))
    split(place / FLAT / "ranks", out / "verl", HYBRID, to="verl")
    jobs.append(("verl", worker.resumed, HYBRID, "verl", out / "verl", place / FLAT))
    case = made / "z3_zero_init_tied_ws4"
    model = "tests.judges.deepspeed_models:menagerie_tied"
    told = split(case / "run", out / "zero3", TENSOR, model=model)
    expected = read_expected(case)
    jobs.append(("zero3", worker.from_deepspeed, TENSOR, out / "zero3", expected))
    config = made / "hf_z1_fp32_tied" / "run" / "config.json"
    jobs.append(("specs", worker.specs_of, TENSOR, config))
    found = {name: [] for name, *_ in jobs}
    for rank in worlds.run(4, run_in_turn, jobs):
        for name, result in rank.items():
            found[name].append(result)
    return found, told, expected["next"]["losses"]


def test_pytorch_loads_every_bit_of_every_block(loaded):
    for name, ranks in loaded[0].items():
        for result in ranks:
            assert result.get("at") is None, (name, result["at"])
            assert result.get("differing", []) == [], name


def test_training_continues_bitwise(loaded, trained):
    for mesh in RESUMED:
        assert loaded[0][f"{mesh} to {mesh}"][0]["losses"] == trained[1][mesh], mesh


def test_another_mesh_continues_like_one_axis(loaded, trained):
    wanted = list(map(float.fromhex, trained[1][FLAT]))
    for name in (f"{FLAT} to {TENSOR}", f"{FLAT} to {HYBRID}", "verl"):
        found = list(map(float.fromhex, loaded[0][name][0]["losses"]))
        assert found == pytest.approx(wanted, rel=3e-7), name


def test_a_mesh_continues_where_deepspeed_stopped(loaded):
    """Four ranks of ZeRO-3 become 2 x 2, the Llama in it cut by transformers' own plan."""
    found, report, wanted = loaded
    assert found["zero3"][0]["losses"] == pytest.approx(wanted, rel=1e-6)
    told = "15 of 26 parameters cut, 0 replicated, 11 match no pattern: stored whole on each"
    assert any(told in note for note in report.notes), report.notes
    assert report.target == "fsdp2 dp=2,tp=2"
    assert any("gradient_accumulation_steps 1 -> 2" in note for note in report.derived)


def test_the_model_beside_a_checkpoint_determines_its_cuts(loaded, made, tmp_path):
    """``config.json``: placed as transformers itself places a model on such a mesh."""
    split(made / "hf_z1_fp32_tied" / "run", tmp_path / "out", TENSOR)
    for rank, wanted in enumerate(loaded[0]["specs"]):
        read = torch.load(tmp_path / "out" / f"model_rank{rank}.pt")
        assert {name: repr(worker.place_of(value)) for name, value in read.items()} == wanted


def test_a_round_trip_keeps_the_bytes_of_every_tensor(trained, plan, tmp_path):
    """By way of meshes that divide nothing evenly, with more ranks than rows."""
    source = trained[0] / FLAT / "ranks"
    split(source, tmp_path / "direct", FLAT)
    split(source, tmp_path / "1", "dp=2,tp=5", plan)
    split(tmp_path / "1", tmp_path / "2", "dp_replicate=2,dp_shard=3,tp=2", plan)
    split(tmp_path / "2", tmp_path / "back", FLAT)
    with reshard.open(source) as wanted:
        for number in (1, 2):
            with reshard.open(tmp_path / str(number)) as found:
                assert_same_state(found, wanted)
    for path in (tmp_path / "direct").iterdir():
        assert_alike(drop_stamp(path), drop_stamp(tmp_path / "back" / path.name))


@pytest.mark.parametrize(
    ("mesh", "options", "error", "text"),
    [
        (TENSOR, {"to": "dcp"}, UsageError, "has no effect with --to dcp"),
        (TENSOR, {"to": "torch"}, UsageError, "has no effect with --to torch"),
        (TENSOR, {"world_size": 8}, UsageError, "has 4 ranks"),
        (TENSOR, {}, UsageError, "no file states how tensor parallelism cuts"),
        (TENSOR, {"model": MODEL}, UsageError, "has no tensor-parallel plan"),
        (FLAT, {"tp_plan": "plan.json"}, UsageError, "needs --mesh with an axis tp=N"),
        ("dp_replicate=2,dp_shard=2", {"to": "verl"}, UsageError, "pass fsdp=N or ddp=N,fsdp=N"),
        ("dp=2,pp=2", {}, UsageError, "split each stage by itself"),
    ],
)
def test_meshes_and_plans_that_do_not_fit_are_refused_by_name(
    trained, mesh, options, error, text, tmp_path
):
    with pytest.raises(error, match=text):
        split(trained[0] / FLAT / "ranks", tmp_path / "out", mesh, **options)
    assert list(tmp_path.iterdir()) == []


def test_packed_weights_are_refused(trained, tmp_path, monkeypatch):
    from reshard.model import shapes

    packed = {"blocks.*.inner.up": "packed_colwise"}
    monkeypatch.setattr(shapes, "_collect_tensor_plans", lambda _root: packed)
    with pytest.raises(UnsupportedError, match="several blocks"):
        split(trained[0] / FLAT / "ranks", tmp_path / "out", TENSOR, model=MODEL)


@pytest.mark.parametrize(("ranks", "new_ranks"), [(2, 2), (2, 4), (4, 2)])
def test_packed_weights_are_read_and_continue(tmp_path, ranks, new_ranks):
    """Gate and up of Mixtral are one tensor, which a ``_StridedShard`` of one axis cuts."""
    cuts, losses = worlds.run(ranks, worker.save_packed, tmp_path)[0]
    assert any("StridedShard(dim=1, sf=2)" in each for each in cuts)
    wanted = torch.load(tmp_path / EXPECTED)
    with reshard.open(tmp_path / "ranks") as checkpoint:
        assert len(checkpoint) == sum("/" not in name for name in wanted)
        for name, value in wanted.items():
            fqn, _, slot = name.partition("/")
            found = checkpoint.optimizer(slot)[fqn] if slot else checkpoint[fqn]
            assert torch.equal(found[...], value), name
    split(tmp_path / "ranks", tmp_path / "out", f"tp={new_ranks}")
    wrong, continued = worlds.run(new_ranks, worker.resume_packed, tmp_path / "out", tmp_path)[0]
    assert wrong == []
    assert continued == (losses if new_ranks == ranks else pytest.approx(losses, rel=1e-5))


def test_blocks_that_torch_itself_states_wrongly(tmp_path):
    """Seven rows of 3 x 2 ranks: ``.metadata`` gives the last row to the rank that has none."""
    rows = [[float(row), -row] for row in range(7)]
    worlds.run(6, worker.save_uneven, tmp_path, rows)
    with reshard.open(tmp_path / "ranks") as checkpoint:
        assert checkpoint["weight"][...].tolist() == rows
    with pytest.raises(CorruptError, match="torch itself saved wrong blocks"):
        reshard.open(tmp_path / "dcp")


def test_a_model_on_some_ranks_of_a_program(tmp_path):
    """As the critic of two models has it: no file of the other ranks is missing."""
    rows = [[float(row), -row] for row in range(5)]
    worlds.run(4, worker.save_on_some, tmp_path, [1, 3], rows)
    with reshard.open(tmp_path) as checkpoint:
        assert checkpoint["weight"][...].tolist() == rows
    (tmp_path / "model_rank1.pt").rename(tmp_path / "model_rank0.pt")
    (tmp_path / "model_rank3.pt").rename(tmp_path / "model_rank1.pt")
    with reshard.open(tmp_path) as checkpoint:
        assert checkpoint["weight"][...].tolist() == rows
    (tmp_path / "model_rank0.pt").unlink()
    with pytest.raises(IncompleteError, match=r"rank0\.pt is missing"):
        reshard.open(tmp_path)


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_of_ranks_are_told_of_and_joined_by_rules(tmp_path, ranks):
    """Each rank saves its parts of a Mixtral as vLLM names them; no file states the cuts."""
    worlds.run(ranks, worker.save_slices, tmp_path)
    wanted = torch.load(tmp_path / EXPECTED)
    one = tmp_path / "slices" / "model-rank-1-part-0.safetensors"
    with reshard.open(one) as checkpoint:
        assert checkpoint["lm_head.weight"].shape != wanted["lm_head.weight"].shape
        (note,) = checkpoint.manifest.warnings
        assert "model-rank-0-part-0.safetensors" in note
        assert "state the cuts with --rules FILE" in note
    rules = tmp_path / "rules.yaml"
    rules.write_text(worker.SLICE_RULES)
    for source in (one, one.parent):
        with reshard.open(source, rules=rules) as checkpoint:
            assert checkpoint.keys() == wanted.keys()
            assert checkpoint.manifest.warnings == ()
            assert [n for n in wanted if not torch.equal(checkpoint[n][...], wanted[n])] == []
    reshard.merge(one.parent, tmp_path / "merged.safetensors", rules=rules)
    merged = load_file(tmp_path / "merged.safetensors")
    assert all(torch.equal(merged[name], value) for name, value in wanted.items())
    if ranks == 4:
        (one.parent / "model-rank-2-part-0.safetensors").unlink()
        with pytest.raises(IncompleteError, match="rank-2-part-0"):
            reshard.open(one, rules=rules)


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_take_the_cut_of_dtensors_or_that_of_the_rules(tmp_path, ranks):
    """Experts that FSDP ignores differ on each rank, and an average is kept as the ranks' parts."""
    source, rules = tmp_path / "source", tmp_path / "rules.yaml"
    source.mkdir()
    losses, weights, moments = worlds.run(ranks, worker.save_local_parts, source)[0]
    rules.write_text("parameters:\n  experts: {cut: column}\n")
    reshard.split(source, tmp_path / "out", to="dcp", world_size=2, rules=rules)
    for path, given in ((source, {"rules": rules}), (tmp_path / "out", {})):
        with reshard.open(path, **given) as checkpoint:
            assert {name: checkpoint[name][...].tolist() for name in checkpoint} == weights
            found = checkpoint.optimizer("exp_avg")
            assert {name: found[name][...].tolist() for name in found} == moments
    with reshard.open(source, key="ema", rules=rules) as checkpoint:
        assert {n: (2 * checkpoint[n][...]).tolist() for n in checkpoint} == weights
    for world in (ranks, 5 - ranks):
        found = worlds.run(world, worker.resume_local_parts, tmp_path / "out")
        assert found == [pytest.approx(losses, rel=1e-6)] * world


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_layout_of_two_folders_is_kept(tmp_path, ranks):
    """NeMo Automodel loads shards of safetensors and DCP's optimizer, and no files of ranks."""
    rows = [[float(row), -row] for row in range(6)]
    source, out, other = (tmp_path / name for name in ("epoch_0_step_4", "out", "other"))
    worlds.run(ranks, worker.save_automodel, source, rows)
    (tmp_path / "mine.json").write_text("{}")
    (source / "link.json").symlink_to(tmp_path / "mine.json")
    report = reshard.split(source, out, world_size=2)
    assert any(note.startswith("link.json was not copied") for note in report.warnings)
    assert {path.name for path in out.iterdir()} == {"model", "optim"}
    reshard.split(source, other, world_size=2, to="dcp")
    for place in (source, out, other):
        with reshard.open(place) as checkpoint:
            assert checkpoint["weight"][...].tolist() == rows
            moments = checkpoint.optimizer("exp_avg")["weight"][...]
            assert torch.equal(moments, torch.tensor(rows) + 10)
