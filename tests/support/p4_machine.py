"""Runs a program read by p4_reader.py on the v1model: parser, ingress, multicast copies, egress,
checksums, deparser. Widths are checked as the language demands: an operation on numbers of different
widths is a P4Error. Variables that a program has not set are random, so that a test notices.

Not supported: priorities, recirculation, clones, meters, and matches other than exact ones.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.support.p4_reader import Control, P4Error, Program

DROP_PORT = 511
STANDARD = {
    "ingress_port": 9,
    "egress_spec": 9,
    "egress_port": 9,
    "mcast_grp": 16,
    "egress_rid": 16,
}


@dataclass(frozen=True)
class Bits:
    value: int
    width: int | None  # None: a literal, which takes the width of the other operand

    def __post_init__(self) -> None:
        assert self.width is None or 0 <= self.value < 1 << self.width


@dataclass
class Record:
    """A struct or a header, with its fields in order."""

    fields: dict[str, Any]
    valid: bool | None = None  # for headers only


@dataclass
class Register:
    cells: list[Bits]


@dataclass
class Counter:
    counts: list[int]


@dataclass
class Instance:
    """A control block and the state that lives as long as the switch."""

    control: Control
    held: dict[str, Any] = field(default_factory=dict)


@dataclass
class Entries:
    """Entries of the control plane: table -> key -> (action, arguments); group -> (port, instance)
    of copies."""

    tables: dict[str, dict[tuple[int, ...], tuple[str, list[int]]]] = field(default_factory=dict)
    groups: dict[int, list[tuple[int, int]]] = field(default_factory=dict)


class _Exhausted(Exception):
    """The packet is shorter than the headers that the parser extracts."""


class Machine:
    def __init__(self, program: Program, entries: Entries, seed: int = 0) -> None:
        self.program, self.entries, self.random = program, entries, random.Random(seed)
        self.constants: dict[str, Bits] = {}
        for name, (type_, value) in program.constants.items():
            self.constants[name] = self.fitted(self.value(value, {}), type_)
        names = ("parser", "verify", "ingress", "egress", "checksum", "deparser")
        self.stages = {
            name: self.instance(program.controls[of]) for name, of in zip(names, program.main)
        }

    # types and stored values

    def width(self, type_: Any) -> int:
        if type_[0] == "bit":
            return self.value(type_[1], {}).value
        if type_[0] == "named" and isinstance(self.program.types.get(type_[1]), tuple):
            return self.width(self.program.types[type_[1]])
        raise P4Error(f"{type_} has no width")

    def made(self, type_: Any) -> Any:
        """Create a variable of this type with random contents."""
        fields = self.program.types.get(type_[1]) if type_[0] == "named" else None
        if isinstance(fields, list):
            valid = False if type_[1] in self.program.headers else None
            return Record({name: self.made(of) for of, name in fields}, valid)
        width = self.width(type_)
        return Bits(self.random.getrandbits(width), width)

    def instance(self, control: Control) -> Instance:
        made = Instance(control)
        for name, (type_, arguments) in control.instances.items():
            if type_[0] == "generic" and type_[1] == "register":
                width, size = self.width(type_[2]), self.value(arguments[0], {}).value
                made.held[name] = Register([Bits(0, width)] * size)
            elif type_ == ("named", "counter"):
                made.held[name] = Counter([0] * self.value(arguments[0], {}).value)
            else:
                made.held[name] = self.instance(self.program.controls[type_[1]])
        return made

    @staticmethod
    def fit(value: Bits, width: int) -> Bits:
        if value.width not in (None, width):
            raise P4Error(f"bit<{value.width}> where bit<{width}> is wanted")
        if value.value >= 1 << width:
            raise P4Error(f"{value.value} is more than bit<{width}> holds")
        return Bits(value.value, width)

    def fitted(self, value: Any, type_: Any) -> Any:
        return value if isinstance(value, Record) else self.fit(value, self.width(type_))

    # packets

    def packet(self, data: bytes, port: int) -> list[tuple[int, bytes]]:
        """Process one packet. Returns (port, packet) of each packet that leaves."""
        headers, rest = self._parsed(data, port)
        standard = self.standard
        self.run("verify", headers, self.meta)
        self.run("ingress", headers, self.meta, standard)
        group = standard.fields["mcast_grp"].value
        if group:
            ways = self.entries.groups[group]
        else:
            ways = [(standard.fields["egress_spec"].value, 0)]
        out = []
        for to, instance in ways:
            if to != DROP_PORT:
                out.append((to, self._leaving(_copied(headers), to, instance) + rest))
        return out

    def _parsed(self, data: bytes, port: int) -> tuple[Record, bytes]:
        parser = self.stages["parser"].control
        headers, self.meta = (self.made(type_) for _, type_, _ in parser.parameters[1:3])
        self.standard = Record({name: Bits(0, width) for name, width in STANDARD.items()})
        self.standard.fields["ingress_port"] = Bits(port, 9)
        self.bits, self.left = int.from_bytes(data), 8 * len(data)
        names = [name for _, _, name in parser.parameters]
        scope = dict(zip(names, ("packet_in", headers, self.meta, self.standard)))
        state = "start"
        try:
            while state not in ("accept", "reject"):
                statements, then = parser.states[state]
                for statement in statements:
                    self.do(statement, scope, self.stages["parser"])
                state = then if isinstance(then, str) else self._selected(then, scope)
        except _Exhausted:
            pass  # v1model continues with the headers extracted so far
        return headers, (self.bits & ((1 << self.left) - 1)).to_bytes(self.left // 8)

    def _selected(self, select: Any, scope: dict[str, Any]) -> str:
        keys = [self.value(expression, scope) for expression in select[0]]
        for values, target in select[1]:
            if values is None:
                return str(target)
            patterns = [self.value(expression, scope) for expression in values]
            if all(
                self.fit(w, k.width).value == k.value for w, k in zip(patterns, keys, strict=True)
            ):
                return str(target)
        return "reject"

    def _leaving(self, headers: Record, port: int, instance: int) -> bytes:
        standard = Record(dict(self.standard.fields))
        standard.fields |= {"egress_port": Bits(port, 9), "egress_rid": Bits(instance, 16)}
        self.run("egress", headers, self.meta, standard)
        self.run("checksum", headers, self.meta)
        self.out = b""
        self.run("deparser", "packet_out", headers)
        return self.out

    def run(self, stage: str, *arguments: Any) -> None:
        instance = self.stages[stage]
        names = [name for _, _, name in instance.control.parameters]
        self.body(instance, dict(zip(names, arguments, strict=True)))

    def body(self, instance: Instance, scope: dict[str, Any]) -> None:
        control = instance.control
        for name, (type_, value) in control.constants.items():
            scope[name] = self.fitted(self.value(value, scope), type_)
        for name, type_ in control.variables.items():
            scope[name] = self.made(type_)
        self.do(control.body, scope, instance)

    # statements

    def do(self, statement: Any, scope: dict[str, Any], instance: Instance) -> None:
        match statement:
            case ("block", statements):
                for inner in statements:
                    self.do(inner, scope, instance)
            case ("if", condition, then, other):
                if self.truth(condition, scope, instance):
                    self.do(then, scope, instance)
                elif other:
                    self.do(other, scope, instance)
            case ("assign", target, value):
                self.assign(target, self.value(value, scope, instance), scope)
            case ("call", _, _):
                self.call(statement, scope, instance)
            case _:
                raise P4Error(f"{statement}")

    def truth(self, condition: Any, scope: dict[str, Any], instance: Instance) -> bool:
        found = self.value(condition, scope, instance)
        if not isinstance(found, bool):
            raise P4Error(f"{condition} is no bool")
        return found

    def assign(self, target: Any, value: Any, scope: dict[str, Any]) -> None:
        holder, name = self._place(target, scope)
        before = holder[name]
        if isinstance(before, Bits):
            assert before.width is not None
            value = self.fit(value, before.width)
        holder[name] = value

    def _place(self, target: Any, scope: dict[str, Any]) -> tuple[dict[str, Any], str]:
        match target:
            case ("name", name) if name in scope:
                return scope, name
            case ("member", inner, name):
                record = self.value(inner, scope)
                if name in record.fields:
                    return record.fields, name
        raise P4Error(f"{target} cannot be set")

    # calls

    def call(self, expression: Any, scope: dict[str, Any], instance: Instance) -> Any:
        _, called, arguments = expression
        match called:
            case ("name", "mark_to_drop"):
                self.assign(("member", arguments[0], "egress_spec"), Bits(DROP_PORT, 9), scope)
            case ("name", "update_checksum"):
                self._checksum(arguments, scope, instance)
            case ("name", "NoAction"):
                pass
            case ("name", action):
                values = [self.value(argument, scope, instance) for argument in arguments]
                self.action(action, values, scope, instance)
            case ("member", of, method):
                return self._method(of, method, arguments, scope, instance)
            case _:
                raise P4Error(f"{called} cannot be called")
        return None

    def action(
        self, name: str, values: list[Bits], scope: dict[str, Any], instance: Instance
    ) -> None:
        if name == "NoAction":
            return
        parameters, body = instance.control.actions[name]
        inner = dict(zip((of for _, of in parameters), values, strict=True))
        for type_, of in parameters:
            inner[of] = self.fitted(inner[of], type_)
        assert not inner.keys() & scope.keys(), "an action's parameter hides a variable"
        merged = _Scope(scope, inner)
        self.do(body, merged, instance)

    def _method(
        self, of: Any, method: str, arguments: list[Any], scope: dict[str, Any], instance: Instance
    ) -> Any:
        control = instance.control
        if of[0] == "name" and of[1] in control.tables and method == "apply":
            return self._apply_table(of[1], scope, instance)
        held = instance.held.get(of[1]) if of[0] == "name" else None
        values = [self.value(argument, scope, instance) for argument in arguments]
        match held if held is not None else self.value(of, scope, instance), method:
            case Register() as register, "read":
                self.assign(arguments[0], register.cells[values[1].value], scope)
            case Register() as register, "write":
                width = register.cells[0].width
                assert width is not None
                register.cells[values[0].value] = self.fit(values[1], width)
            case Counter() as counter, "count":
                counter.counts[values[0].value] += 1
            case Instance() as other, "apply":
                self._apply(other, arguments, values, scope)
            case "packet_in", "extract":
                self._extract(values[0])
            case "packet_out", "emit":
                if values[0].valid:
                    self.out += _packed(values[0])
            case Record() as record, "isValid":
                return bool(record.valid)
            case _:
                raise P4Error(f"{of}.{method}")
        return None

    def _apply(
        self, other: Instance, arguments: list[Any], values: list[Any], scope: dict[str, Any]
    ) -> None:
        inner, parameters = {}, other.control.parameters
        for (_, type_, name), value in zip(parameters, values, strict=True):
            inner[name] = self.fitted(value, type_)
        self.body(other, inner)
        for (direction, _, name), argument in zip(parameters, arguments, strict=True):
            if direction in ("out", "inout"):
                self.assign(argument, inner[name], scope)

    def _apply_table(self, name: str, scope: dict[str, Any], instance: Instance) -> Record:
        table = instance.control.tables[name]
        found = tuple(self.value(key, scope, instance).value for key in table.keys)
        entries = self.entries.tables.get(f"{instance.control.name}.{name}", {})
        if table.size is not None and len(entries) > self.value(table.size, {}).value:
            raise P4Error(f"{len(entries)} entries of table {name}")
        hit = found in entries
        if hit:
            action, plain = entries[found]
            values = [Bits(number, None) for number in plain]
        else:
            action = table.default[0]
            values = [self.value(expression, scope, instance) for expression in table.default[1]]
        if action not in table.actions:
            raise P4Error(f"table {name} has no action {action}")
        self.action(action, values, scope, instance)
        return Record({"hit": hit, "miss": not hit})

    def _extract(self, header: Record) -> None:
        if self.left < sum(bits.width for bits in header.fields.values()):
            raise _Exhausted
        for name, bits in header.fields.items():
            self.left -= bits.width
            header.fields[name] = Bits(
                (self.bits >> self.left) & ((1 << bits.width) - 1), bits.width
            )
        header.valid = True

    def _checksum(self, arguments: list[Any], scope: dict[str, Any], instance: Instance) -> None:
        condition, parts, target, how = arguments
        assert how == ("member", ("name", "HashAlgorithm"), "csum16")
        if not self.truth(condition, scope, instance):
            return
        record = Record({str(i): self.value(e, scope) for i, e in enumerate(parts[1])})
        data = _packed(record)
        total = sum(int.from_bytes(data[i : i + 2]) for i in range(0, len(data), 2))
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        self.assign(target, Bits(total ^ 0xFFFF, 16), scope)

    # expressions

    def value(
        self, expression: Any, scope: dict[str, Any], instance: Instance | None = None
    ) -> Any:
        match expression:
            case ("int", value, width):
                return Bits(value, width)
            case ("name", name):
                if name in scope:
                    return scope[name]
                if name in self.constants:
                    return self.constants[name]
                raise P4Error(f"nobody knows {name}")
            case ("member", ("name", "CounterType" | "HashAlgorithm"), name):
                return name
            case ("member", of, name):
                return self._member(self.value(of, scope, instance), name)
            case ("slice", of, high, low):
                top, bottom = (self.value(limit, {}).value for limit in (high, low))
                whole = self.value(of, scope, instance)
                assert whole.width > top >= bottom >= 0
                width = top - bottom + 1
                return Bits((whole.value >> bottom) & ((1 << width) - 1), width)
            case ("cast", type_, inner):
                width = self.width(type_)
                return Bits(self.value(inner, scope, instance).value % (1 << width), width)
            case ("unary", op, inner):
                return _unary(op, self.value(inner, scope, instance))
            case ("binary", "&&" | "||" as op, left, right):
                assert instance
                if self.truth(left, scope, instance) == (op == "||"):
                    return op == "||"
                return self.truth(right, scope, instance)
            case ("binary", op, left, right):
                pair = (self.value(operand, scope, instance) for operand in (left, right))
                return _binary(op, *pair)
            case ("call", _, _):
                assert instance
                return self.call(expression, scope, instance)
        raise P4Error(f"{expression}")

    @staticmethod
    def _member(record: Any, name: str) -> Any:
        if (
            record.valid is False
            and name in record.fields
            and isinstance(record.fields[name], Bits)
        ):
            raise P4Error(f"field {name} of a header that is not valid")
        return record.fields[name]


class _Scope(dict[str, Any]):
    """Looks names up in an action's parameters first, then in the enclosing scope, where
    assignments go."""

    def __init__(self, outer: dict[str, Any], inner: dict[str, Any]) -> None:
        super().__init__(inner)
        self.outer = outer

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.outer

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) if super().__contains__(name) else self.outer[name]

    def __setitem__(self, name: str, value: Any) -> None:
        (super() if super().__contains__(name) else self.outer).__setitem__(name, value)


def _copied(record: Record) -> Record:
    fields = {
        name: _copied(field) if isinstance(field, Record) else field
        for name, field in record.fields.items()
    }
    return Record(fields, record.valid)


def _packed(record: Record) -> bytes:
    total, width = 0, 0
    for bits in record.fields.values():
        total, width = total << bits.width | bits.value, width + bits.width
    assert width % 8 == 0
    return total.to_bytes(width // 8)


def _unary(op: str, value: Any) -> Any:
    if op == "!":
        assert isinstance(value, bool)
        return not value
    if value.width is None:
        raise P4Error(f"{op} of a number without a width")
    high = 1 << value.width
    return Bits((~value.value if op == "~" else -value.value) % high, value.width)


COMPARED = {
    "==": int.__eq__,
    "!=": int.__ne__,
    "<": int.__lt__,
    ">": int.__gt__,
    "<=": int.__le__,
    ">=": int.__ge__,
}
ARITHMETIC = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
    "/": int.__floordiv__,
    "&": int.__and__,
    "|": int.__or__,
    "^": int.__xor__,
}


def _binary(op: str, left: Any, right: Any) -> Any:
    if op == "++":
        if left.width is None or right.width is None:
            raise P4Error("++ of a number without a width")
        return Bits(left.value << right.width | right.value, left.width + right.width)
    if op in ("<<", ">>"):
        moved = left.value << right.value if op == "<<" else left.value >> right.value
        return Bits(moved if left.width is None else moved % (1 << left.width), left.width)
    width = right.width if left.width is None else left.width
    if width is not None:
        left, right = Machine.fit(left, width), Machine.fit(right, width)
    if op in COMPARED:
        return COMPARED[op](left.value, right.value)
    made = ARITHMETIC[op](left.value, right.value)
    return Bits(made if width is None else made % (1 << width), width)
