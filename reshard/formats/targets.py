"""The targets: what a training state can be written as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from reshard.dtypes import FLOAT32, DType
from reshard.errors import IncompleteError, UsageError
from reshard.formats import hf_trainer
from reshard.formats.colossalai import target as colossalai
from reshard.formats.dcp import target as dcp
from reshard.formats.deepspeed import target as deepspeed
from reshard.formats.deepspeed.target.grid import Wanted as GridWanted
from reshard.formats.megatron import target as megatron
from reshard.formats.megatron.target.choice import Wanted
from reshard.formats.meta import target as meta
from reshard.formats.nanotron import target as nanotron
from reshard.formats.nanotron.choice import Wanted as NanotronWanted
from reshard.formats.state_dict import flat_target, written
from reshard.formats.state_dict import target as state_dict
from reshard.formats.state_dict.mesh import Grid
from reshard.formats.training import Training
from reshard.layout.tensor_parallel import Plan
from reshard.manifest import Skeleton
from reshard.model import ModelShapes
from reshard.model_parallel.described import Described
from reshard.model_parallel.sizes import ONE, Sizes

StateDictType = Literal["full", "local", "sharded", "unsharded"]
STATE_DICT_TYPES = get_args(StateDictType)
FsdpVersion = Literal[1, 2]
FSDP_VERSIONS = get_args(FsdpVersion)
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
PARALLEL = ("tp", "pp", "ep", "dp")  # choices that only targets of model parallelism heed

_BY_ACCELERATE = ("step", "scheduler", "scaler")  # what its directory has a place for


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for, with nothing left open but what a target decides."""

    world_size: int
    parallel: Sizes = ONE
    zero_stage: int = 2
    dtype: DType | None = None  # of the module's parameters; None: as trained
    weights_only: bool = False
    state_dict_type: StateDictType = "sharded"
    rank_files: bool = False  # a file a rank where the form is DCP by default
    fsdp_version: FsdpVersion = 2  # of verl's files
    orig_params: DType | None = None  # FSDP 1: use_orig_params with a forward pass in this dtype
    deepspeed: bool = False  # whether DeepSpeed's directory is written, by itself or in another
    model: ModelShapes | None = None
    device: str = "cuda"  # of the mesh that DTensors are saved on, which must be the model's
    grid: Grid | None = None  # that mesh, of world_size ranks; None: one axis
    tensor: Plan | None = None  # what a tensor-parallel axis of it does
    deepspeed_grid: GridWanted | None = None  # DeepSpeed's model-parallel ranks; None: one
    megatron: Wanted | None = None  # of its directory
    described: Described | None = None  # the model, as tables of parameters need it

    @property
    def data_parallel(self) -> int:
        """How many ranks see different data."""
        tensor = self.grid.size("tensor") if self.grid else 1
        return self.world_size // (tensor * self.parallel.model)

    @property
    def master(self) -> DType:
        """Of the weights that an optimizer updates, where it begins anew."""
        return FLOAT32 if self.deepspeed or self.dtype is None else self.dtype

    @property
    def form(self) -> str:
        """What the target's name leaves open, in words."""
        if self.megatron:
            return " ".join(filter(None, (self.megatron.form, str(self.megatron.sizes))))
        if not self.deepspeed:
            return self.state_dict_type
        return " ".join(filter(None, (f"stage {self.zero_stage}", str(self.parallel))))


@dataclass(frozen=True, slots=True)
class Target:
    """One layout.

    Args:
        lay_out: the files.
        notes: what was derived or is dropped.
        tagged: whether the state files lie in a directory of their step.
        heeds: the choices, among those that not every target has, which mean something to it.
        keeps_rng: whether it has a place for the random states of ranks.
    """

    name: str
    what: str
    lay_out: Callable[[Training, Request], Skeleton]
    notes: Callable[[Training, Request], tuple[str, ...]]
    tagged: bool = False
    heeds: tuple[str, ...] = ()
    keeps_rng: Callable[[Request], bool] = lambda _asked: False


def _deepspeed(state: Training, asked: Request) -> Skeleton:
    if not state.manifest.ordered and not asked.weights_only:
        raise IncompleteError(
            state.manifest.origin.path,
            "DeepSpeed knows parameters by their place in the model, and nothing says which that is"
            " (FSDP's units and safetensors have an order of their own)",
            "say which model it is: --model config.json|DIR|module:factory",
        )
    return deepspeed.lay_out(
        state,
        world_size=asked.data_parallel,
        stage=asked.zero_stage,
        precision=asked.dtype,
        weights_only=asked.weights_only,
        wanted=asked.deepspeed_grid,
    )


