"""The last line of a run: how many tests did not run, and why.

not run: 10 (no slurmd: apt install slurm-wlm munge), 5 (torch has no such option on the CPU)
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The first line of the reason for which a test, or all tests of a file, were skipped."""
    assert isinstance(report.longrepr, tuple)
    reason = report.longrepr[2].removeprefix("Skipped: ").partition("\n")[0]
    return reason if report.when != "collect" else f"all of {report.nodeid}: {reason}"


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "count the skipped tests together with those of earlier runs, which FILE holds"
    parser.addoption("--not-run", type=Path, metavar="FILE", help=about)


def pytest_unconfigure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(
        config, "workerinput"
    ):  # pytest-xdist's controller has the reports
        return
    counts = Counter(map(reason_of, reporter.stats.get("skipped", ())))
    file: Path | None = config.getoption("not_run")
    if file:
        counts += Counter(json.loads(file.read_text()) if file.exists() else {})
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(counts))
    if file or counts:
        groups = [f"{count} ({reason})" for reason, count in counts.most_common()]
        reporter.write_line(f"not run: {', '.join(groups) or 'nothing'}")
