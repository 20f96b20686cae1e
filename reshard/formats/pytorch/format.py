"""The checkpoints of PyTorch-native training as one format, and the layouts that it loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.containers.torch_detect import PLAIN_SUFFIXES
from reshard.core.location import Location, get_directory
from reshard.core.manifest import Manifest, Skeleton
from reshard.errors import UsageError
from reshard.formats import registry
from reshard.formats.base import Format, ReadHints, S, Source, StateConversion, Writer
from reshard.formats.pytorch.directory import FILE, NAME, detect, detect_loosely
from reshard.training import trainer_run

if TYPE_CHECKING:
    from reshard.containers.skeletons import LaidOut
    from reshard.formats.request import Request
    from reshard.formats.target_options import StateDictType, TargetOptions
    from reshard.training.state import WritableState
    from reshard.training.trainer_run import TrainerRun

_DEEPSPEED = ("deepspeed", "deepspeed-universal")
_SHARDED = ("dcp", "fsdp", "torchtitan", "verl")  # sources of sharded training by PyTorch itself


def _read(location: Location, hints: ReadHints) -> Manifest:
    from reshard.formats.pytorch import reader

    return reader.read(location, hints)


def _choose_for_lightning(manifest: Manifest) -> str | None:
    """Return the writer that keeps Lightning's DCP directories; a file has no ranks to change."""
    return "dcp" if any(path.endswith(".distcp") for path in manifest.files) else None


def _choose_for_ranks(manifest: Manifest) -> str | None:
    # NeMo Automodel keeps DCP's optimizer beside shards for Hugging Face.
    return "dcp" if any(path.endswith(".distcp") for path in manifest.files) else "fsdp2"


class _TorchWriter(Writer):
    def lay_out(self, state: WritableState, request: Request) -> LaidOut:
        from reshard.formats.pytorch import layouts

        return layouts.lay_out(self.name, state, request)

    def needs_every_state(self, request: Request) -> bool:
        # torch's ``set_optimizer_state_dict`` looks up names. With the keys of a DCP source, the
        # output has exactly those.
        return request.target is None and not self.numbers_parameters(request)


class _StateDicts(_TorchWriter):
    def numbers_parameters(self, request: Request) -> bool:
        """Return False for FSDP's forms, whose optimizer has names."""
        return request.separate_masters or request.state_dict_type not in ("sharded", "full")

    def choose_state_dict_type(self, source: Manifest, _run: TrainerRun | None) -> StateDictType:
        if source.origin.format in _SHARDED:
            return "sharded"
        if any(path.endswith("pytorch_model_fsdp.bin") for path in source.files):
            return "full"
        has_fsdp_files = any("pytorch_model_fsdp" in path for path in source.files)
        return "unsharded" if self._may_be_unsharded(source) and not has_fsdp_files else "sharded"

    def _may_be_unsharded(self, _source: Manifest) -> bool:
        """Return whether a source without FSDP's files is written as DDP saves it."""
        return False

    def describe(self, request: Request) -> str:
        return request.state_dict_type


_LOAD_DCP = "torch.distributed.checkpoint.load(state, checkpoint_id={})"


class Dcp(_TorchWriter):
    """A DCP directory, which any number of ranks reads."""

    name = "dcp"
    load_line = _LOAD_DCP.format('"{path}"')
    live_line = (
        "torch.distributed.checkpoint.load(state,"
        ' storage_reader=reshard.dcp.StorageReader("{path}"))'
    )
    weights_alone = True

    def numbers_parameters(self, _request: Request) -> bool:
        """Return False: the optimizer has names."""
        return False

    def describe_load(self, request: Request) -> str:
        """Return the line with the directories that the source has, if there are several."""
        from reshard.formats.dcp.saved_keys import SavedKeys

        directories = SavedKeys.of(request).directories
        paths = [f'"{{path}}/{directory.folder}"' for directory in directories if directory.folder]
        first, *others = paths or ['"{path}"']
        return ", and ".join([_LOAD_DCP.format(first), *others])

    def keeps_value(self, _name: str, _request: Request) -> bool:
        """Return True: values of any name are items of the directory."""
        return True

    def adapt(self, conversion: S) -> S:
        """Return the conversion with the keys of a DCP source, if the output can have them.

        Raises:
            UsageError: DCP's optimizer is beside shards, and the options exclude this layout.
        """
        from reshard.formats.dcp import saved_keys

        own, manifest = saved_keys.find(conversion), conversion.manifest
        if own is None and conversion.request.keeps_layout and manifest.origin.format == "fsdp":
            raise UsageError(
                manifest.origin.path,
                "has DCP's optimizer beside weights in another form, a layout that split does not"
                " keep with these options",
                "name the layout to write: --to dcp",
            )
        return replace(conversion, request=own or conversion.request)

    def place(self, skeleton: Skeleton, _state: WritableState, destination: str) -> Skeleton:
        """Return the files without ``iter_N``, if the destination has such a name itself."""
        from reshard.formats.dcp import saved_keys

        return saved_keys.place(skeleton, destination)

    def copies_values(self, conversion: StateConversion) -> bool:
        """Return whether the output has the keys and the values of a DCP source."""
        return conversion.request.target is not None


