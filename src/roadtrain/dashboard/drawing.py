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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bokeh.document import Document
from bokeh.models import ColumnDataSource, Div, HoverTool, InlineStyleSheet, Range1d
from bokeh.plotting import figure
from jinja2 import Environment, FileSystemLoader

from roadtrain.config.cluster import Host
from roadtrain.dashboard import tables
from roadtrain.dashboard.alerts import LaneRate, lane_rates
from roadtrain.dashboard.watch import RunWatch
from roadtrain.planner.look import OTHER_COLOR, RUN_COLORS, STAGE_COLORS, style_sheet
from roadtrain.servers.trace import Interval, joined

POINTS = 600  # most points of a curve
BARS = 4000  # most bars of the timeline; of more, neighbors are joined
REDRAW_S = 1.0  # curves and timeline are drawn at most so often
ROW, LOW_ROW, FRAME = 18, 9, 60  # pixels of a lane, of each of MANY lanes, and around the lanes
MANY = 48
CURVES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "tokens_per_s": "tokens/s",
    "lr": "learning rate",
}
KINDS = ("", "worker", "server", "disk", "link")  # of lanes, from top to bottom; first devices
KIND = re.compile(r"(?:^|: )(worker|server|disk|link) ")
LONG_PATH = re.compile(r"\((/\S{20,}?)(\S{18})\)")  # in the name of a lane


