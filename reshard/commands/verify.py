"""``verify``: check whether a checkpoint is complete and sound, by named checks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard import formats, keys, units
from reshard.checks import names, quick, result
from reshard.checks.opening import open_manifest
from reshard.checks.result import Check, not_applicable, not_run
from reshard.commands.inspect import Inspection
from reshard.commands.lines import LISTED, Report, format_row
from reshard.commands.output_options import ReadOptions
from reshard.commands.page import check_page, write_page
from reshard.commands.reading import Meter, open_progress
from reshard.containers.json_files import read_json_object
from reshard.errors import CorruptError, IncompleteError, UsageError
from reshard.formats import engines
from reshard.manifest import Manifest
from reshard.model import ModelHint, ModelShapes
from reshard.options import option
from reshard.output.destination import check_destination
from reshard.paths import as_path
from reshard.units import counted

if TYPE_CHECKING:
    from reshard.checks.hashes import Contents
    from reshard.html.page import Page

SCHEMA = 1
_checked = partial(option, group="Checks")
_MARKS = {
    result.PASSED: "ok",
    result.FAILED: "FAILED",
    result.WARNED: "warning",
    result.NOT_APPLICABLE: "-",
    result.NOT_RUN: "not run",
}


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(ReadOptions):
    """What is checked. Manifests need every byte, so they imply ``deep``."""

    deep: bool = _checked(
        False, "Read every byte.", flags=("--deep/--quick",), unset="only headers"
    )
    write_manifest: str | Path | None = _checked(
        None, "Write the SHA-256 of every tensor, if all checks pass.", metavar="FILE"
    )
    against: str | Path | None = _checked(
        None, "Compare with such a manifest, made from any layout.", metavar="FILE"
    )
    ignore: Sequence[str] = _checked(
        (),
        "Accept any values (NaN, infinities, zeros) in tensors with a matching name.",
        metavar="REGEX",
    )

    @property
    def reads_all(self) -> bool:
        """Whether every byte is read."""
        return self.deep or self.write_manifest is not None or self.against is not None


@dataclass(slots=True, repr=False)
class VerifyReport(Report):
    """The result of `verify`. Sizes in bytes."""

    source: str
    mode: str  # quick or deep
    options: dict[str, Any] = field(default_factory=dict)  # those that were given
    checks: list[Check] = field(default_factory=list)
    format: str = ""
    detail: str = ""
    notes: list[str] = field(default_factory=list)  # of the reader
    manifest: str = ""  # path of the manifest that was written
    bytes_read: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        """Return whether no check failed."""
        return self.passed

    @property
    def passed(self) -> bool:
        """Whether no check failed; a warning is not a failure."""
        return all(check.status != result.FAILED for check in self.checks)

    @property
    def exit_code(self) -> int:
        """0, or the highest code of the checks that failed: 1 different, 3 corrupt, 5 unsafe."""
        failed = (check for check in self.checks if check.status == result.FAILED)
        return max((check.exit_code for check in failed), default=0)

    def check(self, name: str) -> Check:
        """Return a check by its name."""
        return next(check for check in self.checks if check.name == name)

    def to_json(self) -> dict[str, Any]:
        """Return one document with a stable schema."""
        return {
            "schema": SCHEMA,
            "command": "verify",
            "source": self.source,
            "format": self.format,
            "detail": self.detail,
            "mode": self.mode,
            "options": self.options,
            "passed": self.passed,
            "exit_code": self.exit_code,
            "checks": [check.to_json() for check in self.checks],
            "notes": self.notes,
            "manifest": self.manifest,
            "bytes_read": self.bytes_read,
            "seconds": self.seconds,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report: a line for each check, followed by its findings."""
        what = ", ".join(filter(None, (self.format, self.detail)))
        yield f"{self.source}: {self._verdict()}" + (f" ({what})" if what else "")
        for check in self.checks:
            yield format_row(check.name, f"{_MARKS[check.status]:<9}{check.looked_at}")
            findings = [*check.failures, *check.warnings]
            yield from (format_row("", f"{'':<9}{text}") for text in findings[:LISTED])
            if len(findings) > LISTED:
                more = f"{len(findings) - LISTED} more (all of them with --json)"
                yield format_row("", f"{'':<9}... {more}")
        yield from (format_row("note", text) for text in self.notes)
        if self.manifest:
            yield format_row("manifest", self.manifest)
        read = f", {units.show_bytes(self.bytes_read)} read" if self.bytes_read else ""
        rate = units.show_bytes(self.bytes_read / max(self.seconds, 1e-9))
        yield format_row("time", f"{self.seconds:.2f} s{read}" + (f", {rate}/s" if read else ""))

    def _verdict(self) -> str:
        failed = [check.name for check in self.checks if check.status == result.FAILED]
        if failed:
            return f"FAILED {', '.join(failed)}"
        warned = sum(check.status == result.WARNED for check in self.checks)
        warnings = f", {counted(warned, 'warning')}" if warned else ""
        return f"passed the {self.mode} checks{warnings}"


