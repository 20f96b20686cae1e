"""The functions of the package, whose keywords are the options of the commands.

Each takes the fields of the dataclass named in its decorator as keywords, with their types and
defaults: type checkers and editors show them, and so does `help`.
"""

from __future__ import annotations

import functools
import inspect as introspection
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from reshard.commands.average.options import AverageOptions
from reshard.commands.diff import DiffOptions
from reshard.commands.inspect import InspectOptions
from reshard.commands.merge.options import MergeOptions
from reshard.commands.open_files import FilesOptions
from reshard.commands.options import SourceOptions
from reshard.commands.plan.options import PlanOptions
from reshard.commands.resume_check.options import ResumeCheckOptions
from reshard.commands.split.options import SplitOptions
from reshard.commands.verify.options import VerifyOptions
from reshard.formats import Paths
from reshard.options import options_of

if TYPE_CHECKING:
    from reshard.commands.average.report import AverageReport
    from reshard.commands.diff import DiffReport
    from reshard.commands.inspect import Inspection
    from reshard.commands.merge.report import MergeReport
    from reshard.commands.plan.report import PlanReport
    from reshard.commands.resume_check.report import ResumeReport
    from reshard.commands.split.report import SplitReport
    from reshard.commands.verify.report import VerifyReport
    from reshard.engine.move.on_demand import OnDemandFiles
    from reshard.tensors.lazy import Checkpoint

_P = ParamSpec("_P")
_Options = TypeVar("_Options")
_Result = TypeVar("_Result")
_Report_co = TypeVar("_Report_co", covariant=True)

_CHECKPOINT = "A directory or file of the checkpoint; as Paths, also a list of them (one per node)."
_PARAMETERS = {  # name -> sentence for `help`, for those that are not options
    "path": _CHECKPOINT,
    "source": _CHECKPOINT,
    "sources": "The checkpoints; with ``last``, the directory of one run.",
    "destination": "Where to write; existing files are replaced only with ``overwrite``.",
    "a": "A checkpoint or a model.",
    "b": "What is compared with it.",
    "force": "Another name of source_format.",
}


class _OfPath(Protocol[_P, _Report_co]):
    def __call__(self, path: Paths, *args: _P.args, **options: _P.kwargs) -> _Report_co: ...


class _OfSource(Protocol[_P, _Report_co]):
    def __call__(self, source: Paths, *args: _P.args, **options: _P.kwargs) -> _Report_co: ...


class _OfAnySource(Protocol[_P, _Report_co]):
    def __call__(
        self, source: Paths | None = None, *args: _P.args, **options: _P.kwargs
    ) -> _Report_co: ...


class _OfOnePath(Protocol[_P, _Report_co]):
    def __call__(self, source: str | Path, *args: _P.args, **options: _P.kwargs) -> _Report_co: ...


class _ToDestination(Protocol[_P, _Report_co]):
    def __call__(
        self, source: Paths, destination: str | Path, *args: _P.args, **options: _P.kwargs
    ) -> _Report_co: ...


class _ManyToDestination(Protocol[_P, _Report_co]):
    def __call__(
        self, sources: Paths, destination: str | Path, *args: _P.args, **options: _P.kwargs
    ) -> _Report_co: ...


class _OfTwo(Protocol[_P, _Report_co]):
    def __call__(self, a: Paths, b: Paths, *args: _P.args, **options: _P.kwargs) -> _Report_co: ...


