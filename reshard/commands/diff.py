"""``diff``: compare the training states of two checkpoints of any layouts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from reshard import formats, units
from reshard.checks import train, unread
from reshard.checks.compare import TensorDifference, Tolerance, find_differences
from reshard.checks.pairs import COPY, WEIGHT, Paired, PairKey, TensorPair, pair
from reshard.commands.inspect import Inspection
from reshard.commands.lines import LISTED, Report, format_list, format_row
from reshard.commands.output_options import ReadOptions
from reshard.commands.page import check_page, write_page
from reshard.commands.reading import Meter, open_progress, read_trusted
from reshard.core import dtypes, keys
from reshard.core.box import index_of
from reshard.core.dtypes import DType
from reshard.core.manifest import Manifest
from reshard.errors import UsageError
from reshard.options import option
from reshard.system.files import check_unchanged
from reshard.training.copied_files import TENSOR, collect_own_tensors

if TYPE_CHECKING:
    from reshard.html.page import Page

SCHEMA = 1
OPTIMIZER, TRAIN = "optimizer", "train"
RNG = "rng"  # the train state's name of random states
_WEIGHTS = "weights"  # accepted as --kind beside WEIGHT, the name in reports
_compared = partial(option, group="Comparison")


@dataclass(frozen=True, kw_only=True)
class DiffOptions(ReadOptions):
    """What is compared, and how strictly; the options of the source apply to both sides."""

    atol: float = _compared(0.0, "Absolute tolerance.", minimum=0)
    rtol: float = _compared(0.0, "Tolerance relative to B.", minimum=0)
    ulp: int = _compared(
        0, "Tolerance in units in the last place, for floating point and complex.", minimum=0
    )
    exact: bool = _compared(False, "Require equal bits.", unset="without a tolerance")
    dtype: str | None = _compared(None, "Cast weights to bf16, fp16 or fp32 before comparing.")
    ignore: Sequence[str] = _compared(
        (), "Leave out tensors and values (step, rng ...) with a matching name.", metavar="REGEX"
    )
    kinds: Sequence[str] = _compared(
        (),
        "Compare only weight, optimizer, train, or a slot such as exp_avg.",
        flags=("--kind",),
        unset="all",
    )

    def __post_init__(self) -> None:
        """Refuse values that are not allowed, and a tolerance together with ``exact``.

        Raises:
            UsageError: a value is not allowed; the message names the option.
        """
        super().__post_init__()
        if self.exact and (self.atol or self.rtol or self.ulp):
            raise UsageError(
                "--exact",
                "excludes --atol, --rtol and --ulp",
                "leave out --exact, or the tolerances",
            )


@dataclass(slots=True)
class Unequal:
    """A tensor that is different in the two checkpoints.

    Args:
        what: ``shape``, ``dtype`` or ``values``.
        at: index of the first unequal element in the whole tensor; None if no values differ.
    """

    kind: str
    fqn: str
    what: str
    a: str
    b: str
    at: tuple[int, ...] | None = None
    numel: int = 0
    count: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulp: int = 0
    not_finite: int = 0

    def describe(self) -> str:
        """Return the difference as one line of text."""
        name = f"{self.kind} {self.fqn}"
        if self.what != "values":
            beside = f"; {self.count} of {self.numel} values differ too" if self.count else ""
            return f"{name}: {self.what} {self.a} and {self.b}{beside}"
        worst = f"max abs {self.max_abs:.3g}, rel {self.max_rel:.3g}, {self.max_ulp} ulp"
        strange = f", {self.not_finite} of them not finite" if self.not_finite else ""
        where = f"first at {list(self.at or ())}: {self.a} and {self.b}"
        return f"{name}: {self.count} of {self.numel}{strange}; {worst}; {where}"


@dataclass(slots=True, repr=False)
class DiffReport(Report):
    """The result of `diff`. Sizes in bytes."""

    a: str
    b: str
    options: dict[str, Any] = field(default_factory=dict)  # those that differ from the defaults
    equal: int = 0  # tensors that are the same under the tolerance
    equal_by_kind: dict[str, int] = field(default_factory=dict)
    unequal: list[Unequal] = field(default_factory=list)
    only_a: list[PairKey] = field(default_factory=list)
    only_b: list[PairKey] = field(default_factory=list)
    train: list[train.StateDifference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    exact: bool = True
    bytes_read: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        """Return whether the two are the same, for ``if reshard.diff(a, b)``."""
        return self.same

    @property
    def same(self) -> bool:
        """Whether nothing that was compared differs."""
        return not (self.unequal or self.only_a or self.only_b or self.train)

    @property
    def differs_in_random_states(self) -> bool:
        """Whether random states differ and nothing else; the exit code is 1 then, too."""
        return self._has_equal_tensors and all(value.name == RNG for value in self.train)

    @property
    def lacks_values_alone(self) -> bool:
        """Whether all tensors are equal, and each value that differs is only on one side."""
        return self._has_equal_tensors and all(value.only for value in self.train)

    @property
    def _has_equal_tensors(self) -> bool:
        return bool(self.train) and not (self.unequal or self.only_a or self.only_b)

    @property
    def exit_code(self) -> int:
        """0 if the two are the same, else 1, like the program ``diff``."""
        return 0 if self.same else 1

    def to_dict(self) -> dict[str, Any]:
        """Return one document with a stable schema."""
        return {"schema": SCHEMA, "command": "diff", "same": self.same, **asdict(self)}

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report as text."""
        how = "bit by bit" if self.exact else "under the tolerance"
        counts = ", ".join(f"{count} {kind}" for kind, count in self.equal_by_kind.items())
        verdict = "the same" if self.same else "DIFFERENT"
        if self.differs_in_random_states:
            verdict = "the same, except random states"
        yield f"{self.a} and {self.b}: {verdict}"
        yield format_row(
            "equal",
            f"{units.counted(self.equal, 'tensor')} {how}" + (f" ({counts})" if counts else ""),
        )
        yield from format_list("unequal", [difference.describe() for difference in self.unequal])
        yield from format_list("only in A", [f"{kind} {fqn}" for kind, fqn in self.only_a])
        yield from format_list("only in B", [f"{kind} {fqn}" for kind, fqn in self.only_b])
        for value in self.train:
            if value.only:
                yield format_row(f"only in {value.only.upper()}", value.name)
            else:
                yield format_row("unequal", value.describe())
        yield from format_list("note", self.notes)
        rate = units.show_bytes(self.bytes_read / max(self.seconds, 1e-9))
        read = units.show_bytes(self.bytes_read)
        yield format_row("time", f"{self.seconds:.2f} s, {read} read, {rate}/s")


