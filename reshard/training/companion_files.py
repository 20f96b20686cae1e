"""Find and copy the files that complete a model directory: its config, tokenizer and others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.containers.json_files import format_json, read_json_object
from reshard.containers.safetensors_shards import STEM
from reshard.core.box import Index
from reshard.core.dtypes import DType
from reshard.core.location import Location, get_directory, leads_outside, note_outside
from reshard.core.manifest import Entry, Manifest, OutputFile, Skeleton, find_most_common_dtype
from reshard.errors import UsageError
from reshard.quantised.statement import CONFIG, OTHERS, remove_statement
from reshard.system.files import read_small_file

if TYPE_CHECKING:
    from reshard.model import ModelShapes
    from reshard.training.state import WritableState

_COMPANIONS = re.compile(
    r"(config|generation_config|hf_quant_config|quantize_config|quant_config|tokenizer.*|special_tokens_map|added_tokens|vocab|preprocessor_config"
    r"|processor_config|video_preprocessor_config|image_processor_config|chat_template.*)\.json"
    r"|merges\.txt|vocab\.txt|.*\.(model|tiktoken|jinja)"
)
_MODEL_CODE = re.compile(r"(modeling|configuration|tokenization|processing|image_processing)_")
_EMBEDDING = re.compile(
    r"(.*\.)?(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|shared)\.weight"
)

# A quantised model's weights are codes with scales; the config's dtype is that of the computation.
QUANTISED = "quantization_config"
ADAPTER_CONFIG = "adapter_config.json"
_DIFFUSERS = "diffusion_pytorch_model"  # diffusers 0.42 ``utils/constants.py``
# The file that reshard writes beside trainer_state.json at another size: the run's own number of
# ranks, batch of a rank and accumulation, if it is known. The Trainer saves the last one in
# training_args.bin alone, which the output does not have.
BATCH_BEFORE = "reshard_batch.json"
CONFIG_FOLDERS = (
    *("huggingface", "model/huggingface"),  # verl's; the second with Megatron
    *("model/.hf_metadata", "weights/model/.hf_metadata"),  # NeMo Automodel's; NeMo RL's
    *("model", "weights/model"),  # LLaMA-Factory's; NeMo RL's, with LoRA
)


@dataclass(frozen=True, slots=True)
class Companions:
    """The files that complete a model directory; ``config`` is parsed, the rest is copied.

    Attributes:
        outside: files that are links out of the source, which are not copied. The config may be
            among them: it describes the weights, but is not written.
    """

    directory: Path | None
    config: dict[str, Any] | None
    others: tuple[Path, ...]
    outside: tuple[Path, ...] = ()

    @property
    def may_copy_config(self) -> bool:
        """Whether the output may have the config."""
        return all(path.name != "config.json" for path in self.outside)


def find_companions(hf_dir: Path | None, near: Sequence[Path]) -> Companions:
    """Find config, tokenizer and processor files in ``hf_dir``, else beside the checkpoint.

    Raises:
        UsageError: ``hf_dir`` was given and has no config.json.
        CorruptError: config.json is not JSON.
    """
    inner = ((path, path / folder) for folder in CONFIG_FOLDERS for path in near)
    candidates = [(hf_dir, hf_dir)] if hf_dir else [*((path, path) for path in near), *inner]
    for root, directory in candidates:
        config = directory / "config.json"
        if config.is_file():
            if not hf_dir and not is_model_config(config):
                continue  # some other program's config.json
            parsed = read_json_object(config)
            files = list_model_files(directory, parsed)
            outside = tuple(path for path in (config, *files) if leads_outside(path, root))
            others = tuple(path for path in files if path not in outside)
            return Companions(directory, parsed, others, outside)
    if hf_dir:
        raise UsageError(hf_dir, "has no config.json", "--hf-dir needs a Hugging Face model")
    return Companions(None, None, ())


def is_of_diffusers(config: Mapping[str, Any] | None) -> bool:
    """Return whether a config is one of diffusers' models, which it loads by other file names.

    Source: diffusers 0.42 ``configuration_utils.py`` (``to_json_string``).
    """
    return config is not None and {"_class_name", "_diffusers_version"} <= config.keys()


def choose_stem(config: Mapping[str, Any] | None) -> str:
    """Return how the names of the files of a model's weights begin."""
    return _DIFFUSERS if is_of_diffusers(config) else STEM