def _deepspeed_notes(state: Training, asked: Request) -> tuple[str, ...]:
    return deepspeed.notes(
        state,
        world_size=asked.data_parallel,
        stage=asked.zero_stage,
        precision=asked.dtype,
        weights_only=asked.weights_only,
        wanted=asked.deepspeed_grid,
    )


def _universal(state: Training, asked: Request) -> Skeleton:
    if asked.weights_only:
        raise UsageError(
            "--to ds-universal",
            "is an optimizer's state, a file a parameter",
            "write the weights alone with --to deepspeed, or with reshard merge",
        )
    return deepspeed.lay_out_universal(
        state,
        world_size=asked.data_parallel,
        stage=asked.zero_stage,
        precision=asked.dtype,
        wanted=asked.deepspeed_grid,
    )


def _universal_notes(state: Training, asked: Request) -> tuple[str, ...]:
    return deepspeed.notes_universal(
        state,
        world_size=asked.data_parallel,
        stage=asked.zero_stage,
        precision=asked.dtype,
        wanted=asked.deepspeed_grid,
    )


def _dcp(state: Training, asked: Request) -> Skeleton:
    return dcp.lay_out(
        state, shards=asked.world_size, weights_only=asked.weights_only, dtype=asked.dtype
    )


def _accelerate(state: Training, asked: Request) -> Skeleton:
    if asked.state_dict_type not in ("full", "sharded"):
        raise UsageError(
            f"--state-dict-type {asked.state_dict_type}",
            "is no form that Accelerate loads",
            "write sharded or full; flat parameters are of --to fsdp, DDP's files of --to"
            " hf-trainer, one file is --to torch",
        )
    if asked.state_dict_type == "full":
        return _full(state, asked)
    if asked.rank_files:
        return _ranks(state_dict.ACCELERATE)(state, asked)
    return dcp.accelerate(
        state, shards=asked.world_size, weights_only=asked.weights_only, dtype=asked.dtype
    )


def _full(state: Training, asked: Request) -> Skeleton:
    return state_dict.fsdp1_full(
        state, ranks=asked.world_size, weights_only=asked.weights_only, dtype=asked.dtype
    )


def _ranks(naming: state_dict.Naming) -> Callable[[Training, Request], Skeleton]:
    def lay_out(state: Training, asked: Request) -> Skeleton:
        return state_dict.fsdp2(
            state,
            _grid(naming, asked),
            naming=naming,
            tensor=asked.tensor,
            weights_only=asked.weights_only,
            model=asked.model,
            dtype=asked.dtype,
        )

    return lay_out


def _grid(naming: state_dict.Naming, asked: Request) -> Grid:
    """The mesh that was asked for, else the usual one of a single axis.

    Raises:
        UsageError: nothing that reads such files makes that mesh.
    """
    if asked.grid is None:
        usual = naming.meshes[0] if naming.meshes else None
        return Grid((asked.world_size,), usual, asked.device)
    if naming.meshes and asked.grid.names not in naming.meshes:
        known = (",".join(f"{name}=N" for name in names) for names in naming.meshes)
        raise UsageError(
            f"--mesh {asked.grid}",
            "is none under which these files are read",
            f"give {' or '.join(known)}, or write --to fsdp2",
        )
    return asked.grid


def _fsdp(state: Training, asked: Request) -> Skeleton:
    if asked.state_dict_type != "local":
        return _accelerate(state, asked)
    if asked.orig_params is not None:
        raise UsageError(
            "--state-dict-type local --use-orig-params",
            "FSDP 1 cannot load such files, its own among them",
            "write --state-dict-type sharded or full, which load with use_orig_params as well",
        )
    return flat_target.fsdp1_local(
        state,
        _wrapped(asked, "--state-dict-type local"),
        ranks=asked.world_size,
        naming=state_dict.LOCAL,
        weights_only=asked.weights_only,
        dtype=asked.dtype,
    )