def diff(
    a: formats.Paths,
    b: formats.Paths,
    options: DiffOptions | None = None,
    meter: Meter | None = None,
) -> DiffReport:
    """Compare two checkpoints of any formats, streaming both.

    Raises:
        ReshardError: a checkpoint cannot be read; a difference is not an error.
    """
    options = options or DiffOptions()
    began = time.perf_counter()
    check_page(options, [*formats.as_paths(a), *formats.as_paths(b)])
    left, right = open_checkpoints((a, b), options)
    report = compare(left, right, options, meter)
    report.options = options.given()
    report.seconds = time.perf_counter() - began
    write_page(options, lambda: _build_page(report, left, right))
    return report


def compare(
    left: Manifest, right: Manifest, options: DiffOptions, meter: Meter | None = None
) -> DiffReport:
    """Compare two checkpoints that are open.

    Raises:
        ReshardError: a tensor cannot be read, or an option fits neither checkpoint.
    """
    began = time.perf_counter()
    dtype = dtypes.parse_float("--dtype", options.dtype)
    report = DiffReport(left.origin.path, right.origin.path)
    tolerance = Tolerance(options.atol, options.rtol, options.ulp)
    report.exact = tolerance.is_exact
    selection = _Selection(options, left, right)
    paired = selection.select(pair(left, right))
    report.only_a, report.only_b = paired.only_a, paired.only_b
    if paired.unnamed:
        shown = ", ".join(paired.unnamed[:LISTED])
        report.notes.append(f"tied weights that only one checkpoint names: {shown}")
    if selection.has_train_state:
        values = [*train.find_differences(left, right), *unread.find_differences(left, right)]
        report.notes += unread.describe_others(left, right)
        report.train = [value for value in values if selection.is_selected(value.name)]
        paired.pairs += (
            tensor_pair
            for tensor_pair in (*_pair_own_tensors(left, right), *unread.pair_tensors(left, right))
            if selection.is_selected(tensor_pair.fqn)
        )
    _compare(paired.pairs, report, tolerance, dtype, options, meter)
    check_unchanged({**left.files, **right.files})
    report.notes += _explain_dtypes(report.unequal, tolerance)
    report.notes += _explain_sides(report, left, right)
    report.seconds = time.perf_counter() - began
    return report


