"""The built-in devices and clusters of devices.toml. Reads the file without pydantic, so that
commands which only need a device's size start fast.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from roadtrain.errors import ConfigError
from roadtrain.options.names import did_you_mean


def template(kind: str, name: str) -> dict[str, Any]:
    """Return the built-in table of the device or cluster called `name`. `kind`: "device" or
    "cluster". Raises ConfigError for an unknown name."""
    templates = tables()[kind]
    if name not in templates:
        raise ConfigError(
            f"no {kind} is called {name!r}",
            hint=did_you_mean(name, templates) or f"give a table, or one of {', '.join(templates)}",
        )
    named = {"kind": name} if kind == "device" else {}
    return {key: value for key, value in templates[name].items() if key != "source"} | named


def device_name(text: str) -> str:
    """Return the name in the catalogue of a device as users and drivers call it, such as "RTX 4090"
    or "NVIDIA GeForce RTX 4090". Raises ConfigError, with the nearest name, if there is none or
    several."""
    names, key = list(tables()["device"]), _letters(text)
    exact = [name for name in names if _letters(name) == key]
    near = exact or [n for n in names if key and (key in _letters(n) or _letters(n) in key)]
    if len(near) == 1:
        return near[0]
    guess = did_you_mean(text.strip().replace(" ", "-").upper(), names, least=0.4)
    listed = f"available are {', '.join(near or names)}"
    what = "could be several devices" if near else "is not in the device catalogue"
    raise ConfigError(f"{text!r} {what}", hint=listed if near or not guess else guess)


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


@cache
def tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("roadtrain.config").joinpath("devices.toml").read_text())