class _OrDeepSpeed(_StateDicts):
    """A writer of state dicts, or of DeepSpeed's checkpoint with a library's files beside it."""

    def has_separate_masters(self, _source: Manifest, options: TargetOptions) -> bool:
        if options.zero_stage is not None and options.state_dict_type is not None:
            raise UsageError("--zero-stage", "and --state-dict-type exclude each other here")
        return options.zero_stage is not None

    def describe(self, request: Request) -> str:
        return request.describe_zero() if request.separate_masters else request.state_dict_type

    def adapt(self, conversion: S) -> S:
        engine = registry.find_writer("deepspeed")
        has_engine = conversion.request.separate_masters
        return engine.adapt(conversion) if has_engine else super().adapt(conversion)


class Accelerate(_OrDeepSpeed):
    """Accelerate's directory of a DeepSpeed or FSDP run, of DDP, or of one process."""

    name = "accelerate"
    load_line = 'accelerator.load_state("{path}")'
    options = ("zero_stage", "state_dict_type", "rank_files", "device")
    random_states = "per rank"

    def _may_be_unsharded(self, source: Manifest) -> bool:
        return source.origin.format == "accelerate"

    def keeps_value(self, name: str, request: Request) -> bool:
        """Return whether DeepSpeed's checkpoint keeps the value."""
        return request.separate_masters and (
            registry.find_writer("deepspeed").keeps_value(name, request)
        )


class HFTrainer(_OrDeepSpeed):
    """A ``checkpoint-N`` of HF Trainer: with DeepSpeed, FSDP, DDP or one process."""

    name = "hf-trainer"
    load_line = 'trainer.train(resume_from_checkpoint=True), with output_dir="{path}"'
    options = ("zero_stage", "state_dict_type")
    random_states = "per rank"

    def _may_be_unsharded(self, _source: Manifest) -> bool:
        return True

    def has_separate_masters(self, source: Manifest, options: TargetOptions) -> bool:
        """Return whether to write DeepSpeed's checkpoint: as requested, else like the source."""
        is_like_source = options.state_dict_type is None and source.origin.format in _DEEPSPEED
        return super().has_separate_masters(source, options) or is_like_source

    def adapt(self, conversion: S) -> S:
        """Return the conversion as the writer of the state changes it.

        Raises:
            UsageError: the Trainer cannot resume from the files. With DeepSpeed it always loads an
                optimizer (transformers 5.24 ``integrations/deepspeed.py``).
        """
        if conversion.request.separate_masters and conversion.request.weights_only:
            raise UsageError(
                f"--to {self.name} with DeepSpeed",
                "the Trainer resumes only from a checkpoint with an optimizer",
                "write a new Adam (--init-optimizer zeros), or write a model with merge and begin"
                " from it",
            )
        return super().adapt(conversion)

    def keeps_value(self, name: str, _request: Request) -> bool:
        """Return whether the name of the directory keeps the value."""
        return name == "step"

    def find_companion_folders(
        self, _skeleton: Skeleton, state: WritableState, _request: Request
    ) -> tuple[str, str]:
        """Return ``checkpoint-N`` for both: the Trainer keeps its files above DeepSpeed's."""
        from reshard.formats.trainers import hf_trainer

        return hf_trainer.name_directory(state), hf_trainer.name_directory(state)

    def place(self, skeleton: Skeleton, state: WritableState, destination: str) -> Skeleton:
        """Return the files without ``checkpoint-N``, if the destination has such a name itself."""
        from reshard.containers import skeletons
        from reshard.formats.trainers import hf_trainer

        if not hf_trainer.is_checkpoint(destination):
            return skeleton
        return skeletons.move_out(skeleton, hf_trainer.name_directory(state))


