"""``verify``: check whether a checkpoint is complete and sound, by named checks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reshard import formats
from reshard.checks import names, result
from reshard.checks.opening import open_manifest
from reshard.checks.result import Check, not_run
from reshard.commands.inspect import Inspection
from reshard.commands.page import check_page, write_page
from reshard.commands.reading import Meter, open_progress
from reshard.commands.verify.options import VerifyOptions
from reshard.commands.verify.report import VerifyReport
from reshard.commands.verify.single import run_deep_checks, run_quick_checks
from reshard.core import keys
from reshard.core.manifest import Key, Manifest
from reshard.engine.output.destination import check_destination
from reshard.errors import IncompleteError, UsageError
from reshard.formats import engines
from reshard.model import ModelHint
from reshard.system.files import check_unchanged
from reshard.system.paths import as_path

if TYPE_CHECKING:
    from reshard.checks.digests import Digest
    from reshard.checks.hashes import Contents
    from reshard.html.page import Page


def verify(
    source: formats.Paths,
    options: VerifyOptions | None = None,
    meter: Meter | None = None,
) -> VerifyReport:
    """Check a checkpoint; damage is in the report, not an error.

    Raises:
        ReshardError: no check can run (the path does not exist, the format is not supported), a
            file was changed while it was read, or a manifest cannot be read or written.
    """
    options = options or VerifyOptions()
    began = time.perf_counter()
    sources = formats.as_paths(source)
    if options.history:
        from reshard.commands.verify.history import check_run

        return check_run(sources, options, meter)
    check_page(options, sources)
    if options.include:
        from reshard.commands.verify.files import check_included

        return check_included(sources, options, meter)
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
        report.notes = [
            *manifest.warnings,
            *engines.describe_defects(engines.describe_form(manifest)),
        ]
        shapes = ModelHint(options.model, options.wrap).shapes() if options.model else None
        report.checks = run_quick_checks(manifest, sources, options, shapes)
        if options.reads_all and report.check(names.SAFE).failures:
            report.checks += [not_run(name, "the source is not safe") for name in names.DEEP]
        elif options.reads_all:
            digests = run_deep_checks(manifest, report, options, shapes, listed, meter)
            if options.write_manifest:
                _write_manifest(manifest, digests, report, options, meter)
        check_unchanged(manifest.files)
    report.seconds = time.perf_counter() - began
    write_page(
        options, lambda: _build_page(report, None if isinstance(manifest, Check) else manifest)
    )
    return report


def _read_listed(options: VerifyOptions) -> Contents | None:
    if not options.against:
        return None
    from reshard.checks import hashes

    return hashes.read(as_path(options.against))


def _build_page(report: VerifyReport, manifest: Manifest | None) -> Page:
    from reshard.html import check_pages

    if manifest is None or report.check(names.COVERAGE).status != result.PASSED:
        return check_pages.build_verify_page(report.to_dict())
    return check_pages.build_verify_page(report.to_dict(), Inspection(manifest).to_dict(), manifest)


def _read(sources: Sequence[Path], options: VerifyOptions) -> Manifest:
    # If the source does not fit --model, it is read without it: a check lists all differences.
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
    listed = names.QUICK + (names.DEEP if options.reads_all else ())
    reason = f"the source cannot be read: see {failed.name}"
    return [failed if name == failed.name else not_run(name, reason) for name in listed]


def _write_manifest(
    manifest: Manifest,
    digests: Mapping[Key, Mapping[Digest, str]],
    report: VerifyReport,
    options: VerifyOptions,
    meter: Meter | None,
) -> None:
    """Write the manifest if every check passed: a damaged checkpoint must not get one."""
    from reshard.checks import files, hashes
    from reshard.checks.digests import has_blake3
    from reshard.engine.output import commit

    path = as_path(options.write_manifest or "")
    if not report.passed:
        report.notes.append(f"{path} was not written because a check failed")
        return
    total = sum(file.nbytes for file in manifest.files.values() if file.lasting)
    with open_progress(meter, total) as progress:
        blocks = files.hash_files(manifest.files, workers=options.budget()[0], progress=progress)
    contents = hashes.build_contents(manifest, digests, blocks)
    commit.write_file(path, hashes.to_bytes(contents), overwrite=options.overwrite)
    if not has_blake3():
        report.notes.append(
            "the manifest has SHA-256 digests only; with BLAKE3 (pip install blake3), --against"
            " takes less time"
        )
    report.manifest = str(path)
