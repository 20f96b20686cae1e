"""The main job on built-in data: train at 4 ranks, merge, generate, and go on somewhere else.

python demo.py

A run under ZeRO-3 at 4 ranks is merged into bf16 safetensors, which transformers loads; then it
goes on at 2 ranks and under FSDP 2, and the losses stand side by side. The unbroken run, and the
runs that go on from a checkpoint that ``reshard split`` made, see the same samples in the same
order. The trainer's own sums do not depend on the number of ranks, so there the losses are equal
to the last bit, or something was lost on the way; FSDP 2 sums in an order of its own, which may
move the last bits.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

HALF, END = 4, 8
NOISE = 1e-5  # relative: another order of the same sums
MODEL = "--global-batch 8 --seq-len 32"


def run(command: str) -> None:
    """Show a command and run it."""
    print(f"\n$ {command}", flush=True)
    program, *arguments = shlex.split(command)
    subprocess.run([sys.executable, "-m", program, *arguments], check=True)


def generate(model: Path, prompt: str) -> None:
    """Show what transformers makes of a merged directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    print(f"\n>>> AutoModelForCausalLM.from_pretrained({str(model)!r}).generate({prompt!r})")
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    made = loaded.generate(
        **tokenizer(prompt, return_tensors="pt"), max_new_tokens=24, do_sample=False
    )
    print(f"{loaded.dtype}: {tokenizer.decode(made[0])!r}", flush=True)


def losses(path: Path) -> dict[int, float]:
    """Step -> loss, as the trainer logged them."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def main() -> None:
    """Exit 1 where a run that went on differs from the unbroken one."""
    with tempfile.TemporaryDirectory(prefix="reshard-demo-") as place:
        out = Path(place)
        quiet = "--no-progress"
        run(
            f"trainer --strategy zero3 --nproc 4 --steps {END} {MODEL} {quiet}"
            f" --save-every {HALF} --save {out}/run --log {out}/unbroken.jsonl"
        )
        half = f"{out}/run/global_step{HALF}"
        run(f"reshard merge {out}/run {out}/model --dtype bf16")
        generate(out / "model", "def main(")
        run(f"reshard split {half} {out}/two --world-size 2")
        run(
            f"trainer --resume {out}/two --nproc 2 --steps {END} {quiet}"
            f" --save {out}/two-on --log {out}/two.jsonl"
        )
        run(f"reshard split {half} {out}/fsdp --to accelerate --world-size 2")
        run(
            f"trainer --resume {out}/fsdp --strategy fsdp2 --nproc 2 --steps {END} {quiet}"
            f" --save {out}/fsdp-on --log {out}/fsdp.jsonl"
        )
        runs = {
            "zero3, 4 ranks, unbroken": losses(out / "unbroken.jsonl"),
            "split to 2 ranks": losses(out / "two.jsonl"),
            "split to FSDP 2": losses(out / "fsdp.jsonl"),
        }
    print("\nstep  " + "  ".join(f"{name:>24}" for name in runs))
    whole, two, fsdp = runs.values()
    for step in range(HALF + 1, END + 1):
        print(f"{step:>4}  " + "  ".join(f"{held[step]:>24.17g}" for held in runs.values()))
    same = all(two[step] == whole[step] for step in two)
    off = max(abs(fsdp[step] / whole[step] - 1) for step in fsdp)
    print(f"2 ranks: {'bitwise equal' if same else 'NOT equal'}; FSDP 2: differs by {off:.1e}")
    sys.exit(0 if same and off < NOISE else 1)


if __name__ == "__main__":
    main()
