"""Create the checkpoints to measure: real frameworks write each once, into one directory."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from contest import HERE, PYTHON

RANKS = 8


@dataclass(frozen=True)
class Shape:
    """A Llama."""

    hidden: int
    intermediate: int
    layers: int
    vocab: int = 32000

    @property
    def flags(self) -> list[str]:
        """Return the options of the scripts that make checkpoints."""
        return [f"--{name}={value}" for name, value in vars(self).items()]


SHAPES = {  # parameters, in millions
    "2": Shape(256, 512, 2, 1000),
    "15": Shape(512, 1536, 4, 4000),
    "90": Shape(512, 1536, 16),
    "230": Shape(1024, 3072, 12),
    "460": Shape(1536, 4608, 12),
    "1100": Shape(2048, 5632, 22),
    "4000": Shape(3072, 8192, 40),
}


class Sources:
    """Checkpoints of one model in a directory; what is there already is not made again."""

    def __init__(self, place: Path, shape: Shape, ranks: int) -> None:
        self.place = place
        self.shape = shape
        self.ranks = ranks

    def zero(self, stage: int) -> Path:
        """Return a DeepSpeed run after one step: bf16, fp32 masters and moments."""
        run = self.place / f"zero{stage}"
        self._torchrun(run, "make_zero.py", str(run), "--stage", str(stage), "--train")
        return run

    def fsdp(self, form: str, dtype: str = "bfloat16") -> Path:
        """Return weights that FSDP 2 sharded: ``dcp``, ``hf`` or ``verl``."""
        place = self.place / (f"fsdp-{form}" + f"-{dtype}" * (dtype != "bfloat16"))
        self._torchrun(place, "make_dcp.py", str(place), "--forms", form, "--dtype", dtype)
        return place / {"dcp": "accelerate/pytorch_model_fsdp_0"}.get(form, form)

    def megatron(self, form: str) -> Path:
        """Return weights of tensor and pipeline parallel ranks: ``torch`` or ``torch_dist``."""
        place = self.place / "megatron"
        self._torchrun(place, "make_megatron.py", str(place))
        return place / form

    def converted(self, name: str, source: Path, *options: str) -> Path:
        """Convert another source with reshard, if no peer writes such a layout at this size."""
        made = self.place / name
        if not made.exists():
            command = [PYTHON, "-m", "reshard", "split", str(source), str(made), "--quiet"]
            subprocess.run([*command, *options], check=True)
        return made

    def model(self) -> Path:
        """Return the same weights as a Hugging Face directory."""
        made = self.place / "hf"
        if not made.exists():
            command = [PYTHON, "-m", "reshard", "merge", str(self.zero(2)), str(made), "--quiet"]
            subprocess.run(command, check=True)
        return made

    def _torchrun(self, made: Path, script: str, *arguments: str) -> None:
        if made.exists():
            return
        self.place.mkdir(parents=True, exist_ok=True)
        ranks = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks)]
        command = [PYTHON, *ranks, str(HERE / script), *arguments, *self.shape.flags]
        quiet = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
        done = subprocess.run(
            command, env={**os.environ, **quiet}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{script} failed:\n{done.stderr[-2000:]}")
