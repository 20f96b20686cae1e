"""A checkpoint whose tensors the ranks of a program read as they are stored, without a split."""

from __future__ import annotations

import logging
from collections.abc import Collection

from reshard import formats
from reshard.checks.identity import check_identity
from reshard.commands.output_options import ValueOptions
from reshard.commands.reading import read_trusted
from reshard.core.manifest import Manifest
from reshard.live.files import compute_on_first_rank, log_warnings
from reshard.live.names import fits_live_names, use_live_names
from reshard.model import ModelShapes
from reshard.naming.published import restore_memory_form

_logger = logging.getLogger("reshard")


def read_for_model(
    source: formats.Paths,
    parameters: Collection[str],
    buffers: Collection[str] = (),
    options: ValueOptions | None = None,
    live: ModelShapes | None = None,
) -> Manifest:
    """Return a checkpoint under the names of a live model; rank 0 reads it for every rank.

    Args:
        source: a path as for `reshard.open`.
        parameters: the names of the model's parameters.
        buffers: the names of its buffers, if they are known.
        live: the shapes of its parameters, if it holds them whole: they name what an optimizer
            numbers.

    Raises:
        ReshardError: on every rank, if the source cannot be read or trusted.
    """
    options = options or ValueOptions()

    def read() -> Manifest:
        manifest = read_trusted(formats.as_paths(source), options, live)
        check_identity(manifest, options.trust)
        _logger.info("loading %s without a copy on a disk", manifest.origin.path)
        log_warnings(manifest)
        named, prefix = use_live_names(manifest, parameters, buffers)
        if not fits_live_names(named, parameters):
            restored = restore_memory_form(manifest, may_be_former=True)
            if restored is not None:
                named, prefix = use_live_names(restored, parameters, buffers)
        if prefix is not None:
            _logger.info("%s", prefix)
        return named

    return compute_on_first_rank(read)
