"""The colors, the style sheet and the templates of all pages: `plan --html` and `show`."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from roadtrain.units import show_bytes, show_rate, show_seconds

STAGE_COLORS = {
    "Forward": "#74a3d4",
    "Backward": "#3b6ea8",
    "Fetch": "#59a14f",
    "Push": "#e15759",
    "Update": "#b07aa1",
    "Sum": "#d37295",
    "Read": "#76b7b2",
    "Write": "#f28e2b",
    "Wait": "#bab0ac",
    "Activations": "#edc948",
    "Commit": "#9c755f",
}
OTHER_COLOR = "#888888"
RUN_COLORS = ("#4c78a8", "#e15759", "#59a14f", "#f28e2b", "#b07aa1", "#76b7b2")


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
