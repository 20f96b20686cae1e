"""Pickles made to run code, to crash, to hang, or to fill the memory."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from reshard.containers import torch_objects
from reshard.containers.pickles.unpickle import loads
from reshard.containers.pickles.values import Call
from reshard.errors import CorruptError, ReshardError, UnsafeError

ROOT = Path(__file__).resolve().parents[2]


def read(data, **options):
    return loads(data, where="here.pt", **options).value


def text(value):
    """Return SHORT_BINUNICODE, or BINUNICODE beyond 255 bytes."""
    raw = value.encode()
    size = len(raw)
    return (b"\x8c" + bytes([size]) if size < 256 else b"X" + size.to_bytes(4, "little")) + raw


class Reduced:
    """An object whose pickle asks for a call."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


ATTACKS = {
    "os.system": lambda s: pickle.dumps(Reduced(os.system, f"touch {s}"), 4),
    "posix.system protocol 0": lambda s: f"cposix\nsystem\n(Vtouch {s}\ntR.".encode(),
    "builtins.eval": lambda s: pickle.dumps(Reduced(eval, f"open({s!r}, 'w')"), 2),
    "builtins.exec": lambda s: pickle.dumps(Reduced(exec, f"open({s!r}, 'w')"), 5),
    "__builtin__.exec": lambda s: f"c__builtin__\nexec\n(Vopen({s!r}, 'w')\ntR.".encode(),
    "builtins.open": lambda s: pickle.dumps(Reduced(open, s, "w"), 3),
    "subprocess.Popen": lambda s: pickle.dumps(Reduced(subprocess.Popen, ["touch", s]), 4),
    "INST": lambda s: f"(S'touch {s}'\nios\nsystem\n.".encode(),
    "OBJ": lambda s: f"(cos\nsystem\nS'touch {s}'\no.".encode(),
    "NEWOBJ": lambda s: b"csubprocess\nPopen\n(](" + text("touch") + text(s) + b"et\x81.",
    "NEWOBJ_EX": lambda s: b"cos\nsystem\n(" + text(f"touch {s}") + b"t}\x92.",
    "os.path in the module": lambda s: b"cos.path\nos.system\n(" + text(f"touch {s}") + b"tR.",
    "dotted name": lambda s: text("os") + text("path.os.system") + b"\x93" + text(s) + b"\x85R.",
    "dotted builtin": lambda s: (
        text("builtins") + text("eval.__call__") + b"\x93" + text(f"open({s!r},'w')") + b"\x85R."
    ),
    "dotted getattr": lambda s: text("builtins") + text("getattr.__self__") + b"\x93.",
    "importlib": lambda _: text("importlib") + text("import_module") + b"\x93.",
    "runpy": lambda s: text("runpy") + text("run_path") + b"\x93" + text(s) + b"\x85R.",
    "torch.load": lambda s: text("torch") + text("load") + b"\x93" + text(s) + b"\x85R.",
    "never called": lambda s: b"cos\nsystem\n0N.",
    "popped by a mark": lambda _: b"(cos\nsystem\n1N.",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_is_refused_and_never_run(tmp_path, attack):
    sentinel = tmp_path / "sentinel"
    with pytest.raises(UnsafeError, match=r"here\.pt.*would run code"):
        read(ATTACKS[attack](str(sentinel)))
    assert not sentinel.exists()


def test_unknown_names_are_described_and_never_imported(tmp_path, monkeypatch):
    (tmp_path / "trap_module.py").write_text(f"open({str(tmp_path / 'sentinel')!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = loads(b"ctrap_module\nTrap\n)R}" + text("a") + b"K\x01sb.", where="here.pt")
    assert isinstance(found.value, Call)
    assert found.globals == {"trap_module.Trap"}
    assert "trap_module" not in sys.modules
    assert not (tmp_path / "sentinel").exists()


@pytest.mark.parametrize("called", [b"N)R.", b"(lK\x01\x85R.", text("os.system") + b")R."])
def test_only_named_globals_are_called(called):
    with pytest.raises(CorruptError):
        read(called)


SECONDS = 30 if "COVERAGE_PROCESS_START" in os.environ else 10  # coverage takes its time


