"""Names that users type: an unknown name is answered with the nearest that is known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from roadtrain.errors import ConfigError


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