def _wrapped(asked: Request, by: str) -> ModelShapes:
    """The model with its units, which flat parameters need.

    Raises:
        UsageError: nobody said.
    """
    if asked.model is None or not asked.model.units:
        raise UsageError(
            by,
            "writes flat parameters, and nothing says which parameters lie in which",
            "say which model is wrapped and how: --model config.json|DIR|module:factory"
            " --wrap LlamaDecoderLayer|size=N|none",
        )
    return asked.model


def _verl(state: Training, asked: Request) -> Skeleton:
    if asked.fsdp_version == 2:
        return _ranks(state_dict.VERL)(state, asked)
    return flat_target.fsdp1_sharded(
        state,
        _wrapped(asked, "--fsdp-version 1"),
        _grid(state_dict.VERL, asked),
        naming=state_dict.VERL,
        compute=asked.orig_params,
        weights_only=asked.weights_only,
        dtype=asked.dtype,
    )


def _megatron(state: Training, asked: Request) -> Skeleton:
    return megatron.lay_out(state, *_for_megatron(asked))


def _megatron_notes(state: Training, asked: Request) -> tuple[str, ...]:
    return megatron.notes(state, *_for_megatron(asked))


def _for_megatron(asked: Request) -> tuple[Wanted, Described]:
    if asked.megatron is None or asked.described is None:  # `requested` gives both
        raise AssertionError("megatron")
    return asked.megatron, asked.described


def _meta(state: Training, asked: Request) -> Skeleton:
    known = asked.described
    if known is None:  # the commands give it
        raise AssertionError("meta")
    if not asked.weights_only:
        raise UsageError(
            "--to meta", "is a model's weights alone", "leave the optimizer out: --weights-only"
        )
    return meta.lay_out(
        state,
        ranks=asked.parallel.tensor,
        table=known.table,
        params=known.args,
        dtype=asked.dtype,
    )


def _meta_notes(state: Training, asked: Request) -> tuple[str, ...]:
    return tuple(meta.notes(state, ranks=asked.parallel.tensor))


def _nanotron(state: Training, asked: Request) -> Skeleton:
    if asked.zero_stage > 1:
        raise UsageError(
            f"--zero-stage {asked.zero_stage}", "nanotron has 0 and 1", "give one of them"
        )
    wanted = NanotronWanted(
        sizes=asked.parallel,
        data=asked.data_parallel,
        zero=asked.zero_stage == 1,
        dtype=asked.dtype,
        weights_only=asked.weights_only,
    )
    return nanotron.lay_out(state, wanted)


def _nanotron_notes(state: Training, _asked: Request) -> tuple[str, ...]:
    return tuple(nanotron.notes(state))


def _colossalai(state: Training, asked: Request) -> Skeleton:
    return colossalai.lay_out(
        state, weights_only=asked.weights_only, model=asked.model, dtype=asked.dtype
    )


def _colossalai_notes(state: Training, asked: Request) -> tuple[str, ...]:
    return tuple(colossalai.notes(state, weights_only=asked.weights_only))


def _plain(state: Training, asked: Request) -> Skeleton:
    return state_dict.plain(
        state, model=asked.model, weights_only=asked.weights_only, dtype=asked.dtype
    )


def _notes(*held: str) -> Callable[[Training, Request], tuple[str, ...]]:
    """What a target of PyTorch's derives and drops; ``held`` is what it has a place for, or all."""

    def notes(state: Training, _asked: Request) -> tuple[str, ...]:
        train = state.manifest.train
        lost = [f"not carried: {name}" for name in written.dropped(train, held or None)]
        derived = written.derived(train) if not held or "scaler" in held else []
        return (*derived, *lost)

    return notes


def _rank_notes(*held: str) -> Callable[[Training, Request], tuple[str, ...]]:
    """The same, and what a tensor-parallel axis does."""
    others = _notes(*held)

    def notes(state: Training, asked: Request) -> tuple[str, ...]:
        if asked.tensor is None or asked.grid is None:
            return others(state, asked)
        return (_of_tensor_plan(state, asked, asked.grid, asked.tensor), *others(state, asked))

    return notes


def _of_tensor_plan(state: Training, asked: Request, grid: Grid, tensor: Plan) -> str:
    divided = state_dict.is_divided(state, asked.model)
    weights = written.weights(state, divided=divided)
    touched = state_dict.tensor_cuts(grid, tensor, weights)
    parameters = {value.owner for value in weights.values() if value.divided}
    cut = sum(each is not None for each in touched.values())
    counts = f"{cut} of {len(parameters)} parameters cut, {len(touched) - cut} replicated"
    apart = f"{len(parameters) - len(touched)} named by no pattern: whole on each of its ranks"
    return f"tensor parallel by the plan of {tensor.source}: {counts}, {apart}"


