"""Every value of a saved state becomes something: arrays are weights, nothing is lost unseen."""

from __future__ import annotations

import json
from collections import OrderedDict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

import reshard
from reshard.cli import cli
from reshard.containers import numpy_arrays
from reshard.containers.pickles.values import Call, Global
from reshard.errors import IncompleteError, ReshardError, UnsupportedError

PROTOCOLS = (2, 3, 4, 5)
RANDOM = np.random.default_rng(7)
ARRAYS = {
    "matrix": RANDOM.standard_normal((300, 500)).astype("f4"),  # several blocks of text
    "by columns": np.asfortranarray(RANDOM.standard_normal((5, 7))),
    "a view": RANDOM.standard_normal((6, 6))[::2, 1:],
    "half": RANDOM.standard_normal(4).astype("f2"),
    "every byte": np.arange(256, dtype="u1"),
    "one byte": np.array([200], "u1"),
    "the same byte again": np.array([200], "u1"),
    "int": np.arange(-3, 4),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "0-d": np.array(3.5),
    "scalar": np.float32(2.5),
    "nothing": np.zeros((0, 3), "f4"),
}


def save(value, path, **options):
    torch.save(value, path, **options)
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_flat_parameter_that_states_no_part_is_refused(tmp_path, ranks):
    for rank in range(ranks):
        state = {"unit._flat_param": torch.ones(10), "bias": torch.ones(3)}
        save(state, tmp_path / f"model_rank{rank}.pt")
    with pytest.raises(UnsupportedError, match=r"'unit\._flat_param' as a plain tensor"):
        reshard.merge(tmp_path, tmp_path / "out.safetensors")


def test_a_state_that_is_no_dict_leaves_the_optimizer_out_by_name(tmp_path):
    optimizer = {"state": {0: [torch.ones(2, 2)]}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    saved = {"model": {"w": torch.ones(2, 2)}, "optimizer": optimizer}
    path = save(saved, tmp_path / "x.pt")
    with reshard.open(path) as checkpoint:
        assert (
            "the state of parameter 0 as a list, not as a dict" in checkpoint.manifest.warnings[0]
        )
    with pytest.raises(ReshardError, match="the state of parameter 0 as a list"):
        reshard.split(path, tmp_path / "out", to="torch")


@pytest.mark.parametrize("state", [(1, 2), (1, (-1,), None, False, b""), 7])
def test_an_array_of_another_form_is_named_as_one(state):
    array = Call("numpy.core.multiarray._reconstruct", (Global("numpy.ndarray"),), state)
    assert numpy_arrays.find_obstacle(array).startswith("a numpy array")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numpy_arrays_are_the_tensors_that_they_are(tmp_path, protocol, nested):
    state = {"weight": torch.randn(3, 4), **ARRAYS}
    saved = {"model": state, "step": np.int64(3), "best": np.float64(0.5)} if nested else state
    path = save(saved, tmp_path / "x.pt", pickle_protocol=protocol)
    with reshard.open(path) as checkpoint:
        assert set(checkpoint) == set(state)
        for name, array in ARRAYS.items():
            wanted = torch.from_numpy(np.ascontiguousarray(array).reshape(np.shape(array)))
            found = checkpoint[name][...]
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted), name
        assert torch.equal(checkpoint["matrix"][7:9, 3:450:5], wanted_part())
        if nested:
            assert checkpoint.manifest.train.step == 3
            assert checkpoint.manifest.train.client["best"] == 0.5


def wanted_part():
    return torch.from_numpy(ARRAYS["matrix"])[7:9, 3:450:5]


def test_arrays_of_the_stream_before_zip_are_read(tmp_path):
    path = save(ARRAYS, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with reshard.open(path) as checkpoint:
        assert torch.equal(checkpoint["matrix"][...], torch.from_numpy(ARRAYS["matrix"]))


def test_a_merge_writes_arrays_with_any_number_of_workers(tmp_path):
    path = save({name: a for name, a in ARRAYS.items() if name != "complex"}, tmp_path / "x.pt")
    for workers in (1, 3):
        reshard.merge(path, tmp_path / f"{workers}.safetensors", workers=workers, dtype="keep")
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "3.safetensors").read_bytes()
    written = load_file(tmp_path / "1.safetensors")
    assert written.keys() == ARRAYS.keys() - {"complex"}
    assert torch.equal(written["matrix"], torch.from_numpy(ARRAYS["matrix"]))


