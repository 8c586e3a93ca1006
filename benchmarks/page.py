"""Fill benchmarks/page.md with figures of result files, and write docs/benchmarks.md.

    python -m benchmarks.page [--check]

The template contains placeholders of the form {FILE; CASE; METRIC; VALUE}:

    FILE     name of a result file without its date: benchmarks/results/FILE-DATE.json, the newest;
             NAME.ITEM stands for NAME-ITEM-DATE.json or NAME-DATE.json, whichever is newer
    CASE     the case of a row, or a part of it that no other case of the file contains
    METRIC   the metric of a row, found in the same way; `METRIC (UNIT)` also names the
             unit, `METRIC against PEER` the peer
    VALUE    a field of the row (ours, peer, ratio, of_floor) and a format: `ratio .2f`;
             `over_floor` is 1 / of_floor; `met` shows "yes" or "**no**"; `goal` shows the goal
             before it; `goal, else REASON` adds the reason if the goal is missed; `passed` shows
             how many rows met their goals

If several rows shall match, CASE or METRIC contains `*` (as in a shell), or is `*` alone. Their
values are listed in the order of the file, or VALUE begins with `min` or `max`, or is `count`. Each
section with placeholders ends with the files that it used, and their machines. With `--check`,
nothing is written, and the exit code is 1 if docs/benchmarks.md differs from the filled template.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from roadtrain.errors import ConfigError, RoadtrainError

HERE = Path(__file__).parent
TEMPLATE, RESULTS, PAGE = HERE / "page.md", HERE / "results", HERE.parent / "docs" / "benchmarks.md"
DATED = re.compile(r"(?P<name>.+)-(?P<date>\d{4}-\d\d-\d\d[a-z]?)\.json")
PLACEHOLDER = re.compile(r"\{([^{};]+);([^{};]*);([^{};]*);([^{};]+)\}")
FIELDS = ("ours", "peer", "ratio", "of_floor")

Result = Mapping[str, Any]


def newest(results: Path, name: str) -> Path:
    """Return the newest result file of a benchmark, or of an item NAME.ITEM.

    Raises:
        ConfigError: there is no such file
    """
    names = {name.replace(".", "-"), name.partition(".")[0]}
    dated = [
        (found["date"], path)
        for path in results.glob("*.json")
        if (found := DATED.fullmatch(path.name)) and found["name"] in names
    ]
    if not dated:
        raise ConfigError(
            f"there is no result file {results}/{name}-DATE.json",
            hint=f"run the benchmark, or remove its rows from {TEMPLATE.name}",
        )
    return max(dated)[1]


def fill(template: str, results: Path) -> str:
    """Replace all placeholders of a template.

    Args:
        template: Markdown text
        results: folder of the result files

    Raises:
        ConfigError: a placeholder names a file, row or value that does not exist, or several rows
            without a `*`
    """
    sections = re.split(r"(?m)^(?=## )", template)
    return "".join(_section(section, results) for section in sections)


def _section(text: str, results: Path) -> str:
    used: dict[str, tuple[Path, Sequence[Result], str]] = {}

    def replace(match: re.Match[str]) -> str:
        name, case, metric, value = (part.strip() for part in match.groups())
        if name not in used:
            path = newest(results, name)
            used[name] = path, *read(path)
        path, rows, _ = used[name]
        try:
            return show(rows_of(rows, case, metric), value)
        except ConfigError as error:
            raise ConfigError(f"{match[0]}, from {path.name}: {error}") from None

    filled = PLACEHOLDER.sub(replace, text)
    if not used:
        return filled
    machines: dict[str, dict[str, None]] = {}
    for path, _, machine in used.values():
        machines.setdefault(machine, {})[path.stem] = None
    sources = "; ".join(f"{', '.join(names)} ({on})" for on, names in machines.items())
    return f"{filled.rstrip()}\n\nFrom {sources}.\n\n"


def read(path: Path) -> tuple[Sequence[Result], str]:
    """Return the rows and the machine of a result file, also of `soak` and `reproduce`."""
    result = json.loads(path.read_text())
    if isinstance(result, list):  # reproduce: a figure printed in a paper, and ours
        return [
            _row(x["id"], x["metric"], x["ours"], peer=x["printed"], goal="within 10%")
            | {"met": x["error"] is not None and abs(x["error"]) <= 0.1}
            for x in result
            if x["role"] == "target"
        ], "simulated"
    if "rows" in result:
        return result["rows"], result["machine"]
    faults = result["faults"]  # soak: the ends of faults, counted, and the longest times
    ends = Counter(fault["how"] for fault in faults)
    wrong = sum(n for end, n in ends.items() if end not in {"went on", "sentence", "skipped"})
    rows = [_row("faults", end, n) for end, n in ends.items()]
    rows.append(_row("faults", "wrong", wrong, goal="0") | {"met": wrong == 0})
    kinds = {fault["kind"] if "kind" in fault else fault["fault"]["kind"] for fault in faults}
    rows.append(_row("faults", "kinds", len(kinds)))
    for key in ("recovery_s", "gap_s"):
        if seconds := [fault[key] for fault in faults if fault.get(key) is not None]:
            rows.append(_row("faults", key, max(seconds)))
    return rows, result["machine"]


def _row(case: str, metric: str, ours: float | None, **more: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("unit", "peer", "peer_name", "ratio", "of_floor", "goal", "met"))
    return {**empty, "case": case, "metric": metric, "ours": ours, **more}


def rows_of(rows: Sequence[Result], case: str, metric: str) -> list[Result]:
    """Return the rows that a placeholder names, at least one."""
    metric, _, peer = metric.partition(" against ")
    if peer:
        rows = [row for row in rows if peer in (row["peer_name"] or "")]
    if found := re.fullmatch(r"(.+) \((.+)\)", metric):
        metric, unit = found.groups()
        rows = [row for row in rows if row["unit"] == unit]
    for key, pattern in (("case", case), ("metric", metric)):
        values = {row[key] for row in rows}
        if "*" in pattern:
            kept = {value for value in values if fnmatchcase(value, pattern)}
        else:
            kept = {pattern} if pattern in values else {v for v in values if pattern in v}
            if len(kept) > 1:
                raise ConfigError(
                    f"{len(kept)} {key}s contain {pattern!r}", hint="write more of it"
                )
        rows = [row for row in rows if row[key] in kept]
        if not rows:
            raise ConfigError(f"no row has the {key} {pattern!r}")
    if len(rows) > 1 and "*" not in case + metric:
        raise ConfigError(f"{len(rows)} rows have the case {case!r} and the metric {metric!r}")
    return list(rows)


def show(rows: Sequence[Result], value: str) -> str:
    """Show a value of rows. See the docstring of the module."""
    value, _, reason = value.partition(", else ")
    words = value.split()
    if words == ["count"]:
        return str(len(rows))
    if words in (["met"], ["goal"], ["passed"]):
        missed = reason and not all(row["met"] for row in rows)
        return _verdict(rows, words[0]) + (f", {reason}" if missed else "")
    choose = {"min": min, "max": max}.get(words[0])
    if choose is not None:
        words = words[1:]
    field, spec = words[0], words[1] if len(words) > 1 else ".3g"
    numbers = [_number(row, field) for row in rows]
    return ", ".join(format(x, spec) for x in ([choose(numbers)] if choose else numbers))


def _number(row: Result, field: str) -> float:
    if field == "over_floor":
        return 1 / _number(row, "of_floor")
    if field not in FIELDS:
        raise ConfigError(
            f"a row has no value {field!r}", hint=f"choose one of {', '.join(FIELDS)}"
        )
    if (value := row[field]) is None:
        raise ConfigError(f"the row {row['case']!r}, {row['metric']!r} has no {field}")
    return float(value)


def _verdict(rows: Sequence[Result], value: str) -> str:
    missing = [row for row in rows if row["met"] is None]
    if missing:
        raise ConfigError(
            f"the row {missing[0]['case']!r}, {missing[0]['metric']!r} has no verdict"
        )
    met = sum(row["met"] for row in rows)
    verdict = "yes" if met == len(rows) else "**no**" if not met else f"**{met} of {len(rows)}**"
    if value == "passed":
        return f"{met} of {len(rows)}"
    if value == "met":
        return verdict
    goals = dict.fromkeys(_short(row["goal"]) for row in rows)
    return f"{', '.join(goals)}: {verdict}"


def _short(goal: str) -> str:
    """Shorten a goal: `ratio >= 1.5` to `1.5x`, `ours <= 0.8` to `0.8`."""
    if found := re.fullmatch(r"ratio >= (\S+)", goal):
        return f"{found[1]}x"
    return re.sub(r"^(\w+ )?[<>=]=? ", "", goal)


def main(argv: Sequence[str]) -> int:
    try:
        text = fill(TEMPLATE.read_text(), RESULTS).rstrip() + "\n"
    except RoadtrainError as error:
        print(f"{TEMPLATE.name}: {error}", file=sys.stderr)
        return 2
    if "--check" not in argv:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        print(f"{PAGE} is not what {TEMPLATE} gives: run `make bench-page`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
