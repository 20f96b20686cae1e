"""``reshard merge`` against the mergers of PyTorch, Accelerate and verl, each on what it reads.

    RESHARD_VERL=PACKAGES python benchmarks/merge_dcp.py DIR --out /dev/shm/bench/out --rounds 5

DIR is what ``make_dcp.py`` made. Every command is a whole process, start-up included; commands take
turns. The first round is not counted: there every output is compared with reshard's, tensor by
tensor, by another process (a child's peak RSS begins at its parent's).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from contest import HERE, PYTHON, Contender, forget, limits, measure, report
from merge import needed_spans

FORMS = {"dcp": "accelerate/pytorch_model_fsdp_0", "hf": "hf", "verl": "verl"}


def ours(source: Path) -> list[Contender]:
    merge = [PYTHON, "-m", "reshard", "merge", str(source)]
    return [
        Contender("reshard", lambda out: [*merge, f"{out}.safetensors"]),
        Contender("reshard --no-verify", lambda out: [*merge, f"{out}.safetensors", "--no-verify"]),
    ]


def peers(form: str, source: Path, threads: int) -> list[Contender]:
    """What others have for a form."""
    helper = [PYTHON, str(HERE / "peers.py")]
    scripts = Path(PYTHON).parent
    convert = [PYTHON, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
    consolidate = [*helper, "consolidate", str(source)]
    if form == "dcp":
        return [
            Contender(
                "reshard, to .pt",
                lambda out: [PYTHON, "-m", "reshard", "merge", str(source), f"{out}.pt"],
            ),
            Contender("dcp_to_torch", lambda out: [*convert, str(source), f"{out}.pt"]),
            Contender(
                "accelerate merge-weights",
                lambda out: [str(scripts / "accelerate"), "merge-weights", str(source), str(out)],
            ),
        ]
    if form == "hf":
        return [
            Contender("consolidate, 1 thread", lambda out: [*consolidate, str(out)]),
            Contender(
                f"consolidate, {threads} threads",
                lambda out: [*consolidate, str(out), "--threads", str(threads)],
            ),
        ]
    return [Contender("verl.model_merger", lambda out: [*helper, "verl", str(source), str(out)])]


def check(made: Path, reference: Path) -> int:
    """How many tensors equal the reference's.

    Raises:
        SystemExit: one does not, or is missing.
    """
    import torch
    from safetensors import safe_open

    count = 0
    with ExitStack() as stack:
        known = stack.enter_context(safe_open(reference, "pt"))
        missing = set(known.keys())
        for name, tensor in _tensors(made, stack):
            if not torch.equal(tensor, known.get_tensor(name)):
                raise SystemExit(f"{made}: {name} differs")
            missing.remove(name)
            count += 1
    if missing:
        raise SystemExit(f"{made}: lacks {sorted(missing)[:3]}")
    return count


def _tensors(made: Path, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    import torch
    from safetensors import safe_open

    if made.suffix == ".pt":
        state = torch.load(made, mmap=True, weights_only=True)
        yield from state.get("model", state).items()
        return
    files = sorted(made.glob("*.safetensors")) if made.is_dir() else [made]
    for path in files:
        file = stack.enter_context(safe_open(path, "pt"))
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, from a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def compete(form: str, source: Path, args: argparse.Namespace) -> None:
    threads = len(os.sched_getaffinity(0))
    spans = args.out.with_suffix(".spans.json")
    spans.parent.mkdir(parents=True, exist_ok=True)
    spans.write_text(json.dumps(apart(needed_spans, source)))
    field_of = [*ours(source), *limits(spans), *peers(form, source, threads)]
    for number in range(args.rounds + 1):
        for contender in field_of:
            measure(contender, args.out / "x")
            if number:
                continue
            made = next(args.out.iterdir())
            if contender is field_of[0]:
                shutil.copyfile(made, args.reference)
            elif made.suffix != ".raw":
                count = apart(check, made, args.reference)
                print(f"{contender.name}: {count} tensors equal", flush=True)
            forget(contender)
    report(f"{source}  ->  {form}", field_of)
    spans.unlink()
    args.reference.unlink()
    shutil.rmtree(args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    parser.add_argument("--reference", type=Path, default=Path("bench-reference.safetensors"))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for form in args.forms:
        compete(form, args.directory / FORMS[form], args)


if __name__ == "__main__":
    main()
