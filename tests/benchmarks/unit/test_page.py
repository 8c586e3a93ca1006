"""benchmarks/page.py: docs/benchmarks.md is generated from result files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import page
from roadtrain.errors import ConfigError


def row(case: str, metric: str, **fields: Any) -> dict[str, Any]:
    keys = ("unit", "ours", "peer", "peer_name", "ratio", "of_floor", "goal", "met")
    return {**dict.fromkeys(keys), "case": case, "metric": metric, **fields}


ROWS = [
    row("AdamW, 1 thread", "update", unit="ns", ours=2.0, peer=3.0, ratio=1.5, peer_name="fused")
    | {"goal": "ratio >= 1.4", "met": True},
    row("AdamW, 1 thread", "update", unit="s", ours=9.0, peer=8.0, peer_name="foreach"),
    row("SGD", "rate", ours=7.0, of_floor=0.5, goal="of_floor >= 0.9", met=False),
    row("Lion", "rate", ours=8.0, of_floor=0.95, goal="of_floor >= 0.9", met=True),
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    write(tmp_path, "update-2026-01-02", ROWS)
    return tmp_path


def write(folder: Path, stem: str, rows: list[dict[str, Any]], machine: str = "a CPU") -> None:
    content = {"name": "update", "rows": rows, "machine": machine, "date": "2026-01-02"}
    (folder / f"{stem}.json").write_text(json.dumps(content))


def fill_template(template: str, results: Path) -> str:
    return page.fill(template, results).partition("\n\nFrom ")[0]


@pytest.mark.parametrize(
    ("placeholder", "text"),
    [
        ("update; SGD; rate; ours .2f", "7.00"),
        ("update; AdamW; update (ns); ratio .1f", "1.5"),
        ("update; AdamW; update against foreach; peer g", "8"),
        ("update; *; rate; of_floor .2f", "0.50, 0.95"),
        ("update; *; rate; max ours g", "8"),
        ("update; *; rate; min ours g", "7"),
        ("update; *; rate; count", "2"),
        ("update; SGD; rate; over_floor g", "2"),
        ("update; AdamW; update (ns); goal", "1.4x: yes"),
        ("update; SGD; rate; goal", "0.9: **no**"),
        ("update; SGD; rate; goal, else the disk is slow", "0.9: **no**, the disk is slow"),
        ("update; Lion; rate; goal, else the disk is slow", "0.9: yes"),
        ("update; *; rate; met", "**1 of 2**"),
        ("update; *; rate; passed", "1 of 2"),
    ],
)
def test_a_placeholder_becomes_the_value_of_its_rows(
    placeholder: str, text: str, results: Path
) -> None:
    assert fill_template(f"{{{placeholder}}}", results) == text


@pytest.mark.parametrize(
    ("placeholder", "why"),
    [
        ("store; *; *; count", "no result file .*store-DATE.json"),
        ("update; Adam; nothing; ours", "no row has the metric 'nothing'"),
        ("update; nothing; rate; ours", "no row has the case 'nothing'"),
        ("update; nothing*; rate; ours", r"no row has the case 'nothing\*'"),
        ("update; AdamW; update; ours", "2 rows have the case 'AdamW'"),
        ("update; i; rate; ours", "contain"),
        ("update; SGD; rate; peer", "has no peer"),
        ("update; SGD; rate; theirs", "no value 'theirs'"),
        ("update; AdamW; update (s); met", "has no verdict"),
    ],
)
def test_a_placeholder_without_its_row_is_refused(
    placeholder: str, why: str, results: Path
) -> None:
    write(results, "update-2026-01-03", [*ROWS, row("Lion, Triton", "update", ours=1.0)])
    with pytest.raises(ConfigError, match=why):
        page.fill(f"{{{placeholder}}}", results)


def test_the_newest_file_counts_and_is_named_with_its_machine(results: Path) -> None:
    newer = [row("SGD", "rate", ours=1.0)]
    write(results, "update-2026-01-02b", newer, machine="another CPU")
    write(results, "update-2026-01-02-before", ROWS)
    write(results, "updates-2026-02-01", ROWS)
    text = page.fill("# Page\n\n## Update\n\n{update; SGD; rate; ours g}\n\n## Nothing\n", results)
    assert text == (
        "# Page\n\n## Update\n\n1\n\nFrom update-2026-01-02b (another CPU).\n\n## Nothing\n"
    )


def test_an_item_is_read_from_its_own_file_unless_the_complete_file_is_newer(results: Path) -> None:
    write(results, "update-sgd-2026-01-01", [row("SGD", "rate", ours=1.0)])
    assert fill_template("{update.sgd; SGD; rate; ours g}", results) == "7"
    write(results, "update-sgd-2026-01-03", [row("SGD", "rate", ours=2.0)])
    assert fill_template("{update.sgd; SGD; rate; ours g}", results) == "2"
    assert fill_template("{update; SGD; rate; ours g}", results) == "7"


def test_faults_are_counted_by_their_outcome(tmp_path: Path) -> None:
    faults = [
        {"kind": "killed", "how": "went on", "recovery_s": 1.5},
        {"kind": "cut", "how": "went on", "recovery_s": 0.5},
        {"kind": "cut", "how": "hung", "recovery_s": None},
    ]
    content = {"machine": "a CPU", "faults": faults}
    (tmp_path / "soak-2026-01-01.json").write_text(json.dumps(content))
    template = (
        "{soak; faults; went on; ours .0f} {soak; faults; recovery_s; ours} "
        "{soak; faults; kinds; ours} {soak; faults; wrong; goal}"
    )
    assert fill_template(template, tmp_path) == "2 1.5 2 0: **no**"


def test_a_printed_figure_that_is_not_simulated_counts_as_missed(tmp_path: Path) -> None:
    figure = {"id": "a", "role": "target", "metric": "rate", "printed": 2.0, "ours": 1.9}
    figures = [
        figure | {"error": -0.05},
        figure | {"error": 0.2},
        figure | {"ours": None, "error": None},
        figure | {"role": "input", "error": 0.0},
    ]
    (tmp_path / "reproduce-2026-01-01.json").write_text(json.dumps(figures))
    assert fill_template("{reproduce; *; *; passed}", tmp_path) == "1 of 3"


def test_the_page_is_up_to_date_with_its_template() -> None:
    assert page.main(["--check"]) == 0, "run `make bench-page`"


def test_a_page_that_differs_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = tmp_path / "benchmarks.md"
    changed.write_text(page.PAGE.read_text().replace("yes", "**no**", 1))
    monkeypatch.setattr(page, "PAGE", changed)
    assert page.main(["--check"]) == 1
    assert "bench-page" in capsys.readouterr().err
    assert page.main([]) == 0 and page.main(["--check"]) == 0
