"""Pickles that Python writes come back equal; what would run code runs nothing."""

from __future__ import annotations

import collections
import datetime as dt
import math
import pickle
import pickletools
import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.containers.pickles import trust
from reshard.containers.pickles.unpickle import loads
from reshard.containers.pickles.values import Call, Global
from reshard.errors import CorruptError, ReshardError, UnsupportedError

PROTOCOLS = range(6)


def read(data, **options):
    return loads(data, where="here.pt", **options).value


def plain(value):
    """Return the value with our container types in place of Python's special ones."""
    if isinstance(value, dict):
        return {plain(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, collections.deque)):
        return [plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return type(value)(map(plain, value))
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return bytes(value) if isinstance(value, bytearray) else value


VALUES = {
    "none": None,
    "bools": [True, False, 0, 1, 0.0, 1.0],
    "small ints": list(range(-300, 300)),
    "int edges": [
        s * 2**n + d for n in (7, 8, 15, 31, 32, 63) for s in (1, -1) for d in (-1, 0, 1)
    ],
    "big ints": [2**n * s for n in (100, 1000, 2039, 2040, 5000) for s in (1, -1)],
    "floats": [0.0, -0.0, 1.5, -2.25e300, 5e-324, math.inf, -math.inf],
    "strings": ["", "a", "x" * 255, "y" * 256, "line\nbreak\\", "quote'\"", "\0\x7f"],
    "latin": ["é", "naïve ÿ", "\x80\xff"],
    "wide": ["权重", "Größe", "🐍", "\u2028"],
    "surrogates": ["\ud800", "a\udfffb"],
    "bytes": [b"", b"\0\xff", b"z" * 300, bytes(range(256))],
    "bytearrays": [bytearray(), bytearray(b"\0\xff"), bytearray(300)],
    "complex": [complex(1, -2), complex(0, math.inf)],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((),))],
    "lists": [[], [[]], list(range(1200))],
    "sets": [set(), {1, "a", (2,)}, frozenset(), frozenset({1, frozenset({2})})],
    "dicts": [{}, {"a": {1: {None: ()}}}, {i: str(i) for i in range(1100)}],
    "ordered": collections.OrderedDict([("b", 1), ("a", [2])]),
    "default": collections.defaultdict(list, {"k": [1, 2]}),
    "counter": collections.Counter("abca"),
    "deques": [collections.deque(), collections.deque([1, 2]), collections.deque([3], maxlen=4)],
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", VALUES)
def test_what_python_pickles_comes_back_equal(name, protocol):
    data = pickle.dumps(VALUES[name], protocol)
    result = read(data)
    assert result == plain(VALUES[name])
    assert repr(result) == repr(plain(VALUES[name]))  # tells True from 1 and -0.0 from 0.0
    assert read(pickletools.optimize(data)) == result


@pytest.mark.parametrize(
    "line", [rb"'a\\b\n\xe9'", b'"it\'s"', b"''x''", b"''"], ids=["escaped", "s", "x", "empty"]
)
def test_a_string_of_python_2_is_what_its_repr_says(line):
    data = b"S" + line + b"\n."
    assert read(data) == pickle.loads(data, encoding="latin-1")


@pytest.mark.parametrize("line", [b"abc", b"'", b"'abc\""])
def test_a_string_of_python_2_without_quotes_is_refused(line):
    with pytest.raises(CorruptError, match="without quotes"):
        read(b"S" + line + b"\n.")


