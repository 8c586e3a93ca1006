"""Judge a run: what limits it, how fast its disks and links are, and what is wrong with it.

Pure functions of a RunWatch. Does not import torch or Bokeh.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, median, pstdev

from roadtrain.config.cluster import Host
from roadtrain.dashboard.watch import RunWatch
from roadtrain.servers.trace import Interval
from roadtrain.training.metrics import alike
from roadtrain.training.predicted import RECENT, tables_of
from roadtrain.training.run_lines import WRITES
from roadtrain.units import show_bytes, show_rate, show_seconds

DISK, LINK = "disk of ", "link of "  # how the names of such lanes begin
SLOW_DISK = 0.5  # a disk is slow below this fraction of the other disks, or of its probed rate
LEAST_S = 1e-6  # no interval is shorter
BUSY_S = 0.05  # a rate counts if a lane was busy for so long
FULL = 0.02  # a disk is full soon if less than this fraction is free
TREND, TREND_S = 1000, 60.0  # a trend is that of the last so many steps, and of at least this time
COMPARED = 10_000  # the best mean loss is that of the last so many steps
DIVERGED = 4.0  # so many standard deviations above the best mean loss


@dataclass(frozen=True)
class LaneRate:
    """The bytes per second of a disk or link in the steps that the timeline shows.

    `mean` counts the whole time, `busy` the time in which the lane worked. `probed`: None if it
    was not measured.
    """

    lane: str
    mean: float
    busy: float
    busy_s: float
    probed: float | None = None


def busy_seconds(intervals: Iterable[Interval]) -> float:
    """Return the seconds in which at least one of the intervals lasts."""
    total, until = 0.0, -math.inf
    for interval in sorted(intervals, key=lambda interval: interval.begin):
        total += max(0.0, interval.end - max(interval.begin, until))
        until = max(until, interval.end)
    return total


def lane_rates(run: RunWatch, host: Host | None) -> list[LaneRate]:
    """Return the rates of the disks and links. `host`: the probed rates of this host."""
    lanes: dict[str, list[Interval]] = {}
    every = [*chain.from_iterable(run.by_process().values())]
    for interval in every:
        if interval.lane.startswith((DISK, LINK)) and interval.nbytes:
            lanes.setdefault(interval.lane, []).append(interval)
    window = max((s.end for s in every), default=0.0) - min((s.begin for s in every), default=0.0)
    out = []
    for lane, intervals in sorted(lanes.items()):
        nbytes, busy_s = sum(interval.nbytes for interval in intervals), busy_seconds(intervals)
        probed = None if host is None else probed_rate(lane, intervals, host)
        mean, busy = nbytes / max(window, LEAST_S), nbytes / max(busy_s, LEAST_S)
        out.append(LaneRate(lane, mean, busy, busy_s, probed))
    return out


def probed_rate(lane: str, intervals: Sequence[Interval], host: Host) -> float | None:
    """Return the probed rate of a disk, for its mix of reads and writes, or of a link; None if the
    cluster file does not have it."""
    if lane.startswith(LINK):
        local = "127.0.0.1" in lane or "localhost" in lane
        return None if local or not host.nics else max(nic.rate for nic in host.nics)
    directory = lane.partition("(")[2].rstrip(")")
    named = {path: ssd for ssd in host.ssds for path in ssd.directories}
    above = [path for path in named if Path(directory).is_relative_to(path)]
    if not above and (named or len(host.ssds) != 1):
        return None
    ssd = named[max(above, key=len)] if above else host.ssds[0]
    written = sum(work.nbytes for work in intervals if work.stage in WRITES)
    read = sum(interval.nbytes for interval in intervals) - written
    mixed = ssd.mixed if read and written else 1.0
    return (read + written) / (read / ssd.read + written / ssd.write) * mixed


def limit_line(run: RunWatch) -> str:
    """Return one line that says what limits the steps, and how they compare with the plan."""
    if not run.lines.recent:
        return run.hidden or "no step yet"
    line = f"limited by {run.lines.limit(run.job)}"
    tables = tables_of(alike([*watch.lines.recent]) for watch in run.ranks.values())
    slowest = max(tables, key=_ratio, default=[])
    if slowest:
        where, (_, planned, took, ratio) = slowest[0][0], slowest[1]
        line += f"; {where} takes {took} a step, {ratio} times the plan's {planned}"
    return line


def _ratio(table: Sequence[Sequence[str]]) -> float:
    ratio = table[1][3]  # of a whole step
    return 0.0 if ratio == "-" else float(ratio)


def alerts(run: RunWatch, rates: Sequence[LaneRate]) -> list[str]:
    """Return a line for each thing that is wrong with the run now."""
    state = run.state()
    out = [*_not_finite(run), *_diverging(run)]
    if state in ("training", "starting", "stalled"):
        for node in run.nodes:
            if silence := node.silence:
                out.append(f"{node.role} {node.address} {silence}")
        out += [*_full_disks(run), *_slow_disks(rates)]
        out += [
            f"{process.name} on {process.host} is {process.state}"
            for process in run.processes
            if process.state != "running"
        ]
    if state == "stalled":
        quiet, usual = show_seconds(round(run.quiet_s)), show_seconds(run.lines.step_s)
        out.insert(0, f"stalled: no new step for {quiet}, a step takes {usual}")
    return out


def _not_finite(run: RunWatch) -> list[str]:
    steps = [line["step"] for line in run.lines.recent if line["loss"] is None]
    return [f"the loss of step {steps[-1]} is not finite"] if steps else []


def _diverging(run: RunWatch) -> list[str]:
    """Compare the mean loss of the last steps with the best mean of as many steps before."""
    losses = [loss for loss in run.lines.curves["loss"][-COMPARED:] if math.isfinite(loss)]
    parts = [losses[i : i + RECENT] for i in range(len(losses) % RECENT, len(losses), RECENT)]
    if len(parts) < 2:
        return []
    best = min(parts[:-1], key=fmean)
    now, least = fmean(parts[-1]), fmean(best)
    if now - least <= max(DIVERGED * pstdev(best), abs(least) / 10):
        return []
    return [f"the loss diverges: {now:.4g} over the last {RECENT} steps, {least:.4g} at best"]


def _full_disks(run: RunWatch) -> list[str]:
    out: dict[int, str] = {}
    directories = [] if run.job.servers.addresses else run.job.store.files
    for directory in [run.directory, *map(Path, directories)]:
        if not directory.is_dir():
            continue
        usage = shutil.disk_usage(directory)
        if usage.free < FULL * usage.total:
            left = f"{show_bytes(usage.free)} of {show_bytes(usage.total)} are free"
            out[directory.stat().st_dev] = f"disk full soon: {left} at {directory}"
    return [*out.values()] or _filling_disks(run)


def _filling_disks(run: RunWatch) -> list[str]:
    """Compare the free bytes of the disks with the rate at which they have become fewer."""
    free, seconds = (run.lines.curves[name][-TREND:] for name in ("free", "seconds"))
    if not (lost := free[0] - free[-1] if free else 0.0) > 0 or sum(seconds) < TREND_S:
        return []
    lasts_s, left_s = free[-1] * sum(seconds) / lost, run.lines.left_s(run.job)
    if lasts_s > left_s:
        return []
    return [
        f"disk full soon: {show_bytes(free[-1])} are free, enough for {show_seconds(lasts_s)}"
        f" at the rate of the last {show_seconds(sum(seconds))}, but training takes"
        f" {show_seconds(left_s)} more"
    ]


def _slow_disks(rates: Sequence[LaneRate]) -> list[str]:
    out = []
    disks = [rate for rate in rates if rate.lane.startswith(DISK) and rate.busy_s > BUSY_S]
    for disk in disks:
        others = [other.busy for other in disks if other is not disk]
        usual = disk.probed or (median(others) if others else 0.0)
        if disk.busy < SLOW_DISK * usual:
            than = "its probed rate is" if disk.probed else "the other disks reach"
            out.append(
                f"slow disk: {show_rate(disk.busy)} at {disk.lane.removeprefix(DISK)},"
                f" {than} {show_rate(usual)}"
            )
    return out
