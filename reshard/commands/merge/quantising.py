"""``merge --quantise-like`` and ``--quantise``: write weights as codes and scales.

The form is that of a quantised release, or the one that transformers chooses for the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reshard.commands.merge.options import QUANTISE, QUANTISE_LIKE
from reshard.commands.merge.passes import Merge
from reshard.commands.output_options import ReadOptions
from reshard.commands.reading import read_trusted
from reshard.core.box import Index, whole
from reshard.core.chunks import contiguous
from reshard.core.dtypes import E4M3, FLOAT32, DType
from reshard.core.location import get_directory
from reshard.core.manifest import PARAM, Entry, Manifest, Quantisation
from reshard.errors import UnsupportedError, UsageError
from reshard.model import library
from reshard.quantised import tiles
from reshard.quantised.pairs import find_pairs, list_unused_scales
from reshard.quantised.scaled import Scaled
from reshard.quantised.statement import KEYS, remove_statement
from reshard.quantised.weights import QuantisedPair
from reshard.system.paths import as_path
from reshard.training import companion_files
from reshard.training.companion_files import Companions
from reshard.units import abridge, counted

Tensors = Sequence[tuple[Entry, DType]]

_WRITTEN = ("fp8", "mxfp8", "mxfp4")  # methods with scales of blocks
_BLOCK = 128  # DeepSeek V3's, and the default of transformers' FineGrainedFP8Config
_SETTINGS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [_BLOCK, _BLOCK],
}


@dataclass(frozen=True, slots=True)
class Release:
    """A quantised model.

    Args:
        stated: what its config.json states.
        pairs: name -> codes and scales of a quantised weight.
        entries: name -> every tensor that it stores.
    """

    path: Path
    manifest: Manifest
    stated: Quantisation
    pairs: Mapping[str, QuantisedPair]
    entries: Mapping[str, Entry]

    @classmethod
    def open(cls, path: Path, allow_pickle: Sequence[str]) -> Release:
        """Read the headers of the model.

        Raises:
            UsageError: it is not quantised.
            UnsupportedError: it is quantised by a method that cannot be written.
            ReshardError: it cannot be read or trusted.
        """
        manifest = read_trusted([path], ReadOptions(allow_pickle=allow_pickle))
        stated = manifest.quantisation
        if stated is not None and stated.method not in _WRITTEN:
            raise UnsupportedError(
                f"{QUANTISE_LIKE} {path}",
                f"is quantised with {stated.method!r}; reshard writes only {', '.join(_WRITTEN)}",
                "merge to bf16, and quantise the result with the program that made this release",
            )
        pairs = {pair.fqn: pair for pair in find_pairs(manifest, stated)} if stated else {}
        if stated is None or not pairs:
            raise UsageError(
                f"{QUANTISE_LIKE} {path}",
                "is not a quantised model: no weight is stored as codes and scales",
                "pass the directory of a release in fp8 or MXFP4, with its weights",
            )
        entries = {entry.fqn: entry for entry in manifest.of_kind(PARAM)}
        release = cls(path, manifest, stated, pairs, entries)
        release.refuse_unknown()
        return release

    def refuse_unknown(self) -> None:
        """Refuse scales that cannot be computed from the weights block by block.

        Raises:
            UnsupportedError: the release has such scales.
        """
        unused = list_unused_scales(self.manifest)
        if unused:
            raise UnsupportedError(
                f"{QUANTISE_LIKE} {self.path}",
                f"has scales of activations ({abridge(unused)}), which depend on calibration data",
                "calibrate the merged model with the program that quantised this release",
            )
        unbounded = [
            fqn
            for fqn, pair in self.pairs.items()
            if pair.weight.shared
            and (pair.weight.matrices > 1 or not self.stated.settings.get("weight_block_size"))
        ]
        if unbounded:
            raise UnsupportedError(
                f"{QUANTISE_LIKE} {self.path}",
                f"has one scale for a whole tensor ({abridge(unbounded)}); reshard writes scales of"
                " blocks",
                "pass a release with weight_block_size",
            )


def quantise(merge: Merge) -> Merge:
    """Return the merge with codes and scales in place of the weights that are quantised.

    Raises:
        UsageError: the release is another model, nothing states the model, or the output cannot
            state the quantisation.
        UnsupportedError: the release is quantised by a method that cannot be written.
        ReshardError: the release cannot be read or trusted.
    """
    if not merge.is_directory:
        flag = QUANTISE if merge.options.quantise else QUANTISE_LIKE
        raise UsageError(
            str(merge.output),
            f"the name has the suffix of a file, but {flag} writes a directory: its"
            " config.json states how to read the codes",
            "pass a name without that suffix",
        )
    return _quantise_blocks(merge) if merge.options.quantise else _quantise_like(merge)


def _quantise_like(merge: Merge) -> Merge:
    path = as_path(str(merge.options.quantise_like))
    release = Release.open(path, merge.options.allow_pickle)
    tensors = merge.weights.tensors
    _check_same_model(release, tensors)
    kept = tiles.KeptScales()
    written = [item for weight in tensors for item in _convert(release, merge, kept, *weight)]
    merge.notes.derived.append(_describe(release, tensors))
    merge.notes.warnings += _note_differences(release, tensors)
    files = {**release.manifest.files, **merge.manifest.files}
    return replace(
        merge,
        manifest=replace(merge.manifest, files=files),
        weights=replace(merge.weights, tensors=written),
        companions=_state_method(merge.companions, release),
        worker_nbytes=merge.worker_nbytes
        + max(map(tiles.count_worker_nbytes, release.pairs.values())),
    )


def _check_same_model(release: Release, tensors: Tensors) -> None:
    # Weights that the run does not have are allowed if it has no others in their place:
    # transformers does not load the layers of DeepSeek V3 that predict several tokens.
    entries = {entry.fqn: entry for entry, _ in tensors}
    flag = f"{QUANTISE_LIKE} {release.path}"
    missing = [fqn for fqn in release.pairs if fqn not in entries]
    extra = [fqn for fqn in entries if fqn not in release.entries and fqn not in release.pairs]
    if len(missing) == len(release.pairs) or (missing and extra):
        raise UsageError(
            flag,
            f"is another model: it quantises {abridge(missing)}, which the merged model does not"
            f" have; the merged model has {abridge(extra or list(entries))}",
            "pass a release of the model that was trained",
        )
    for fqn, pair in release.pairs.items():
        entry = entries.get(fqn)
        if entry is not None and (entry.shape != pair.shape or entry.dtype.family != "float"):
            raise UsageError(
                flag,
                f"is another model: {fqn!r} has shape {pair.shape}, but in the merged model it is"
                f" {entry.dtype} of shape {entry.shape}",
                "pass a release of the model that was trained",
            )


def _convert(
    release: Release, merge: Merge, kept: tiles.KeptScales, entry: Entry, dtype: DType
) -> Iterator[tuple[Entry, DType]]:
    pair = release.pairs.get(entry.fqn)
    if pair is not None:
        for part in tiles.quantise(entry, pair, kept):
            yield part, part.dtype
        return
    like = release.entries.get(entry.fqn)
    is_free = merge.options.dtype is None and entry.fqn not in merge.weights.kept_fp32
    both_float = like is not None and like.dtype.family == dtype.family == "float"
    yield entry, like.dtype if like is not None and both_float and is_free else dtype


def _describe(release: Release, tensors: Tensors) -> str:
    pairs = [release.pairs[entry.fqn] for entry, _ in tensors if entry.fqn in release.pairs]
    sizes = dict.fromkeys(
        f"blocks of {pair.weight.block[0]} x {pair.weight.block[1]} with {pair.scales.dtype} scales"
        for pair in pairs
        if not pair.weight.shared
    )
    how = f" ({', '.join(sizes)})" if sizes else ""
    return (
        f"{counted(len(pairs), 'weight')} quantised to {release.stated.method}{how} like"
        f" {release.path}; blocks with values equal to the release's have the same bytes as there"
    )


def _note_differences(release: Release, tensors: Tensors) -> Iterator[str]:
    names = {entry.fqn for entry, _ in tensors}
    parts = {fqn for pair in release.pairs.values() for fqn in (pair.codes.fqn, pair.scales.fqn)}
    stored = [*release.pairs, *(fqn for fqn in release.entries if fqn not in parts)]
    missing = [fqn for fqn in stored if fqn not in names]
    extra = [fqn for fqn in names if fqn not in stored]
    if missing:
        yield f"only the release has {abridge(missing)}: not in the output"
    if extra:
        yield f"the release does not have {abridge(extra)}: not quantised"


def _state_method(companions: Companions, release: Release) -> Companions:
    found = companion_files.find_companions(get_directory(release.path), [])
    if companions.config is None:
        return found
    config = remove_statement(companions.config)
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = str(release.stated.dtype)
    config[KEYS[0]] = dict(release.stated.settings)
    return replace(companions, config=config)


def _quantise_blocks(merge: Merge) -> Merge:
    if merge.companions.config is None or not merge.companions.may_copy_config:
        raise UsageError(
            QUANTISE,
            "needs the model's config.json, which states which weights are linear layers",
            "pass a directory that contains it: --hf-dir DIR",
        )
    if not library.is_installed():
        raise UsageError(QUANTISE, "needs transformers, which is not installed", library.INSTALL)
    from reshard.model import fp8_modules

    config = remove_statement(merge.companions.config)
    shapes, modules = fp8_modules.choose(config, _BLOCK)
    both = [fqn for fqn in merge.weights.kept_fp32 if fqn in shapes]
    if both:
        raise UsageError(
            "--keep-fp32",
            f"matches {abridge(both)}, which {QUANTISE} writes as codes",
            "leave out one of the two options, or change the regular expression",
        )
    kept, written, pairs, others = tiles.KeptScales(), [], [], []
    for entry, dtype in merge.weights.tensors:
        if entry.fqn in shapes:
            pairs.append(_build_pair(entry, shapes[entry.fqn]))
            written += [(part, part.dtype) for part in tiles.quantise(entry, pairs[-1], kept)]
            continue
        written.append((entry, dtype))
        if len(entry.shape) > 1:
            others.append(entry.fqn)
    if not pairs:
        raise UsageError(
            QUANTISE,
            f"the model of config.json has no linear layer of whole blocks ({_BLOCK} x {_BLOCK})"
            f" among the weights: {abridge(others)}",
            "pass the config of this model with --hf-dir DIR, or leave the option out",
        )
    merge.notes.derived.append(
        f"{counted(len(pairs), 'weight')} quantised to fp8 (blocks of {_BLOCK} x {_BLOCK} with"
        f" {FLOAT32} scales); not quantised: {abridge(others)}"
    )
    # The list replaces the modules that transformers leaves out by itself, so it has these as well.
    # A parameter of another name than "weight" is not a linear layer's, but a layer may be below.
    modules += [fqn.removesuffix(".weight") for fqn in others if fqn.endswith(".weight")]
    statement = _SETTINGS | {"modules_to_not_convert": sorted({*modules})}
    return replace(
        merge,
        weights=replace(merge.weights, tensors=written),
        companions=replace(merge.companions, config=config | {KEYS[0]: statement}),
        worker_nbytes=merge.worker_nbytes + max(map(tiles.count_worker_nbytes, pairs)),
    )


def _build_pair(entry: Entry, shape: Index) -> QuantisedPair:
    if entry.shape != shape or entry.dtype.family != "float":
        raise UsageError(
            QUANTISE,
            f"{entry.fqn!r} is {entry.dtype} of shape {entry.shape}, but the model of config.json"
            f" has floats of shape {shape}",
            "pass the config of this model with --hf-dir DIR",
        )
    (rows, columns), block = shape, (_BLOCK, _BLOCK)
    grid, file = (rows // _BLOCK, columns // _BLOCK), entry.chunks[0].file
    codes = Entry(entry.fqn, PARAM, E4M3, shape, ())
    scales = Entry(f"{entry.fqn}_scale_inv", PARAM, FLOAT32, grid, ())
    at, scales_at = (contiguous(file, 0, e.dtype, whole(e.shape)) for e in (codes, scales))
    weight = Scaled(entry.fqn, at, scales_at, 1, rows, columns, block, E4M3.name)
    return QuantisedPair(entry.fqn, shape, codes, scales, weight)
