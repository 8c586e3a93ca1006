"""Draw runs with Bokeh: the curves, the timeline, and the parts that are text.

Curves and timelines are thinned out before they are sent, so a page costs the same for 100 and for
100,000 steps. A page is drawn again when a run has new lines.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.models import ColumnDataSource, Div, FactorRange, HoverTool, InlineStyleSheet
from bokeh.plotting import figure
from bokeh.themes import Theme
from jinja2 import Environment, FileSystemLoader

from roadtrain.config.cluster import Host
from roadtrain.dashboard import tables
from roadtrain.dashboard.findings import LaneRate, lane_rates
from roadtrain.dashboard.watch import RunWatch
from roadtrain.planner.look import LINES, OTHER_COLOR, RUN_COLORS, STAGE_COLORS, TEXT, style_sheet
from roadtrain.servers.trace import Span
from roadtrain.units import show_bytes, show_rate, show_seconds

POINTS = 600  # most points of a curve
BARS = 2000  # most bars of the timeline; of more, the longest are drawn
ROW, FRAME = 18, 60  # pixels of a lane, and around the lanes
CURVES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "tokens_per_s": "tokens/s",
    "lr": "learning rate",
}
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


def kind_of(lane: str) -> int:
    """Return the position of a lane's kind: devices, workers, servers, disks, links."""
    for position, begin in ((4, "link"), (3, "disk"), (2, "server"), (1, "worker")):
        if lane.startswith(begin):
            return position
    return 0


def bars(runs: Sequence[RunWatch]) -> tuple[list[str], dict[str, list[Any]]]:
    """Return the lanes of the timeline, from top to bottom, and the columns of its bars."""
    named: list[tuple[str, Span]] = []
    for run in runs:
        before = f"{run.name}: " if len(runs) > 1 else ""
        for spans in run.processes_of_spans().values():
            named += [(before + span.lane, span) for span in spans]
    lanes = sorted({(kind_of(span.lane), lane) for lane, span in named})
    labels = {lane: LONG_PATH.sub(r"(…\2)", lane) for _, lane in lanes}
    if len({*labels.values()}) < len(labels):
        labels = {lane: lane for lane in labels}
    named.sort(key=lambda pair: pair[1].begin - pair[1].end)
    columns: dict[str, list[Any]] = {key: [] for key in ("lane", "left", "right", "color", "text")}
    for lane, span in named[:BARS]:
        seconds = span.end - span.begin
        text = f"{span.stage} {show_seconds(seconds)}"
        if span.nbytes and seconds > 0:
            text += f", {show_bytes(span.nbytes)}, {show_rate(span.nbytes / seconds)}"
        values = (labels[lane], span.begin * 1e3, span.end * 1e3)
        for column, value in zip(columns.values(), (*values, _color(span.stage), text)):
            column.append(value)
    return [*labels.values()], columns


def _color(stage: str) -> str:
    return STAGE_COLORS.get(stage, OTHER_COLOR)


@dataclass
class Panels:
    """The panels of a page, by name. `update` brings them up to date."""

    runs: Sequence[RunWatch]
    host: Host | None
    tbw: float | None
    texts: dict[str, Div] = field(default_factory=dict)
    figures: dict[str, figure] = field(default_factory=dict)
    sources: dict[str, ColumnDataSource] = field(default_factory=dict)
    drawn: list[int] = field(default_factory=list)  # the versions of the runs that are drawn
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
        source = ColumnDataSource({key: [] for key in ("lane", "left", "right", "color", "text")})
        plot = figure(
            name="timeline",
            y_range=FactorRange(),
            x_axis_type="datetime",
            sizing_mode="stretch_width",
            tools="xpan,xwheel_zoom,xbox_zoom,reset",
            active_drag="xpan",
            active_scroll="xwheel_zoom",
            toolbar_location="right",
        )
        plot.hbar(
            "lane", left="left", right="right", height=0.8, color="color", source=source, alpha=0.8
        )
        plot.add_tools(HoverTool(tooltips="@text"))
        self.figures["timeline"], self.sources["timeline"] = plot, source

    def update(self) -> None:
        """Draw what is new. The texts name times, so they are always compared."""
        versions = [run.version for run in self.runs]
        if versions != self.drawn:
            self.drawn = versions
            self._draw()
        for name, text in self._texts():
            if self.texts[name].text != text:
                self.texts[name].text = text

    def _draw(self) -> None:
        for name in CURVES:
            for number, run in enumerate(self.runs):
                x, y = curve(run, name)
                self.sources[f"{name} {number}"].data = {"x": x, "y": y}
        lanes, columns = bars(self.runs)
        plot = self.figures["timeline"]
        if lanes[::-1] != plot.y_range.factors:
            plot.y_range.factors = lanes[::-1]
            plot.height = FRAME + ROW * max(3, len(lanes))
        self.sources["timeline"].data = columns
        self.found = [lane_rates(run, self.host) for run in self.runs]

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
    document.theme = Theme(json=_theme(theme or "light"))
    # like Bokeh's own, this template gets parts of pages; the names of runs are in the documents
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent))
    document.template = templates.get_template("dashboard.html.j2")
    document.template_variables.update(
        style=style_sheet(theme), theme=theme, scripts=scripts, live=bool(scripts)
    )


def _theme(theme: str) -> Mapping[str, Any]:
    text, lines = TEXT[theme], LINES[theme]
    axis = {
        "axis_line_color": lines,
        "major_tick_line_color": lines,
        "minor_tick_line_color": None,
        "major_label_text_color": text,
        "axis_label_text_color": text,
    }
    attrs = {
        "Plot": {
            "background_fill_color": None,
            "border_fill_color": None,
            "outline_line_color": lines,
        },
        "Grid": {"grid_line_color": lines, "grid_line_alpha": 0.6},
        "Axis": axis,
        "Title": {"text_color": text, "text_font_size": "13px"},
        "Legend": {"background_fill_alpha": 0.0, "label_text_color": text, "border_line_alpha": 0},
    }
    return {"attrs": attrs}
