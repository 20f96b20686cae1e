"""The quick checks, on manifests that no reader returns."""

from __future__ import annotations

from reshard.checks import quick
from reshard.core.dtypes import FLOAT32
from reshard.core.manifest import PARAM, Entry, Manifest, Origin, index_entries
from reshard.model import ModelShapes


def test_a_name_is_suggested_only_for_the_same_shape():
    expected = {"model.up.weight": (4, 2), "model.down.weight": (2, 4)}
    stored = {"model.upp.weight": (4, 2), "model.downn.weight": (4, 4)}
    entries = [Entry(fqn, PARAM, FLOAT32, shape, ()) for fqn, shape in stored.items()]
    manifest = Manifest(Origin("x", "path"), index_entries(entries), {}, ordered=False)
    assert quick.check_model(manifest, ModelShapes("model", expected, {}, {})).failures == [
        "missing: model.up.weight (is it model.upp.weight?)",
        "missing: model.down.weight",
        "unexpected: model.upp.weight (is it model.up.weight?)",
        "unexpected: model.downn.weight",
    ]
