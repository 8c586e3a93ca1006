"""The keywords of place() in the first edition: each works for one version more, with one printed
line that says its name now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from roadtrain.errors import ConfigError
from roadtrain.options.lossy import Delay, Downcast, TopK
from roadtrain.options.names import unknown_name
from roadtrain.placement.stores import Files, Memory, Servers
from roadtrain.streaming.split import NAMES

Report = Callable[[str], None]


@dataclass(frozen=True)
class FormerKeyword:
    """What a former keyword is now: a field of a value, or another option."""

    option: str  # of place()
    value: type | None  # the class of the option's value; None: the option takes it as it is
    field: str  # of `value`
    default: Any  # what it was where nobody gave it, which leaves the field out
    made: Callable[[Any], Any] = lambda given: given  # the former value -> the field's

    @property
    def now(self) -> str:
        return (
            f"{self.option}={self.value.__name__}({self.field}=...)" if self.value else self.option
        )


FORMER = {
    "servers": FormerKeyword("store", Servers, "addresses", None),
    "replicas": FormerKeyword("store", Servers, "replicas", 1),
    "give_up": FormerKeyword("store", Servers, "give_up", ()),
    "link": FormerKeyword("store", Servers, "link", None),
    "relay": FormerKeyword("store", Servers, "relay", None),
    "buffering": FormerKeyword("store", Servers, "buffering", "auto"),
    "store_rates": FormerKeyword("store", Files, "rates", None),
    "moved_from": FormerKeyword("store", Files, "moved_from", ()),
    "direct": FormerKeyword("store", Files, "direct", True),
    "topk": FormerKeyword(
        "compress",
        TopK,
        "keep",
        None,
        lambda volume: volume / 2 if isinstance(volume, float) else volume,
    ),
    "topk_per_block": FormerKeyword("compress", TopK, "per_block", False),
    "error_feedback": FormerKeyword("compress", TopK, "error_feedback", False),
    "grad_dtype": FormerKeyword(
        "compress",
        Downcast,
        "dtype",
        None,
        lambda dtype: NAMES.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype,
    ),
    "staleness": FormerKeyword(
        "delay", Delay, "steps", 0, lambda steps: None if steps == "none" else steps
    ),
    "budget": FormerKeyword("host_budget", None, "", None),
}
NEEDED = {Servers: "addresses", TopK: "keep"}  # the field without which a value is nothing
IDLE = {"link", "per_block", "direct"}  # fields that said nothing where what they are about was not


def current(options: dict[str, Any], former: Mapping[str, Any], report: Report) -> dict[str, Any]:
    """`options` of place(), with what `former` keywords say in their places. Raises ConfigError for
    a keyword that never was one, and where an option is given in both words."""
    options = dict(options)
    values: dict[type, dict[str, Any]] = {}
    for name, given in former.items():
        if name not in FORMER:
            raise unknown_name("option of place", name, [*options, *FORMER])
        keyword = FORMER[name]
        report(f"place({name}=...) is {keyword.now} now; the former word works in this version")
        if _is_default(keyword, given):
            continue
        if keyword.value is None:
            _check_alone(name, options, keyword.option)
            options[keyword.option] = given
        else:
            values.setdefault(keyword.value, {})[keyword.field] = keyword.made(given)
    if store := _store(options["store"], values.pop(Servers, {}), values.pop(Files, {})):
        options["store"] = store
    for kind, fields in values.items():
        option = "delay" if kind is Delay else "compress"
        _check_alone(kind.__name__, options, option)
        if _is_meant(kind, fields):
            options[option] = kind(**fields)
    return options


def _is_default(keyword: FormerKeyword, given: Any) -> bool:
    empty = not keyword.default and isinstance(given, list | tuple) and not given
    return empty or (type(given) is type(keyword.default) and given == keyword.default)


def _check_alone(name: str, options: Mapping[str, Any], option: str) -> None:
    if options[option] is not None:
        raise ConfigError(
            f"place(): {name} (in a former word) together with {option}={options[option]}",
            hint=f"{option} is one value: give it alone",
        )


def _is_meant(kind: type, fields: Mapping[str, Any]) -> bool:
    """Whether the value is there; fields in IDLE alone were taken and said nothing. Raises
    ConfigError where the field is absent without which the others mean nothing."""
    needed = NEEDED.get(kind)
    if needed is None or needed in fields:
        return True
    if fields.keys() <= IDLE:
        return False
    word = next(w for w, k in FORMER.items() if (k.value, k.field) == (kind, needed))
    raise ConfigError(
        f"{', '.join(sorted(fields))} is said, and no {word} are given", hint=f"give {word} too"
    )


def _store(store: Any, servers: dict[str, Any], files: dict[str, Any]) -> Files | Servers | None:
    """Former keywords about stores, with the path or paths that were `store` then; None where they
    change nothing."""
    if not servers and not files:
        return None
    if isinstance(store, Files | Memory | Servers):
        kept = f"{type(store).__name__}(...)"
        raise ConfigError(
            f"place(): {', '.join(servers | files)} in a former word, together with store={kept}",
            hint=f"say it in {kept}",
        )
    if servers and _is_meant(Servers, servers):
        return _servers(store, servers, files)
    if store:
        return Files(store, **files)
    if files.keys() <= IDLE:
        return None
    raise ConfigError(f"{', '.join(files)} for 0 directories", hint="name them: store=Files([...])")


def _servers(store: Any, servers: dict[str, Any], files: dict[str, Any]) -> Servers:
    """`store` was the directory of the residuals then."""
    if files.keys() - {"direct"}:
        raise ConfigError(
            f"{', '.join(files)} together with servers",
            hint="the state rests here (Files) or there (Servers)",
        )
    return Servers(residuals=Files(store, **files) if store else None, **servers)
