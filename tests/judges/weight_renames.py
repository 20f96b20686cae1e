"""Build the table of renamed weights of transformers 5 when this module is imported.

transformers builds it at the first model that is loaded or saved, which takes half a second of
every rank; whoever imports this module before the forks has it built once.
"""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):  # transformers 4 has no such table
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")
