"""The one way in which what a user writes is read and checked: jobs, clusters, plans and labs.

A schema is a `Section`, or a `value` where code makes one too. Its fields stand one a line, each
with its type, its unit, its limits and its meaning; `docs/reference` is made from them. `checked`
makes one of a table. Each mistake is a ConfigError that names the file, the key, what was found and
what is expected, or the nearest key that is known. A number is never made of a text that looks
like one, or of true and false.
Does NOT know which keys there are.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform, get_args

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass, is_pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.options.names import did_you_mean
from roadtrain.units import parse_bytes, parse_flops, parse_rate, parse_seconds

T = TypeVar("T")
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's words for a key
RULES = ConfigDict(extra="forbid", protected_namespaces=())


class Section(BaseModel):
    """A table of a file. The text below a field says what it means."""

    model_config = RULES | {"frozen": True, "use_attribute_docstrings": True}


@dataclass_transform(frozen_default=True, field_specifiers=(field, Field))
def value(kind: type[T]) -> type[T]:
    """Makes `kind` a frozen dataclass with the rules of a Section. One that code makes is checked
    too, and raises ConfigError."""
    made: Any = dataclass(frozen=True, config=RULES)(kind)
    unexplained = made.__init__

    def __init__(self: T, *args: Any, **fields: Any) -> None:
        named = [*made.__pydantic_fields__][: len(args)]
        if len(named) < len(args) or fields.keys() & set(named):
            raise TypeError(f"{kind.__name__}(): too many arguments, or one given twice")
        fields |= zip(named, args)
        try:
            unexplained(self, **fields)
        except ValidationError as cause:
            raise explained(cause, made, fields, kind.__name__) from cause

    made.__init__ = __init__
    return made  # type: ignore[no-any-return]


Integer = Annotated[int, Field(strict=True)]
Whole = Annotated[Integer, Field(ge=0)]
Count = Annotated[Integer, Field(ge=1)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Number = Annotated[Real, Field(ge=0)]
Flag = Annotated[bool, Field(strict=True)]


class _Refused(ValueError):
    """An error of ours inside pydantic's."""

    def __init__(self, error: RoadtrainError) -> None:
        super().__init__(str(error).partition("\nhint: ")[0])
        self.error = error