def list_model_files(directory: Path, config: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the files of a directory that belong to a model, except its config."""
    files = Location([directory]).files
    return tuple(path for name, path in files.items() if _is_model_file(name, config))


def is_model_config(path: Path) -> bool:
    """Return whether a ``config.json`` is one of transformers'."""
    return bool({"model_type", "architectures"} & read_json_object(path).keys())


def is_companion(name: str) -> bool:
    """Return whether a file completes a model directory or states its progress, by its name."""
    own = ("config.json", ADAPTER_CONFIG, _PROGRESS, BATCH_BEFORE)
    return name in own or _COMPANIONS.fullmatch(name) is not None


def _is_model_file(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a file beside config.json is part of the model; code if auto_map names it."""
    if name.endswith(".py"):
        return bool(config.get("auto_map")) and _MODEL_CODE.match(name) is not None
    return name != "config.json" and _COMPANIONS.fullmatch(name) is not None


def is_embedding(fqn: str) -> bool:
    """Return whether a weight is the embedding of a model's tokens, by its name."""
    return _EMBEDDING.fullmatch(fqn) is not None


def match_config(
    config: Mapping[str, Any],
    tensors: Sequence[tuple[Entry, DType]],
    dtype: str,
    *,
    untied: bool,
    known: Mapping[str, Index],
) -> tuple[dict[str, Any], list[str]]:
    """Return the config with dtype and vocab_size as written, and a note for each change.

    Args:
        config: the config of the model.
        tensors: the weights to write, each with its dtype.
        dtype: the dtype of most weights.
        untied: whether tied weights are written as copies.
        known: shapes that transformers gives weights of this config. Some models have more rows
            than `vocab_size` in their embedding (transformers 5.23 Mllama: 8 for images).
    """
    updated = json.loads(json.dumps(config))
    changes: list[str] = []

    def put(section: dict[str, Any], key: str, value: Any) -> None:
        if section.get(key) != value:
            changes.append(f"config.json: {key} {section.get(key)!r} -> {value!r}")
            section[key] = value

    sections = [updated, *(value for value in updated.values() if isinstance(value, dict))]
    keyed_sections = [(s, k) for s in sections for k in ("dtype", "torch_dtype") if k in s]
    for section, key in keyed_sections or [(updated, "dtype")]:
        if QUANTISED not in updated and (key in section or section is updated):
            put(section, key, dtype)
    embeddings = [entry for entry, _ in tensors if is_embedding(entry.fqn)]
    rows = {entry.shape[0] for entry in embeddings if entry.shape != known.get(entry.fqn)}
    sized = [section for section in sections if "vocab_size" in section]
    if len(rows) == 1 and len(sized) == 1:
        put(sized[0], "vocab_size", rows.pop())
    if untied and updated.get("tie_word_embeddings") is not False:
        put(updated, "tie_word_embeddings", False)
    return updated, changes


def add_derived_config(
    skeleton: Skeleton,
    config: Mapping[str, Any],
    state: WritableState,
    dtype: DType | None,
    at: str,
) -> tuple[Skeleton, str]:
    """Add a config.json for a model that the source describes in another form; return a note on it.

    Args:
        dtype: dtype of the module's parameters; None: as trained.
        at: folder in the skeleton.
    """
    name = f"{at}/config.json" if at else "config.json"
    tensors = [(weight.value, dtype or weight.dtype) for weight in state.weights]
    main = dtype.name if dtype else find_most_common_dtype(stored for _, stored in tensors)
    matched, _ = match_config(config, tensors, main, untied=False, known={})
    kind = config["architectures"][0]
    added = OutputFile.from_bytes(name, format_json(matched))
    note = f"{name} is built from the source: a {kind}"
    return replace(skeleton, files=(*skeleton.files, added)), note


_PROGRESS = "trainer_state.json"  # HF Trainer's, and our trainer's
_MAX_BYTES = 64 << 20


def copy_companions(
    skeleton: Skeleton, manifest: Manifest, *, beside: str, above: str
) -> tuple[Skeleton, list[str]]:
    """Add copies of the model's files that are beside the source's files, or in the folder above.

    Links out of the source are not copied, and a note names each.

    Args:
        beside: folder in the skeleton for the files of the checkpoint's directory.
        above: folder in the skeleton for the files of the directory above it. (HF Trainer's files
            are above DeepSpeed's directory.)
    """
    directory = get_directory(manifest.origin.path)
    taken = {file.name for file in skeleton.files}
    added: dict[str, OutputFile] = {}
    outside: list[Path] = []
    for folder, below in ((directory, beside), (directory.resolve().parent, above)):
        for path in _list_companions(folder):
            if folder != directory and directory.resolve() in path.parents:
                continue
            name = path.relative_to(folder).as_posix()
            name = f"{below}/{name}" if below else name
            if name not in taken and name not in added:
                if leads_outside(path, folder):
                    outside.append(path)
                    continue
                is_progress = path.name == _PROGRESS
                data = _read_progress(path, manifest) if is_progress else _read_copy(path, manifest)
                if data is None:
                    continue
                added[name] = OutputFile.from_bytes(name, data)
                batch = manifest.train.opaque.get(BATCH_BEFORE) if is_progress else None
                name = f"{below}/{BATCH_BEFORE}" if below else BATCH_BEFORE
                if batch and name not in taken:
                    added[name] = OutputFile.from_bytes(name, format_json(batch))
        # If both folders of the source become one folder, the files of the checkpoint's own
        # directory are complete, and those above it may be of another run.
        if added and not beside:
            break
    files = (*skeleton.files, *added.values())
    return Skeleton(files, skeleton.entries), note_outside(outside)


def _read_copy(path: Path, manifest: Manifest) -> bytes | None:
    # Dequantised weights need no statement of a quantisation, and would be misread with one.
    if manifest.quantisation is not None and manifest.quantisation.decoded:
        if path.name in OTHERS:
            return None
        if path.name == CONFIG:
            return format_json(remove_statement(read_json_object(path)))
    return read_small_file(path)


def find_config(manifest: Manifest) -> Path | None:
    """Return the transformers ``config.json`` of the checkpoint's directory, or of the run's."""
    directory = get_directory(manifest.origin.path)
    folder = find_companions(None, [directory, directory.resolve().parent]).directory
    return folder / "config.json" if folder else None


def describe_beside(manifest: Manifest, wrap: str | None = None) -> ModelShapes | None:
    """Return the model of the config that `find_config` finds; None without one.

    Args:
        wrap: how FSDP 1 wrapped the model, see `ModelHint`.
    """
    from reshard.model import ModelHint  # a merge does not need it

    config = find_config(manifest)
    return ModelHint(str(config), wrap).shapes() if config else None


def _read_progress(path: Path, manifest: Manifest) -> bytes:
    data = read_small_file(path)
    changed = manifest.train.trainer_state or {}
    saved = json.loads(data) if changed else {}
    if all(saved.get(name) == value for name, value in changed.items()):
        return data
    return format_json({**saved, **changed})


def _list_companions(folder: Path) -> list[Path]:
    folders = [folder, *(child for child in sorted(folder.iterdir()) if child.is_dir())]
    # PEFT stores the configuration of an adapter with a name in a folder of that name. A folder
    # with the progress of a run is another checkpoint.
    own = [near for near in folders if near == folder or not (near / _PROGRESS).is_file()]
    adapters = [path for near in own if (path := near / ADAPTER_CONFIG).is_file()]
    found = find_companions(None, [folder])
    paths = [*found.others, *(path for path in found.outside if path.name != "config.json")]
    if adapters and not paths:  # PEFT's directories have no config.json
        paths = list(list_model_files(folder, {}))
    paths += adapters
    if found.directory is not None:
        paths.append(found.directory / "config.json")
    progress = folder / _PROGRESS
    if progress.is_file():
        paths.append(progress)
    return [path for path in paths if path.stat().st_size <= _MAX_BYTES]