class Fsdp2(_TorchWriter):
    """A file of DTensors per rank."""

    name = "fsdp2"
    options = ("device", "mesh", "tp_plan")
    weights_alone = True


class Verl(_TorchWriter):
    """Verl's files of ranks, for either version of FSDP."""

    name = "verl"
    options = ("device", "mesh", "tp_plan", "fsdp_version", "use_orig_params")

    def describe(self, request: Request) -> str:
        """Return the version of FSDP."""
        return f"FSDP {request.fsdp_version}"

    def adapt(self, conversion: S) -> S:
        """Return the conversion with a note if the run had another version of FSDP."""
        from reshard.formats import adjacent_files

        place = Location([get_directory(conversion.manifest.origin.path)])
        if conversion.request.fsdp_version > 1 and adjacent_files.is_verl_with_fsdp_1(place):
            conversion.notes.derived.append(
                "FSDP 1 becomes FSDP 2: set strategy=fsdp2 in the new run, or pass --fsdp-version 1"
                " with --model and --wrap"
            )
        return conversion


class Fsdp(_StateDicts):
    """FSDP 1's files under Accelerate's names, flat parameters too."""

    name = "fsdp"
    options = ("state_dict_type", "rank_files", "device", "use_orig_params")
    random_states = "per rank"
    weights_alone = True


class OurTrainer(_StateDicts):
    """A run of ``python -m trainer``, in the form in which it was saved."""

    name = trainer_run.NAME
    load_line = "python -m trainer --resume {path}"
    options = ("state_dict_type", "rank_files", "device")
    is_tagged = True

    def choose_state_dict_type(self, source: Manifest, run: TrainerRun | None) -> StateDictType:
        """Return the type that the run saves."""
        return run.form if run is not None else super().choose_state_dict_type(source, run)

    def resolve(self, request: Request, source: Manifest, options: TargetOptions) -> Request:
        """Return the request with the run's files per rank, and with its flat parameters."""
        from reshard.formats.pytorch import layouts
        from reshard.training.companion_files import describe_beside

        run = layouts.require_run(request, source)
        if run.has_rank_files and options.state_dict_type is None:
            request = replace(request, rank_files=True)
        # Flat parameters can only be cut with the model's units; the run states how it was wrapped.
        if request.model is None and run.is_flat:
            request = replace(request, model=describe_beside(source, run.wrap))
        return request

    def settings_of_run(self, request: Request) -> Mapping[str, str]:
        """Return the settings that state the form of the files."""
        files = "rank" if request.rank_files else "dcp"
        return {"state_dict_type": request.state_dict_type, "sharded_files": files}


class Torch(_TorchWriter):
    """One file with torch.optim's own state."""

    name = NAME
    load_line = 'torch.load("{path}")'
    weights_alone = True
    writes_file = True

    def describe_load(self, request: Request) -> str:
        """Return the line that loads the file, which may be in a directory."""
        return (
            self.load_line if request.file else self.load_line.replace("{path}", f"{{path}}/{FILE}")
        )


def _translate(manifest: Manifest) -> tuple[Manifest, list[str]]:
    from reshard.quantised.remainders import name_masters

    return name_masters(manifest)


FORMAT = Format(
    name=NAME,
    detect=detect,
    read=_read,
    sources={
        "dcp": Source(writer="dcp", translate=_translate),
        "torchtitan": Source(writer="dcp", translate=_translate),
        "verl": Source(writer="verl", translate=_translate),
        "accelerate": Source(writer="accelerate", translate=_translate),
        "hf-trainer": Source(writer="hf-trainer", translate=_translate),
        "fsdp": Source(choose_writer=_choose_for_ranks, translate=_translate),
        trainer_run.NAME: Source(writer=trainer_run.NAME),
        "lightning": Source(choose_writer=_choose_for_lightning),
        **dict.fromkeys(("fairscale", "torch_xla"), Source()),
        NAME: Source(is_whole=True),
    },
    writers=(
        Dcp(),
        Accelerate(),
        HFTrainer(),
        Fsdp2(),
        Verl(),
        Fsdp(),
        OurTrainer(),
        Torch(),
    ),
    detect_loosely=detect_loosely,
    is_generic=True,
    yields_to_runs=True,
    suffixes=PLAIN_SUFFIXES,
    requires=("dcp", "fsdp", "huggingface", "trainers"),
)