def refusing(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`read` as a validator: what it raises is said with the key."""

    def validator(given: Any) -> Any:
        try:
            return read(given)
        except RoadtrainError as error:
            raise _Refused(error) from error

    return validator


def _with_unit(parse: Callable[[str], float]) -> BeforeValidator:
    def read(given: object) -> float:
        if type(given) in (int, float) and given == 0:
            return 0.0
        if not isinstance(given, str):
            raise ConfigError(f"{given!r} has no unit", hint="write a number and a unit")
        return parse(given)

    return BeforeValidator(refusing(read))


def _written(unit: str, scale: float = 1.0, decimals: int = 0) -> PlainSerializer:
    """`decimals`: of a large number. A small one has so many that it is not written as nothing."""

    def write(held: float) -> str | int:
        digits = f"{held / scale:.{12 if held < 1e3 * scale else decimals}f}"
        digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
        return digits + unit if held else 0

    return PlainSerializer(write)


# numbers that are written with a unit
Rate = Annotated[float, _with_unit(parse_rate), _written("B/s")]
Bytes = Annotated[float, _with_unit(parse_bytes), _written("B")]
Flops = Annotated[float, _with_unit(parse_flops), _written("TFLOP/s", 1e12, 6)]
Seconds = Annotated[float, _with_unit(parse_seconds), _written("ns", 1e-9)]


def _size_text(size: object) -> str:
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ConfigError(f"{size!r} is not a size", hint="write a number and a unit, as 1.5GiB")
    parse_bytes(size)
    return str(size)


def _rate_text(rate: str) -> str:
    parse_rate(rate)
    return rate


# texts that stay as they were written, for people
SizeText = Annotated[str, BeforeValidator(refusing(_size_text))]  # as `1.5GiB`
RateText = Annotated[str, AfterValidator(refusing(_rate_text))]  # as `400Mbit/s` or `50MB/s`


def _as_list(given: object) -> object:
    return [text for text in (given,) if text] if isinstance(given, str) else given


Texts = Annotated[list[str], BeforeValidator(_as_list)]  # one may stand alone


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as cause:
        raise ConfigError(f"cannot read {what} {path}: {cause.strerror}") from cause
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as cause:
        raise ConfigError(f"{path} is not TOML: {cause}") from cause


def checked(kind: type[T], tree: object, where: str = "") -> T:
    """A `kind` of a table. `where`: the file, for errors. Raises ConfigError."""
    try:
        return TypeAdapter(kind).validate_python(tree)
    except ValidationError as cause:
        raise explained(cause, kind, tree, where) from cause


def as_tree(held: Any, **how: Any) -> dict[str, Any]:
    """The table that `held` is read from. `how`: of pydantic's `dump_python`."""
    tree: dict[str, Any] = TypeAdapter(type(held)).dump_python(
        held, mode="json", exclude_none=True, **how
    )
    return tree


def as_toml(held: Any, **how: Any) -> str:
    """The file that `held` is read from. `how`: of pydantic's `dump_python`."""
    return tomli_w.dumps(as_tree(held, **how))


def merged(tree: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with dotted keys set; None takes a key away. Raises ConfigError."""
    out = {k: dict(v) if isinstance(v, Mapping) else v for k, v in tree.items()}
    for key, given in words.items():
        *path, last = key.split(".")
        at = out
        for i, part in enumerate(path):
            inner = at.get(part, {})
            if not isinstance(inner, Mapping):
                raise ConfigError(
                    f"`{'.'.join(path[: i + 1])}` is not a table, so `{key}` cannot be set"
                )
            at[part] = dict(inner)
            at = at[part]
        if given is None:
            at.pop(last, None)
        else:
            at[last] = given
    return out


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value, of a file's tables."""
    out: dict[str, Any] = {}
    for name, table in tree.items():
        if isinstance(table, Mapping) and table:
            out |= {f"{name}.{key}": inner for key, inner in table.items()}
        else:
            out[name] = table
    return out


def keys_of(kind: Any) -> dict[str, FieldInfo]:
    """The keys of a section, as they are written."""
    fields: dict[str, FieldInfo] = (
        kind.__pydantic_fields__ if is_pydantic_dataclass(kind) else kind.model_fields
    )
    return {about.alias or name: about for name, about in fields.items()}


def meaning_of(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def section_in(annotation: Any) -> Any:
    """The section that a field holds, alone, in a list or where it may be missing; else None."""
    if isinstance(annotation, type) and (
        is_pydantic_dataclass(annotation) or issubclass(annotation, BaseModel)
    ):
        return annotation
    found = (section_in(arg) for arg in get_args(annotation))
    return next((one for one in found if one is not None), None)


def unknown_key(kind: Any, path: Sequence[int | str], where: str = "") -> ConfigError:
    """The error for the first part of `path` that is no key of its section."""
    inside, before = kind, ""
    for part in path:
        known = keys_of(inside) if inside is not None and isinstance(part, str) else {}
        if isinstance(part, str) and part not in known:
            break
        inside = section_in(known[part].annotation) if isinstance(part, str) else inside
        before += f"{part}."
    near = did_you_mean(str(part), known, before)
    return ConfigError(
        f"{_at(where)}unknown key `{before}{part}`",
        hint=near or f"keys here are {', '.join(known)}",
    )


def refusal_in(error: ErrorDetails) -> RoadtrainError | None:
    """The error of ours that a `refusing` validator raised, if one did."""
    refused = error.get("ctx", {}).get("error")
    return refused.error if isinstance(refused, _Refused) else None


def explained(cause: ValidationError, kind: Any, tree: object, where: str = "") -> ConfigError:
    """The first mistake in `tree`, which is no `kind`; an unknown key explains a missing one."""
    errors = cause.errors()
    error = min(errors, key=lambda one: one["type"] not in UNKNOWN)
    if error["type"] in UNKNOWN:
        return unknown_key(kind, error["loc"], where)
    if error["type"].startswith("missing"):
        key = ".".join(map(str, error["loc"]))
        about = keys_of(kind).get(key)
        is_table = about is not None and section_in(about.annotation) is not None
        hint = (meaning_of(about) if about else "") or (f"add a [{key}] table" if is_table else "")
        return ConfigError(f"{_at(where)}`{key}` is missing", hint=hint)
    path, found = _reached(tree, error["loc"])
    # where a field may be of several types, each says why it is not
    own = [one for one in errors if _reached(tree, one["loc"])[0] == path]
    said = " or ".join(dict.fromkeys(map(_said, own)))
    if repr(found) not in said and not (error["type"] == "value_error" and isinstance(found, dict)):
        said += f", not {found!r:.200}"
    ours = refusal_in(error) or ConfigError("")
    key = f"`{'.'.join(map(str, path))}`: " if path else ""
    error_type = type(ours) if isinstance(ours, ConfigError) else ConfigError
    return error_type(_at(where) + key + said, hint=ours.hint)


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def _reached(tree: Any, path: Sequence[int | str]) -> tuple[list[int | str], Any]:
    """The part of `path` that leads through `tree`, and what is there. What follows is the name of
    one of the types that a field may have."""
    through: list[int | str] = []
    for part in path:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            break
        through.append(part)
    return through, tree


def _said(error: ErrorDetails) -> str:
    if error["type"] in ("model_type", "dataclass_type", "dict_type"):
        return "Input should be a table"
    return error["msg"].removeprefix("Value error, ").replace("valid tuple", "valid list")