def verify(
    source: formats.Paths,
    options: VerifyOptions | None = None,
    meter: Meter | None = None,
) -> VerifyReport:
    """Check a checkpoint; damage is in the report, not an error.

    Raises:
        ReshardError: no check can run (the path does not exist, the format is not supported), or
            a manifest cannot be read or written.
    """
    options = options or VerifyOptions()
    began = time.perf_counter()
    sources = formats.as_paths(source)
    check_page(options, sources)
    listed = _read_listed(options)
    if options.write_manifest:
        path = as_path(options.write_manifest)
        check_destination(path, sources, is_directory=False, overwrite=options.overwrite)
    mode = "deep" if options.reads_all else "quick"
    report = VerifyReport(str(sources[0]), mode, options.given())
    manifest = open_manifest(lambda: _read(sources, options))
    if isinstance(manifest, Check):
        report.checks = _list_checks_without_source(manifest, options)
    else:
        manifest = keys.edit(manifest, keys.Edits()).manifest
        origin = manifest.origin
        report.format, report.detail = origin.format, origin.detail
        report.notes = [*manifest.warnings, *engines.describe_defects(engines.form_of(manifest))]
        shapes = ModelHint(options.model, options.wrap).shapes() if options.model else None
        report.checks = _run_quick_checks(manifest, sources, options, shapes)
        if options.reads_all and report.check(names.SAFE).failures:
            report.checks += [not_run(name, "the source is not safe") for name in names.DEEP]
        elif options.reads_all:
            _run_deep_checks(manifest, report, options, shapes, listed, meter)
    report.seconds = time.perf_counter() - began
    write_page(
        options, lambda: _build_page(report, None if isinstance(manifest, Check) else manifest)
    )
    return report


def _read_listed(options: VerifyOptions) -> Contents | None:
    """Return the manifest to compare with, if the user gives one."""
    if not options.against:
        return None
    from reshard.checks import hashes

    return hashes.read(as_path(options.against))


def _build_page(report: VerifyReport, manifest: Manifest | None) -> Page:
    """Build the page, with a map of the shards if their coverage was proved."""
    from reshard.html import proof_pages

    if manifest is None or report.check(names.COVERAGE).status != result.PASSED:
        return proof_pages.verified(report.to_json())
    return proof_pages.verified(report.to_json(), Inspection(manifest).to_json(), manifest)


def _read(sources: Sequence[Path], options: VerifyOptions) -> Manifest:
    """Read the manifest without the proof of its coverage.

    If the source does not fit ``--model``, it is read without the model: a check lists all
    differences.
    """
    arguments = options.reader_arguments()
    try:
        return formats.read(sources, prove=False, **arguments)
    except (UsageError, IncompleteError) as error:
        is_of_model = isinstance(error, IncompleteError) or error.where.startswith("--model")
        if not options.model or not is_of_model:
            raise
        ModelHint(options.model, options.wrap).shapes()  # raises if there is no such model
        return formats.read(sources, prove=False, **{**arguments, "model": None, "wrap": None})


