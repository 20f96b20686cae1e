"""The layers: imports point one way, and reading imports neither torch nor numpy."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from reshard.formats.registry import list_built_in_formats, list_built_in_writers
from tests.support.programs import run_python

ROOT = Path(__file__).resolve().parent.parent
OURS = {"reshard", "trainer"}
HEAVY = {"torch", "numpy", "transformers", "safetensors", "accelerate", "deepspeed", "fsspec"}
# In the order in which data flow: a module imports only from groups before its own, or its own.
LAYERS = (
    ("errors", "version", "units"),
    ("system",),
    ("options",),
    ("core",),
    ("engine", "model"),
    ("layouts", "sizing"),
    ("containers",),
    ("quantised",),
    ("training",),
    ("state_dict",),
    ("naming",),
    ("formats",),
    ("tensors", "hooks"),
    ("checks",),
    ("html",),
    ("commands",),
    ("live",),
    ("api", "dcp", "deepspeed", "accelerate", "filesystem"),
    ("transformers", "lightning", "torchtitan"),
    ("testing",),
    ("",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


@functools.cache
def modules(package):
    """Dotted module name -> its syntax tree."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text()
        )
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def compiled_modules():
    """Return the optional modules, of which only the stub is always there."""
    return {
        ".".join(stub.relative_to(ROOT).with_suffix("").parts)
        for stub in ROOT.glob("reshard/**/*.pyi")
    }


def imported(tree, known=(), *, top_level=False):
    """Every module that is imported; ``from a import b`` is ``a.b`` where that is a module."""
    nodes = _at_import(tree) if top_level else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else str(node.module)


