"""Traces in the format of Chrome, which ui.perfetto.dev opens: of simulated and of real steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# process, lane, name, begin and end in seconds, further values
Slice = tuple[str, str, str, float, float, Mapping[str, Any]]


def trace_events(
    slices: Iterable[Slice], counters: Mapping[str, Sequence[tuple[float, float]]] = {}
) -> dict[str, Any]:
    """Return a trace as plain data for JSON, with times in microseconds.

    Args:
        slices: Work, and the process and lane that show it.
        counters: (seconds, bytes) of each memory, by name.
    """
    events: list[dict[str, Any]] = []
    pids: dict[str, int] = {}
    tids: dict[tuple[str, str], int] = {}
    for process, lane, name, begin, end, args in slices:
        if end <= begin:
            continue
        pid = pids.setdefault(process, len(pids) + 1)
        tid = tids.setdefault((process, lane), len(tids) + 1)
        at = {"ts": begin * 1e6, "dur": (end - begin) * 1e6}
        events.append({"ph": "X", "name": name, "pid": pid, "tid": tid, **at, "args": args})
    events += [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process or "all"}}
        for process, pid in pids.items()
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": pids[process], "tid": tid, "args": {"name": lane}}
        for (process, lane), tid in tids.items()
    ]
    for name, changes in counters.items():
        events += [
            {"ph": "C", "name": name, "pid": 0, "ts": at * 1e6, "args": {"bytes": held}}
            for at, held in changes
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
