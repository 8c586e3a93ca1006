"""Draw runs with Bokeh: the curves, the timeline, and the parts that are text.

Curves and timelines are thinned out before they are sent, so a page costs the same for 100 and for
100,000 steps. A page is drawn again when a run has new lines.
"""

from __future__ import annotations

import functools
import math
import re
import time
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bokeh import models
from bokeh.document import Document
from bokeh.models import ColumnDataSource, Div, HoverTool, Range1d
from bokeh.plotting import figure

from roadtrain.config.cluster import Host
from roadtrain.dashboard.alerts import LaneRate, alerts, lane_rates, limit_line
from roadtrain.dashboard.watch import RunWatch
from roadtrain.planner import look
from roadtrain.servers.trace import Interval, joined
from roadtrain.training.run_lines import wear_rows

HERE = Path(__file__).parent
POINTS = 600  # most points of a curve
BARS = 4000  # most bars of the timeline; of more, neighbors are joined
REDRAW_S = 1.0  # curves and timeline are drawn at most so often
ROW, LOW_ROW, FRAME = 18, 9, 60  # pixels of a lane, of each of MANY lanes, and around the lanes
MANY = 48
COMMON: dict[str, Any] = {  # of all figures
    "sizing_mode": "stretch_width",
    "tools": "xpan,xwheel_zoom,xbox_zoom,reset",
    "active_drag": "xpan",
    "active_scroll": "xwheel_zoom",
}
CURVES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "tokens_per_s": "tokens/s",
    "lr": "learning rate",
}
TEXTS = ("top", "memory", "rates", "state", "wear")  # macros of panels.html.j2
KINDS = ("", "worker", "server", "disk", "link")  # of lanes, from top to bottom; first devices
KIND = re.compile(r"(?:^|: )(worker|server|disk|link) ")
LONG_PATH = re.compile(r"\((/\S{20,}?)(\S{18})\)")  # in the name of a lane


