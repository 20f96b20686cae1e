"""Targets that are files of grids of ranks: DeepSpeed's, Megatron's, Meta's, nanotron's.

Each imports what lays it out when it is asked for.
"""

from __future__ import annotations

from typing import Any

from reshard.containers.skeletons import LaidOut
from reshard.errors import IncompleteError, UsageError
from reshard.formats.targets.request import Request
from reshard.training.state import Training


def of_deepspeed(state: Training, asked: Request) -> LaidOut:
    """DeepSpeed's native directory.

    Raises:
        IncompleteError: nothing says in which order the model has its parameters.
        ReshardError: as `deepspeed.write.lay_out`.
    """
    from reshard.formats.deepspeed import write as deepspeed

    if not state.manifest.ordered and not asked.weights_only:
        raise IncompleteError(
            state.manifest.origin.path,
            "DeepSpeed knows parameters by their place in the model, and nothing says which that is"
            " (FSDP's units and safetensors have an order of their own)",
            "say which model it is: --model config.json|DIR|module:factory",
        )
    return deepspeed.lay_out(state, weights_only=asked.weights_only, **_of_grid(asked))


def of_universal(state: Training, asked: Request) -> LaidOut:
    """DeepSpeed's universal directory, which any number of ranks loads.

    Raises:
        UsageError: the optimizer is to be left out.
        ReshardError: as `deepspeed.write.lay_out_universal`.
    """
    from reshard.formats.deepspeed import write as deepspeed

    if asked.weights_only:
        raise UsageError(
            "--to ds-universal",
            "is an optimizer's state, a file a parameter",
            "write the weights alone with --to deepspeed, or with reshard merge",
        )
    return deepspeed.lay_out_universal(state, **_of_grid(asked))


def _of_grid(asked: Request) -> dict[str, Any]:
    """What both directories of DeepSpeed depend on."""
    return {
        "world_size": asked.data_parallel,
        "stage": asked.zero_stage,
        "precision": asked.dtype,
        "wanted": asked.deepspeed_grid,
    }


def of_megatron(state: Training, asked: Request) -> LaidOut:
    """Megatron-LM's directory: a file a model-parallel rank, or torch_dist.

    Raises:
        ReshardError: as `megatron.write.lay_out`.
    """
    from reshard.formats.megatron import write as megatron

    if asked.megatron is None or asked.described is None:  # `requested` gives both
        raise AssertionError("megatron")
    return megatron.lay_out(state, asked.megatron, asked.described)


def of_meta(state: Training, asked: Request) -> LaidOut:
    """A Llama as Meta's code loads it.

    Raises:
        UsageError: the optimizer is not left out, or a size does not divide.
    """
    from reshard.formats.meta import target as meta

    known = asked.described
    if known is None:  # the commands give it
        raise AssertionError("meta")
    if not asked.weights_only:
        raise UsageError(
            "--to meta", "is a model's weights alone", "leave the optimizer out: --weights-only"
        )
    ranks = asked.parallel.tensor
    made = meta.lay_out(state, ranks=ranks, table=known.table, params=known.args, dtype=asked.dtype)
    return LaidOut(made, tuple(meta.notes(state, ranks=ranks)))


def of_nanotron(state: Training, asked: Request) -> LaidOut:
    """Nanotron's directory.

    Raises:
        UsageError: a stage that it has not.
        ReshardError: as `nanotron.target.lay_out`.
    """
    from reshard.formats.nanotron import target as nanotron
    from reshard.formats.nanotron.choice import Wanted

    if asked.zero_stage > 1:
        raise UsageError(
            f"--zero-stage {asked.zero_stage}", "nanotron has 0 and 1", "give one of them"
        )
    wanted = Wanted(
        sizes=asked.parallel,
        data=asked.data_parallel,
        zero=asked.zero_stage == 1,
        dtype=asked.dtype,
        weights_only=asked.weights_only,
    )
    return LaidOut(nanotron.lay_out(state, wanted), tuple(nanotron.notes(state)))
