"""Python in English words, by fixed rules: a language pair, and summaries, that need no download.

A statement read aloud: `self.count += 1` becomes "increase self dot count by one". What the rules can't say
(f-strings, lambdas, comprehensions, long strings) has no translation and is left out.

A function summed up: what it is called, what it takes and what it calls.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_SMALL = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "plus",
    ast.Sub: "minus",
    ast.Mult: "times",
    ast.Div: "divided by",
    ast.FloorDiv: "floor divided by",
    ast.Mod: "modulo",
    ast.Pow: "to the power of",
    ast.LShift: "shifted left by",
    ast.RShift: "shifted right by",
    ast.BitAnd: "bitwise and",
    ast.BitOr: "bitwise or",
    ast.BitXor: "bitwise xor",
    ast.MatMult: "matrix times",
}
_AUGMENTED: dict[type[ast.operator], str] = {
    ast.Add: "increase",
    ast.Sub: "decrease",
    ast.Mult: "multiply",
    ast.Div: "divide",
}
_UNARY: dict[type[ast.unaryop], str] = {
    ast.Not: "not",
    ast.USub: "minus",
    ast.UAdd: "plus",
    ast.Invert: "bitwise not",
}
_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Eq: "equals",
    ast.NotEq: "does not equal",
    ast.Lt: "is less than",
    ast.LtE: "is at most",
    ast.Gt: "is greater than",
    ast.GtE: "is at least",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "is in",
    ast.NotIn: "is not in",
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


class _UnspeakableError(Exception):
    """The rules have no words for a node."""


def statements(tree: ast.AST, *, words: range = range(1, 100)) -> Iterator[tuple[str, str]]:
    """The simple statements and the heads of compound ones in a tree: (Python on one line, English).

    Args:
        tree: a module.
        words: how many words the English has.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            try:
                english = _statement(node)
            except _UnspeakableError:
                continue
            if len(english.split()) in words:
                yield _source(node), english


def outlines(tree: ast.AST, *, longest: int) -> Iterator[tuple[str, str]]:
    """The functions in a tree without their docstrings: (source, "NAME with ARGUMENTS calls FUNCTIONS").

    `self` and `cls` are no arguments; of the functions that are called, the first three are named, in the
    order in which their names stand in the source. A function without either is left out.

    Args:
        tree: a module.
        longest: most characters of a function's source.
    """
    for node in ast.walk(tree):
        # A line of code has some twenty characters at least: longer functions need not be written out.
        if isinstance(node, ast.FunctionDef) and len(node.body) <= longest // 10:
            try:
                source, outline = _without_docstring(node), _outline(node)
            except _UnspeakableError:
                continue
            if len(source) <= longest:
                yield source, outline


def _without_docstring(node: ast.FunctionDef) -> str:
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not body:
        raise _UnspeakableError
    bare = ast.FunctionDef(**{**dict(ast.iter_fields(node)), "body": body, "decorator_list": []})
    return ast.unparse(ast.copy_location(bare, node))


def _outline(node: ast.FunctionDef) -> str:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    named += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
    taken = [_words(argument.arg) for argument in named if argument.arg not in ("self", "cls")]
    places: dict[str, tuple[int, int]] = {}
    for call in (call for statement in node.body for call in ast.walk(statement)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name | ast.Attribute):
            name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
            place = (call.func.end_lineno or 0, call.func.end_col_offset or 0)
            places[name] = min(place, places.get(name, place))
    called = [_words(name) for name in sorted(places, key=lambda name: places[name])[:3]]
    if not taken and not called:
        raise _UnspeakableError
    outline = _words(node.name)
    for verb, names in (("with", taken), ("calls", called)):
        if names:
            outline += f" {verb} {' and '.join(names)}"
    return outline


