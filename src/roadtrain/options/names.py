"""Names that users type: one that nobody knows is answered with the nearest that is known, one of
the first edition works for one version more."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from roadtrain.errors import ConfigError

Report = Callable[[str], None]


def did_you_mean(word: str, known: Iterable[str], before: str = "", least: float = 0.6) -> str:
    """`did you mean X?`, or nothing if no known word is near. `before`: what goes before each of
    them, as `optimizer.`; `least`: how near is near, from 0 to 1."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=least)
    return f"did you mean `{before}{near[0]}`?" if near else ""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for `name`, which is no `kind` ("command", "benchmark"), with the nearest that
    is."""
    known = sorted(known)
    hint = did_you_mean(name, known) or f"known: {', '.join(known) or 'none'}"
    return ConfigError(f"unknown {kind} `{name}`", hint=hint)


@dataclass(frozen=True)
class Former:
    """What a key of the first edition is now."""

    now: str
    made: Callable[[Any], Any] = lambda given: given  # the former value -> the key's


def in_words_of_now(
    words: Mapping[str, Any], former: Mapping[str, Former], report: Report
) -> dict[str, Any]:
    """Key -> value, with keys of the first edition, or of its tables, as they are called now.
    `report` hears of each of them. Raises ConfigError where a key is given in both words."""
    out: dict[str, Any] = {}
    for key, given in words.items():
        known = _former(key, former)
        if known.now != key:
            report(f"`{key}` is `{known.now}` now; the former key works in this version")
        if known.now in out or (known.now != key and known.now in words):
            raise ConfigError(f"`{key}` and `{known.now}` are one key", hint=f"give {known.now}")
        out[known.now] = None if given is None else known.made(given)
    return out


def _former(key: str, former: Mapping[str, Former]) -> Former:
    table, _, name = key.partition(".")
    if key in former or table not in former:
        return former.get(key, Former(key))
    return Former(f"{former[table].now}.{name}")