def thinned(x: array[float], y: array[float] | np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Return at most POINTS points of a curve: the least and the largest value of each stretch."""
    xs, ys = np.array(x), np.array(y, dtype=float)  # copies: the arrays still grow
    if len(xs) <= POINTS:
        return xs, ys
    edges = np.linspace(0, len(xs), POINTS // 2 + 1).astype(int)
    low, high = (np.where(np.isfinite(ys), ys, other) for other in (np.inf, -np.inf))
    least = [a + np.argmin(low[a:b]) for a, b in pairwise(edges)]
    most = [a + np.argmax(high[a:b]) for a, b in pairwise(edges)]
    kept = np.unique([*least, *most])
    return xs[kept], ys[kept]


def curve(run: RunWatch, name: str) -> tuple[Any, Any]:
    curves = run.lines.curves
    if name != "tokens_per_s":
        return thinned(curves["step"], curves[name])
    with np.errstate(divide="ignore", invalid="ignore"):
        return thinned(curves["step"], np.array(curves["tokens"]) / np.array(curves["seconds"]))


class Bars(NamedTuple):
    """The bars of a timeline. `lanes`: their names, from top to bottom."""

    lanes: list[str]
    columns: dict[str, Any]


@functools.lru_cache(maxsize=8)
def computed(
    runs: tuple[RunWatch, ...],
    versions: tuple[int, ...],
    host: Host | None,
    window: tuple[float, float] | None,
) -> tuple[Bars, list[list[LaneRate]]]:
    """Return the bars and the rates of runs, which all readers share."""
    return bars(runs, window), [lane_rates(run, host) for run in runs]


def bars(runs: Sequence[RunWatch], window: tuple[float, float] | None = None) -> Bars:
    """Return the bars of the last steps of runs. `window`: the seconds (begin, end) into which a
    reader has zoomed, where short bars are drawn as well."""
    every: list[Interval] = []
    for run in runs:
        before = f"{run.name}: " if len(runs) > 1 else ""
        for own in run.by_process().values():
            every += [work._replace(lane=before + work.lane) for work in own]
    lanes = sorted({work.lane for work in every}, key=_order)
    position = {lane: i for i, lane in enumerate(lanes)}
    every.sort(key=lambda work: work.end)
    begin, end = window or (-math.inf, math.inf)
    drawn = few([work for work in every if work.begin < end and work.end > begin])
    if window is not None:  # the ends of all, so that `reset` shows them
        ends = min(work.begin for work in every), every[-1].end
        drawn += [Interval("", lanes[0], end, end) for end in ends]
    colors = [look.STAGE_COLORS.get(work.stage, look.OTHER_COLOR) for work in drawn]
    numbers = np.array([(position[work.lane], *work[2:]) for work in drawn], dtype=float)
    y, left, right, nbytes = numbers.reshape(-1, 4).T
    columns = {
        "y": y,
        "left": left * 1e3,
        "right": right * 1e3,
        "color": np.array([int(f"{color[1:]}cc", 16) for color in colors], dtype=np.uint32),
        "stage": [work.stage for work in drawn],
        "ms": (right - left) * 1e3,
        "MB": nbytes / 1e6,
        "GB/s": nbytes / 1e9 / np.maximum(right - left, 1e-9),
    }
    return Bars([LONG_PATH.sub(r"(…\2)", lane) for lane in lanes], columns)


def few(intervals: list[Interval]) -> list[Interval]:
    """Join intervals until there are at most BARS, or until a lane has one bar for each stage."""
    begin = min((work.begin for work in intervals), default=0.0)
    whole_s = intervals[-1].end - begin if intervals else 0.0
    gap_s = whole_s / BARS
    while len(intervals) > BARS and gap_s < whole_s:
        intervals, gap_s = joined(intervals, gap_s), gap_s * 2
    return intervals


def _order(lane: str) -> tuple[int, list[tuple[bool, Any]]]:
    """Sort lanes by kind, and "worker 10" after "worker 9"."""
    words = re.split(r"(\d+)", lane)
    kind = KIND.search(lane)
    return KINDS.index(kind[1] if kind else ""), [
        (word.isdigit(), int(word) if word.isdigit() else word) for word in words
    ]


@functools.cache
def macros() -> Any:
    templates = look.templates_in(HERE)
    templates.globals |= {"alerts": alerts, "limit_line": limit_line, "wear_rows": wear_rows}
    return templates.get_template("panels.html.j2").module


def part(name: str, *values: Any) -> str:
    """Return the HTML of a part of the page that is text."""
    return str(getattr(macros(), name)(*values))


class Panels:
    """The panels of a page, by name. `update` brings them up to date."""

    def __init__(self, runs: Sequence[RunWatch], host: Host | None, tbw: float | None) -> None:
        self.runs, self.host, self.tbw = runs, host, tbw
        self.drawn: tuple[int, ...] = ()  # the versions of the runs that are drawn
        self.drawn_at = -math.inf
        self.window: tuple[float, float] | None = None  # what the reader sees of the timeline
        self.lanes: list[str] = []
        self.found: list[list[LaneRate]] = []
        sheet = models.InlineStyleSheet(css=(HERE / "panels.css").read_text(encoding="utf-8"))
        self.texts = {
            name: Div(name=name, stylesheets=[sheet], sizing_mode="stretch_width")
            for name in ("legend", *TEXTS)
        }
        self.texts["legend"].text = part("legend", look.STAGE_COLORS)
        self.sources: dict[str, ColumnDataSource] = {}
        steps = models.DataRange1d()  # all curves show the same steps
        self.figures = {name: self._curves(name, steps) for name in CURVES}
        self.figures["timeline"] = self._timeline()
        self.update()

    def _curves(self, name: str, steps: models.DataRange1d) -> figure:
        plot = figure(name=name, title=CURVES[name], x_range=steps, height=190, **COMMON)
        plot.toolbar_location = None
        plot.y_range.update(default_span=2e-5)  # around a constant learning rate
        plot.add_tools(HoverTool(tooltips=[("step", "@x"), (CURVES[name], "@y")], mode="vline"))
        for number, run in enumerate(self.runs):
            source = self.sources[f"{name} {number}"] = ColumnDataSource({"x": [], "y": []})
            label = {"legend_label": run.name} if len(self.runs) > 1 else {}
            color = look.RUN_COLORS[number % len(look.RUN_COLORS)]
            plot.line("x", "y", source=source, color=color, line_width=1.5, **label)
        return plot

    def _timeline(self) -> figure:
        source = self.sources["timeline"] = ColumnDataSource(bars([]).columns)
        plot = figure(name="timeline", y_range=Range1d(), x_axis_type="datetime", **COMMON)
        edges: dict[str, Any] = {"left": "left", "right": "right", "height": 0.8}
        plot.hbar("y", **edges, fill_color="color", line_color=None, source=source)
        tooltips = [("", "@stage"), ("ms", "@ms{0.000}"), ("MB", "@MB{0.0}")]
        plot.add_tools(HoverTool(tooltips=[*tooltips, ("GB/s", "@{GB/s}{0.000}")]))
        plot.ygrid.visible = False
        return plot

    def update(self) -> None:
        """Draw what is new. Some texts name times, so they are always compared."""
        versions, window = tuple(run.version for run in self.runs), self._zoom()
        new = versions != self.drawn and time.monotonic() - self.drawn_at > REDRAW_S
        if changed := new or window != self.window:
            self.drawn, self.drawn_at, self.window = versions, time.monotonic(), window
            self._draw()
        several = len(self.runs) > 1
        for name in TEXTS if changed else ("top", "state"):
            text = ""
            for run, found in zip(self.runs, self.found, strict=True):
                heading = part("heading", run) if several and name != "top" else ""
                text += heading + part(name, run, found, self.tbw)
            if self.texts[name].text != text:
                self.texts[name].text = text

    def _draw(self) -> None:
        for name in CURVES:
            for number, run in enumerate(self.runs):
                x, y = curve(run, name)
                self.sources[f"{name} {number}"].data = {"x": x, "y": y}
        (lanes, columns), self.found = computed(
            tuple(self.runs), self.drawn, self.host, self.window
        )
        if lanes != self.lanes:
            self.lanes, plot = lanes, self.figures["timeline"]
            row, font = (ROW, "11px") if len(lanes) <= MANY else (LOW_ROW, "8px")
            plot.height = FRAME + row * max(3, len(lanes))
            plot.y_range.update(start=len(lanes) - 0.5, end=-0.5)
            plot.yaxis.update(
                ticker=[*range(len(lanes))],
                major_label_overrides=dict(enumerate(lanes)),
                major_label_text_font_size=font,
            )
        self.sources["timeline"].data = columns

    def _zoom(self) -> tuple[float, float] | None:
        """Return the seconds (begin, end) into which the reader has zoomed, or None."""
        shown, columns = self.figures["timeline"].x_range, self.sources["timeline"].data
        if not len(columns["left"]) or not math.isfinite(shown.end - shown.start):
            return None
        whole_ms = columns["right"].max() - columns["left"].min()
        beside = (shown.end - shown.start) / 2  # a reader who moves sees bars at once
        if 4 * beside > whole_ms:
            return None
        return (shown.start - beside) / 1e3, (shown.end + beside) / 1e3


def fill(document: Document, panels: Panels, theme: str, scripts: Sequence[str] = ()) -> None:
    """Add the panels to a document.

    Args:
        theme: light or dark; "" for that of the reader's system.
        scripts: The addresses of Bokeh's scripts on a server.
    """
    with document.models.freeze():  # so that all models are counted once
        for root in (*panels.texts.values(), *panels.figures.values()):
            document.add_root(root)
    document.title = " ".join(run.name for run in panels.runs)
    templates = look.templates_in(HERE)
    templates.autoescape = False  # like Bokeh's own, this template gets parts of pages
    document.template = templates.get_template("dashboard.html.j2")
    document.template_variables.update(style=look.style_sheet(theme), scripts=scripts)