def _with_keywords(function: Callable[..., _Result], kind: Callable[..., Any]) -> Any:
    """Return the function with the fields of its last argument's dataclass as keywords."""
    own = introspection.signature(function)
    known = introspection.signature(kind).parameters
    keywords = [
        parameter for parameter in known.values() if parameter.name != "team"
    ]  # a launcher sets it
    *paths, _ = own.parameters.values()

    @functools.wraps(function)
    def call(*args: Any, **values: Any) -> _Result:
        # Paths can be passed by keyword as well; all other keywords are options.
        given = {
            parameter.name: values.pop(parameter.name)
            for parameter in paths
            if parameter.name in values
        }
        for name in values:
            if name not in known:
                raise TypeError(_explain_keyword(function.__name__, name, kind))
        return function(*args, **given, options=kind(**values))

    call.__signature__ = own.replace(parameters=[*paths, *keywords])  # type: ignore[attr-defined]
    further = [name for name in (*own.parameters, *known) if name in _PARAMETERS]
    described = [f"        {name}: {_PARAMETERS[name]}" for name in further]
    call.__doc__ = "\n".join(
        [call.__doc__ or "", "    Parameters:", *described, *_describe_keywords(kind), ""]
    )
    return call


def _describe_keywords(kind: Any) -> Iterator[str]:
    for name, group in groupby(options_of(kind), key=lambda option: option.within or option.name):
        described = list(group)
        if described[0].within:
            fields = ", ".join(option.name for option in described)
            yield f"        {name}: reshard.{_name_class(kind, name)}({fields})."
        else:
            text, is_negated = described[0].declared.help, described[0].flags[0] == f"--no-{name}"
            yield f"        {name}: {f'False: {text}' if is_negated else text}"


def _explain_keyword(function: str, name: str, kind: Any) -> str:
    from difflib import get_close_matches  # only an error needs it

    flag = f"--{name.replace('_', '-')}"
    named = [option for option in options_of(kind) if flag in option.flags]
    # An option can be named by its flag, or be a field of a nested dataclass.
    right = [
        f"{option.within}=reshard.{_name_class(kind, option.within)}({option.name}=...)"
        if option.within
        else option.name
        for option in named
    ] or get_close_matches(
        name, [option.name for option in options_of(kind) if not option.within], 1
    )
    advice = f"did you mean {right[0]}?" if right else f"help(reshard.{function}) lists them"
    return f"reshard.{function}() got an unexpected keyword argument {name!r}; {advice}"


def _name_class(kind: Any, field: str) -> str:
    """Return the name that the class of a nested dataclass has in `reshard`."""
    return str(introspection.signature(kind).parameters[field].annotation).rpartition(".")[2]


def _of_path(
    kind: Callable[_P, _Options],
) -> Callable[[Callable[[Paths, _Options], _Result]], _OfPath[_P, _Result]]:
    return lambda function: _with_keywords(function, kind)


def _of_source(
    kind: Callable[_P, _Options],
) -> Callable[[Callable[[Paths, _Options], _Result]], _OfSource[_P, _Result]]:
    return lambda function: _with_keywords(function, kind)


def _of_any_source(
    kind: Callable[_P, _Options],
) -> Callable[[Callable[[Paths | None, _Options], _Result]], _OfAnySource[_P, _Result]]:
    return lambda function: _with_keywords(function, kind)


def _of_directory(
    kind: Callable[_P, _Options],
) -> Callable[[Callable[[str | Path, _Options], _Result]], _OfOnePath[_P, _Result]]:
    return lambda function: _with_keywords(function, kind)


def _to_destination(
    kind: Callable[_P, _Options],
) -> Callable[[Callable[[Paths, str | Path, _Options], _Result]], _ToDestination[_P, _Result]]:
    return lambda function: _with_keywords(function, kind)


def _many_to_destination(
    kind: Callable[_P, _Options],
) -> Callable[[Callable[[Paths, str | Path, _Options], _Result]], _ManyToDestination[_P, _Result]]:
    return lambda function: _with_keywords(function, kind)


def _of_two(
    kind: Callable[_P, _Options],
) -> Callable[[Callable[[Paths, Paths, _Options], _Result]], _OfTwo[_P, _Result]]:
    return lambda function: _with_keywords(function, kind)


