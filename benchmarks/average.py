"""Compare `reshard average` with the usual script, and with the limit.

    python benchmarks/average.py --count 4 --size 90 --rounds 3 --place /dev/shm/bench-average

Writes random weights as Hugging Face files in fp32 and bf16, and as DeepSpeed's files of ZeRO 2 on
4 ranks. The script loads all models, stacks their tensors and takes the mean. The limit is a loop
that reads all input bytes and writes as many bytes as the mean has in fp32. ``--cold DIR`` writes
the models to a disk and drops them from the page cache before each run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

from contest import HERE, PYTHON, Contender, compete, limits, report
from merge import needed_spans
from sources import SHAPES

import reshard

FORMS = ("fp32", "bf16", "zero2")


def make(place: Path, form: str, count: int, size: str) -> list[Path]:
    """Write a number of checkpoints of one model."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPES[size]
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 64,
        vocab_size=shape.vocab,
    )
    dtype = torch.bfloat16 if form == "bf16" else torch.float32
    with torch.device("meta"):
        names = {n: t.shape for n, t in LlamaForCausalLM(config).state_dict().items()}
    found = []
    for number in range(count):
        made = torch.Generator().manual_seed(number)
        model = place / f"{form}-{number}"
        model.mkdir(parents=True)
        state = {n: torch.randn(s, generator=made).mul_(0.02).to(dtype) for n, s in names.items()}
        save_file(state, model / "model.safetensors", {"format": "pt"})
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(model)
        if form == "zero2":
            run = place / f"run-{number}"
            groups = place / "groups.json"
            groups.write_text(json.dumps([{"lr": 1e-4}]))
            how = {"to": "deepspeed", "zero_stage": 2, "world_size": 4, "dtype": "bf16"}
            reshard.split(model, run, init_optimizer="zeros", param_groups=groups, **how)
            shutil.rmtree(model)
            model = run
        found.append(model)
    return found


def average_with_torch(out: Path, paths: Sequence[Path]) -> None:
    """Load everything, and average it, as scripts do."""
    import torch
    from safetensors.torch import load_file, save_file

    states = [load_file(path / "model.safetensors") for path in paths]
    mean = {
        name: torch.stack([state[name].float() for state in states]).mean(0) for name in states[0]
    }
    save_file(mean, f"{out}.safetensors")


def list_contenders(paths: Sequence[Path], form: str, spans: Path) -> list[Contender]:
    read = [span for path in paths for span in needed_spans(path, masters=form == "zero2")]
    spans.write_text(json.dumps(read))
    command = [PYTHON, "-m", "reshard", "average", *map(str, paths)]
    script = [PYTHON, str(HERE / "average.py"), "--script"]
    found = [
        Contender(
            "reshard average", lambda out: [*command, f"{out}.safetensors", "--dtype", "fp32"]
        ),
        Contender(
            "reshard average --no-verify",
            lambda out: [*command, f"{out}.safetensors", "--dtype", "fp32", "--no-verify"],
        ),
        Contender(
            "reshard average, to bf16",
            lambda out: [*command, f"{out}.safetensors", "--dtype", "bf16"],
        ),
        *limits(spans, shrink=len(paths) // 2 if form == "bf16" else len(paths)),
    ]
    if form != "zero2":
        found.append(Contender("torch", lambda out: [*script, str(out), *map(str, paths)]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=4, help="an even number")
    parser.add_argument("--size", choices=list(SHAPES), default="90")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--place", type=Path, default=Path("/dev/shm/bench-average"))
    parser.add_argument("--cold", type=Path, metavar="DIR", help="a new folder on a disk")
    args = parser.parse_args()
    models = args.cold or args.place / "models"
    for form in args.forms:
        args.place.mkdir(parents=True)
        try:
            # A process of its own: the peak memory of a child counts what its parent has.
            with get_context("spawn").Pool(1) as pool:
                paths = pool.apply(make, (models, form, args.count, args.size))
            contenders = list_contenders(paths, form, args.place / "spans.json")
            compete(contenders, args.place / "out" / "x", args.rounds, cold=args.cold)
            report(f"mean of {args.count} x {args.size} M parameters, {form}", contenders)
        finally:
            shutil.rmtree(args.place)
            shutil.rmtree(models, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--script"]:
        average_with_torch(Path(sys.argv[2]), [Path(path) for path in sys.argv[3:]])
    else:
        main()
