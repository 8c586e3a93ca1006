"""Rows of result tables. The unit, the ratio and the verdict of a row follow from its values, its
peer and its goal.
"""

from __future__ import annotations

import operator
from dataclasses import replace

from benchmarks.common.report import Row
from roadtrain.units import parse_bytes

# unit of a row -> its values, divided by seconds, bytes or bytes/s
SCALES = {"ms": 1e3, "ns/element": 1e9, "MB": 1e-6, "GB": 1e-9, "GB/s": 1e-9, "%": 100.0}
SIGNS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, "==": operator.eq}


def row(
    case: str,
    metric: str,
    unit: str,
    ours: float,
    peer: tuple[float, str] | None = None,
    *,
    goal: str | None = None,
    of_floor: float | None = None,
    more_is_better: bool = False,
) -> Row:
    """Build a row from values in seconds, bytes or bytes/s; fractions if the unit is %.

    Args:
        peer: value and name of the peer. The ratio of the row is peer / ours.
        goal: a field of the row, a sign and a limit in the row's unit, such as `ratio >= 1.5`
        more_is_better: the ratio is ours / peer
    """
    scale = SCALES.get(unit, 1.0)
    made = Row(case, metric, unit, ours * scale, of_floor=of_floor, goal=goal)
    if peer is not None:
        value, name = peer
        ratio = ours / value if more_is_better else value / ours
        made = replace(made, peer=value * scale, peer_name=name, ratio=ratio)
    if goal is None:
        return made
    field, sign, limit = goal.split()
    return replace(made, met=bool(SIGNS[sign](getattr(made, field), float(limit))))


def buffers_row(case: str, resident: float, budget: str, goal: str | None = None) -> Row:
    """Compare the bytes of roadtrain's buffers with their budget."""
    most = (parse_bytes(budget), "budget")
    return row(case, "held by roadtrain's buffers", "MB", resident, most, goal=goal)