def _source(node: ast.stmt) -> str:
    match node:
        case ast.If(test=test):
            return f"if {ast.unparse(test)}:"
        case ast.While(test=test):
            return f"while {ast.unparse(test)}:"
        case ast.For(target=target, iter=many):
            return f"for {ast.unparse(target)} in {ast.unparse(many)}:"
    return ast.unparse(node)


def _statement(node: ast.stmt) -> str:  # noqa: PLR0911 (one case a node)
    match node:
        case ast.If(test=test):
            return f"if {_say(test)}"
        case ast.While(test=test):
            return f"while {_say(test)}"
        case ast.For(target=target, iter=many):
            return f"for each {_say(target)} in {_say(many)}"
        case ast.Assign(targets=[target], value=value):
            return f"set {_say(target)} to {_say(value)}"
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in _AUGMENTED:
            return f"{_AUGMENTED[type(op)]} {_say(target)} by {_say(value)}"
        case ast.Return(value=None):
            return "return nothing"
        case ast.Return(value=ast.expr() as value):
            return f"return {_say(value)}"
        case ast.Raise(exc=ast.expr() as error, cause=None):
            return f"raise {_say(error)}"
        case ast.Assert(test=test, msg=None):
            return f"assert that {_say(test)}"
        case ast.Delete(targets=[target]):
            return f"delete {_say(target)}"
        case ast.Expr(value=ast.Call() as call):
            return f"call {_say(call)}"
    raise _UnspeakableError


def _say(node: ast.expr) -> str:  # noqa: PLR0911, PLR0912 (one case a node)
    match node:
        case ast.Name(id=name):
            return _words(name)
        case ast.Attribute(value=value, attr=name):
            return f"{_say(value)} dot {_words(name)}"
        case ast.Constant(value=value):
            return _constant(value)
        case ast.Call(func=function, args=args, keywords=keywords):
            said = [_say(arg) for arg in args] + [_keyword(keyword) for keyword in keywords]
            return f"{_say(function)} of {_listed(said)}"
        case ast.Subscript(value=value, slice=ast.Slice(lower=lower, upper=upper, step=None)):
            start = "" if lower is None else f" from {_say(lower)}"
            end = "" if upper is None else f" up to {_say(upper)}"
            return f"{_say(value)}{start}{end}" if start or end else f"all of {_say(value)}"
        case ast.Subscript(value=value, slice=place):
            return f"{_say(value)} at {_say(place)}"
        case ast.BinOp(left=left, op=op, right=right):
            return f"{_say(left)} {_BINARY[type(op)]} {_say(right)}"
        case ast.UnaryOp(op=op, operand=operand):
            return f"{_UNARY[type(op)]} {_say(operand)}"
        case ast.BoolOp(op=op, values=values):
            return (" and " if isinstance(op, ast.And) else " or ").join(_say(value) for value in values)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return f"{_say(left)} {_COMPARED[type(op)]} {_say(right)}"
        case ast.IfExp(test=test, body=body, orelse=other):
            return f"{_say(body)} if {_say(test)} else {_say(other)}"
        case ast.Tuple(elts=parts) if parts:
            return f"tuple of {_listed([_say(part) for part in parts])}"
        case ast.List(elts=parts):
            return f"list of {_listed([_say(part) for part in parts])}"
        case ast.Dict(keys=[]):
            return "empty dictionary"
        case ast.Await(value=value):
            return f"await {_say(value)}"
    raise _UnspeakableError


def _keyword(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise _UnspeakableError
    return f"{_words(keyword.arg)} as {_say(keyword.value)}"


def _constant(value: object) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value < len(_SMALL):
        return _SMALL[value]
    if value == "":
        return "empty text"
    if isinstance(value, str) and value.isidentifier() and value.isascii():
        return f"text {_words(value)}"
    raise _UnspeakableError


def _listed(said: list[str]) -> str:
    return " and ".join(said) or "nothing"


def _words(name: str) -> str:
    """`_getPayload2` -> `get payload 2`."""
    if not (words := _WORD.findall(name)):
        raise _UnspeakableError
    return " ".join(words).lower()
