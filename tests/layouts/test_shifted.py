"""Values plus a constant, computed as they are read."""

from __future__ import annotations

import pytest
import torch

from reshard.core.box import Box
from reshard.core.chunks import Chunk
from reshard.core.dtypes import BFLOAT16, FLOAT32
from reshard.layouts.model_parallel.shifted import add_to_chunks
from reshard.system.files import SourceFiles


@pytest.mark.parametrize(("dtype", "ours"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
def test_each_value_is_that_of_the_file_plus_a_constant(tmp_path, dtype, ours):
    values = torch.randn(7).to(dtype)
    path = tmp_path / "values"
    path.write_bytes(b"head" + values.view(torch.uint8).numpy().tobytes())
    chunk = Chunk(Box((0,), (7,)), str(path), 4, (ours.itemsize,), ours, factor=0.5)
    (shifted,) = add_to_chunks([chunk], 1.0)
    assert shifted.file.computation.files == (str(path),)
    assert shifted.file.computation.nbytes == path.stat().st_size
    with SourceFiles() as files:
        raw = files.read(shifted.file, 4 + ours.itemsize, 6 * ours.itemsize)
    read = torch.frombuffer(bytearray(raw), dtype=dtype)
    assert torch.equal(read, values[1:] + 2)  # the half of it is the value plus 1


def test_the_way_back_gives_the_bits_of_a_norm(tmp_path):
    values = torch.linspace(0.5, 3, 999)
    path = tmp_path / "values"
    path.write_bytes(values.numpy().tobytes())
    chunk = Chunk(Box((0,), (999,)), str(path), 0, (4,), FLOAT32)
    chunks = list(add_to_chunks(add_to_chunks([chunk], -1.0), 1.0))
    with SourceFiles() as files:
        raw = files.read(chunks[0].file, 0, 4 * 999)
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32), values)