def _list_checks_without_source(failed: Check, options: VerifyOptions) -> list[Check]:
    """Return all checks of a source that cannot be read: one has failed, the others did not run."""
    listed = names.QUICK + (names.DEEP if options.reads_all else ())
    reason = f"the source cannot be read: see {failed.name}"
    return [failed if name == failed.name else not_run(name, reason) for name in listed]


def _run_quick_checks(
    manifest: Manifest,
    sources: Sequence[Path],
    options: VerifyOptions,
    shapes: ModelShapes | None,
) -> list[Check]:
    return [
        quick.check_headers(manifest),
        quick.check_safe(manifest, options.allow_pickle),
        quick.check_complete(manifest),
        quick.check_agreement(manifest),
        quick.check_index(manifest),
        quick.check_coverage(manifest),
        quick.check_ranks(manifest),
        quick.check_stale(manifest, sources),
        quick.check_steps(manifest),
        quick.check_slots(manifest),
        quick.check_model(manifest, shapes),
    ]


def _run_deep_checks(
    manifest: Manifest,
    report: VerifyReport,
    options: VerifyOptions,
    shapes: ModelShapes | None,
    listed: Contents | None,
    meter: Meter | None,
) -> None:
    """Read every byte, and add the deep checks to the report."""
    from reshard.checks import deep, hashes, scan

    config = _read_config(manifest)
    digests = hashes.choose_dtypes(manifest) if options.write_manifest else {}
    if listed:
        for key, dtypes in hashes.choose_dtypes_to_compare(manifest, listed).items():
            digests[key] = tuple(dict.fromkeys((*digests.get(key, ()), *dtypes)))
    planned = deep.plan_tasks(manifest, config=config, shapes=shapes, digests=digests)
    workers, window_bytes = options.budget()
    with open_progress(meter, sum(task.nbytes for task in planned)) as progress:
        seen = scan.scan(
            planned,
            manifest.files,
            workers=workers,
            window_bytes=window_bytes,
            progress=progress,
        )
    report.bytes_read = seen.bytes_read
    patterns = keys.compile_patterns(options.ignore, "--ignore")

    def ignored(fqn: str) -> bool:
        return any(pattern.search(fqn) for pattern in patterns)

    report.checks += [
        deep.check_crc(manifest, seen),
        deep.check_replicas(planned, seen),
        deep.check_masters(manifest, planned, seen),
        deep.check_tied(manifest, planned, seen, config=config, shapes=shapes),
        deep.check_padding(manifest, window_bytes),
        deep.check_finite(manifest, seen, ignored),
        deep.check_moments(manifest, seen, ignored),
        deep.check_zeros(manifest, seen, ignored),
        hashes.check_against(manifest, listed, seen.digests)
        if listed
        else not_applicable(names.AGAINST, "no --against"),
    ]
    if options.write_manifest:
        _write_manifest(hashes.build_contents(manifest, seen.digests), report, options)


def _read_config(manifest: Manifest) -> dict[str, Any] | None:
    """Return the transformers config beside the checkpoint; None if it is missing or damaged."""
    from reshard.training.companion_files import config_beside

    try:
        path = config_beside(manifest)
        return read_json_object(path) if path else None
    except CorruptError:
        return None


def _write_manifest(contents: Contents, report: VerifyReport, options: VerifyOptions) -> None:
    """Write the manifest if every check passed: a damaged checkpoint must not get one."""
    from reshard.checks import hashes
    from reshard.output import commit

    path = as_path(options.write_manifest or "")
    if not report.passed:
        report.notes.append(f"{path} was not written because a check failed")
        return
    with commit.stage_output(path, is_directory=False, overwrite=options.overwrite) as staging:
        (staging / path.name).write_bytes(hashes.to_bytes(contents))
    report.manifest = str(path)