def _pair_own_tensors(a: Manifest, b: Manifest) -> Iterator[TensorPair]:
    left, right = (collect_own_tensors(manifest.train) for manifest in (a, b))
    for name in left.keys() & right.keys():
        yield TensorPair(TENSOR, name, left[name], right[name])


def _build_page(report: DiffReport, a: Manifest, b: Manifest) -> Page:
    from reshard.html import check_pages

    facts = [Inspection(manifest).to_dict() for manifest in (a, b)]
    return check_pages.build_diff_page(report.to_dict(), facts, a, b)


def open_checkpoint(paths: formats.Paths, options: ReadOptions) -> Manifest:
    """Read a checkpoint, check that it is safe, and rename its tensors as `merge` does."""
    (manifest,) = open_checkpoints([paths], options)
    return manifest


def open_checkpoints(sources: Iterable[formats.Paths], options: ReadOptions) -> list[Manifest]:
    """Open checkpoints to compare: DDP's ``module`` is removed from all their names or from none.

    A file of weights does not say whether ``module`` is DDP's or a part of the model.
    """
    read = [read_trusted(formats.as_paths(paths), options) for paths in sources]
    wrapped = any(manifest.may_be_ddp for manifest in read)
    return [
        keys.edit(replace(manifest, may_be_ddp=wrapped), keys.Edits()).manifest for manifest in read
    ]


class _Selection:
    def __init__(self, options: DiffOptions, *manifests: Manifest) -> None:
        slots = {kind for manifest in manifests for kind, _ in manifest.entries} - {
            "buffer",
            "param",
        }
        known = {WEIGHT, OPTIMIZER, TRAIN, *(slots - {"master"})}
        self._kinds = {WEIGHT if kind == _WEIGHTS else kind for kind in options.kinds}
        for kind in self._kinds - known:
            raise UsageError(f"--kind {kind}", f"must be one of {', '.join(sorted(known))}")
        self._ignored: list[re.Pattern[str]] = keys.compile_patterns(options.ignore, "--ignore")

    @property
    def has_train_state(self) -> bool:
        return not self._kinds or TRAIN in self._kinds

    def is_selected(self, name: str) -> bool:
        return not any(pattern.search(name) for pattern in self._ignored)

    def select(self, paired: Paired) -> Paired:
        return Paired(
            [
                tensor_pair
                for tensor_pair in paired.pairs
                if self._is_key_selected((tensor_pair.kind, tensor_pair.fqn))
            ],
            [key for key in paired.only_a if self._is_key_selected(key)],
            [key for key in paired.only_b if self._is_key_selected(key)],
            [fqn for fqn in paired.unnamed if self._is_key_selected((WEIGHT, fqn))],
        )

    def _is_key_selected(self, key: PairKey) -> bool:
        kind, fqn = key
        group = WEIGHT if kind in (WEIGHT, COPY) else OPTIMIZER
        return self.is_selected(fqn) and (not self._kinds or bool(self._kinds & {group, kind}))


def _compare(
    pairs: Sequence[TensorPair],
    report: DiffReport,
    tolerance: Tolerance,
    dtype: DType | None,
    options: DiffOptions,
    meter: Meter | None,
) -> None:
    workers, window_bytes = options.budget()
    compared = [
        (number, (tensor_pair.a, tensor_pair.b, common))
        for number, tensor_pair in enumerate(pairs)
        if tensor_pair.a.shape == tensor_pair.b.shape
        and (common := _choose_dtype(tensor_pair, dtype))
    ]
    report.bytes_read = sum(a.nbytes + b.nbytes for _, (a, b, _) in compared)
    with open_progress(meter, report.bytes_read) as progress:
        differing = find_differences(
            [tensors for _, tensors in compared],
            tolerance,
            workers=workers,
            window_bytes=window_bytes,
            progress=progress,
        )
    by_pair = {compared[position][0]: difference for position, difference in differing.items()}
    for number, tensor_pair in enumerate(pairs):
        unequal = _describe_difference(tensor_pair, by_pair.get(number), dtype)
        if unequal is not None:
            report.unequal.append(unequal)
            continue
        report.equal += 1
        report.equal_by_kind[tensor_pair.kind] = report.equal_by_kind.get(tensor_pair.kind, 0) + 1


