"""Checks that no test depends on wall time: `python ops/check_deadlines.py` lists each line of tests/ that does.

A deadline comes from `patience` of tests/support/patience.py. A number may stay if the test is about the number, such
as a deadline that must expire, and if its line ends with `# subject: why`.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
MARK = "# subject: "
CLOCKS = ("time.monotonic", "time.perf_counter", "time.time", "loop.time", "asyncio.get_running_loop().time")
SLEEPS = ("asyncio.sleep", "time.sleep")
# Methods whose only argument is a deadline.
WAITS = ("wait", "join", "result")

DEADLINE = "a deadline is a number: write patience(seconds), from tests.support.patience"
SLEEP = "an assertion follows a sleep: wait for the event itself"
BOUND = "an assertion bounds wall time: assert an order of events, count operations, or measure processor time"


class Finding(NamedTuple):
    """A line that depends on wall time, with advice to change the line."""

    line: int
    advice: str


def findings(source: str, modules: Mapping[str, set[str]] | None = None) -> list[Finding]:
    """Returns the lines of a test module that must be changed, in order.

    modules: the constants of other modules, by module.
    """
    tree, marked = ast.parse(source), _marked(source)
    nodes = list(ast.walk(tree))
    numbers = _constants(tree, marked) | {
        name.asname or name.name
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
        if name.name in (modules or {}).get(statement.module or "", ())
    }
    found: list[tuple[ast.expr | ast.stmt, str]] = [
        (node, DEADLINE) for node in nodes if isinstance(node, ast.expr) and _is_deadline(node, numbers)
    ]
    found += [(sleep, SLEEP) for node in nodes for sleep in _sleeps(node)]
    # Modules without a clock are skipped: walking through all their functions would take seconds in all.
    if any(clock in source for clock in CLOCKS):
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        found += [(bound, BOUND) for function in functions for bound in _bounds(function)]
    return sorted({Finding(node.lineno, advice) for node, advice in found if marked.isdisjoint(_lines(node))})


def constants(source: str) -> set[str]:
    """Returns the names of a module's positive numeric constants, except constants on marked lines."""
    return _constants(ast.parse(source), _marked(source))


def _constants(tree: ast.Module, marked: set[int]) -> set[str]:
    return {
        name
        for statement in tree.body
        for name, value in _assigned(statement)
        if _is_number(value, set()) and marked.isdisjoint(_lines(statement))
    }


def _marked(source: str) -> set[int]:
    """Lines with a mark and a reason."""
    if MARK not in source:
        return set()
    return {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and token.string.partition(MARK)[2].strip()
    }


def _lines(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yields the names and values of an assignment, also of a tuple to a tuple."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                pairs = zip(target.elts, value.elts, strict=False) if several else [(target, value)]  # type: ignore[attr-defined]
                yield from ((name.id, part) for name, part in pairs if isinstance(name, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value
        case ast.NamedExpr(target=ast.Name(id=name), value=value):
            yield name, value


def _is_number(node: ast.expr, numbers: set[str]) -> bool:
    """Whether an expression consists of positive numbers: literals, these names, and arithmetic of both."""
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float() as value):
            return value > 0
        case ast.Name(id=name):
            return name in numbers
        case ast.BinOp(left=left, right=right):
            return _is_number(left, numbers) and _is_number(right, numbers)
    return False


def _called(node: ast.AST) -> str:
    """The dotted name of the called function; empty if the node is no call."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _is_deadline(node: ast.expr, numbers: set[str]) -> bool:
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right) if _called(left) in CLOCKS:
            return _is_number(right, numbers)
        case ast.Call(func=func, args=args, keywords=keywords):
            name, _, method = _called(node).rpartition(".")
            waits = isinstance(func, ast.Attribute) and method in WAITS and len(args) == 1
            found = args if waits or method == "wait_for" or (name, method) == ("asyncio", "timeout") else []
            return any(_is_number(one, numbers) for one in (*found, *(k.value for k in keywords if k.arg == "timeout")))
    return False


def _sleeps(node: ast.AST) -> Iterator[ast.stmt]:
    """Sleeps right before an assertion in a block of this node."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, ())
        # A lambda and a conditional expression have a body that is no block.
        for before, after in pairwise(block) if isinstance(block, list) else ():
            if isinstance(before, ast.Expr) and isinstance(after, ast.Assert):
                call = before.value.value if isinstance(before.value, ast.Await) else before.value
                if isinstance(call, ast.Call) and _called(call) in SLEEPS and ast.unparse(call.args[0]) != "0":
                    yield before


def _bounds(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.stmt]:
    """Assertions of a function with an upper bound for a span of time."""
    times, spans = set[str](), set[str]()
    assignments = [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)]
    for assignment in sorted(assignments, key=lambda node: node.lineno):
        for name, value in _assigned(assignment):
            if _called(value) in CLOCKS:
                times.add(name)
            elif _has_span(value, times, spans):
                spans.add(name)
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and any(_has_span(less, times, spans) for less in _lesser(node.test)):
            yield node


def _lesser(test: ast.expr) -> Iterator[ast.expr]:
    """The sides of comparisons that must be less than the other side."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare):
            for (left, right), operator in zip(pairwise((node.left, *node.comparators)), node.ops, strict=True):
                if isinstance(operator, ast.Lt | ast.LtE):
                    yield left
                elif isinstance(operator, ast.Gt | ast.GtE):
                    yield right


def _has_span(node: ast.expr, times: set[str], spans: set[str]) -> bool:
    """Whether an expression contains the time between two moments."""
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name) if name in spans:
                return True
            case ast.BinOp(left=left, op=ast.Sub(), right=right) if not isinstance(right, ast.Constant):
                if any(
                    _called(one) in CLOCKS or (isinstance(one, ast.Name) and one.id in times) for one in (left, right)
                ):
                    return True
    return False


def main() -> int:
    """Returns the exit status: 1 if a line has to change."""
    argparse.ArgumentParser(description="Lists each line of tests/ that depends on wall time.").parse_args()
    sources = {path: path.read_text() for path in sorted(TESTS.rglob("*.py"))}
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): constants(source) for path, source in sources.items()
    }
    status = 0
    for path, source in sources.items():
        for line, advice in findings(source, modules):
            print(f"{path.relative_to(ROOT)}:{line}: {advice}; or end the line with `{MARK}why`", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
