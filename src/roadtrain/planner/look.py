"""The colors and the style sheet of all pages: `plan --html` and `show`."""

from __future__ import annotations

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
TEXT = {"light": "#1a1c1e", "dark": "#e6e8ea"}
LINES = {"light": "#d5d8dc", "dark": "#3c4249"}
GROUND = {"light": "#ffffff", "dark": "#15191c"}
PANEL = {"light": "#f4f5f7", "dark": "#20262b"}
FONT = "system-ui, sans-serif"
WARNING, FINE = "#c8102e", "#2e7d32"


def _colors(theme: str) -> str:
    return (
        f"--text: {TEXT[theme]}; --lines: {LINES[theme]}; --ground: {GROUND[theme]};"
        f" --panel: {PANEL[theme]}; color-scheme: {theme};"
    )


def style_sheet(theme: str = "") -> str:
    """Return the style sheet of a page. `theme`: light or dark; "" for that of the reader's
    system."""
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {_colors('dark')} }} }}"
    return f"""
:root {{ {_colors(theme or "light")} }}
{"" if theme else dark}
body {{ font: 14px {FONT}; margin: 1.5em; color: var(--text); background: var(--ground) }}
pre {{ white-space: pre-wrap; background: var(--panel); padding: 1em }}
a {{ color: inherit }}
svg {{ width: 100% }}
svg text {{ fill: var(--text) }}
"""
