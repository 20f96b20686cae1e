"""The checks of a single checkpoint, which `verify` runs, also on each checkpoint of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.checks import names, quick
from reshard.checks.result import Check, not_applicable
from reshard.commands.reading import Meter, open_progress
from reshard.commands.verify.options import VerifyOptions
from reshard.commands.verify.report import VerifyReport
from reshard.containers.json_files import read_json_object
from reshard.core import keys
from reshard.core.manifest import Key, Manifest
from reshard.errors import CorruptError
from reshard.model import ModelShapes

if TYPE_CHECKING:
    from reshard.checks.digests import Digest
    from reshard.checks.hashes import Contents


def run_quick_checks(
    manifest: Manifest,
    sources: Sequence[Path],
    options: VerifyOptions,
    shapes: ModelShapes | None,
) -> list[Check]:
    """Run the checks that read headers."""
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


def run_deep_checks(
    manifest: Manifest,
    report: VerifyReport,
    options: VerifyOptions,
    shapes: ModelShapes | None,
    listed: Contents | None,
    meter: Meter | None,
) -> Mapping[Key, Mapping[Digest, str]]:
    """Read every byte, and add the deep checks to the report.

    Args:
        listed: the manifest to compare with, if there is one.

    Returns:
        The digests that the options ask for.
    """
    from reshard.checks import deep, hashes, scan

    config = _read_config(manifest)
    digests = hashes.choose_digests(manifest) if options.write_manifest else {}
    if listed:
        for key, compared in hashes.choose_digests_to_compare(manifest, listed).items():
            digests[key] = tuple(dict.fromkeys((*digests.get(key, ()), *compared)))
    planned = deep.plan_tasks(manifest, config=config, shapes=shapes, digests=digests)
    workers, window_bytes = options.budget()
    with open_progress(meter, sum(task.nbytes for task in planned)) as progress:
        seen = scan.scan(
            planned,
            manifest.files,
            workers=workers,
            window_bytes=window_bytes,
            ahead_bytes=options.ahead_bytes,
            progress=progress,
        )
    report.bytes_read = seen.bytes_read
    patterns = keys.compile_patterns(options.ignore, "--ignore")

    def is_ignored(name: str) -> bool:
        return any(pattern.search(name) for pattern in patterns)

    report.checks += [
        deep.check_crc(manifest, seen),
        deep.check_replicas(planned, seen),
        deep.check_masters(manifest, planned, seen),
        deep.check_tied(manifest, planned, seen, config=config, shapes=shapes),
        deep.check_padding(manifest, window_bytes),
        deep.check_finite(manifest, seen, is_ignored),
        deep.check_moments(manifest, seen, is_ignored),
        deep.check_zeros(manifest, seen, is_ignored),
        hashes.check_against(manifest, listed, seen.digests, is_ignored)
        if listed
        else not_applicable(names.AGAINST, "--against is not given"),
    ]
    return seen.digests


def _read_config(manifest: Manifest) -> dict[str, Any] | None:
    from reshard.training.companion_files import find_config

    try:
        path = find_config(manifest)
        return read_json_object(path) if path else None
    except CorruptError:
        return None
