"""The trainer's layers: imports point one way."""

from __future__ import annotations

from tests.test_imports import assert_no_cycle, imported, modules

# In the order in which a run uses them: imports come from groups before a module's own, or its own.
LAYERS = (
    ("cores", "core"),
    ("environment", "settings", "tokenizer", "choices"),
    ("process_group",),
    ("checkpoint",),
    ("checkpoint.saving", "checkpoint.background", "log"),
    ("session",),
    ("config_files", "launch", "resolve"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
TRAINER = modules("trainer")


def layer(module):
    """Return the longest listed name that the module belongs to."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in RANK:
            return ".".join(parts[:length])
    return ""


def edges():
    return [
        (module, target)
        for module, tree in TRAINER.items()
        for target in imported(tree, TRAINER, top_level=True)
        if target.startswith("trainer.")
    ]


def test_every_module_has_a_layer():
    assert {module for module in TRAINER if not layer(module)} == {"trainer"}


def test_layers_point_one_way():
    crossed = [(a, b) for a, b in edges() if RANK[layer(b)] > RANK[layer(a)]]
    assert crossed == []


def test_the_core_imports_nothing_from_outside_of_it():
    outside = {(a, b) for a, b in edges() if a.startswith("trainer.core")}
    assert {(a, b) for a, b in outside if not b.startswith("trainer.core")} == set()


def test_no_two_modules_import_each_other():
    assert_no_cycle(TRAINER, edges())
