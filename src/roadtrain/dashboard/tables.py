"""The parts of the page that are text: macros of panels.html.j2. Does not import torch or Bokeh."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from roadtrain.dashboard.alerts import alerts, limit_line
from roadtrain.planner.look import templates_in
from roadtrain.training.run_lines import wear_rows

HERE = Path(__file__).parent


@functools.cache
def macros() -> Any:
    templates = templates_in(HERE)
    templates.globals |= {"alerts": alerts, "limit_line": limit_line, "wear_rows": wear_rows}
    return templates.get_template("panels.html.j2").module


def part(name: str, *values: Any) -> str:
    """Return the HTML of a part of the page."""
    return str(getattr(macros(), name)(*values))