@_of_path(SourceOptions)
def open(path: Paths, options: SourceOptions) -> Checkpoint:  # noqa: A001 - reshard.open reads well
    """Return a mapping fqn -> lazy tensor over a checkpoint; only headers are read.

    Names are without wrapper prefixes (``module.``, ``_orig_mod.``), as `merge` writes them.

    Raises:
        ReshardError: the checkpoint is unknown, incomplete or corrupt.
    """
    # Each function imports its command when it is called, so that none imports what others need.
    from reshard import formats
    from reshard.core import keys
    from reshard.tensors.lazy import Checkpoint

    manifest = formats.read(path, **options.reader_arguments())
    return Checkpoint(keys.edit(manifest, keys.Edits()).manifest)


@_of_source(FilesOptions)
def open_files(source: Paths, options: FilesOptions) -> AbstractContextManager[OnDemandFiles]:
    """Open the files that `merge` or `split` would write; keywords as in `FilesOptions`.

    Nothing is written: each byte is computed when it is read.

    Raises:
        ReshardError: the source cannot be read, trusted or laid out.
    """
    from reshard.commands.open_files import open_files as run

    return run(source, options)


@_of_path(InspectOptions)
def inspect(path: Paths, options: InspectOptions) -> Inspection:
    """Describe a checkpoint from its headers; keywords as in `InspectOptions`.

    Raises:
        ReshardError: the checkpoint is unknown, incomplete or corrupt.
    """
    from reshard.commands.inspect import inspect as run

    return run(path, options)


@_to_destination(MergeOptions)
def merge(source: Paths, destination: str | Path, options: MergeOptions) -> MergeReport:
    """Write the full weights; keywords as in `MergeOptions`.

    Raises:
        ReshardError: the output could not be written; the destination is unchanged.
    """
    from reshard.commands.merge.command import merge as run

    return run(source, destination, options)


@_many_to_destination(AverageOptions)
def average(sources: Paths, destination: str | Path, options: AverageOptions) -> AverageReport:
    """Write the mean of the weights of several checkpoints; keywords as in `AverageOptions`.

    Raises:
        ReshardError: the output could not be written; the destination is unchanged.
    """
    from reshard.commands.average.command import average as run

    return run(sources, destination, options)


@_to_destination(SplitOptions)
def split(source: Paths, destination: str | Path, options: SplitOptions) -> SplitReport:
    """Write the training state for other ranks or another layout; keywords as in `SplitOptions`.

    Raises:
        ReshardError: the output could not be written; the destination is unchanged.
    """
    from reshard.commands.split.command import split as run

    return run(source, destination, options)


@_of_two(DiffOptions)
def diff(a: Paths, b: Paths, options: DiffOptions) -> DiffReport:
    """Compare two training states of any layouts; keywords as in `DiffOptions`.

    Raises:
        ReshardError: a state cannot be read; a difference is not an error.
    """
    from reshard.commands.diff import diff as run

    return run(a, b, options)


@_of_source(VerifyOptions)
def verify(source: Paths, options: VerifyOptions) -> VerifyReport:
    """Check a checkpoint by named checks; keywords as in `VerifyOptions`.

    Raises:
        ReshardError: no check can run; a check that fails is in the report.
    """
    from reshard.commands.verify.command import verify as run

    return run(source, options)


@_of_directory(ResumeCheckOptions)
def resume_check(source: str | Path, options: ResumeCheckOptions) -> ResumeReport:
    """Check that training continues the same from what `split` writes.

    Keywords as in `ResumeCheckOptions`, which include the layout to split into.

    Raises:
        ReshardError: nothing could be compared; a run that continues differently is not an error.
    """
    from reshard.commands.resume_check.command import resume_check as run

    return run(source, options)


@_of_any_source(PlanOptions)
def plan(source: Paths | None = None, options: PlanOptions | None = None) -> PlanReport:
    """Forecast the memory of each strategy and recommend one; keywords as in `PlanOptions`.

    Without a source, ``model`` or ``params`` states the model.

    Raises:
        ReshardError: the source cannot be read, or the options contradict each other.
    """
    from reshard.commands.plan.command import plan as run

    return run(source, options)
