"""The rules of the language pair, against sentences written by hand."""

import ast

import pytest

from hf_dist.data.builtin.spoken_python import outlines, statements


@pytest.mark.parametrize(
    ("python", "english"),
    [
        ("self.count += 1", "increase self dot count by one"),
        ("x = a[0] + b", "set x to a at zero plus b"),
        ("line = text[1:n]", "set line to text from one up to n"),
        ("copy = names[:]", "set copy to all of names"),
        ("return not self._isEmpty()", "return not self dot is empty of nothing"),
        ("return", "return nothing"),
        ("f.write(data, encoding='utf8')", "call f dot write of data and encoding as text utf 8"),
        ("assert x is not None", "assert that x is not none"),
        ("raise ValueError", "raise value error"),
        ("del a[-1]", "delete a at minus one"),
        ("a = b if c <= 2 else ''", "set a to b if c is at most two else empty text"),
        ("x = (1, [], {})", "set x to tuple of one and list of nothing and empty dictionary"),
        ("value = await read(1 << n)", "set value to await read of one shifted left by n"),
    ],
)
def test_simple_statements(python, english):
    assert list(statements(ast.parse(python))) == [(python, english)]


@pytest.mark.parametrize(
    ("python", "head", "english"),
    [
        ("if a and b in c:\n    pass", "if a and b in c:", "if a and b is in c"),
        ("while True:\n    pass", "while True:", "while true"),
        ("for key in sorted(keys):\n    pass", "for key in sorted(keys):", "for each key in sorted of keys"),
    ],
)
def test_heads_of_compound_statements(python, head, english):
    assert list(statements(ast.parse(python))) == [(head, english)]


@pytest.mark.parametrize(
    "python",
    ["x = f'{y}'", "x = lambda: 1", "x = [y for y in z]", "x = 'two words'", "x = 12345", "f(**k)",
     "a = b = c", "x = _", "1 < x < 2", "x = a[::2]"],
)  # fmt: skip
def test_what_the_rules_cannot_say_is_left_out(python):
    assert list(statements(ast.parse(python))) == []


def test_statements_inside_functions_are_found():
    code = "def f(a):\n    '''Doc.'''\n    if a:\n        return a.b\n"
    assert list(statements(ast.parse(code))) == [("if a:", "if a"), ("return a.b", "return a dot b")]


def test_only_as_many_words_as_asked_for():
    tree = ast.parse("return\nx = 1\ny = a + b + c")
    assert [python for python, _ in statements(tree, words=range(3, 5))] == ["x = 1"]


@pytest.mark.parametrize(
    ("code", "source", "outline"),
    [
        (
            "def readLine(self, limit=-1):\n    'Doc.'\n    return self.find(len(limit), key=min)",
            "def readLine(self, limit=-1):\n    return self.find(len(limit), key=min)",
            "read line with limit calls find and len",
        ),
        ("@x\ndef f(cls, *a, **kw):\n    pass", "def f(cls, *a, **kw):\n    pass", "f with a and kw"),
        ("def f():\n    a(b(c()))\n    a(d)", None, "f calls a and b and c"),
        ("def f():\n    x.y(1).z(e())\n    g()\n    h()", None, "f calls y and z and e"),
        ("def f(self):\n    'Doc.'", "", ""),
        ("def f(self):\n    return 1", "", ""),
        ("def f(x):\n    return '" + "a" * 80 + "'", "", ""),
    ],
)  # fmt: skip
def test_outlines(code, source, outline):
    found = list(outlines(ast.parse(code), longest=80))
    assert found == ([(source or code, outline)] if outline else [])
