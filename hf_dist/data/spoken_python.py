"""Python statements read aloud in English, by fixed rules: a language pair that needs no download.

`self.count += 1` becomes "increase self dot count by one". What the rules can't say (f-strings, lambdas,
comprehensions, long strings) has no translation and is left out.
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


def statements(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The simple statements and the heads of compound ones in a tree: (Python on one line, English)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            try:
                yield _statement(node)
            except _UnspeakableError:
                continue


def _statement(node: ast.stmt) -> tuple[str, str]:
    match node:
        case ast.If(test=test):
            return f"if {ast.unparse(test)}:", f"if {_say(test)}"
        case ast.While(test=test):
            return f"while {ast.unparse(test)}:", f"while {_say(test)}"
        case ast.For(target=target, iter=many):
            return (
                f"for {ast.unparse(target)} in {ast.unparse(many)}:",
                f"for each {_say(target)} in {_say(many)}",
            )
        case ast.Assign(targets=[target], value=value):
            english = f"set {_say(target)} to {_say(value)}"
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in _AUGMENTED:
            english = f"{_AUGMENTED[type(op)]} {_say(target)} by {_say(value)}"
        case ast.Return(value=None):
            english = "return nothing"
        case ast.Return(value=ast.expr() as value):
            english = f"return {_say(value)}"
        case ast.Raise(exc=ast.expr() as error, cause=None):
            english = f"raise {_say(error)}"
        case ast.Assert(test=test, msg=None):
            english = f"assert that {_say(test)}"
        case ast.Delete(targets=[target]):
            english = f"delete {_say(target)}"
        case ast.Expr(value=ast.Call() as call):
            english = f"call {_say(call)}"
        case _:
            raise _UnspeakableError
    return ast.unparse(node), english


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
