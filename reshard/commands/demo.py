"""``demo``: the main job on built-in data: train at 4 ranks, merge, generate, go on elsewhere.

A run under ZeRO-3 at 4 ranks is merged into bf16 safetensors, which transformers loads; then it
goes on at 2 ranks and under FSDP 2, and `resume_check` compares the losses with the unbroken run's.
The trainer's own sums do not depend on the number of ranks, so there the losses are equal to the
last bit, or something was lost on the way; FSDP 2 sums in an order of its own, which may move the
last bits.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reshard.commands import programs
from reshard.commands.merge.command import merge
from reshard.commands.merge.options import MergeOptions
from reshard.commands.resume_check.command import place_for, resume_check
from reshard.commands.resume_check.options import ResumeCheckOptions
from reshard.errors import DifferentError

Tell = Callable[[str], None]

_HALF, _END = 4, 8
_LIMIT_S = 600.0
_NOISE = 1e-5  # relative: another order of the same sums
_PROMPT = "def main("
_TRAIN = (
    f"-m trainer --strategy zero3 --nproc 4 --steps {_END} --save-every {_HALF}"
    " --global-batch 8 --seq-len 32 --no-progress"
)


def demo(keep: Path | None, tell: Tell) -> bool:
    """Do it, in about a minute on two cores.

    Args:
        keep: a new directory for everything that is made; None: nothing stays.
        tell: called with each line of what is done.

    Returns:
        Whether training went on the same: bitwise at 2 ranks, within noise under FSDP 2.

    Raises:
        DifferentError: the trainer failed.
        ReshardError: a command failed.
    """
    with place_for(keep, "reshard-demo-") as place:
        run, log, model = place / "run", place / "run.jsonl", place / "model"
        _train([*_TRAIN.split(), "--save", str(run), "--log", str(log)], place, tell)
        tell(f"\n$ reshard merge {run} {model} --dtype bf16")
        for line in merge(run, model, MergeOptions(dtype="bf16")).lines():
            tell(line)
        tell(f"\n>>> AutoModelForCausalLM.from_pretrained({str(model)!r}).generate({_PROMPT!r})")
        tell(_generated(model))
        half = run / f"global_step{_HALF}"
        tell(
            f"\n$ reshard resume-check {half} --world-size 2 --to deepspeed --to accelerate"
            f" --steps {_END - _HALF} --rtol {_NOISE} --unbroken {log}"
        )
        options = ResumeCheckOptions(
            world_sizes=(2,),
            to=("deepspeed", "accelerate"),
            steps=_END - _HALF,
            rtol=_NOISE,
            unbroken=log,
            timeout_s=_LIMIT_S,
            keep=place / "resumed" if keep else None,
        )
        report = resume_check(half, options, tell=tell)
    for line in report.lines():
        tell(line)
    two, fsdp = report.targets
    return report.reaches(two, "bitwise") and report.reaches(fsdp, "trajectory")


def _train(arguments: list[str], place: Path, tell: Tell) -> None:
    """Run the trainer and show what it said."""
    tell(f"$ python {shlex.join(arguments)}")
    ended = programs.run([sys.executable, *arguments], place, _LIMIT_S)
    if ended.failed:
        raise DifferentError("the trainer", ended.why(), output=ended.said)
    tell((place / "stdout.txt").read_text().rstrip())


def _generated(model: Path) -> str:
    """What transformers makes of a merged directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    made = loaded.generate(
        **tokenizer(_PROMPT, return_tensors="pt"), max_new_tokens=24, do_sample=False
    )
    return f"{loaded.dtype}: {tokenizer.decode(made[0])!r}"
