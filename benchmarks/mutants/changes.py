"""Change one place of a Python source in a small wrong way that its tests should detect."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import singledispatch

_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Continue: ast.Break,
    ast.Break: ast.Continue,
}
_NAMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "bisect_left": "bisect_right",
    "bisect_right": "bisect_left",
}
Change = tuple[ast.AST, ast.AST]  # a node, and what stands there in the mutant
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Mutant:
    """A function, or a constant of the module, with one change.

    ``name`` is its place in the module, ``was`` and ``now`` the statement before and after.
    """

    name: str
    line: int
    was: str
    now: str
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.name} | {self.was} | {self.now}"


def mutants(source: str) -> Iterator[Mutant]:
    """Yield every mutant of a source, in the order of its lines."""
    tree = ast.parse(source)
    for name, home in _homes(tree, ""):
        for statement in _statements(home):
            for was, now in _changes(statement):
                # a copy in which one node is another: the tree itself stays as it was
                changed = copy.deepcopy(tree, {id(was): now})
                fresh = copy.deepcopy(statement, {id(was): now})
                ast.fix_missing_locations(changed)
                yield Mutant(name, statement.lineno, _head(statement), _head(fresh), changed)


def _homes(tree: ast.Module | ast.ClassDef, within: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield functions, methods and the module's constants, each with its name."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from _homes(node, f"{within}{node.name}.")
        elif isinstance(node, _FUNCTIONS):
            if not any(ast.unparse(d) == "overload" for d in node.decorator_list):
                yield f"{within}{node.name}", node
        elif isinstance(node, ast.Assign) and not within and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node


def _statements(home: ast.stmt) -> Iterator[ast.stmt]:
    if not isinstance(home, _FUNCTIONS):
        yield home
        return
    for statement in home.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.stmt):
                yield node


def _head(statement: ast.stmt) -> str:
    """Return a statement as one line, without the block under it."""
    text = ast.unparse(statement)
    return text.split(":\n")[0] if hasattr(statement, "body") else " ".join(text.split())


def _changes(statement: ast.stmt) -> Iterator[Change]:
    """Yield the changes of a statement and of its own expressions."""
    yield from _of(statement)
    for field, value in ast.iter_fields(statement):
        if field in ("annotation", "target", "targets", "body", "orelse"):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.expr):
                for node in _walk(part):
                    yield from _of(node)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and its descendants, without zip's ``strict``, which only states a fact."""
    if not (isinstance(node, ast.keyword) and node.arg == "strict"):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _walk(child)


@singledispatch
def _of(_: ast.AST) -> Iterator[Change]:
    """Yield the possible replacements of a node."""
    yield from ()


@_of.register(ast.Raise)
@_of.register(ast.Expr)
def _left_out(node: ast.Raise | ast.Expr) -> Iterator[Change]:
    if isinstance(node, ast.Raise) or not isinstance(node.value, ast.Constant):
        yield node, ast.Pass()


@_of.register(ast.AugAssign)
def _of_update(node: ast.AugAssign) -> Iterator[Change]:
    yield node, ast.Pass()
    yield from _of_operator(node)


@_of.register(ast.Return)
def _of_return(node: ast.Return) -> Iterator[Change]:
    if node.value is not None and ast.unparse(node.value) != "None":
        yield node, ast.Return(ast.Constant(None))


@_of.register(ast.Continue)
@_of.register(ast.Break)
def _of_jump(node: ast.Continue | ast.Break) -> Iterator[Change]:
    yield node, _SWAPS[type(node)]()


@_of.register(ast.If)
@_of.register(ast.While)
@_of.register(ast.IfExp)
def _of_condition(node: ast.If | ast.While | ast.IfExp) -> Iterator[Change]:
    yield node.test, ast.UnaryOp(ast.Not(), node.test)


@_of.register(ast.comprehension)
def _of_filter(node: ast.comprehension) -> Iterator[Change]:
    for test in node.ifs:
        yield test, ast.UnaryOp(ast.Not(), test)


@_of.register(ast.BinOp)
@_of.register(ast.BoolOp)
def _of_operator(node: ast.BinOp | ast.BoolOp | ast.AugAssign) -> Iterator[Change]:
    other = _SWAPS.get(type(node.op))
    if other:
        changed = copy.copy(node)
        changed.op = other()
        yield node, changed


@_of.register(ast.Compare)
def _of_comparison(node: ast.Compare) -> Iterator[Change]:
    for at, operator in enumerate(node.ops):
        ops = [*node.ops[:at], _SWAPS[type(operator)](), *node.ops[at + 1 :]]
        yield node, ast.Compare(node.left, ops, node.comparators)


@_of.register(ast.UnaryOp)
def _of_sign(node: ast.UnaryOp) -> Iterator[Change]:
    if isinstance(node.op, (ast.Not, ast.USub)):
        yield node, node.operand


@_of.register(ast.Call)
def _of_call(node: ast.Call) -> Iterator[Change]:
    if isinstance(node.func, ast.Name) and node.func.id in _NAMES:
        yield node.func, ast.Name(_NAMES[node.func.id], ast.Load())


@_of.register(ast.Constant)
def _of_constant(node: ast.Constant) -> Iterator[Change]:
    if isinstance(node.value, bool):
        yield node, ast.Constant(not node.value)
    elif isinstance(node.value, (int, float)):
        yield node, ast.Constant(node.value + 1)
        yield node, ast.Constant(node.value - 1)
