"""Read and check the files that users write: jobs, clusters, plans and labs.

A schema is a class derived from `Section`, or a class decorated with `value` if code creates its
instances too. Each field of the class declares a key with its type, unit, limits and description;
`docs/reference` is generated from these fields. Other packages define the schemas.

`checked` builds an instance from a table. A mistake raises a ConfigError that names the file, the
key and the accepted values or the nearest valid key. A number must be written as a number: neither
"1" nor true is accepted for 1.
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
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's types of unknown keys
RULES = ConfigDict(extra="forbid", protected_namespaces=(), ser_json_inf_nan="constants")


class Section(BaseModel):
    """The base class of schemas: a subclass declares the keys of a table in a file. The string
    below a field is the description of the key."""

    model_config = RULES | {"frozen": True, "use_attribute_docstrings": True}


@dataclass_transform(frozen_default=True, field_specifiers=(field, Field))
def value(kind: type[T]) -> type[T]:
    """Turn the class `kind` into a frozen dataclass that is a schema like a Section. Instances that
    Python code creates are checked too: an invalid field raises ConfigError."""
    made: Any = dataclass(frozen=True, config=RULES)(kind)
    plain_init = made.__init__

    def __init__(self: T, *args: Any, **fields: Any) -> None:
        named = [*made.__pydantic_fields__][: len(args)]
        if len(named) < len(args) or fields.keys() & set(named):
            raise TypeError(f"{kind.__name__}(): too many arguments, or a repeated argument")
        fields |= zip(named, args)
        try:
            plain_init(self, **fields)
        except ValidationError as cause:
            raise explain(cause, made, fields, kind.__name__) from cause

    made.__init__ = __init__
    return made  # type: ignore[no-any-return]


Integer = Annotated[int, Field(strict=True)]
Whole = Annotated[Integer, Field(ge=0)]
Count = Annotated[Integer, Field(ge=1)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Number = Annotated[Real, Field(ge=0)]
Flag = Annotated[bool, Field(strict=True)]


class _Refused(ValueError):
    """A ValueError, which pydantic expects from validators, that contains a RoadtrainError."""

    def __init__(self, error: RoadtrainError) -> None:
        super().__init__(str(error).partition("\nhint: ")[0])
        self.error = error


def refusing(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Turn `read` into a pydantic validator. A RoadtrainError of `read` reaches the user with the
    name of the invalid key."""

    def validator(value: Any) -> Any:
        try:
            return read(value)
        except RoadtrainError as error:
            raise _Refused(error) from error

    return validator


def _read_unit(parse: Callable[[str], float]) -> BeforeValidator:
    def read(value: object) -> float:
        if type(value) in (int, float) and value == 0:
            return 0.0
        if not isinstance(value, str):
            raise ConfigError(f"{value!r} has no unit", hint="write a number with a unit")
        return parse(value)

    return BeforeValidator(refusing(read))


def _write_unit(unit: str, scale: float = 1.0, decimals: int = 0) -> PlainSerializer:
    """Return a pydantic serializer that writes a number as a multiple of `scale` with the unit
    `unit`."""

    def write(number: float) -> str | int:
        digits = f"{number / scale:.{12 if number < 1e3 * scale else decimals}f}"
        digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
        return digits + unit if number else 0

    return PlainSerializer(write)


# numbers that are written with a unit
Rate = Annotated[float, _read_unit(parse_rate), _write_unit("B/s")]
Bytes = Annotated[float, _read_unit(parse_bytes), _write_unit("B")]
Flops = Annotated[float, _read_unit(parse_flops), _write_unit("TFLOP/s", 1e12, 6)]
Seconds = Annotated[float, _read_unit(parse_seconds), _write_unit("ns", 1e-9)]


def _size_text(size: object) -> str:
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ConfigError(f"{size!r} is not a size", hint="write a size such as 1.5GiB")
    parse_bytes(size)
    return str(size)


def _rate_text(rate: str) -> str:
    parse_rate(rate)
    return rate


# text with a unit, kept as the user wrote it
SizeText = Annotated[str, BeforeValidator(refusing(_size_text))]  # such as `1.5GiB`
RateText = Annotated[str, AfterValidator(refusing(_rate_text))]  # such as `400Mbit/s`


def as_list(value: object) -> object:
    """Put a single text into a list; return other values unchanged."""
    return [text for text in (value,) if text] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(as_list)]  # a single text is accepted too


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """Return the content of a TOML file. `what`: the kind of file, for error messages. Raises
    ConfigError."""
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as cause:
        raise ConfigError(f"cannot read {what} {path}: {cause.strerror}") from cause
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as cause:
        raise ConfigError(f"{path} is not TOML: {cause}") from cause


def checked(kind: type[T], tree: object, where: str = "") -> T:
    """Build an instance of the schema `kind` from a table. `where`: name of the file in error
    messages. Raises ConfigError if the table does not match the schema."""
    try:
        return TypeAdapter(kind).validate_python(tree)
    except ValidationError as cause:
        raise explain(cause, kind, tree, where) from cause


def as_tree(value: Any, **options: Any) -> dict[str, Any]:
    """Convert an instance of a schema to a table, from which `checked` builds an equal instance.
    `options`: arguments for pydantic's `dump_python`."""
    tree: dict[str, Any] = TypeAdapter(type(value)).dump_python(
        value, mode="json", exclude_none=True, **options
    )
    return tree


