"""Suggest the nearest valid name for an unknown name that a user has typed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from roadtrain.errors import ConfigError


def did_you_mean(word: str, choices: Iterable[str], before: str = "", least: float = 0.6) -> str:
    """Return `did you mean X?`, where X is the choice most similar to `word`, or "". `before`: a
    prefix to print before X, such as `optimizer.`. `least`: the required similarity, from 0 to 1.
    """
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=least)
    return f"did you mean `{before}{near[0]}`?" if near else ""


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> ConfigError:
    """Return the error for an unknown `kind` ("command", "benchmark") called `name`."""
    choices = sorted(choices)
    hint = did_you_mean(name, choices) or f"available: {', '.join(choices) or 'none'}"
    return ConfigError(f"unknown {kind} `{name}`", hint=hint)
