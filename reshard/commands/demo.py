"""``demo``: train on 4 ranks, merge, generate text and resume on other ranks, on built-in data.

A ZeRO-3 run on 4 ranks is merged into bf16 safetensors, which transformers loads; then it resumes
on 2 ranks and under FSDP 2, and `resume_check` compares the losses with those of the uninterrupted
run. The sums of the trainer do not depend on the number of ranks: on 2 ranks, the losses must be
equal bit by bit. FSDP 2 adds in its own order, which may change the last bits.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reshard.checks import trajectory
from reshard.commands import programs
from reshard.commands.merge.command import merge
from reshard.commands.merge.options import MergeOptions
from reshard.commands.resume_check.command import RunMeter, open_folder, resume_check
from reshard.commands.resume_check.options import ResumeCheckOptions
from reshard.errors import DifferentError
from reshard.system import optional

Print = Callable[[str], None]

_HALF, _END = 4, 8
_LIMIT_S = 600.0
_NOISE = 1e-5  # relative difference that another order of the same sums may cause
_PROMPT = "def main("
_TRAIN = (
    f"-m trainer --strategy zero3 --nproc 4 --steps {_END} --save-every {_HALF}"
    " --global-batch 8 --seq-len 32 --no-progress"
)
_END_TEXT = """
What you saw: a checkpoint that 4 ranks saved under ZeRO 3 became
- a model in bf16, which transformers loaded and which generated text;
- a checkpoint for 2 ranks: training continued with the same losses, bit by bit;
- a checkpoint for FSDP 2: training continued with the same losses, within rounding.

With a run of your own:
  reshard inspect RUN                     what is in it, and whether it is whole
  reshard merge RUN MODEL --dtype bf16    a model for transformers
  reshard split RUN NEW --world-size 2    a checkpoint for other ranks
  reshard plan RUN --gpus 4x24GB          does training fit on other GPUs?
  reshard --help                          all commands"""


def demo(keep: Path | None, print_line: Print, run_meter: RunMeter) -> bool:
    """Run the demo, which takes about a minute on two cores.

    Args:
        keep: a new directory for all files; None: they are deleted.
        run_meter: opens a display for each training run.

    Returns:
        Whether training continued identically: bitwise on 2 ranks, within noise under FSDP 2.

    Raises:
        DifferentError: the trainer failed.
        ReshardError: a command failed.
        MissingModuleError: torch or transformers is not installed.
    """
    for name in ("torch", "transformers"):
        optional.require(name, "the demo")
    with open_folder(keep, "reshard-demo-") as folder:
        run, log, model = folder / "run", folder / "run.jsonl", folder / "model"
        command = [*_TRAIN.split(), "--save", str(run), "--log", str(log)]
        print_line(f"$ python {shlex.join(command)}")
        with run_meter("training", _END) as show:
            _train(command, folder, lambda *state: show(trajectory.count_steps(log), *state))
        print_line((folder / "stdout.txt").read_text().rstrip())
        print_line(f"\n$ reshard merge {run} {model} --dtype bf16")
        for line in merge(run, model, MergeOptions(dtype="bf16")).lines():
            print_line(line)
        print_line(
            f"\n>>> AutoModelForCausalLM.from_pretrained({str(model)!r}).generate({_PROMPT!r})"
        )
        print_line(_generate_text(model))
        half = run / f"global_step{_HALF}"
        print_line(
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
            keep=folder / "resumed" if keep else None,
        )
        report = resume_check(half, options, print_line=print_line, run_meter=run_meter)
    for line in report.lines():
        print_line(line)
    two, fsdp = report.targets
    continued = report.reaches(two, "bitwise") and report.reaches(fsdp, "trajectory")
    if continued:
        print_line(_END_TEXT)
    return continued


def _train(arguments: list[str], folder: Path, watch: programs.Watch) -> None:
    ended = programs.run([sys.executable, *arguments], folder, _LIMIT_S, watch)
    if ended.failed:
        raise DifferentError("the trainer", ended.describe(), output=ended.last_lines)


def _generate_text(model: Path) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    tokens = loaded.generate(
        **tokenizer(_PROMPT, return_tensors="pt"), max_new_tokens=24, do_sample=False
    )
    return f"{loaded.dtype}: {tokenizer.decode(tokens[0])!r}"