def limited(data):
    """Interpret in a process of its own; return 'ok' or the error's name, and its peak in MB."""
    probe = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3000 << 20,) * 2)\n"
        f"resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "from reshard.errors import ReshardError\n"
        "from reshard.containers.torch_objects import TORCH_BUILDERS, Storages\n"
        "from reshard.containers.pickles.unpickle import loads\n"
        "try:\n"
        "    loads(sys.stdin.buffer.read(), where='x', builders=TORCH_BUILDERS,\n"
        "          persistent=Storages('x'))\n"
        "    said = 'ok'\n"
        "except ReshardError as error:\n"
        "    said = type(error).__name__ if len(str(error)) < 2000 else 'a long message'\n"
        "peak = next(l for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "print(said, int(peak.split()[1]) >> 10)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe],
        input=data,
        capture_output=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-300:]!r}"
    said, peak = done.stdout.decode().rsplit(maxsplit=1)
    return said, int(peak)


DEEP = 400_000
PID = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
TYPED = b"ctorch._tensor\n_rebuild_from_type_v2\n"
BOMBS = {
    "a tuple nested deeply": b"N" + b"\x85" * DEEP + b".",
    "lists nested deeply": b"]" * DEEP + b"a" * (DEEP - 1) + b".",
    "dicts nested deeply": b"}" + b"N}" * DEEP + b"s" * DEEP + b".",
    "a deep tuple as a key": b"})" + b"\x85" * DEEP + b"Ns.",
    "a deep tuple in a set": b"\x8f()" + b"\x85" * DEEP + b"\x90.",
    "a deep frozenset": b"(" * DEEP + b"\x91" * DEEP + b".",
    "a tuple doubled 60 times as a key": b"})" + b"2\x86" * 60 + b"Ns.",
    "a tuple doubled 60 times in a frozenset": b"()" + b"2\x86" * 60 + b"\x91.",
    "a storage key doubled 40 times": (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n)" + b"2\x86" * 40 + b"NK\x00tQ."
    ),
    "a storage tag doubled 40 times": b")" + b"2\x86" * 40 + b"NNNN\x94" + b"(h\x00NNNNtQ.",
    "a shape doubled 40 times": (REBUILD + b"(" + PID + b"K\x01tQK\x00)" + b"2\x86" * 40 + b")tR."),
    "a storage key nested deeply": (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n)" + b"\x85" * DEEP + b"NK\x00tQ."
    ),
    "rebuilds nested deeply": (
        TYPED
        + b"q\x000"
        + b"(h\x00N" * 50_000
        + b"(h\x00N)Nt"
        + b"Nt" * 50_000
        + b"q\x010h\x00h\x01R."
    ),
    "copies of one long list": (
        b"cbuiltins\nlist\nq\x000]("
        + b"N" * 100_000
        + b"eq\x010("
        + b"h\x00h\x01\x85R" * 20_000
        + b"l."
    ),
    "copies of one long string": (
        b"c_codecs\nencode\nq\x000"
        + text("x" * 500_000)
        + b"q\x010("
        + b"h\x00h\x01\x85R" * 20_000
        + b"l."
    ),
    "keys of one hash": b"}("
    + b"".join(
        b"\x8a\x0c" + (i * ((1 << 61) - 1)).to_bytes(12, "little") + b"N" for i in range(40_000)
    )
    + b"u.",
    "a huge memo index": b"Nr\xff\xff\xff\xff0j\xff\xff\xff\xff.",
    "a memo index of 10^12": b"Np1000000000000\n0g1000000000000\n.",
    "a memo index of 4000 digits": b"Np" + b"9" * 4000 + b"\n.",
    "a huge LONG4": b"\x8b\xff\xff\xff\x7f\x01.",
    "a huge BINUNICODE8": b"\x8d" + b"\xff" * 8 + b"x.",
    "a huge BINBYTES8": b"\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",
    "a huge BYTEARRAY8": b"\x96" + (1 << 40).to_bytes(8, "little") + b"x.",
    "a huge bytearray by number": b"cbuiltins\nbytearray\n\x8b\x06\x00\x00\x00"
    + b"\xff" * 5
    + b"\x00\x85R.",
    "a decimal of a million digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "a long line without end": b"V" + b"x" * 1_000_000,
    "marks without end": b"(" * DEEP + b"t.",
    "marks popped from far": b"(" + b"N" * 1000 + b"t0" * 2 + b".",
    "frames in frames": b"\x95\x00\x00\x00\x00\x00\x00\x00\x00" * 100_000 + b"N.",
    "a storage of astronomic size": PID + b"\x8b\x00\x10\x00\x00" + b"\x7f" * 4096 + b"tQ.",
    "a shape of ten thousand dims": (
        REBUILD
        + b"("
        + PID
        + b"K\x01tQK\x00("
        + b"J\xff\xff\xff\x7f" * 10_000
        + b"t("
        + b"K\x00" * 10_000
        + b"ttR."
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_costs_little_time_and_memory(bomb):
    said, peak_megabytes = limited(BOMBS[bomb])
    assert said in ("ok", "CorruptError", "UnsafeError", "UnsupportedError")
    assert peak_megabytes < 600


@pytest.fixture(scope="module")
def torch_pickle(tmp_path_factory):
    """Return the data.pkl of a real file with nested state, a parameter and shared storages."""
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    shared = torch.arange(6.0)
    state = {
        "model": module.state_dict(),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": shared}}, "lr": 1e-3},
        "param": torch.nn.Parameter(shared.view(2, 3)),
        "shapes": [torch.Size([2, 3]), torch.bfloat16, (1, 2**70, None, True, "é")],
        "uint16": torch.zeros(3, dtype=torch.uint16),
    }
    path = tmp_path_factory.mktemp("fuzz") / "state.pt"
    torch.save(state, path)
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        return archive.read(name)


def mutated(chance, data):
    """Return data after a few random flips, cuts, insertions or repetitions."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(made)) if made else 0
        kind = chance.randrange(6)
        if kind == 0 and made:
            made[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and made:
            made[at] = chance.randrange(256)
        elif kind == 2:
            del made[at:]
        elif kind == 3:
            made[at:at] = chance.randbytes(chance.randint(1, 6))
        elif kind == 4:
            del made[at : at + chance.randint(1, 9)]
        else:
            made[at:at] = made[max(at - 12, 0) : at] * chance.randint(1, 50)
    return bytes(made)


@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_pickles_raise_only_our_errors_and_quickly(torch_pickle, seed):
    chance = random.Random(seed)
    builders = torch_objects.TORCH_BUILDERS
    messages, slowest = [], 0.0
    for _ in range(2000):
        data = mutated(chance, torch_pickle)
        began = time.thread_time()
        try:
            loads(data, where="x", builders=builders, persistent=torch_objects.Storages("x"))
        except ReshardError as error:
            messages.append(str(error))
        slowest = max(slowest, time.thread_time() - began)
    assert len(messages) > 500
    assert all(message.startswith("x: ") and len(message) < 2000 for message in messages)
    assert slowest < 1


def test_random_opcodes_raise_only_our_errors():
    chance = random.Random(5)
    opcodes = bytes(sorted(set(range(256)) - set(b"X\x8d\x8eBT")))
    refused = 0
    for _ in range(6000):
        data = bytes(chance.choices(opcodes, k=chance.randint(1, 40))) + b"."
        try:
            read(data, persistent=lambda pid: pid)
        except ReshardError:
            refused += 1
    assert refused > 3000


# ------------------------------------------------------------------- one value in many places


def shared(levels, twice):
    """Return a value that contains one value twice, which contains one value twice, ..."""
    return b"\x80\x02N" + twice * levels + b"."


GROWING = {
    "tuples by DUP": shared(60, b"2\x86"),
    "tuples by memo": b"\x80\x02]q\x00"
    + b"".join(b"h%c" % n * 2 + b"\x86q%c" % (n + 1) for n in range(60))
    + b".",
    "lists filled later": b"\x80\x02"
    + b"".join(b"]q%c" % n for n in range(60))
    + b"".join(b"h%c(h%ch%ce0" % (n + 1, n, n) for n in range(59))
    + b"h\x3b.",
    "one dict ten thousand times": pickle.dumps([dict.fromkeys(range(10_000))] * 10_000, 2),
    "within an object": b"\x80\x02ca\nB\nN" + b"2\x86" * 60 + b"\x85R.",
}


@pytest.mark.parametrize("attack", GROWING)
def test_a_value_that_grows_by_what_it_shares_is_refused(attack):
    began = time.process_time()
    with pytest.raises(CorruptError, match="repeats one value so often"):
        read(GROWING[attack])
    assert time.process_time() - began < 5


def test_what_frameworks_share_is_read():
    betas, shape, group = (0.9, 0.95), (3, 4), [1, 2, 3]
    held = {str(n): {"shape": shape, "betas": betas, "group": group} for n in range(5000)}
    assert read(pickle.dumps(held, 2)) == held
    ring = []
    ring.append(ring)
    assert read(pickle.dumps([ring] * 10, 2))[0][0]