def _hf_trainer(state: Training, asked: Request) -> Skeleton:
    if asked.deepspeed:
        held = _deepspeed(state, asked)
    elif asked.state_dict_type == "unsharded":
        held = hf_trainer.unsharded(
            state, weights_only=asked.weights_only, model=asked.model, dtype=asked.dtype
        )
    elif asked.state_dict_type == "full":
        held = state_dict.fsdp1_full(state, weights_only=asked.weights_only, dtype=asked.dtype)
    elif asked.state_dict_type == "sharded":
        held = dcp.fsdp(
            state, shards=asked.world_size, weights_only=asked.weights_only, dtype=asked.dtype
        )
    else:
        raise UsageError(
            "--state-dict-type local",
            "is no form that the Trainer resumes from",
            "choose sharded, full or unsharded",
        )
    return hf_trainer.run(
        state,
        held,
        ranks=asked.world_size,
        deepspeed=asked.deepspeed,
        weights_only=asked.weights_only,
    )


def _hf_trainer_notes(state: Training, asked: Request) -> tuple[str, ...]:
    inner = _deepspeed_notes if asked.deepspeed else _notes("scheduler", "step")
    own = hf_trainer.notes(state, deepspeed=asked.deepspeed, weights_only=asked.weights_only)
    return (*inner(state, asked), *own)


def _always(_asked: Request) -> bool:
    return True


TARGETS = {
    target.name: target
    for target in (
        Target(
            "deepspeed",
            "DeepSpeed's native directory",
            _deepspeed,
            _deepspeed_notes,
            tagged=True,
            heeds=("zero_stage", *PARALLEL, *_OF_DEEPSPEED),
        ),
        Target(
            "ds-universal",
            "DeepSpeed's universal directory, which any number of ranks loads",
            _universal,
            _universal_notes,
            tagged=True,
            heeds=("zero_stage",),
        ),
        Target("dcp", "a DCP directory, which any number of ranks reads", _dcp, _notes()),
        Target(
            "accelerate",
            "Accelerate's FSDP directory",
            _accelerate,
            _notes(*_BY_ACCELERATE),
            keeps_rng=_always,
            heeds=("state_dict_type", "rank_files", "device"),
        ),
        Target(
            "hf-trainer",
            "a checkpoint-N of HF Trainer",
            _hf_trainer,
            _hf_trainer_notes,
            keeps_rng=_always,
            heeds=("zero_stage", "state_dict_type"),
        ),
        Target(
            "fsdp2",
            "a file of DTensors a rank",
            _ranks(state_dict.PAIR),
            _rank_notes(),
            heeds=("device", "mesh", "tp_plan"),
        ),
        Target(
            "verl",
            "verl's rank files",
            _verl,
            _rank_notes("scheduler"),
            heeds=("device", "mesh", "tp_plan", "fsdp_version", "use_orig_params"),
        ),
        Target(
            "fsdp",
            "FSDP 1 under Accelerate's names, flat too",
            _fsdp,
            _notes(*_BY_ACCELERATE),
            keeps_rng=_always,
            heeds=("state_dict_type", "rank_files", "device", "use_orig_params"),
        ),
        Target(
            "megatron",
            "Megatron-LM's directory, a file a model-parallel rank or torch_dist",
            _megatron,
            _megatron_notes,
            heeds=(*PARALLEL, *_OF_MEGATRON),
        ),
        Target(
            "meta",
            "Llama as Meta's code loads it: a file a tensor-parallel rank",
            _meta,
            _meta_notes,
            heeds=("tp",),
        ),
        Target(
            "nanotron",
            "nanotron's directory",
            _nanotron,
            _nanotron_notes,
            heeds=(*PARALLEL, "zero_stage"),
        ),
        Target(
            "colossalai",
            "ColossalAI's shards under an index, which any of its plugins loads",
            _colossalai,
            _colossalai_notes,
        ),
        Target("torch", "one file with torch.optim's own state", _plain, _notes()),
    )
}
NAMES = tuple(TARGETS)
