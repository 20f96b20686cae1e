"""Kill merge, split and the trainer's saves at random points, and check what remains.

    python benchmarks/crashes.py --out /dev/shm/crashes --kills 200

Half of the kills happen at a random call that changes a file. A preloaded library counts these
calls (see crashes.c); half of the kills at a write let a part of the write through. The other half
of the kills happen at a random time. After each kill, the destination must be absent or complete,
and a resumed run must give the bytes of an uninterrupted run. For the trainer, ``latest`` must name
a complete checkpoint, and the run that continues from it must end with the same weights. The
program prints one line per command, and exits with 1 after a failure.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
SMALL = ["--workers", "2", "--max-memory", str(256 << 10)]  # windows of 64 KiB
BATCH_BYTES = 256 << 10  # of the journal
WARM = ["numpy", "reshard.commands.merge.command", "reshard.commands.split.command"]
WARM += ["trainer.session", "trainer.core.zero2", "trainer.core.fsdp2", "torch.distributed.fsdp"]
TRAIN = ["--seq-len", "8", "--global-batch", "2", "--micro-batch", "1", "--precision", "fp32"]
TRAIN += ["--steps", "6", "--save-every", "2", "--keep", "2", "--threads", "1"]


def serve() -> None:
    """Fork for each trial of stdin: everything is imported once."""
    from reshard.engine.move import journal
    from trainer import tokenizer
    from trainer.core import model
    from trainer.core.model_config import load_model_config
    from trainer.resolve import resolve

    for name in WARM:
        importlib.import_module(name)
    settings = resolve({"seq_len": 8, "strategy": "zero2", "global_batch": 2}, 1)
    model.build_model(settings)  # which makes transformers import what it needs
    with tempfile.TemporaryDirectory() as place:
        load_model_config(settings).save_pretrained(place)
        tokenizer.save(Path(place))
    journal.BATCH_BYTES = BATCH_BYTES
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    _say("ready")
    for line in sys.stdin:
        trial = json.loads(line)
        began = time.perf_counter()
        child = os.fork()
        if child == 0:
            _become(trial, shim)
        killer = threading.Timer(trial["after"] or 0, _kill, [child])
        if trial["after"]:
            killer.start()
        _, status = os.waitpid(child, 0)
        killer.cancel()
        _say([os.waitstatus_to_exitcode(status), time.perf_counter() - began])


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _kill(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return  # it had ended


def _become(trial: dict[str, object], shim: ctypes.CDLL) -> None:
    """Run a module as a program, in a group of its own, with its calls counted."""
    os.setsid()
    said = os.open(str(trial["said"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(said, 1)
    os.dup2(said, 2)
    module, *arguments = trial["command"]
    sys.argv = [module, *arguments]
    shim.crash_arm(os.fsencode(str(trial["counter"])), ctypes.c_long(trial["at"]))
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - a fork must not go on in its parent's code
        import traceback

        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    os._exit(code)


class Bench:
    """A server, and a directory for what it makes."""

    def __init__(self, out: Path) -> None:
        self.out = out
        shim = out / "crashes.so"
        build = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(shim), str(HERE / "crashes.c"), "-ldl"]
        subprocess.run(build, check=True)
        self.server = subprocess.Popen(
            [sys.executable, str(HERE / "crashes.py"), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"},
        )
        self.answer()

    def answer(self) -> list[float]:
        """Return the next answer of the server."""
        assert self.server.stdout is not None
        return json.loads(self.server.stdout.readline())

    def run(self, command: list[str], at: int = -1, after: float = 0) -> tuple[int, float]:
        """Run a command; return its exit code and seconds."""
        counter = self.out / "counter"
        counter.unlink(missing_ok=True)
        trial = {"command": command, "at": at, "after": after}
        assert self.server.stdin is not None
        places = {"counter": str(counter), "said": str(self.out / "said")}
        self.server.stdin.write(json.dumps({**trial, **places}) + "\n")
        self.server.stdin.flush()
        code, seconds = self.answer()
        return int(code), seconds

    @property
    def calls(self) -> int:
        """Return how many calls of the last run changed files."""
        return int.from_bytes((self.out / "counter").read_bytes(), sys.byteorder)

    def must(self, command: list[str]) -> float:
        """Run a command that must succeed; return its seconds."""
        code, seconds = self.run(command)
        if code:
            raise SystemExit(f"{command} ended with {code}:\n{(self.out / 'said').read_text()}")
        return seconds


def contents(directory: Path, pattern: str = "*") -> dict[str, bytes]:
    files = (path for path in directory.rglob(pattern) if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def kills(bench: Bench, command: list[str], number: int, coin: random.Random) -> list[dict]:
    """Return where to kill: calls and times of uninterrupted runs, of which the first warms up."""
    place = Path(command[command.index("--save") + 1] if "--save" in command else command[3])
    for _ in range(2):
        shutil.rmtree(place, ignore_errors=True)
        seconds = bench.must(command)
    calls = bench.calls
    shutil.rmtree(place)
    print(f"  a run makes {calls} calls that change files, in {seconds:.2f} s", flush=True)
    at = [{"at": coin.randrange(calls)} for _ in range(number // 2)]
    return at + [{"after": coin.uniform(0.001, seconds)} for _ in range(number - len(at))]


def convert(bench: Bench, name: str, command: list[str], number: int, seed: int) -> bool:
    """Kill a conversion again and again; check what is left, resume, and compare."""
    print(f"{name}", flush=True)
    out = Path(command[3])
    bench.must(command)
    whole = contents(out)
    seen: Counter[str] = Counter()
    for kill in kills(bench, command, number, random.Random(seed)):
        code, _ = bench.run(command, **kill)
        seen["killed" if code == -signal.SIGKILL else "ended first"] += 1
        if out.exists():
            seen["left all"] += 1
        else:
            seen["left nothing"] += 1
            seen["left a journal"] += (out.parent / f".{out.name}.partial" / "journal").exists()
            bench.must([*command, "--resume"])
            seen["went on"] += "\nresumed " in (bench.out / "said").read_text()
        if contents(out) != whole:
            seen["DIFFERENT"] += 1
        shutil.rmtree(out)
        shutil.rmtree(out.parent / f".{out.name}.partial", ignore_errors=True)
    print("  " + ", ".join(f"{count} {what}" for what, count in seen.items()), flush=True)
    return not seen["DIFFERENT"]


def train(bench: Bench, strategy: str, number: int, seed: int) -> bool:
    """Kill a run that saves; check what ``latest`` names, continue, and compare the weights."""
    print(f"trainer {strategy}", flush=True)
    run = bench.out / "run"
    command = ["trainer", "--strategy", strategy, "--save", str(run), *TRAIN]
    bench.must(command)
    whole = contents(run / "global_step6", "*.pt")
    seen: Counter[str] = Counter()
    for kill in kills(bench, command, number, random.Random(seed)):
        code, _ = bench.run(command, **kill)
        seen["killed" if code == -signal.SIGKILL else "ended first"] += 1
        tags = [path for path in run.glob("global_step*") if path.is_dir()]
        if tags:
            seen["had a checkpoint"] += 1
            resume = ["trainer", "--resume", str(run)]
            bench.must(resume)
        else:
            shutil.rmtree(run, ignore_errors=True)
            bench.must(command)
        if (run / "latest").read_text() != "global_step6":
            seen["DIFFERENT"] += 1
        if contents(run / "global_step6", "*.pt") != whole:
            seen["DIFFERENT"] += 1
        if list(run.glob(".global_step*")):
            seen["finished, with a hidden left-over"] += 1  # the next save removes it
        shutil.rmtree(run)
    print("  " + ", ".join(f"{count} {what}" for what, count in seen.items()), flush=True)
    return not seen["DIFFERENT"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("/dev/shm/crashes"))
    parser.add_argument("--kills", type=int, default=200, help="number of kills per command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the names of the commands to run")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    import torch

    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    source, groups = options.out / "x.pt", options.out / "groups.json"
    torch.manual_seed(0)
    torch.save({f"layers.{i}.weight": torch.randn(256, 256) for i in range(40)}, source)
    groups.write_text('[{"lr": 0.001}]')
    bench = Bench(options.out)
    begin = ["--init-optimizer", "zeros", "--param-groups", str(groups)]
    tell = ["reshard", "merge", str(source), str(options.out / "merged")]
    cut = ["reshard", "split", str(source), str(options.out / "cut"), *begin, *SMALL]
    jobs = {
        "merge to a directory": [*tell, "--dtype", "bf16", "--max-shard-size", "1MB", *SMALL],
        "split to DeepSpeed ZeRO-2": [*cut, "--to", "deepspeed", "--world-size", "3"],
        "split to FSDP (DCP)": [*cut, "--to", "fsdp", "--world-size", "3"],
    }
    good = True
    for name, command in jobs.items():
        if options.only in name:
            good &= convert(bench, name, command, options.kills, options.seed)
    for strategy in ("zero2", "fsdp2"):
        if options.only in f"trainer {strategy}":
            good &= train(bench, strategy, options.kills // 2, options.seed)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
