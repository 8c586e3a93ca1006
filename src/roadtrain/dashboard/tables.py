"""The parts of the page that are text: rows of a run, as HTML. Does not import torch or Bokeh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from roadtrain.dashboard.alerts import LaneRate, alerts, limit_line
from roadtrain.dashboard.watch import RunWatch
from roadtrain.planner.look import FINE, STAGE_COLORS, WARNING
from roadtrain.training.run_lines import show_duration, wear_rows
from roadtrain.units import show_bytes, show_rate, show_seconds

STYLE = f"""
:host {{ color: var(--text); font: 13px system-ui, sans-serif }}
h2 {{ font-size: 14px; margin: 0 0 .4em }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ text-align: left; padding: 1px 10px 1px 0; vertical-align: top; font-weight: normal }}
th {{ opacity: .7 }}
.limit {{ font-size: 17px; margin: .2em 0 }}
.alert {{ background: {WARNING}; color: #fff; padding: 3px 8px; margin: 3px 0; border-radius: 3px }}
.bar {{ width: 9em; background: var(--lines); height: 9px; margin-top: 4px }}
.bar div {{ height: 9px; max-width: 100% }}
.stage {{ margin-right: 1em; white-space: nowrap }}
.stage i {{ display: inline-block; width: 10px; height: 10px; margin-right: 4px }}
"""
TIERS = {
    "device": "device memory",
    "host": "host buffers",
    "process": "whole process",
    "disk": "disk, with free space",
}
NEAR = 0.9  # a bar from here on is drawn as a warning


class Html(str):
    """Text that is not escaped again."""


def table(title: str, rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Return a heading and a table."""
    body = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"] if head else []
    for row in rows:
        cells = (cell if isinstance(cell, Html) else escape(cell) for cell in row)
        body.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<h2>{escape(title)}</h2><table>{''.join(body)}</table>"


def bar(share: float) -> Html:
    color = WARNING if share > NEAR else FINE
    return Html(f'<div class="bar"><div style="width:{share:.1%};background:{color}"></div></div>')


def top(run: RunWatch, rates: Sequence[LaneRate]) -> str:
    """Return the first lines: what limits the run, how far it is, and what is wrong."""
    lines, steps, state = run.lines, run.job.run.steps, run.state()
    done = f"step {lines.step:,} of {steps:,}"
    if lines.recent and state != "finished":
        left = show_duration(lines.left_s(run.job))
        done += f", {left} left at {show_seconds(lines.step_s)} a step"
    if lines.recent:
        done += f", {lines.tokens_per_s:,.0f} tokens/s, loss {lines.loss:.4f}"
    wrong = "".join(f'<div class="alert">{escape(text)}</div>' for text in alerts(run, rates))
    return (
        f'<div class="limit"><b>{escape(run.name)}</b>: {escape(limit_line(run))}</div>'
        f"<div>{state}: {escape(done)}</div>{wrong}"
    )


def legend() -> str:
    return "".join(
        f'<span class="stage"><i style="background:{color}"></i>{name}</span>'
        for name, color in STAGE_COLORS.items()
    )


def memory(run: RunWatch) -> str:
    """Return the memory of every tier of each worker beside its budget."""
    rows: list[tuple[str, ...]] = []
    for rank, tiers in run.memory().items():
        for name, words in TIERS.items():
            if (tier := tiers.get(name)) is None:
                continue
            nbytes, budget = tier["bytes"], tier.get("budget")
            share = nbytes / budget if budget else math.nan
            limit = show_bytes(budget) if budget else "no limit"
            shown = bar(share) if budget else Html("")
            rows.append((f"worker {rank}", words, show_bytes(nbytes), limit, shown))
    return table("Memory", rows or [("not recorded in this run",)], ("", "", "used", "budget"))


def rates(found: Sequence[LaneRate]) -> str:
    """Return the bytes per second of each disk and link beside the probed rate."""
    rows = []
    for rate in found:
        probed, shown = "not measured", Html("")
        if rate.probed is not None:
            probed, shown = show_rate(rate.probed), bar(rate.busy / rate.probed)
        rows.append((rate.lane, show_rate(rate.mean), show_rate(rate.busy), probed, shown))
    head = ("", "over all", "while busy", "probed")
    return table("Disks and links", rows or [("no traffic in the last steps",)], head)


def durability(run: RunWatch) -> str:
    """Return the last durable step, servers, replicas and spare hosts, and what is inexact."""
    job = run.job
    durable = f"step {run.durable}" if run.durable >= 0 else "none"
    rows = [("last durable step", durable), ("lossy or late", "nothing: training is exact")]
    if job.lossy:
        rows[1] = ("lossy or late", ", ".join(f"{k} {v}" for k, v in job.lossy.items()))
    if job.servers.addresses:
        rows.append(("replicas", str(job.servers.replicas)))
    if not any(node.role == "spare host" for node in run.nodes):
        rows.append(("spare hosts", "none"))
    for node in run.nodes:
        text = node.silence or node.text or "is asked"
        rows.append((f"{node.role} {node.address}", text))
        for worker, (seconds, what) in node.waits.items():
            if what:
                rows.append((worker, f"waits {seconds:.1f} s for {what}"))
    for process in run.processes:
        rows.append((process.name, f"{process.state} on {process.host}"))
    return table("State", rows)


def wear(run: RunWatch, tbw: float | None) -> str:
    return table("Endurance of the SSDs", wear_rows(run.job, run.lines, tbw))
