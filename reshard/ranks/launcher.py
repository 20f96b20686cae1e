"""The number of ranks that a launcher of training programs states in the environment."""

from __future__ import annotations

import os

from reshard.errors import UsageError

# Sources: torchrun (torch 2.13 ``distributed/elastic/agent/server/local_elastic_agent.py``),
# Slurm's srun, Open MPI's and MPICH's mpirun.
_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def parse_world_size(text: str) -> int:
    """Return a number of ranks; ``auto`` stands for the number that the launcher states.

    Raises:
        UsageError: the text is neither a number of at least 1 nor ``auto``, or no launcher
            states a number.
    """
    if text != "auto":
        if not text.isdecimal() or int(text) < 1:
            raise UsageError(f"--world-size {text}", "must be a number of at least 1, or auto")
        return int(text)
    for name in _VARIABLES:
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return int(value)
    raise UsageError(
        "--world-size auto",
        f"needs a launcher, which sets one of {', '.join(_VARIABLES)}; none is set here",
        "pass the number of ranks",
    )
