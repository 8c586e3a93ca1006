"""Reads P4-16: the part of the language that plugins/switch_offload's switch.p4 uses, from its
source.

    text -> preprocessed (#define NAME VALUE, #ifndef; #include is left out: p4_machine.py has what
    core.p4 and v1model.p4 declare) -> tokens -> Program

Anything else in the source is a P4Error with its line. Expressions are tuples that start with their
kind:

    ("int", value, width or None)  ("name", "x")  ("member", e, "field")  ("slice", e, high, low)
    ("unary", op, e)  ("binary", op, e, e)  ("cast", type, e)  ("call", e, [e, ...])

Statements are tuples too: ("assign", e, e) ("call", e, [...]) ("if", e, block, block) ("block",
[...]) ("declare", type, name, e or None)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TOKEN = re.compile(
    r"(?P<skip>\s+|//[^\n]*|/\*.*?\*/)"
    r"|(?P<int>(?:\d+w)?(?:0x[0-9a-fA-F]+|\d+))"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>@|\+\+|<<|>>|==|!=|<=|>=|&&|\|\||[-+*/&|^~!<>=(){}\[\];:,.?])",
    re.DOTALL,
)
# From the weakest; operators in a row bind equally. Unlike in C, `|`, `^` and `&` bind more tightly
# than comparisons (appendix on the grammar in the language's specification).
BINARY = (
    ("||",), ("&&",), ("==", "!="), ("<", ">", "<=", ">="), ("|",), ("^",), ("&",),
    ("<<", ">>"), ("++", "+", "-"), ("*", "/"),
)  # fmt: skip
IN_ANGLES = 8  # precedence allowed in `bit<...>`: neither comparisons nor shifts


class P4Error(Exception): ...


@dataclass
class Table:
    keys: list[Any]
    actions: list[str]
    default: tuple[str, list[Any]]
    size: int | None


@dataclass
class Control:
    name: str
    parameters: list[tuple[str, Any, str]]  # (direction, type, name)
    instances: dict[str, tuple[Any, list[Any]]] = field(default_factory=dict)  # (type, arguments)
    variables: dict[str, Any] = field(default_factory=dict)  # name -> type
    constants: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    actions: dict[str, tuple[list[tuple[Any, str]], Any]] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    states: dict[str, tuple[list[Any], Any]] = field(default_factory=dict)  # parsers only
    body: Any = None


@dataclass
class Program:
    types: dict[str, Any] = field(default_factory=dict)  # ("bit", width) or [(type, name), ...]
    headers: set[str] = field(default_factory=set)
    constants: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    controls: dict[str, Control] = field(default_factory=dict)
    main: list[str] = field(default_factory=list)


def preprocessed(text: str, defined: Mapping[str, int]) -> str:
    values: dict[str, str] = {name: str(value) for name, value in defined.items()}
    out, keeps = [], [True]
    for line in text.splitlines():
        words = line.split()
        if line.startswith("#ifndef"):
            keeps.append(keeps[-1] and words[1] not in values)
        elif line.startswith("#endif"):
            keeps.pop()
        elif line.startswith("#define") and keeps[-1]:
            values[words[1]] = " ".join(words[2:])
        elif not line.startswith("#"):
            out.append(re.sub(r"[A-Za-z_]\w*", lambda m: values.get(m[0], m[0]), line))
            continue
        out.append("")
    assert keeps == [True]
    return "\n".join(out)


def read(text: str, defined: Mapping[str, int] = {}) -> Program:
    return _Reader(preprocessed(text, defined)).program()


class _Reader:
    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str, int]] = []
        at = 0
        while at < len(text):
            found = TOKEN.match(text, at)
            line = text.count("\n", 0, at) + 1
            if not found:
                raise P4Error(f"line {line}: {text[at : at + 20]!r}")
            if found.lastgroup != "skip":
                self.tokens.append((str(found.lastgroup), found[0], line))
            at = found.end()
        self.tokens.append(("end", "", 0))
        self.at = 0

    # tokens

    @property
    def word(self) -> str:
        return self.tokens[self.at][1]

    def wrong(self) -> P4Error:
        kind, word, line = self.tokens[self.at]
        return P4Error(f"line {line}: unexpected {kind} {word!r}")

    def take(self, word: str) -> None:
        if self.word != word:
            raise self.wrong()
        self.at += 1

    def takes(self, word: str) -> bool:
        if self.word == word:
            self.at += 1
            return True
        return False

    def name(self) -> str:
        kind, word, _ = self.tokens[self.at]
        if kind != "name":
            raise self.wrong()
        self.at += 1
        return word

    def several(self, what: Any, end: str, between: str = ",") -> list[Any]:
        found = []
        while not self.takes(end):
            found.append(what())
            if self.word != end:
                self.take(between)
        return found

    # declarations

    def program(self) -> Program:
        self.out = Program()
        while self.word:
            kind = self.name()
            if kind == "typedef":
                type_ = self.type()
                self.out.types[self.name()] = type_
                self.take(";")
            elif kind == "const":
                self.constant(self.out.constants)
            elif kind in ("header", "struct"):
                self.fields(kind)
            elif kind in ("parser", "control"):
                self.control(kind)
            elif kind == "V1Switch":
                self.take("(")
                self.out.main = [call[1][1] for call in self.several(self.expression, ")")]
                self.take("main")
                self.take(";")
            else:
                self.at -= 1
                raise self.wrong()
        return self.out

    def fields(self, kind: str) -> None:
        name = self.name()
        self.take("{")
        found = []
        while not self.takes("}"):
            type_ = self.type()
            found.append((type_, self.name()))
            self.take(";")
        self.out.types[name] = found
        if kind == "header":
            self.out.headers.add(name)

    def type(self) -> Any:
        name = self.name()
        if not self.takes("<"):
            return ("bool",) if name == "bool" else ("named", name)
        if name == "bit":
            width = self.expression(IN_ANGLES)
            self.closing_angle()
            return ("bit", width)
        inner = self.type()
        self.closing_angle()
        return ("generic", name, inner)

    def closing_angle(self) -> None:
        kind, word, line = self.tokens[self.at]
        if word == ">>":  # closes two types
            self.tokens[self.at : self.at + 1] = [(kind, ">", line), (kind, ">", line)]
        self.take(">")

    def constant(self, into: dict[str, tuple[Any, Any]]) -> None:
        type_ = self.type()
        name = self.name()
        self.take("=")
        into[name] = (type_, self.expression())
        self.take(";")

    def parameter(self) -> tuple[str, Any, str]:
        direction = self.name() if self.word in ("in", "out", "inout") else ""
        type_ = self.type()
        return direction, type_, self.name()

    def control(self, kind: str) -> None:
        name = self.name()
        self.take("(")
        made = Control(name, self.several(self.parameter, ")"))
        self.take("{")
        while not self.takes("}"):
            self.member(made, kind)
        self.out.controls[name] = made

    def member(self, made: Control, kind: str) -> None:
        if self.takes("state"):
            self.state(made)
        elif self.takes("const"):
            self.constant(made.constants)
        elif self.takes("action"):
            name = self.name()
            self.take("(")
            parameters = [(type_, of) for _, type_, of in self.several(self.parameter, ")")]
            made.actions[name] = (parameters, self.block())
        elif self.takes("table"):
            self.table(made)
        elif kind == "control" and self.takes("apply"):
            made.body = self.block()
        else:
            self.variable(made)

    def variable(self, made: Control) -> None:
        """`T() name;`, `T(arguments) name;` or `T name;`"""
        type_ = self.type()
        if self.takes("("):
            arguments = self.several(self.expression, ")")
            made.instances[self.name()] = (type_, arguments)
        else:
            made.variables[self.name()] = type_
        self.take(";")

    def state(self, made: Control) -> None:
        name = self.name()
        self.take("{")
        statements = []
        while not self.takes("transition"):
            statements.append(self.statement())
        if not self.takes("select"):
            made.states[name] = (statements, self.name())
            self.take(";")
        else:
            self.take("(")
            keys = self.several(self.expression, ")")
            self.take("{")
            cases = []
            while not self.takes("}"):
                cases.append(self.case())
            made.states[name] = (statements, (keys, cases))
        self.take("}")

    def case(self) -> tuple[list[Any] | None, str]:
        values: list[Any] | None
        if self.takes("default"):
            values = None
        elif self.takes("("):
            values = self.several(self.expression, ")")
        else:
            values = [self.expression()]
        self.take(":")
        target = self.name()
        self.take(";")
        return values, target

    def table(self, made: Control) -> None:
        name = self.name()
        table = Table([], [], ("NoAction", []), None)
        self.take("{")
        while not self.takes("}"):
            what = self.name()
            self.take("=")
            if what == "key":
                self.take("{")
                while not self.takes("}"):
                    table.keys.append(self.expression())
                    self.take(":")
                    self.take("exact")
                    self.take(";")
            elif what == "actions":
                self.take("{")
                while not self.takes("}"):
                    table.actions.append(self.name())
                    self.take(";")
            elif what == "default_action":
                called = self.expression()
                table.default = (called[1][1], called[2])
                self.take(";")
            elif what == "size":
                table.size = self.expression()
                self.take(";")
            else:
                raise self.wrong()
        made.tables[name] = table

    # statements

    def block(self) -> Any:
        self.take("{")
        found = []
        while not self.takes("}"):
            found.append(self.statement())
        return ("block", found)

    def statement(self) -> Any:
        if self.takes("@"):
            self.take("atomic")  # packets run one at a time here anyway
            return self.block()
        if self.word == "{":
            return self.block()
        if self.takes("if"):
            self.take("(")
            condition = self.expression()
            self.take(")")
            then = self.statement()
            return ("if", condition, then, self.statement() if self.takes("else") else None)
        target = self.expression()
        if self.takes("="):
            target = ("assign", target, self.expression())
        elif target[0] != "call":
            raise self.wrong()
        self.take(";")
        return target

    # expressions

    def expression(self, above: int = 0) -> Any:
        if above == len(BINARY):
            return self.unary()
        left = self.expression(above + 1)
        while self.word in BINARY[above]:
            op = self.word
            self.at += 1
            left = ("binary", op, left, self.expression(above + 1))
        return left

    def unary(self) -> Any:
        for op in ("~", "!", "-"):
            if self.takes(op):
                return ("unary", op, self.unary())
        return self.after(self.primary())

    def primary(self) -> Any:
        kind, word, _ = self.tokens[self.at]
        if kind == "int":
            self.at += 1
            width, _, value = word.rpartition("w")
            return ("int", int(value, 0), int(width) if width else None)
        if kind == "name":
            return ("name", self.name())
        if self.takes("{"):
            return ("list", self.several(self.expression, "}"))
        self.take("(")
        if cast := self.cast():
            return cast
        inside = self.expression()
        self.take(")")
        return inside

    def cast(self) -> Any:
        """Read a cast `(bit<N>)e` or `(T)e`, where T names a type, after its bracket; None if it is
        no cast."""
        if self.word != "bit" and self.word not in self.out.types:
            return None
        type_ = self.type()
        self.take(")")
        return ("cast", type_, self.unary())

    def after(self, made: Any) -> Any:
        while True:
            if self.takes("."):
                made = ("member", made, self.name())
            elif self.takes("["):
                high = self.expression()
                self.take(":")
                made = ("slice", made, high, self.expression())
                self.take("]")
            elif self.takes("("):
                made = ("call", made, self.several(self.expression, ")"))
            else:
                return made
