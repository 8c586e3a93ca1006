"""The colors, the style sheet and the templates of all pages: `plan --html` and `show`."""

from __future__ import annotations

import tomllib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from roadtrain.units import show_bytes, show_rate, show_seconds

COLORS = tomllib.loads(Path(__file__).with_name("look.toml").read_text(encoding="utf-8"))
STAGE_COLORS: dict[str, str] = COLORS["stages"]
OTHER_COLOR: str = COLORS["other"]
RUN_COLORS: list[str] = COLORS["runs"]


def style_sheet(theme: str = "") -> str:
    """Return the style sheet of a page. `theme`: light or dark; "" for that of the reader's
    system."""
    scheme = theme or "light dark"
    sheet = Path(__file__).with_name("look.css").read_text(encoding="utf-8")
    return f":root {{ color-scheme: {scheme} }}\n{sheet}"


def templates_in(folder: Path) -> Environment:
    """Return the templates of a room, which escape all values and format units by filters."""
    found = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"bytes": show_bytes, "rate": show_rate, "seconds": show_seconds}
    return found
