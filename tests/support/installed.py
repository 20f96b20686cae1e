"""Tell what the installed torch and safetensors write, to compare our files with theirs.

reshard writes the archive of torch 2.7 and later, and every dtype of safetensors 0.8. The oldest
versions that `tests/versions.py` installs, torch 2.6 and safetensors 0.4.3, lack a part of both.
"""

from __future__ import annotations

import torch
from safetensors.torch import save

from reshard.core import dtypes
from reshard.core.dtypes import DType

TORCH_2_6 = torch.__version__.startswith("2.6.")
# torch/serialization.py, `_save`: records of an archive that torch 2.6 does not write.
NEW_RECORDS = frozenset({".format_version", ".storage_alignment"})
TORCH_DTYPES = tuple(dtype for dtype in dtypes.ALL if hasattr(torch, dtype.name))


def _is_saved(dtype: DType) -> bool:
    try:
        save({"w": torch.empty(0, dtype=dtype.to_torch())})
    except KeyError:  # `_SIZE` in safetensors/torch.py
        return False
    return True


SAFETENSORS_DTYPES = tuple(each for each in TORCH_DTYPES if each.safetensors and _is_saved(each))