def thinned(x: array[float], y: array[float] | np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Return at most POINTS points of a curve: the least and the largest value of each stretch."""
    xs, ys = np.array(x), np.array(y, dtype=float)  # copies: the arrays still grow
    if len(xs) <= POINTS:
        return xs, ys
    edges = np.linspace(0, len(xs), POINTS // 2 + 1).astype(int)[:-1]
    ends = np.append(edges[1:], len(xs))
    filled = np.where(np.isfinite(ys), ys, np.inf), np.where(np.isfinite(ys), ys, -np.inf)
    least = [a + int(np.argmin(filled[0][a:b])) for a, b in zip(edges, ends)]
    most = [a + int(np.argmax(filled[1][a:b])) for a, b in zip(edges, ends)]
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
    drawn = every
    if window is not None:
        drawn = [work for work in every if work.begin < window[1] and work.end > window[0]]
    drawn = few(drawn)
    if window is not None:  # the ends of all, so that `reset` shows them
        ends = min(work.begin for work in every), every[-1].end
        drawn += [Interval("", lanes[0], end, end) for end in ends]
    begins, ends_s = (np.array([work[i] for work in drawn], dtype=float) for i in (2, 3))
    nbytes, took_s = np.array([work.nbytes for work in drawn], dtype=float), ends_s - begins
    colors = [STAGE_COLORS.get(work.stage, OTHER_COLOR) for work in drawn]
    columns = {
        "y": np.array([position[work.lane] for work in drawn], dtype=float),
        "left": begins * 1e3,
        "right": ends_s * 1e3,
        "color": np.array([int(f"{color[1:]}cc", 16) for color in colors], dtype=np.uint32),
        "stage": [work.stage for work in drawn],
        "ms": took_s * 1e3,
        "MB": nbytes / 1e6,
        "GB/s": nbytes / 1e9 / np.maximum(took_s, 1e-9),
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


@dataclass
class Panels:
    """The panels of a page, by name. `update` brings them up to date."""

    runs: Sequence[RunWatch]
    host: Host | None
    tbw: float | None
    texts: dict[str, Div] = field(default_factory=dict)
    figures: dict[str, figure] = field(default_factory=dict)
    sources: dict[str, ColumnDataSource] = field(default_factory=dict)
    drawn: tuple[int, ...] = ()  # the versions of the runs that are drawn
    drawn_at: float = -math.inf
    window: tuple[float, float] | None = None  # what the reader sees of the timeline
    lanes: list[str] = field(default_factory=list)
    found: list[list[LaneRate]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("top", "legend", "memory", "rates", "state", "wear"):
            sheet = InlineStyleSheet(css=tables.STYLE)
            self.texts[name] = Div(name=name, stylesheets=[sheet], sizing_mode="stretch_width")
        self.texts["legend"].text = tables.legend()
        for name, title in CURVES.items():
            self._add_curves(name, title)
        self._add_timeline()
        self.update()

    def _add_curves(self, name: str, title: str) -> None:
        plot = figure(
            name=name,
            title=title,
            height=190,
            sizing_mode="stretch_width",
            tools="xpan,xwheel_zoom,reset",
            active_scroll="xwheel_zoom",
            toolbar_location=None,
        )
        plot.add_tools(HoverTool(tooltips=[("step", "@x"), (title, "@y")], mode="vline"))
        for number, run in enumerate(self.runs):
            source = self.sources[f"{name} {number}"] = ColumnDataSource({"x": [], "y": []})
            label = {"legend_label": run.name} if len(self.runs) > 1 else {}
            color = RUN_COLORS[number % len(RUN_COLORS)]
            plot.line("x", "y", source=source, color=color, line_width=1.5, **label)
        self.figures[name] = plot

    def _add_timeline(self) -> None:
        source = self.sources["timeline"] = ColumnDataSource(bars([]).columns)
        plot = figure(
            name="timeline",
            y_range=Range1d(),
            x_axis_type="datetime",
            sizing_mode="stretch_width",
            tools="xpan,xwheel_zoom,xbox_zoom,reset",
            active_drag="xpan",
            active_scroll="xwheel_zoom",
            toolbar_location="right",
        )
        plot.hbar("y", left="left", right="right", height=0.8, fill_color="color", source=source)
        plot.renderers[0].glyph.line_color = None
        tooltips = [("", "@stage"), ("ms", "@ms{0.000}"), ("MB", "@MB{0.0}")]
        plot.add_tools(HoverTool(tooltips=[*tooltips, ("GB/s", "@{GB/s}{0.000}")]))
        plot.ygrid.visible = False
        self.figures["timeline"] = plot

    def update(self) -> None:
        """Draw what is new. The texts name times, so they are always compared."""
        versions = tuple(run.version for run in self.runs)
        changed = versions != self.drawn and time.monotonic() - self.drawn_at > REDRAW_S
        if changed or self._zoom() != self.window:
            self.drawn, self.drawn_at, self.window = versions, time.monotonic(), self._zoom()
            self._draw()
        for name, text in self._texts():
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
            row = ROW if len(lanes) <= MANY else LOW_ROW
            plot.height = FRAME + row * max(3, len(lanes))
            plot.y_range.update(start=len(lanes) - 0.5, end=-0.5)
            plot.yaxis.ticker = [*range(len(lanes))]
            plot.yaxis.major_label_overrides = dict(enumerate(lanes))
            plot.yaxis.major_label_text_font_size = "11px" if row == ROW else "8px"
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

    def _texts(self) -> Iterator[tuple[str, str]]:
        def of_all(draw: Callable[[RunWatch, list[LaneRate]], str]) -> str:
            both = zip(self.runs, self.found, strict=True)
            return "".join(self._name(run) + draw(run, found) for run, found in both)

        yield "top", "".join(map(tables.top, self.runs, self.found))
        yield "memory", of_all(lambda run, _: tables.memory(run))
        yield "rates", of_all(lambda _, found: tables.rates(found))
        yield "state", of_all(lambda run, _: tables.durability(run))
        yield "wear", of_all(lambda run, _: tables.wear(run, self.tbw))

    def _name(self, run: RunWatch) -> str:
        """Return a heading if several runs are compared."""
        return f"<h2>{escape(run.name)}</h2>" if len(self.runs) > 1 else ""


def fill(document: Document, panels: Panels, theme: str, scripts: Sequence[str] = ()) -> None:
    """Add the panels to a document.

    Args:
        theme: light or dark; "" for that of the reader's system.
        scripts: The addresses of Bokeh's scripts on a server.
    """
    for root in (*panels.texts.values(), *panels.figures.values()):
        document.add_root(root)
    document.title = " ".join(run.name for run in panels.runs)
    document.theme = f"{theme or 'light'}_minimal"
    # like Bokeh's own, this template gets parts of pages; the names of runs are in the documents
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent))
    document.template = templates.get_template("dashboard.html.j2")
    document.template_variables.update(
        style=style_sheet(theme), theme=theme, scripts=scripts, live=bool(scripts)
    )