def test_bare_storages_are_vectors(tmp_path):
    values = torch.arange(5.0)
    typed, raw = values._typed_storage(), values.clone().untyped_storage()
    state = {"w": torch.ones(2), "typed": typed, "raw": raw}
    with reshard.open(save(state, tmp_path / "x.pt")) as checkpoint:
        assert torch.equal(checkpoint["typed"][...], values)
        assert torch.equal(checkpoint["raw"][...], values.view(torch.uint8))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_arrays_in_a_dcp_directory_are_weights(tmp_path):
    state = {"model": {"w": torch.ones(3), "a": ARRAYS["matrix"]}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    with reshard.open(tmp_path / "dcp") as checkpoint:
        assert set(checkpoint) == {"w", "a"}
        assert torch.equal(checkpoint["a"][...], torch.from_numpy(ARRAYS["matrix"]))


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.arange(3.0).astype(">f4"), "big-endian"),
        (np.array([1, "a"], dtype=object), "object dtype"),
        (np.zeros(3, [("a", "f4")]), "structured dtype"),
        (np.array(["a"]), "text dtype"),
        (np.array([1.0]).view(np.recarray), r"numpy\.(rec\.)?recarray"),
        (np.ma.array([1.0, 2.0]), "masked"),
    ],
    ids=["big-endian", "object", "structured", "text", "subclass", "masked"],
)
@pytest.mark.parametrize("nested", [False, True])
def test_an_array_that_is_no_tensor_is_refused_by_name(tmp_path, array, reason, nested):
    state = {"w": torch.ones(3), "odd": array}
    path = save({"model": state} if nested else state, tmp_path / "x.pt")
    with pytest.raises(UnsupportedError, match=f"odd is .*{reason}"):
        reshard.inspect(path)


class Coded:
    """A quantised weight of a class of its own, as Transformer Engine's and quanto's are."""

    def __init__(self, codes):
        self.codes = codes

    def __reduce__(self):
        return Coded, (self.codes,)


CODES = torch.ones(6, dtype=torch.uint8)
CLASS = f"{Coded.__module__}.Coded"


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"model": {"norm.weight": torch.ones(2), "a.weight": Coded(CODES)}}, "model.a.weight"),
        ({"model": {"norm.weight": torch.ones(2), "a.table": Coded(CODES)}}, "model.a.table"),
        ({"model": {"norm.weight": torch.ones(2), "a": [Coded(CODES)]}}, "model.a.0"),
        ({"norm.weight": torch.ones(2), "a.weight": Coded({"codes": b"12"})}, "a.weight"),
        ({"norm.weight": torch.ones(2), "a.table": Coded({"codes": CODES})}, "a.table"),
    ],
)
def test_a_weight_of_another_class_is_refused_although_the_class_is_allowed(tmp_path, state, named):
    path = save(state, tmp_path / "x.pt")
    with pytest.raises((UnsupportedError, IncompleteError), match=named):
        reshard.merge(path, tmp_path / "out.safetensors", allow_pickle=[CLASS])
    with pytest.raises((UnsupportedError, IncompleteError), match=named):
        reshard.inspect(path)


def test_an_object_of_a_script_beside_the_weights_is_allowed(tmp_path):
    own = {"history": Coded(CODES), "seen": [Coded(CODES)], "model.version": Coded("1.2")}
    path = save({"norm.weight": torch.ones(2), **own}, tmp_path / "x.pt")
    reshard.merge(path, tmp_path / "out.safetensors", allow_pickle=[CLASS])
    assert load_file(tmp_path / "out.safetensors").keys() == {"norm.weight"}


@pytest.mark.parametrize("held", [[torch.ones(2)], {"deep": [ARRAYS["matrix"]]}, (torch.ones(2),)])
@pytest.mark.parametrize("nested", [False, True])
def test_weights_in_a_list_beside_the_weights_are_refused(tmp_path, held, nested):
    state = {"w": torch.ones(3), "more": held}
    path = save({"model": state} if nested else state, tmp_path / "x.pt")
    with pytest.raises(IncompleteError, match=r"1 tensor of the model would be left out.*more\."):
        reshard.merge(path, tmp_path / "out.safetensors")


def test_what_lies_in_a_list_with_the_model_is_kept(tmp_path):
    path = save([{"w": torch.ones(3)}, 7, {"best": 0.5}], tmp_path / "x.pt")
    with reshard.open(path) as checkpoint:
        assert checkpoint.manifest.train.client == {"1": 7, "2": {"best": 0.5}}