def _explain_dtypes(unequal: Sequence[Unequal], tolerance: Tolerance) -> Iterator[str]:
    by_dtype: dict[str, list[Unequal]] = {}
    for difference in unequal:
        both = (
            [dtypes.parse(name) for name in (difference.a, difference.b)]
            if difference.what == "dtype"
            else []
        )
        if both and not difference.count and all(dtype.family == "float" for dtype in both):
            narrow = min(both, key=lambda dtype: dtype.itemsize)
            by_dtype.setdefault(narrow.name, []).append(difference)
    how = "the same" if tolerance.is_exact else "the same under the tolerance"
    for name, tensors in by_dtype.items():
        scope = (
            ""
            if all(difference.kind in (WEIGHT, COPY) for difference in tensors)
            else " (weights only)"
        )
        yield (
            f"{len(tensors)} of the unequal tensors differ only in dtype: as {name}, their values"
            f" are {how}; --dtype {name} compares them in this dtype{scope}"
        )


def _explain_sides(report: DiffReport, left: Manifest, right: Manifest) -> Iterator[str]:
    only = [{kind for kind, _ in side} for side in (report.only_a, report.only_b)]
    paired = {*report.equal_by_kind, *(difference.kind for difference in report.unequal)}
    if WEIGHT in only[0] & only[1] and WEIGHT not in paired:
        yield (
            "no weight has the same name in both. If one of them has names of its own, as Megatron"
            " does, compare the output of reshard convert --to dcp, or of reshard merge, instead"
        )
        return
    optimizers = {"A": left.has_optimizer, "B": right.has_optimizer}
    without = [side for side, has_optimizer in optimizers.items() if not has_optimizer]
    lacking = {kind for kind, _ in (*report.only_a, *report.only_b)}
    if len(without) == 1 and lacking - {WEIGHT, COPY}:
        yield f"{without[0]} has no optimizer state; --kind weight compares only the weights"
    elif left.origin.world != right.origin.world and any(
        value.name == "scheduler" for value in report.train
    ):
        yield (
            "a scheduler that counts the steps of all ranks, as Accelerate's does, differs at"
            " another number of ranks; --ignore scheduler leaves it out"
        )
    elif any(value.name == RNG for value in report.train):
        yield (
            "each rank has random states of its own, which another number of ranks does not"
            " keep: dropout and the order of samples go on differently;"
            f" --ignore {RNG} leaves them out"
        )
    elif report.lacks_values_alone:
        yield (
            "all tensors are equal. A layout without a place for these values leaves them out, and"
            " split reports them as not copied; --ignore NAME leaves them out here"
        )


def _choose_dtype(tensor_pair: TensorPair, dtype: DType | None) -> DType | None:
    if dtype is not None and _is_cast(tensor_pair):
        return dtype
    if tensor_pair.a.dtype == tensor_pair.b.dtype:
        return tensor_pair.a.dtype
    narrow = min(tensor_pair.a.dtype, tensor_pair.b.dtype, key=lambda stored: stored.itemsize)
    return narrow if _are_floats(tensor_pair) else None


def _is_cast(tensor_pair: TensorPair) -> bool:
    return tensor_pair.kind in (WEIGHT, COPY) and _are_floats(tensor_pair)


def _are_floats(tensor_pair: TensorPair) -> bool:
    return tensor_pair.a.dtype.family == tensor_pair.b.dtype.family == "float"


def _describe_difference(
    tensor_pair: TensorPair, difference: TensorDifference | None, dtype: DType | None
) -> Unequal | None:
    a, b = tensor_pair.a, tensor_pair.b
    values = Unequal(tensor_pair.kind, tensor_pair.fqn, "values", "", "", numel=a.numel)
    if difference is not None:
        values.a, values.b = (
            str(value) if isinstance(value, int) else f"{value:.9g}"
            for value in difference.first_values
        )
        values.at = index_of(difference.first, a.shape)
        values.count, values.not_finite = difference.count, difference.not_finite
        values.max_abs, values.max_rel = difference.max_abs, difference.max_rel
        values.max_ulp = difference.max_ulp
    if a.shape != b.shape:
        return replace(values, what="shape", a=str(list(a.shape)), b=str(list(b.shape)))
    if a.dtype != b.dtype and not (dtype and _is_cast(tensor_pair)):
        return replace(values, what="dtype", a=str(a.dtype), b=str(b.dtype))
    return values if difference is not None else None