KEYS = (  # integers of 64 bits: larger ones can be made to collide, and are refused as keys
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(), max_size=20)
    | st.binary(max_size=20)
)
ATOMS = KEYS | st.integers() | st.integers(-(2**70), 2**70)
NESTED = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=5)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(NESTED, st.sampled_from(PROTOCOLS))
def test_any_nested_value_comes_back_equal(value, protocol):
    assert read(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shared_references_stay_one_object(protocol):
    inner = ["x"]
    result = read(pickle.dumps({"a": inner, "b": (inner, inner), "c": {"d": inner}}, protocol))
    assert result["a"] is result["b"][0] is result["b"][1] is result["c"]["d"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_recursive_containers_hold_themselves(protocol):
    around: list = [1]
    around.append({"me": around, "tuple": (around,)})
    result = read(pickle.dumps(around, protocol))
    assert result[1]["me"] is result
    assert result[1]["tuple"][0] is result


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_memo_holds_more_than_255_entries(protocol):
    value = [[str(i)] for i in range(700)]
    result = read(pickle.dumps(value + value, protocol))
    assert result == value + value
    assert all(a is b for a, b in zip(result[:700], result[700:], strict=True))


class Point:
    """A class that a checkpoint may carry; reading it must not import it."""

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_class_instances_become_calls(protocol):
    found = loads(pickle.dumps({"p": Point([7])}, protocol), where="here.pt")
    point = found.value["p"]
    assert isinstance(point, Call)
    assert point.name == f"{__name__}.Point"
    assert point.get("x") == [7]
    assert point.get("y", "none") == "none"
    assert found.globals == {f"{__name__}.Point"}


@pytest.mark.parametrize("protocol", [0, 1])
def test_old_class_instances_become_calls_too(protocol):
    point = read(pickle.dumps(Point([7]), protocol))
    assert isinstance(point, Call)
    assert point.get("x") == [7]
    assert Global(f"{__name__}.Point") in point.args


def test_functions_and_classes_become_globals():
    assert read(pickle.dumps([Point, dt.date], 4)) == [
        Global(f"{__name__}.Point"),
        Global("datetime.date"),
    ]
    made = read(pickle.dumps(dt.timedelta(3, 4), 4))
    assert (made.name, made.args) == ("datetime.timedelta", (3, 4, 0))


class Slotted:
    """State as a pair of dicts; keyword arguments of ``__new__``."""

    def __getnewargs_ex__(self):
        return (1,), {"key": "word"}


def test_keyword_arguments_are_kept():
    made = read(pickle.dumps(Slotted(), 4))
    assert (made.args, made.items) == ((1,), {"key": "word"})


def test_builders_make_values_from_their_arguments():
    made = read(
        pickle.dumps(dt.timedelta(3, 4), 4),
        builders={"datetime.timedelta": lambda *args: ("built", args)},
    )
    assert made == ("built", (3, 4, 0))


def test_persistent_ids_go_to_the_callback_and_are_refused_without_one():
    binary = b"\x80\x02K\x07Q."
    text = b"Pseven\n."
    assert read(binary, persistent=lambda pid: ["got", pid]) == ["got", 7]
    assert read(text, persistent=lambda pid: ["got", pid]) == ["got", "seven"]
    for data in (binary, text):
        with pytest.raises(CorruptError):
            read(data)


def test_several_pickles_in_one_stream_are_read_one_after_another():
    parts = [pickle.dumps(v, 2) for v in (1, "two", [3])]
    data, at, values = b"junk" + b"".join(parts), 4, []
    for _ in parts:
        done = loads(data, where="here.pt", start=at)
        values.append(done.value)
        at = done.end
    assert values == [1, "two", [3]]
    assert at == len(data)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"N", b".", b"(.", b"K", b"\x80\x06N.", b"0.", b"a.", b"Na.", b"NNa.", b"N}s."),
        *(b"}Ns.", b"}(Nu.", b"(Nt", b"h\x00.", b"j\xff\xff\xff\xff.", b"gx\n.", b"g-1\n."),
        *(b"}]Ns.", b"(]tR.", b"NNR.", b"N)\x81.", b"NN\x93.", b"\x85.", b"(\x85.", b"N\x86."),
        *(b"(N\x87.", b"Ib\n.", b"Fnot\n.", b"X\xff\xff\xff\xffab."),
        *(b"X\x02\x00\x00\x00\xff\xfe.", b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffab."),
        *(b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fab.", b"\x95\xff\xff\xff\xff\xff\xff\xff\xffN."),
        *(b"\x8b\xff\xff\xff\xff.", b"\x8b\xff\xff\xff\x7f.", b"T\xff\xff\xff\xffabc."),
        *(b"B\xff\xff\xff\xffabc.", b"\x82\x01.", b"\x83\x01\x00.", b"\x84\x01\x00\x00\x00."),
        *(b"\x97.", b"\x98.", b"\xff.", b"cmodule\nname", b"cmodule", b"1.", b"2.", b"(o."),
        *(b"(imodule\n.", b"ccollections\nOrderedDict\n(K\x01tR.", b"cbuiltins\nset\n(K\x01tR."),
        b"cbuiltins\nbytearray\n(J\xff\xff\xff\x7ftR.",
    ],
)
def test_malformed_streams_are_corrupt(data):
    with pytest.raises(CorruptError, match=r"here\.pt: the pickle is damaged") as caught:
        read(data)
    assert caught.value.exit_code == 3


def test_a_dict_in_a_set_and_other_unhashable_keys_are_corrupt():
    for data in (b"\x8f(}\x90.", b"(}\x91.", b"}]]s.", b"}(]Nu."):
        with pytest.raises(ReshardError):
            read(data)


class Float8Tensor:
    """Pickled as Transformer Engine pickles its own (``__reduce_ex__`` of float8_tensor.py)."""

    @classmethod
    def _make_in_reduce_ex(cls, *_args):
        raise NotImplementedError

    def __reduce_ex__(self, protocol):
        return Float8Tensor._make_in_reduce_ex, (b"codes", 1.0)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_quantised_weights_of_transformer_engine_are_refused_by_name(monkeypatch, protocol):
    place = "transformer_engine.pytorch.tensor.float8_tensor"
    module = types.ModuleType(place)
    module.Float8Tensor = Float8Tensor
    for name in (place, "transformer_engine"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Float8Tensor, "__module__", place)
    data = pickle.dumps({"weight": Float8Tensor()}, protocol)
    with pytest.raises(UnsupportedError, match="Transformer Engine's class Float8Tensor"):
        read(data)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kind", [int, str, range, chr, set])
def test_builtins_have_their_names_of_python_3(kind, protocol):
    """Protocols 0 to 2 write ``int`` as ``__builtin__.long``, e.g. in a ``defaultdict(int)``."""
    assert read(pickle.dumps(kind, protocol)) == Global(f"builtins.{kind.__name__}")


@pytest.mark.parametrize(
    "name",
    [
        "galore_torch.galore_projector.GaLoreProjector",
        "apollo_torch.random_projector.GradientProjector",
    ],
)
def test_projectors_of_optimizers_that_hf_trainer_offers_are_expected(name):
    assert trust.is_expected(name)
    assert not trust.is_expected(f"{name.partition('.')[0]}.system")