def test_weights_in_a_list_of_a_deepspeed_module_are_refused(tmp_path):
    module = {"w": torch.ones(3), "more": [torch.ones(2)]}
    state = {"module": module, "buffer_names": [], "ds_version": "0.19.8", "global_steps": 1}
    (tmp_path / "global_step1").mkdir()
    save(state, tmp_path / "global_step1" / "mp_rank_00_model_states.pt")
    with pytest.raises(IncompleteError, match=r"module\.more\.0"):
        reshard.inspect(tmp_path / "global_step1")


def test_an_array_in_a_deepspeed_module_is_a_weight(tmp_path):
    module = OrderedDict(w=torch.ones(3), a=ARRAYS["matrix"], _extra_state=b"scales")
    state = {"module": module, "buffer_names": [], "ds_version": "0.19.8", "global_steps": 1}
    (tmp_path / "global_step1").mkdir()
    save(state, tmp_path / "global_step1" / "mp_rank_00_model_states.pt")
    with reshard.open(tmp_path / "global_step1") as checkpoint:
        assert torch.equal(checkpoint["a"][...], torch.from_numpy(ARRAYS["matrix"]))
        assert checkpoint.manifest.unread == {"module._extra_state": "bytes"}


class Scaled(torch.nn.Linear):
    """Saves a dict with tensors as its extra state."""

    def get_extra_state(self):
        return {"amax": torch.ones(3)}

    def set_extra_state(self, state):
        pass


def test_tensors_in_the_extra_state_of_a_module_are_not_weights(tmp_path):
    module = torch.nn.Sequential(Scaled(4, 4), Scaled(4, 4)).state_dict()
    with reshard.open(save({"net": module, "epoch": 1}, tmp_path / "x.pt")) as checkpoint:
        assert set(checkpoint) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        unread = checkpoint.manifest.unread
    assert unread == {f"net.{number}._extra_state": "dict" for number in range(2)}


def test_the_report_states_the_balance(tmp_path, capsys):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {
        "model": {**model.state_dict(), "_extra_state": b"scales"},
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "queue": [torch.ones(4)],
        "rng": np.random.get_state(),  # noqa: NPY002 - what scripts save
    }
    path = save(state, tmp_path / "x.pt")
    cli.main(["inspect", str(path), "--json"], standalone_mode=False)
    leaves = json.loads(capsys.readouterr().out)["leaves"]
    assert (leaves["weights"], leaves["optimizer"]) == (2, 6)
    assert leaves["opaque"] == {"model._extra_state": "bytes"}
    assert leaves["read"] == sum(v for k, v in leaves.items() if k in KINDS) + 1
    report = reshard.merge(path, tmp_path / "out.safetensors")
    (line,) = (line for line in report.lines() if line.startswith("values "))
    assert "2 weights, 6 of the optimizer" in line
    assert "1 not interpreted (model._extra_state)" in line
    assert any("queue.0" in text for text in report.warnings)
    split = reshard.split(path, tmp_path / "ds", to="deepspeed", world_size=2)
    assert split.leaves == report.leaves


KINDS = ("weights", "optimizer", "train_state")


def test_numpys_random_state_is_no_weight(tmp_path):
    state = {"w": torch.ones(3), "numpy": np.random.get_state()}  # noqa: NPY002
    with reshard.open(save(state, tmp_path / "x.pt")) as checkpoint:
        assert set(checkpoint) == {"w"}


@pytest.mark.parametrize(
    ("own", "lost"),
    [
        ({"scale": np.float32(1.5), "seen": np.arange(5), "mask": np.ones(3, bool)}, []),
        ({"scheduler": {"last_epoch": 3}, "seen": np.arange(5)}, []),
        ({"losses": np.arange(5.0)}, ["own (another state dict)"]),
    ],
)
def test_a_split_carries_or_names_the_arrays_of_a_scripts_own_dict(tmp_path, own, lost):
    """They are no model where no array is both of floats and larger than a number."""
    state = {"model": {"weight": torch.randn(4, 4)}, "own": own}
    path = save(state, tmp_path / "x.pt")
    report = reshard.split(path, tmp_path / "out", to="dcp", world_size=2, weights_only=True)
    told = [note for note in report.notes if note.startswith("not copied: ")]
    assert told == [f"not copied: {name}" for name in lost]
    with reshard.open(path) as checkpoint:
        assert set(checkpoint) == {"weight"}
