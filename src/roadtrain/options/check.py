"""Check the options that code passes to a public function or dataclass.

The annotation of an argument or dataclass field declares an option: its type, its limits
(`Annotated[int, Field(ge=1)]`) and additional checks (`refusing`). Values are never converted.
"""

from __future__ import annotations

import functools
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model

from roadtrain.errors import ConfigError
from roadtrain.options.schema import refusal_in, refusing
from roadtrain.units import parse_bytes

_RULES = ConfigDict(
    arbitrary_types_allowed=True, strict=True, allow_inf_nan=False, protected_namespaces=()
)
_WORDS: dict[Any, str] = {
    str: "a string",
    bytes: "bytes",
    int: "an integer",
    float: "a number",
    bool: "True or False",
    Any: "anything",
    NoneType: "None",
    Path: "a Path",
}
_LIMITS = {
    "gt": "above",
    "ge": "at least",
    "lt": "below",
    "le": "at most",
    "multiple_of": "a multiple of",
}
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 80


def _check_path(path: str | Path) -> str | Path:
    if not str(path) or "\0" in str(path):
        raise ConfigError("a path must not be empty or contain a null character")
    return path


def _check_exists(path: str | Path) -> None:
    if not os.path.exists(path):
        raise ConfigError("the file or directory does not exist")


Size = Annotated[
    str | int,
    AfterValidator(refusing(parse_bytes)),
    Field(description="a size such as '900MiB', a number of bytes"),
]
PositiveInt = Annotated[int, Field(ge=1)]
Deadline = Annotated[float, Field(gt=0, le=10**9)]  # seconds until a wait fails (Rule 5)
PathLike = Annotated[str | Path, AfterValidator(refusing(_check_path)), Field(description="a path")]
ExistingPath = Annotated[PathLike, AfterValidator(refusing(_check_exists))]


def check_options(owner: Callable[..., Any], values: Mapping[str, Any], where: str = "") -> None:
    """Raise ConfigError for the first option whose value the annotations of `owner` do not allow.

    Args:
        owner: The function or dataclass that declares the options.
        values: The values of the options, by the name of the argument or field.
        where: The name of `owner` in the error message. If "", its name in the code.
    """
    model, hints = _declared(owner)
    try:
        model.model_validate({name: values[name] for name in hints if name in values})
    except ValidationError as cause:
        errors = cause.errors()
        name = str(errors[0]["loc"][0])
        own = owner.__name__ if isinstance(owner, type) else f"{owner.__name__}()"
        what = f"{where or own}: `{name}` cannot be {' '.join(_SHOWN.repr(values[name]).split())}"
        hint = f"`{name}` must be {_accepted(hints[name])}"
        refused = next(filter(None, map(refusal_in, errors)), None)
        if refused is None:
            raise ConfigError(what, hint=hint) from cause
        reason = str(refused).partition("\nhint: ")[0]
        raise type(refused)(f"{what} ({reason})", hint=hint) from cause


class Checked:
    """Checks the fields of a dataclass whenever one is made. Raises ConfigError."""

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))


@functools.cache
def _declared(owner: Callable[..., Any]) -> tuple[type[BaseModel], dict[str, Any]]:
    """Return a pydantic model with a field for each option of `owner`, and the annotations by
    name."""
    hints = get_type_hints(owner, include_extras=True)
    hints.pop("return", None)
    fields: dict[str, Any] = {name: (hint, None) for name, hint in hints.items()}
    return create_model(owner.__name__, __config__=_RULES, **fields), hints


def _accepted(hint: Any) -> str:
    """Describe the values that the annotation `hint` allows, such as `an integer at least 1`."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in _WORDS or not args:
        return _WORDS.get(hint) or _class_name(hint)
    if origin is Annotated:
        described = [about.description for about in args[1:] if getattr(about, "description", "")]
        limited = f"{_accepted(args[0])} {' and '.join(_limits(args[1:]))}"
        return described[0] if described else limited.rstrip()
    if origin is Literal:
        return _either([repr(value) for value in args])
    if origin is Callable:
        return "a function"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a dict whose values are each {_accepted(args[1])}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list in which each item is {_accepted(args[0])}"
    return _either([_accepted(arg) for arg in args])


def _limits(metadata: Sequence[Any]) -> list[str]:
    """Return a text for each limit in the metadata of an annotation, such as `at least 1`."""
    found = [m for about in metadata for m in getattr(about, "metadata", [about])]
    return [
        f"{word} {getattr(m, at):,}"
        for m in found
        for at, word in _LIMITS.items()
        if hasattr(m, at)
    ]


def _either(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _class_name(kind: Any) -> str:
    """Return the name of a class for an error message, such as `a torch.nn.Module` or `TopK`."""
    if not isinstance(kind, type):
        return str(kind).removeprefix("typing.")
    package = ".".join(kind.__module__.split(".")[:2])
    own = kind.__module__.startswith(("roadtrain", "builtins"))
    return kind.__qualname__ if own else f"a {package}.{kind.__qualname__}"
