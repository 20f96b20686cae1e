"""Read the ``trainer_state.json`` of a run of ``python -m trainer``.

The trainer writes DeepSpeed's and Accelerate's files. A run of the trainer is
recognized by this document beside them: it has ``format``, ``progress``, ``settings`` and
``world_size``, while HF Trainer's file of the same name has ``global_step``.

Source: ``trainer/checkpoint/state.py`` (the document), ``trainer/core/settings.py`` and
``trainer/settings.py`` (the settings), ``trainer/core/fsdp_units.py`` (``list_mesh_axes``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from reshard.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from reshard.core.manifest import Skeleton, TrainState
from reshard.core.schema import COUNT, TEXT, expect, make_kind, record, sequence
from reshard.errors import UsageError

NAME = "trainer"
_FSDP = ("fsdp", "fsdp2")
_PARTS = ("format", "progress", "settings")
_PROGRESS = record(step=COUNT, skipped=COUNT, samples=COUNT)
_SETTINGS = record(
    strategy=TEXT,
    precision=TEXT,
    state_dict_type=TEXT,
    sharded_files=TEXT,
    global_batch=COUNT,
    micro_batch=COUNT,
    fsdp_sharding_strategy=TEXT,
    fsdp_hybrid_size=COUNT,
    fsdp_auto_wrap_policy=TEXT,
    fsdp_transformer_layer_cls_to_wrap=sequence(TEXT),
    fsdp_min_num_params=COUNT,
    fsdp_use_orig_params=make_kind("true or false", lambda value: isinstance(value, bool)),
)
# Settings that may differ at each start of the program, and those that only distribute a run over
# ranks: two checkpoints of the same training may differ in them.
_OF_A_START = frozenset(
    "steps nproc device threads timeout accumulation nvme_path save save_every"
    " async_save overwrite keep resume tag log progress wall_clock_breakdown parameter_hash".split()
)
_OF_THE_RANKS = frozenset(
    "strategy reduction reduce_bucket_size sub_group_size persistence_threshold"
    " offload_optimizer offload_param state_dict_type sharded_files".split()
)


class TrainerRun(NamedTuple):
    """One document of the trainer, checked against its schema."""

    document: Mapping[str, Any]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the run."""
        settings: Mapping[str, Any] = self.document["settings"]
        return settings

    @property
    def progress(self) -> Mapping[str, int]:
        """The counters ``step``, ``skipped`` and ``samples``."""
        progress: Mapping[str, int] = self.document["progress"]
        return progress

    @property
    def tag(self) -> str:
        """The name of the checkpoint's directory in the run directory."""
        return f"global_step{self.progress['step']}"

    @property
    def has_own_layout(self) -> bool:
        """Whether its files have PyTorch's forms; ddp and ZeRO write DeepSpeed's."""
        return str(self.settings["strategy"]) in _FSDP

    @property
    def form(self) -> Literal["full", "local", "sharded"]:
        """The state dict type to write: that of the run."""
        saved = self.settings["state_dict_type"]
        return saved if saved in ("full", "local") else "sharded"

    @property
    def has_rank_files(self) -> bool:
        """Whether the run has one file for each rank and resumes from such files."""
        form = self.settings["state_dict_type"], self.settings["sharded_files"]
        return form == ("sharded", "rank")

    @property
    def is_flat(self) -> bool:
        """Whether ranks hold slices of FSDP 1's flat parameters."""
        flat = ("fsdp", "local")
        return (self.settings["strategy"], self.settings["state_dict_type"]) == flat

    @property
    def wrap(self) -> str:
        """How FSDP wraps the model, as a value of ``--wrap``."""
        from reshard.model.wrap import OWN_LAYERS

        settings = self.settings
        policy = settings["fsdp_auto_wrap_policy"]
        if policy == "SIZE_BASED_WRAP":
            return f"size={settings['fsdp_min_num_params']}"
        if policy == "NO_WRAP":
            return "none"
        return ",".join(settings["fsdp_transformer_layer_cls_to_wrap"]) or OWN_LAYERS

    @property
    def compute(self) -> DType:
        """The dtype of the forward pass, by which FSDP aligns parameters in a flat one."""
        return {"fp32": FLOAT32, "fp16": FLOAT16}.get(self.settings["precision"], BFLOAT16)

    def is_whole(self, ranks: int) -> bool:
        """Return whether each rank holds the model uncut, like FSDP 1's NO_SHARD."""
        unsharded = ranks == 1 or self.settings["fsdp_sharding_strategy"] == "NO_SHARD"
        return unsharded and bool(self.settings["strategy"] == "fsdp")

    def mesh(self, ranks: int) -> dict[str, int]:
        """Return the axes of the trainer's device mesh for a number of data-parallel ranks.

        Raises:
            UsageError: the run states the size of a replica, and the ranks cannot form replicas of
                that size.
        """
        settings = self.settings
        if "HYBRID" not in settings["fsdp_sharding_strategy"] or ranks == 1:
            return {"shard": ranks}
        # Without a size, a replica is half of the ranks; of two, or an odd number, it is all.
        half = ranks // 2 if ranks % 2 == 0 and ranks > 2 else ranks
        size = settings["fsdp_hybrid_size"] or half
        if ranks % size:
            raise UsageError(
                f"--world-size {ranks}",
                f"the run shards its model over replicas of {size} ranks (fsdp_hybrid_size), and"
                f" {ranks} ranks cannot form such replicas",
                f"use a multiple of {size}, or write files that fit any number of ranks:"
                " --state-dict-type sharded",
            )
        return {"replicate": ranks // size, "shard": size}

    def build_document(self, ranks: int, **settings: str) -> dict[str, Any]:
        """Return the document of the same run on another number of ranks."""
        changed = {"world_size": ranks, "settings": {**self.settings, **settings}}
        return {**self.document, **changed}

    def lay_out_directory(self, checkpoint: Skeleton) -> Skeleton:
        """Lay out the run directory around a checkpoint: its tag, and ``latest``."""
        from reshard.containers import skeletons

        pointer = skeletons.lay_out_bytes("latest", self.tag.encode())
        return skeletons.join([pointer, skeletons.move_into(checkpoint, self.tag)])

    def set_counters(self, train: TrainState) -> TrainState:
        """Return the training state with the counters of the document."""
        progress = self.progress
        return replace(
            train,
            step=progress["step"],
            skipped_steps=progress["skipped"],
            samples=progress["samples"],
        )

    def list_training_values(self) -> dict[str, Any]:
        """Return the counters and settings that do not depend on how ranks share the run."""
        settings = {
            f"settings.{name}": value
            for name, value in self.settings.items()
            if name not in _OF_A_START | _OF_THE_RANKS and not name.startswith("fsdp_")
        }
        parts = {name: self.document.get(name) for name in ("progress", "scaler", "text")}
        return {**parts, **settings}


def is_document(value: Mapping[str, Any] | None) -> bool:
    """Return whether a ``trainer_state.json`` is the trainer's, and not HF Trainer's."""
    return value is not None and all(name in value for name in _PARTS)


def read(value: Mapping[str, Any] | None, where: object) -> TrainerRun | None:
    """Return the run that a ``trainer_state.json`` describes; None if it is HF Trainer's."""
    if value is None or not is_document(value):
        return None
    expect(where, value["progress"], _PROGRESS, "progress")
    expect(where, value["settings"], _SETTINGS, "settings")
    return TrainerRun(value)


def describe_resume(ranks: int) -> str:
    """Return the command that resumes a run, with ``{path}`` for its directory."""
    return f"python -m trainer --resume {{path}} --nproc {ranks}"


_FSDP_FORMS = (  # a file of the form, the strategies that load it, and the flags that name it
    ("pytorch_model_fsdp_0", ("fsdp2", "fsdp"), "--state-dict-type sharded --sharded-files dcp"),
    (
        "pytorch_model_fsdp_0_rank0.bin",
        ("fsdp2",),
        "--state-dict-type sharded --sharded-files rank",
    ),
    ("pytorch_model_fsdp.bin", ("fsdp", "fsdp2"), "--state-dict-type full --sharded-files dcp"),
    (
        "pytorch_model_fsdp_rank0.bin",
        ("fsdp",),
        "--state-dict-type local --sharded-files dcp --no-fsdp-use-orig-params",
    ),
)


def choose_flags(names: Collection[str], zero_stage: int | None, strategy: str) -> list[str] | None:
    """Return the flags with which ``python -m trainer`` loads a checkpoint; None if it cannot.

    Args:
        names: the files and folders of the checkpoint.
        zero_stage: the ZeRO stage of a checkpoint in DeepSpeed's layout; None for others.
        strategy: the strategy of the run so far, which is kept if it loads the checkpoint.
    """
    if zero_stage is not None and "latest" in names:
        return ["--strategy", f"zero{zero_stage}" if zero_stage else "ddp"]
    for name, strategies, flags in _FSDP_FORMS:
        if name in names:
            chosen = strategy if strategy in strategies else strategies[0]
            return ["--strategy", chosen, *flags.split()]
    return None
