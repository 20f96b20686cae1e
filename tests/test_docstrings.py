"""What a public function raises on purpose, its docstring says: nobody must read the code for it.

A statement ``raise OurError(...)`` in the function itself counts, also by a function that makes the
error (``raise build_disk_error(...)``). Under ``Raises:`` stands the class, or a base of it.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LINE = re.compile(r" {4}((?:\w+, )*\w+): ")  # what goes on in a further line is indented more


@functools.cache
def trees():
    """Return every module's tree; the docstrings of a command line are shown by --help."""
    return {
        path.relative_to(ROOT): ast.parse(path.read_text())
        for package in ("reshard", "trainer")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name != "cli.py" and path.parent.name != "cli"
    }


@functools.cache
def classes():
    """Return every class of both packages -> the names of its bases."""
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    return {
        node.name: [ast.unparse(base) for base in node.bases]
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }


def family(name):
    """Return a class and all its bases."""
    return {name}.union(*(family(base) for base in classes().get(name, ())))


@functools.cache
def our_errors():
    return {name for name in classes() if family(name) & {"ReshardError", "TrainerError"}}


def functions(body, prefix=""):
    """(qualified name, function) of those that are no other's inside."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, FUNCTIONS):
            yield prefix + node.name, node


@functools.cache
def all_functions():
    return {
        f"{path}: {name}": node
        for path, tree in trees().items()
        for name, node in functions(tree.body)
    }


@functools.cache
def makers():
    """Return the functions that make our errors -> which."""
    return {
        node.name: node.returns.id
        for node in all_functions().values()
        if isinstance(node.returns, ast.Name) and node.returns.id in our_errors()
    }


def inside(node):
    """Yield the nodes of a function's own body, not those of functions in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield child
            yield from inside(child)


def raised(function):
    """Our errors that it raises itself."""
    for node in inside(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            name = makers().get(name, name)
            if name in our_errors():
                yield name


def documented(function):
    """Return the classes under the docstring's ``Raises:``, which is its last section."""
    _, _, section = (ast.get_docstring(function) or "").partition("Raises:\n")
    matches = map(LINE.match, section.splitlines())
    return [name for match in matches if match for name in match[1].split(", ")]


def is_public(place):
    return not any(name.startswith("_") for name in place.split(": ")[1].split("."))


def test_public_functions_document_what_they_raise():
    lacking = {
        f"{place}: {name}"
        for place, function in all_functions().items()
        if is_public(place)
        for name in raised(function)
        if family(name).isdisjoint(documented(function))
    }
    assert lacking == set()


def test_what_is_documented_can_be_raised():
    known = {name for name in classes() if "Exception" in family(name)} | vars(builtins).keys()
    unknown = {
        f"{place}: {name}"
        for place, function in all_functions().items()
        for name in documented(function)
        if name not in known
    }
    assert unknown == set()


def test_the_check_sees_what_it_is_for():
    code = '''
class Thing:
    def hidden(self):
        """Without a word."""
        raise errors.CorruptError("x", "y")

    def told(self):
        """With one.

        Raises:
            UnsupportedError, ReshardError: the base counts,
                and what follows is no name: of a class.
        """
        raise StaleError("x", "y")
'''
    hidden, told = (node for _, node in functions(ast.parse(code).body))
    assert list(raised(hidden)) == ["CorruptError"]
    assert documented(hidden) == []
    assert documented(told) == ["UnsupportedError", "ReshardError"]
    assert family("StaleError") >= {"StaleError", "CorruptError", "ReshardError"}
    assert makers()["build_disk_error"] == "ReshardError"


@pytest.mark.parametrize("name", ["ReshardError", "TrainerError", "CheckpointError", "StaleError"])
def test_the_errors_are_found(name):
    assert name in our_errors()
