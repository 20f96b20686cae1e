"""Universal directories of DeepSpeed: which files are opened, and in which order."""

from __future__ import annotations

import pytest

from reshard.core.box import whole
from reshard.core.chunks import contiguous
from reshard.core.dtypes import FLOAT32
from reshard.core.location import Location
from reshard.core.manifest import MASTER, Entry
from reshard.formats.deepspeed import universal
from reshard.formats.deepspeed.cuts import Cuts
from reshard.formats.deepspeed.universal_ranks import SourceRanks


@pytest.mark.parametrize(
    "name", ["mp_rank_{:02d}_model_states.pt", "zero_pp_rank_{}_mp_rank_00_model_states.pt"]
)
def test_ranks_are_opened_by_their_numbers(name, tmp_path, monkeypatch):
    """Text orders the hundredth rank before the tenth."""
    for rank in range(101):
        (tmp_path / name.format(rank)).touch()
    (tmp_path / name.replace("{", "x{").format(1)).touch()  # no rank's
    monkeypatch.setattr(universal, "open_model", lambda path: path.name)
    opened = universal._open_models(Location.from_paths([tmp_path]))
    assert opened == [name.format(rank) for rank in range(101)]


def normalized(info, rules, local, stored):
    """Return where the rows of a joined matrix come from, and the notes on it."""
    cuts = Cuts("here", info, {"0.up.weight": local}, ranks=2, rules=rules)
    ranks = SourceRanks(2, 1, [{"0.up.weight": local}], cuts)
    shape = (local[0] * 2, local[1])
    chunk = contiguous("fp32.pt", 64, FLOAT32, whole(shape))
    entry = ranks.normalize(Entry("0.up.weight", MASTER, FLOAT32, shape, (chunk,)), stored)
    rows = {c.box.origin[0]: (c.byte_offset - 64) // 8 for c in entry.chunks}
    return entry.shape, rows, [*ranks.notes, *cuts.notes]


def test_what_ds_to_universal_joined_rank_after_rank_gets_in_order(tmp_path):
    """Where no pattern matches gate and up; a file that it joined by parts states their number."""
    rules = tmp_path / "rules.yaml"
    rules.write_text('parameters:\n  "{i}.up.weight": gated\n')
    info = {"original_vocab_size": 4}
    shape, rows, (note, of_run) = normalized(info, rules, (4, 2), {"param"})
    assert (shape, rows) == ((8, 2), {0: 0, 4: 2, 2: 4, 6: 6})
    assert "stored rank after rank" in note
    assert of_run.endswith("cut along dim 0 in 2 parts")
    assert normalized({}, rules, (4, 2), {"param_n_sub_params"}) == ((8, 2), {0: 0}, [])
    rules.write_text('parameters:\n  "{i}.up.weight": row\n')
    shape, _, (note,) = normalized({}, rules, (4, 2), {"param"})
    assert shape == (4, 4)
    assert "right only at a tensor-parallel size of 2" in note


def test_what_ds_to_universal_joined_by_an_affine_map_is_whole():
    """Also if the blocks of ranks are not adjacent, which a run itself is refused for."""
    blocks = [{"shape": [2, 2], "source": [at, [2, 1]]} for at in (0, 8, 4, 12)]
    held = {rank: {"shard_shape": [4, 2], "pieces": blocks[rank * 2 :][:2]} for rank in range(2)}
    params = {"0.up.weight": {"logical_shape": [8, 2], "ranks": held}}
    info = {"affine_map": {"params": params}}
    assert normalized(info, None, (4, 2), {"param"}) == ((8, 2), {0: 0}, [])
