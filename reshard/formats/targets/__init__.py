"""The targets: what a training state can be written as.

request         what was asked for
model_parallel  files of grids of ranks: DeepSpeed's, Megatron's, Meta's, nanotron's
pytorch         what PyTorch-native training loads
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reshard.containers.skeletons import LaidOut
from reshard.formats.targets import model_parallel
from reshard.formats.targets.request import Request
from reshard.training import trainer_run
from reshard.training.state import Training

PARALLEL = ("tp", "pp", "ep", "dp")  # choices that only targets of model parallelism heed
_OF_MEGATRON = (
    "vpp",
    "stage_layers",
    "ckpt_format",
    "distributed_optimizer",
    "adam",
    "transformer_impl",
    "extra_state",
    "make_vocab_size_divisible_by",
)
_OF_DEEPSPEED = ("stage_layers", "make_vocab_size_divisible_by")

LayOut = Callable[[Training, Request], LaidOut]


@dataclass(frozen=True, slots=True)
class Target:
    """One layout.

    Args:
        lay_out: the files, and what was derived or is dropped.
        tagged: whether the state files lie in a directory of their step.
        heeds: the choices, among those that not every target has, which mean something to it.
        keeps_rng: whether it has a place for the random states of ranks.
        weights_alone: whether weights without an optimizer are complete: nothing that loads the
            layout asks for more.
    """

    name: str
    lay_out: LayOut
    tagged: bool = False
    heeds: tuple[str, ...] = ()
    keeps_rng: bool = False
    weights_alone: bool = False


def _by_pytorch(name: str) -> LayOut:
    """A function of `pytorch`, which imports what lays out all of its targets."""

    def lay_out(state: Training, asked: Request) -> LaidOut:
        from reshard.formats.targets import pytorch

        made: LaidOut = getattr(pytorch, name)(state, asked)
        return made

    return lay_out


TARGETS = {
    target.name: target
    for target in (
        Target(
            "deepspeed",
            model_parallel.of_deepspeed,
            tagged=True,
            heeds=("zero_stage", *PARALLEL, *_OF_DEEPSPEED),
        ),
        Target("ds-universal", model_parallel.of_universal, tagged=True, heeds=("zero_stage",)),
        Target("dcp", _by_pytorch("of_dcp"), weights_alone=True),
        Target(
            "accelerate",
            _by_pytorch("of_accelerate"),
            keeps_rng=True,
            heeds=("state_dict_type", "rank_files", "device"),
        ),
        Target(
            "hf-trainer",
            _by_pytorch("of_hf_trainer"),
            keeps_rng=True,
            heeds=("zero_stage", "state_dict_type"),
        ),
        Target(
            "fsdp2",
            _by_pytorch("of_ranks"),
            weights_alone=True,
            heeds=("device", "mesh", "tp_plan"),
        ),
        Target(
            "verl",
            _by_pytorch("of_verl"),
            heeds=("device", "mesh", "tp_plan", "fsdp_version", "use_orig_params"),
        ),
        Target(
            "fsdp",
            _by_pytorch("of_fsdp"),
            keeps_rng=True,
            weights_alone=True,
            heeds=("state_dict_type", "rank_files", "device", "use_orig_params"),
        ),
        Target("megatron", model_parallel.of_megatron, heeds=(*PARALLEL, *_OF_MEGATRON)),
        Target("meta", model_parallel.of_meta, weights_alone=True, heeds=("tp",)),
        Target("nanotron", model_parallel.of_nanotron, heeds=(*PARALLEL, "zero_stage")),
        Target(
            trainer_run.NAME,
            _by_pytorch("of_trainer"),
            tagged=True,
            heeds=("state_dict_type", "rank_files", "device"),
        ),
        Target("colossalai", _by_pytorch("of_colossalai"), weights_alone=True),
        Target("torch", _by_pytorch("of_torch"), weights_alone=True),
    )
}
NAMES = tuple(TARGETS)
