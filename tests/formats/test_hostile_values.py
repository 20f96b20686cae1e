"""What files say of themselves, and cannot be: each ends in an error that names file and place."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import reshard
from benchmarks.hostile import case
from reshard import formats
from reshard.containers.pickles.values import Global
from reshard.core.box import whole
from reshard.core.chunks import contiguous
from reshard.core.dtypes import FLOAT32
from reshard.errors import CorruptError, ReshardError, UnsafeError
from reshard.formats.deepspeed import cuts, tag_directory
from reshard.formats.megatron import arguments
from reshard.formats.megatron.optimizers import rank_optimizer
from reshard.formats.megatron.write import groups
from reshard.layouts.model_parallel.rules import load_table
from reshard.layouts.model_parallel.traits import Traits
from reshard.state_dict import shard_metadata, tree
from reshard.state_dict.tree import LocalTensors
from reshard.training.state import build_writable_state
from tests.judged import falsified

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"


def altered(path, keys, value):
    """Save a file again with another value under these keys."""
    is_json = path.suffix == ".json"
    root = json.loads(path.read_text()) if is_json else torch.load(path, weights_only=False)
    node = root
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    if is_json:
        path.write_text(json.dumps(root))
    else:
        torch.save(root, path)


ZERO3 = "examples/llama-zero3-4ranks"
MODEL = "zero_pp_rank_*_model_states.pt"
UNIVERSAL = ("universal_checkpoint_info",)
META = "tests/data/meta/llama_mp2"
COLOSSALAI = "tests/data/colossalai/plain/ckpt"
IMPOSSIBLE = [  # checkpoint, files, where, value, what is told
    (
        *(ZERO3, MODEL, ["param_shapes"], [{"w": (2, -1)}]),
        r"param_shapes\[0\]\['w'\] is \(2, -1\), expected a",
    ),
    (ZERO3, MODEL, ["module"], {3: 4}, "module has the key 3, expected a string"),
    *(
        (ZERO3, MODEL, ["dp_world_size"], size, r"states .* for dp_world_size")
        for size in (1 << 40, -1, [4], 2.5)
    ),
    (
        *(ZERO3, MODEL, UNIVERSAL, {"vocabulary_parameter_patterns": [b"x"]}),
        r"universal_checkpoint_info.vocabulary_parameter_patterns\[0\] is b'x', expected a string",
    ),
    (
        *(ZERO3, MODEL, UNIVERSAL),
        {"affine_map": {"params": {"w": {"logical_shape": (2,), "ranks": {"x": {}}}}}},
        r"affine_map.params\['w'\].ranks has the key 'x', expected the number of a rank",
    ),
    (
        *(ZERO3, MODEL, UNIVERSAL),
        {"parameter_with_sub_params": [{"patterns": [], "shape": []}]},
        r"parameter_with_sub_params\[0\] has no 'partition_dim'",
    ),
    (META, "params.json", ["n_heads"], "8", "n_heads is '8', expected a number of at least 0"),
    (META, "params.json", ["rope_theta"], [], r"rope_theta is \[\], expected a number"),
    (META, "*.00.pth", ["norm.weight"], torch.ones(2, 2), "has no matrix .* or no vector"),
    (COLOSSALAI, "*optim*-0*1.bin", [0], 7, r"\[0\] is 7, expected a dict"),
    (COLOSSALAI, "*optim_group.bin", [0], 7, r"\[0\] is 7, expected a dict"),
]


@pytest.mark.parametrize(
    ("checkpoint", "files", "keys", "value", "told"),
    IMPOSSIBLE,
    ids=[f"{row[0].split('/')[-2]}-{row[4][:20]}" for row in IMPOSSIBLE],
)
def test_a_value_that_cannot_be_is_named(tmp_path, checkpoint, files, keys, value, told):
    place = Path(shutil.copytree(ROOT / checkpoint, tmp_path / "run"))
    found = sorted(place.rglob(files))
    for path in found:
        altered(path, keys, value)
    with pytest.raises(CorruptError, match=told) as caught:
        formats.read(place)
    assert Path(caught.value.where) in found


# Single values, which one rank alone has: `other` is recorded as the script's own.
RANKS = {
    "examples/llama-zero3-4ranks": (),
    "tests/data/deepspeed_0.14.5/z3_mics_ws4/run": ("frozen_param_fragments.*",),
    "tests/data/deepspeed_0.8.3/z2_apexadam/run": (
        *("module.scale", "module.count", "module.*", "lr_scheduler", "epoch", "nested"),
        *("ds_config.zero_optimization", "ds_config.zero_allow_untested_optimizer"),
    ),
}


@pytest.mark.judge
@pytest.mark.parametrize("checkpoint", RANKS)
def test_a_value_of_another_kind_is_refused_with_the_file_and_the_key(tmp_path, checkpoint):
    """Every container, number, text and tensor of the last file of each kind."""
    pytest.importorskip("deepspeed")  # the files hold pickled objects of its classes
    place = Path(shutil.copytree(ROOT / checkpoint, tmp_path / "run"))
    known, wrong = formats.read(place), []
    for path, _ in list(falsified.select_files(place)):
        content, state = path.read_bytes(), falsified.load(path)
        for value in list(falsified.list_places(state)):
            true = value.get()
            value.set("7" if type(true) in (int, float) else 7)
            torch.save(state, path)
            value.set(true)
            try:
                found = formats.read(place)
            except ReshardError as error:
                text = str(error).replace(" ", "_")
                keys = [key for key in re.split(r"[.#*]+", value.path) if key][-2:]
                if path.name not in text or not any(key in text for key in keys):
                    wrong.append((value.path, text))
            else:
                if not falsified.are_same(found, known):
                    wrong.append((value.path, "read"))
        path.write_bytes(content)
    assert [each for each in wrong if not each[0].startswith(RANKS[checkpoint])] == []


def test_what_a_reader_trips_over_is_corrupt_and_not_a_bug(monkeypatch):
    monkeypatch.setattr(tag_directory, "open_first", lambda _files: 7)
    with pytest.raises(CorruptError, match="not have the structure of its format") as caught:
        formats.read(ROOT / ZERO3)
    assert isinstance(caught.value.__cause__, AttributeError)
    assert "format.py" in case.tripped(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_model_parallel_size": 1 << 40},
        {"num_layers": 1 << 40},
        {"num_experts": 1 << 62},
        {"tensor_model_parallel_size": 1 << 12, "pipeline_model_parallel_size": 1 << 12},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_grid_of_megatrons_that_no_machine_has(given):
    with pytest.raises(CorruptError, match=r"states .* for|states that"):
        arguments.parse(given, "rank 0")


def test_megatron_s_arguments_and_groups_of_another_kind():
    with pytest.raises(CorruptError, match=r"args\.tensor_model_parallel_size is '2', expected"):
        arguments.parse({"tensor_model_parallel_size": "2"}, "rank 0")
    with pytest.raises(CorruptError, match=r"optimizer.param_groups\[0\] is 7, expected a dict"):
        rank_optimizer.read(
            {"param_groups": [7]},
            [],
            arguments.parse({}, "rank 0"),
            load_table("megatron"),
            "rank 0",
        )


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (7, r"param_metadata\[0\].params is 7, expected a dict"),
        (
            {"f": {"names": ["a"], "shapes": [], "numels": []}},
            "of 'f' does not have one shape for each name",
        ),
        ({"f": {"names": [], "shapes": [], "numels": []}}, "of 'f' names no parameter"),
    ],
)
def test_fairscale_s_metadata_of_another_kind(params, told):
    metadata = {"param_metadata": [{"fsdp_path": "", "params": params}]}
    with pytest.raises(CorruptError, match=f"shard.pt: shard_metadata.*{told}"):
        shard_metadata.resolve({}, metadata, "shard.pt")


@pytest.mark.parametrize("layout", ["Et*999999999L", "(t*999999|)*999999", "(t)*" + "9" * 6000])
def test_a_pipeline_layout_without_end(layout):
    args = arguments.parse({"pipeline_model_parallel_layout": layout}, "rank 0")
    with pytest.raises(CorruptError, match="rank 0: has a pipeline layout of too many layers"):
        args.list_layers()


@pytest.mark.parametrize("field", ["heads", "groups", "head_dim", "hidden"])
@pytest.mark.parametrize("size", [0, -8, 1 << 40, "8"])
def test_a_model_of_impossible_sizes(field, size):
    with pytest.raises(CorruptError, match=r"params\.json: states"):
        Traits(source="params.json", **{field: size})


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", "a*a*a*a*$", "(.*)*x", "(a{1,9}){9}"])
def test_a_pattern_that_a_search_never_ends_with(pattern):
    with pytest.raises(UnsafeError, match="may never end") as raised:
        cuts._matches(pattern, "a" * 60)
    assert "--rules" not in str(raised.value)  # a table does not replace patterns


def test_a_name_that_is_too_long_for_a_search():
    with pytest.raises(UnsafeError, match="a name of 600 characters"):
        cuts._matches("a", "a" * 600)


def test_a_pattern_that_is_none():
    with pytest.raises(CorruptError, match="universal_checkpoint_info"):
        cuts._matches("(", "a")


def test_a_tensor_on_one_rank_and_a_class_on_another():

    local = LocalTensors({1: contiguous("b.pt", 0, FLOAT32, whole((2,)))})
    with pytest.raises(CorruptError, match=r"a\.pt: 'w' is "):
        tree.join_trees([{"w": Global("x.Y")}, {"w": local}], ["a.pt", "b.pt"])


ALIASES = {
    "in a list": ("[x]", "[{}]"),
    "in a mapping": ("{k: 1}", "{{<<: [{}]}}"),
}


@pytest.mark.parametrize("kind", ALIASES)
def test_settings_whose_aliases_have_no_end(tmp_path, kind):
    first, each = ALIASES[kind]
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{n}: &a{n} {each.format(','.join([f'*a{n - 1}'] * 9))}" for n in range(1, 12)]
    place = Path(shutil.copytree(DATA / "gpt_neox" / "tp2pp0" / "run", tmp_path / "run"))
    path = place / "global_step3" / "configs" / "zz.yml"
    path.write_text("\n".join([*lines, "activation: *a11"]))
    with pytest.raises(CorruptError, match=r"zz\.yml: has more than \d+ values after its aliases"):
        formats.read(place)


@pytest.mark.parametrize(
    "text", ["a: 2001-99-99", f"a: {'9' * 5000}", "a: &a [*a]", "a: [", "!!x y", "a: \x08"]
)
def test_settings_that_are_no_yaml(tmp_path, text):
    place = Path(shutil.copytree(DATA / "gpt_neox" / "tp2pp0" / "run", tmp_path / "run"))
    (place / "global_step3" / "configs" / "zz.yml").write_text(text)
    with pytest.raises(CorruptError, match=r"zz\.yml: (is not YAML|has more than)"):
        formats.read(place)


def test_half_a_letter_in_a_config_is_written_as_it_was(tmp_path):
    place = Path(shutil.copytree(ROOT / ZERO3, tmp_path / "run"))
    config = json.loads((place / "config.json").read_text()) | {"note": "\ud800"}
    (place / "config.json").write_text(json.dumps(config))
    reshard.merge(place, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["note"] == "\ud800"


@pytest.mark.judge
def test_the_states_of_groups_in_a_tuple_are_as_in_a_list(tmp_path):
    pytest.importorskip("deepspeed")  # the files hold pickled objects of its classes
    run = shutil.copytree(DATA / "deepspeed_0.16.4" / "z2_elastic" / "run", tmp_path / "run")
    for path in run.glob("*/*optim_states.pt"):
        state = torch.load(path, weights_only=False)["optimizer_state_dict"]
        keys = ("optimizer_state_dict", "base_optimizer_state")
        altered(path, keys, tuple(state["base_optimizer_state"]))
    listed = formats.read(DATA / "deepspeed_0.16.4" / "z2_elastic" / "run")
    assert formats.read(run).entries.keys() == listed.entries.keys()
    for path in run.glob("*/*optim_states.pt"):
        altered(path, keys, ())
    with pytest.raises(CorruptError, match="base_optimizer_state contains 0 groups; group 0"):
        formats.read(run)


def test_a_group_of_megatrons_that_is_told_apart_by_no_number():
    run = DATA / "megatron_core_0.15.3" / "llama_dp2"
    manifest = formats.read(next(run.rglob("latest_checkpointed_iteration.txt")).parent)
    first, *rest = manifest.train.param_groups
    odd = replace(first, hyper={**first.hyper, "lr_mult": {}})
    state = build_writable_state(
        replace(manifest, train=replace(manifest.train, param_groups=(odd, *rest)))
    )
    with pytest.raises(CorruptError, match="a param group whose lr_mult is a dict"):
        groups.make_groups(state, frozenset(), None)