def _at_import(tree):
    """Nodes that run when the module is imported: no function bodies, no TYPE_CHECKING blocks."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


COMPILED = compiled_modules()


def layer(module):
    return [*module.split("."), ""][1]


@cache
def edges():
    return [
        (module, target)
        for module, tree in modules("reshard").items()
        for target in imported(tree, modules("reshard"))
        if target.split(".")[0] == "reshard" and target not in COMPILED
    ]


def test_every_module_has_a_layer():
    assert {layer(module) for module in modules("reshard")} <= set(RANK)


def test_layers_point_one_way():
    def allowed(module, target):
        if layer(target) == "" and layer(module) in ("cli", "__main__"):
            return True
        return RANK[layer(target)] <= RANK[layer(module)] and layer(target) != ""

    assert [edge for edge in edges() if not allowed(*edge)] == []


def assert_no_cycle(modules, edges):
    """Follow every import from every module, and never come back."""
    graph = {module: set() for module in modules}
    for a, b in edges:
        graph[a].add(b)
    done: set[str] = set()

    def visit(module, path):
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for target in sorted(graph.get(module, ())):
                visit(target, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    assert done == set(graph)


def test_no_two_modules_import_each_other():
    assert_no_cycle(modules("reshard"), edges())


@pytest.mark.parametrize(
    ("importer", "forbidden"),
    [
        ("core.box", {"errors", "core"}),
        ("core.manifest", {"system.files", "system.paths"}),
        ("layouts.model_parallel", {"model", "system.files"}),
        ("containers", {"engine"}),
        ("containers.pickles", {"core.box", "core.manifest", "layouts", "system"}),
        ("engine", {"model"}),
        ("model", {"engine"}),
        ("engine.planning", {"engine.move", "engine.output", "system.files"}),
        ("engine.output", {"engine.planning", "engine.move"}),
        ("training", {"engine"}),
        ("state_dict", {"engine"}),
        ("naming", {"engine"}),
        ("formats", {"engine"}),
        ("tensors.weights", {"formats"}),
        ("html", {"formats", "engine.move", "tensors", "checks"}),
    ],
)
def test_a_package_never_imports(importer, forbidden):
    def is_in(module, part):
        return f"{module}.".startswith(f"reshard.{part}.")

    assert any(is_in(module, importer) for module in modules("reshard"))
    crossed = {
        (a, b)
        for a, b in edges()
        if is_in(a, importer) and any(is_in(b, part) for part in forbidden)
    }
    assert crossed == set()


def test_only_the_main_module_imports_the_command_line():
    importing = {a for a, b in edges() if layer(b) == "cli"}
    assert {name for name in importing if layer(name) != "cli"} <= {"reshard.__main__"}


def test_reshard_and_trainer_do_not_depend_on_each_other():
    """The trainer must write its files without reshard: it would test reshard by its mirror image.

    One module is a user of reshard like any other program: it resumes from the files of others,
    and imports reshard only when it is asked to.
    """
    targets = {t.split(".")[0] for tree in modules("reshard").values() for t in imported(tree)}
    assert "trainer" not in targets
    trainer = modules("trainer") if (ROOT / "trainer").is_dir() else {}

    def find_users(*, top_level):
        return {
            name
            for name, tree in trainer.items()
            for target in imported(tree, top_level=top_level)
            if target.split(".")[0] == "reshard"
        }

    # auto: the formulas of memory have one home, and no part of a checkpoint depends on them
    assert find_users(top_level=False) <= {"trainer.checkpoint.any_format"}
    assert find_users(top_level=True) == set()


def test_only_the_commands_that_train_start_programs():
    starting = {a for a, b in edges() if b == "reshard.commands.programs"}
    training = ("demo", "resume_check.command", "resume_check.program")
    assert starting == {f"reshard.commands.{name}" for name in training}


WITH_NUMPY = (  # imported by functions only
    "reshard.checks.element_facts",
    "reshard.checks.history.movement",
    "reshard.checks.scan",
    "reshard.filesystem",
    "reshard.live.comparison",
    "reshard.live.memory",
    "reshard.live.safe_load",
    "reshard.live.swapped_optimizer",
    "reshard.engine.move.cast",
    "reshard.quantised.decode",
    "reshard.quantised.encode",
    "reshard.quantised.loops",
)


def test_nothing_heavy_is_imported_at_the_top_of_a_module():
    heavy = {
        (module, target)
        for module, tree in modules("reshard").items()
        for target in imported(tree, top_level=True)
        if target.split(".")[0] in HEAVY
        and not module.startswith("reshard.live.dcp.")  # its users have imported torch
        and module not in WITH_NUMPY
    }
    assert heavy == set()


def test_no_module_uses_pickle_or_runs_code():
    banned = {"pickle", "dill", "cloudpickle", "marshal", "subprocess", "importlib", "shelve"}
    banned |= {"pkgutil", "runpy"}
    asked_for = {
        ("reshard", "importlib"),  # its own modules, on the first use of a name
        (
            "reshard.formats.engines",
            "importlib",
        ),  # importlib.metadata: versions, nothing is imported
        ("reshard.system.compiled", "importlib"),  # its own compiled modules
        ("reshard.formats.registry", "importlib"),  # its own packages, and installed extensions
        ("reshard.model.library", "importlib.util"),  # finds transformers and imports nothing
        ("reshard.system.optional", "importlib.util"),  # finds torch and transformers
        ("reshard.live.safe_load", "pickle"),  # the error of torch.load(weights_only=True)
        ("reshard.model.build", "pkgutil"),  # --model module:factory runs the user's own code
        ("reshard.commands.programs", "subprocess"),  # resume-check starts the user's own program
    }
    used = {
        (module, target)
        for module, tree in modules("reshard").items()
        for target in imported(tree)
        if target.split(".")[0] in banned
    }
    calls = {
        (module, node.func.id)
        for module, tree in modules("reshard").items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("eval", "exec", "__import__", "compile")
    }
    assert used | calls == asked_for


def test_only_one_module_makes_a_path_of_text():
    """A URL that `pathlib.Path` was made of would be looked for on this machine, and not found."""
    local = {  # of their own files, or of files that must be of this machine
        "reshard.system.paths",
        "reshard.html.document",
        "reshard.layouts.model_parallel.rules",
        "reshard.training.param_groups",
        "reshard.html.shards",
        "reshard.engine.output.files",
        "reshard.tensors.replicas",
        "reshard.model.library",
        "reshard.engine.move.receipts",
        "reshard.checks.control",
        "reshard.commands.resume_check.command",
        "reshard.deepspeed",
        "reshard.live.files",
        "reshard.live.patched_loads",
        "reshard.commands.resume_check.program",
    }
    pure = ("name", "stem", "suffix")
    made = {
        module
        for module, tree in modules("reshard").items()
        for node in ast.walk(tree)
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.Call)
        and isinstance(child.func, ast.Name)
        and child.func.id == "Path"
        and not (isinstance(node, ast.Attribute) and node.attr in pure)
    }
    assert made - local == set()


EXAMPLE = str(ROOT / "examples" / "llama-zero3-4ranks")
USED = {  # the words of a command -> modules that it has no use for
    ("--help",): "reshard.formats reshard.commands reshard.engine concurrent.futures",
    ("inspect", "a.pt"): "torch numpy fsspec reshard.system.remote",
    ("inspect", "a.safetensors"): "torch numpy fsspec reshard.system.remote",
    ("inspect", EXAMPLE): "torch numpy jinja2 reshard.html",
    ("merge", "a", "o"): (
        "numpy difflib html logging tempfile reshard.commands.forecast"
        " reshard.commands.merge.upload reshard.engine.move.on_demand"
        " reshard.containers.torch_writer reshard.training.state"
    ),
    ("average", "a", "b", "o"): (
        "numpy importlib.metadata reshard.commands.split.command reshard.formats.engines"
        " reshard.training.state"
    ),
    ("convert", EXAMPLE, "o", "--to", "ds-universal"): (
        "torch yaml reshard.formats.megatron.write.dist reshard.formats.megatron.write.legacy"
        " reshard.formats.dcp.writer reshard.formats.meta.writer reshard.formats.colossalai.writer"
        " reshard.formats.fsdp reshard.formats.trainers.hf_trainer"
    ),
}


@pytest.mark.parametrize("words", USED, ids=lambda words: f"{words[0]} {Path(words[-1]).name}")
def test_a_command_imports_only_what_it_uses(words, tmp_path):
    import torch
    from safetensors.torch import save_file

    if words[0] == "average":
        pytest.importorskip("reshard.tensors.averages._sums", reason="numpy computes")
    state = {"a.weight": torch.ones(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16)}
    torch.save(state, tmp_path / "a.pt")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_file({"a.weight": torch.ones(3, 2)}, tmp_path / name / "model.safetensors")
    save_file(state, tmp_path / "a.safetensors")
    probe = (
        "import sys\n"
        "before = set(sys.modules)\n"  # of coverage, which measures it
        "from reshard.cli import cli\n"
        f"cli({list(words)}, standalone_mode=False)\n"
        f"unused = tuple({USED[words]!r}.split())\n"
        "print('LOADED', [name for name in set(sys.modules) - before if f'{name}.'.startswith(\n"
        "    tuple(f'{each}.' for each in unused))])\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = run_python("-c", probe, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("LOADED []\n")


def test_every_public_name_is_there_when_it_is_asked_for():
    import reshard

    assert all(getattr(reshard, name) is not None for name in reshard.__all__)
    assert set(reshard.__all__) <= set(dir(reshard))
    with pytest.raises(AttributeError, match="no attribute 'splits'"):
        reshard.splits  # noqa: B018 - asking is the test


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_what_runs_by_hand_asks_for_what_is_there(folder):
    """No other test and no type checker sees these imports, nor what is taken of such a module."""
    known = {*modules("reshard"), *modules("trainer")}
    missing = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree, held = ast.parse(path.read_text()), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in OURS:
                if node.module in COMPILED:
                    continue
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    if full in known:
                        held[alias.asname or alias.name] = importlib.import_module(full)
                    elif not hasattr(importlib.import_module(str(node.module)), alias.name):
                        missing.append(full)
        missing += [
            f"{held[node.value.id].__name__}.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if node.value.id in held and not hasattr(held[node.value.id], node.attr)
        ]
    assert missing == []


def test_a_package_that_lists_its_modules_lists_all_of_them():
    """The list is where a newcomer begins: a module that is not in it is not found."""
    for package in ("reshard", "trainer"):
        for path in (ROOT / package).rglob("*/__init__.py"):
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            inside = {file.stem for file in path.parent.glob("*.py")} - {"__init__"}
            inside |= {file.parent.name for file in path.parent.glob("*/__init__.py")}
            listed = set(re.findall(r"^ *(\w+)(?:  +\S|$)", text, re.MULTILINE))
            beside_a_folder_a_format = path.parent.name == "formats"
            if len(listed & inside) < 3 or beside_a_folder_a_format:
                continue
            missing = {name for name in inside if not re.search(rf"\b{name}\b", text)}
            assert missing == set(), path
            assert listed - inside == set(), path


# Modules outside of formats/ and cli/ that name a format or a layout, and why.
NAME_A_FORMAT = {
    "accelerate": "loads into one library, whose files it asks for",
    "deepspeed": "the same",
    "transformers": "the same",
    "commands.demo": "shows two layouts",
    "sizing.strategies": "forecasts two frameworks, and says which layout each loads",
    "training.trainer_run": "reads the document of our trainer, which several formats have",
}
# Words that are also the name of a format: packages, devices, keys and strategies of programs.
HOMONYMS = {
    "containers.pickles.trust": {"torch", "deepspeed"},
    "layouts.mesh": {"fsdp"},
    "layouts.model_parallel.rules": {"megatron"},  # a table of names
    "lightning": {"trainer"},
    "live": {"torch"},
    "model.build": {"meta"},
    "model.library": {"torch"},
    "naming.options": {"megatron"},  # the same table
    "sizing.configs": {"deepspeed", "fsdp", "fsdp2", "torch"},  # frameworks and strategies
    "sizing.sources": {"huggingface"},
    "sizing.strategy_choice": {"deepspeed"},
    "state_dict.sections": {"meta"},
    "system.optional": {"trainer"},
    "training.companion_files": {"huggingface"},
}
# Modules outside of formats/ that import a format's folder, and why.
IMPORT_A_FORMAT = {
    "checks.unread": "compares folders of DCP that no reader of the checkpoint used",
    "deepspeed": "reads the configuration of DeepSpeed's engine",
    "live.memory": "reads the names of experts in DeepSpeed's engine",
}


def test_a_format_is_named_and_imported_only_with_a_reason():
    formats = {f.name for f in list_built_in_formats()} | list_built_in_writers().keys()
    known = modules("reshard")
    nested = (re.match(r"reshard\.formats\.\w+\.", name) for name in known)
    folders = tuple({found[0] for found in nested if found})
    named, importers = {}, set()
    for name, tree in known.items():
        module = name.removeprefix("reshard.")
        if module.split(".")[0] not in ("formats", "cli"):
            words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
            named |= {module: words & formats} if words & formats else {}
            if any(f"{each}.".startswith(folders) for each in imported(tree, known)):
                importers.add(module)
    assert {module: named[module] for module in named.keys() - NAME_A_FORMAT} == HOMONYMS
    assert NAME_A_FORMAT.keys() <= named.keys()
    assert importers == IMPORT_A_FORMAT.keys()


def test_each_class_name_has_one_meaning():
    """A reader who knows a name from one module knows it in the others."""
    places = defaultdict(list)
    for module, tree in modules("reshard").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_the_layers_in_the_guide_name_every_file():
    """CONTRIBUTING.md is the map: a loose file of `reshard` or `reshard.formats` is on it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = [*(ROOT / "reshard").glob("*.py"), *(ROOT / "reshard" / "formats").glob("*.py")]
    loose = {file.name for file in files if not file.name.startswith("__")} - {"version.py"}
    assert {name for name in loose if not re.search(rf"\b{name}\b", text)} == set()
