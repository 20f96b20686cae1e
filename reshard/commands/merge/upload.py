"""Upload of a merged model to a repository of the Hugging Face Hub, without a copy on a disk.

The files are computed when huggingface_hub reads them: once for the SHA-256 that the Hub asks for
before an upload, and once for the upload. One commit has all of them, so that the repository never
has a part of the model. Source: huggingface_hub 2.4 ``_commit_api.py`` (``CommitOperationAdd``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reshard import formats
from reshard.commands.merge.options import HUB_PREFIX, MergeOptions
from reshard.commands.merge.report import MergeReport
from reshard.commands.unwritten import open_planned, plan_unwritten
from reshard.core.manifest import Manifest
from reshard.engine.move.on_demand import OnDemandFiles
from reshard.errors import ExistsError, ReshardError, ResourceError, UsageError
from reshard.system.paths import as_path
from reshard.units import abridge

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.commands.output import Job

    Plan = Callable[[Manifest, Path, Path], Job[MergeReport]]

_REPOSITORY = re.compile(rf"{HUB_PREFIX}/?(?P<name>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/?")


@dataclass(frozen=True, slots=True)
class Repository:
    """A model repository of the Hub, and the branch to commit to."""

    name: str
    revision: str | None

    @property
    def url(self) -> str:
        """The repository as the user names it."""
        return f"hf://{self.name}" + (f"@{self.revision}" if self.revision else "")


def find_repository(destination: str | Path) -> Repository:
    """Return the repository of the Hub that a destination names.

    Raises:
        UsageError: it is not ``hf://organization/name``.
    """
    match = _REPOSITORY.fullmatch(str(destination))
    if match is None:
        raise UsageError(
            destination, "is not hf://organization/name or hf://organization/name@branch"
        )
    return Repository(match["name"], match["revision"])


def upload(
    source: formats.Paths, repository: Repository, options: MergeOptions, plan: Plan
) -> MergeReport:
    """Merge a checkpoint into a repository, in one commit.

    Args:
        plan: plans a merge, given the source, its path and the name of the output.

    Raises:
        UsageError: an option that needs files is given.
        ReshardError: the source cannot be read, trusted or laid out, the repository does not
            exist or has one of the files, or the Hub refuses the commit. It is then unchanged.
    """
    options.refuse_given(
        ("resume", "html"),
        "is not possible for an upload to the Hub",
        "leave it out, or merge to a disk",
    )
    began = time.perf_counter()
    job = plan_unwritten(
        source, options, lambda manifest, first: plan(manifest, first, as_path("uploaded"))
    )
    report = job.report
    report.destination, report.options = repository.url, options.given()
    report.load_line = _describe_load_from_hub(report.load_line, repository)
    if options.dry_run:
        return report
    with _explain_errors(repository), open_planned(job, options) as files:
        _commit(files, repository, overwrite=options.overwrite)
        report.overflowed = dict(files.overflowed)
    report.done = True
    report.seconds = time.perf_counter() - began
    return report


def _describe_load_from_hub(line: str, repository: Repository) -> str:
    """``line`` loads the model from the directory ``{path}``; empty if only reshard can."""
    if "from_pretrained" not in line:
        return ""
    revision = f', revision="{repository.revision}"' if repository.revision else ""
    return line.replace('"{path}"', f'"{repository.name}"{revision}')


def _commit(files: OnDemandFiles, repository: Repository, *, overwrite: bool) -> None:
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    info = api.model_info(repository.name, revision=repository.revision)
    present = {sibling.rfilename for sibling in info.siblings or ()} & set(files)
    if present and not overwrite:
        raise ExistsError(
            repository.url,
            f"already contains {abridge(sorted(present))}",
            "pass --overwrite to replace them in a new commit",
        )
    additions = [CommitOperationAdd(name, files.open(name)) for name in files]
    api.create_commit(
        repository.name,
        additions,
        commit_message="Upload merged weights",
        revision=repository.revision,
        parent_commit=info.sha,
    )


@contextmanager
def _explain_errors(repository: Repository) -> Iterator[None]:
    from huggingface_hub.errors import RepositoryNotFoundError

    where = repository.url
    try:
        yield
    except RepositoryNotFoundError as error:
        raise ResourceError(
            where,
            "is not a model repository that your token can read",
            "create it with `hf repo create`, and log in with `hf auth login`",
        ) from error
    except ReshardError:
        raise
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, ReshardError):  # in a thread that uploads
            raise cause from error
        raise ResourceError(where, f"the upload failed: {cause}", "run it again") from error