def as_toml(value: Any, **options: Any) -> str:
    """Convert an instance of a schema to TOML text, from which `read_toml` and `checked` build an
    equal instance. `options`: arguments for pydantic's `dump_python`."""
    return tomli_w.dumps(as_tree(value, **options))


def merged(tree: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the table `tree` with the values of `overrides`, whose keys are dotted, such
    as `run.dir`. The value None removes a key. Raises ConfigError if a dotted key leads through a
    value that is not a table."""
    out = {k: dict(v) if isinstance(v, Mapping) else v for k, v in tree.items()}
    for key, value in overrides.items():
        *path, last = key.split(".")
        at = out
        for i, part in enumerate(path):
            inner = at.get(part, {})
            if not isinstance(inner, Mapping):
                raise ConfigError(
                    f"`{key}` cannot be set, because `{'.'.join(path[: i + 1])}` is not a table"
                )
            at[part] = dict(inner)
            at = at[part]
        if value is None:
            at.pop(last, None)
        else:
            at[last] = value
    return out


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a file as one dict with dotted keys: {"a.b": 1} for {"a": {"b": 1}}.

    Tables inside these tables are not flattened: {"a.b": {"c": 1}} for {"a": {"b": {"c": 1}}}.
    """
    out: dict[str, Any] = {}
    for name, table in tree.items():
        if isinstance(table, Mapping) and table:
            out |= {f"{name}.{key}": inner for key, inner in table.items()}
        else:
            out[name] = table
    return out


def keys_of(kind: Any) -> dict[str, FieldInfo]:
    """Return the fields of the schema `kind`, by the name that the key has in a file."""
    fields: dict[str, FieldInfo] = (
        kind.__pydantic_fields__ if is_pydantic_dataclass(kind) else kind.model_fields
    )
    return {about.alias or name: about for name, about in fields.items()}


def meaning_of(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def section_in(annotation: Any) -> Any:
    """Return the schema that a type annotation is or contains, such as `Host` in `list[Host]`, or
    None."""
    if isinstance(annotation, type) and (
        is_pydantic_dataclass(annotation) or issubclass(annotation, BaseModel)
    ):
        return annotation
    found = (section_in(arg) for arg in get_args(annotation))
    return next((section for section in found if section is not None), None)


def unknown_key(kind: Any, path: Sequence[int | str], where: str = "") -> ConfigError:
    """Return an error for the first of the nested keys in `path` that is not a key in the schema
    `kind`. `where`: name of the file in the message."""
    inside, before = kind, ""
    for part in path:
        keys = keys_of(inside) if inside is not None and isinstance(part, str) else {}
        if isinstance(part, str) and part not in keys:
            break
        inside = section_in(keys[part].annotation) if isinstance(part, str) else inside
        before += f"{part}."
    near = did_you_mean(str(part), keys, before)
    return ConfigError(
        f"{_at(where)}unknown key `{before}{part}`",
        hint=near or f"valid keys are {', '.join(keys)}",
    )


def refusal_in(error: ErrorDetails) -> RoadtrainError | None:
    """Return the RoadtrainError inside a pydantic error that a `refusing` validator has caused, or
    None."""
    refused = error.get("ctx", {}).get("error")
    return refused.error if isinstance(refused, _Refused) else None


def explain(cause: ValidationError, kind: Any, tree: object, where: str = "") -> ConfigError:
    """Return a ConfigError for the first mistake in the table `tree`; unknown keys come first.
    `kind` is the schema of `tree`, and `where` the name of the file in the message."""
    errors = cause.errors()
    error = min(errors, key=lambda e: e["type"] not in UNKNOWN)
    if error["type"] in UNKNOWN:
        return unknown_key(kind, error["loc"], where)
    if error["type"].startswith("missing"):
        key = ".".join(map(str, error["loc"]))
        about = keys_of(kind).get(key)
        is_table = about is not None and section_in(about.annotation) is not None
        hint = (meaning_of(about) if about else "") or (f"add a [{key}] table" if is_table else "")
        return ConfigError(f"{_at(where)}`{key}` is missing", hint=hint)
    path, found = _follow(tree, error["loc"])
    # if a field accepts several types, pydantic reports one error for each
    own = [e for e in errors if _follow(tree, e["loc"])[0] == path]
    message = " or ".join(dict.fromkeys(map(_message, own)))
    is_table = error["type"] == "value_error" and isinstance(found, dict)
    message += "" if repr(found) in message or is_table else f", not {found!r:.200}"
    ours = refusal_in(error) or ConfigError("")
    key = f"`{'.'.join(map(str, path))}`: " if path else ""
    error_type = type(ours) if isinstance(ours, ConfigError) else ConfigError
    return error_type(_at(where) + key + message, hint=ours.hint)


def _at(where: str) -> str:
    return f"{where}: " if where else ""


def _follow(tree: Any, path: Sequence[int | str]) -> tuple[list[int | str], Any]:
    """Return the longest beginning of `path` that exists in the table `tree`, and the value at its
    end."""
    through: list[int | str] = []
    for part in path:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            break
        through.append(part)
    return through, tree


def _message(error: ErrorDetails) -> str:
    if error["type"] in ("model_type", "dataclass_type", "dict_type"):
        return "Input should be a table"
    return error["msg"].removeprefix("Value error, ").replace("valid tuple", "valid list")
