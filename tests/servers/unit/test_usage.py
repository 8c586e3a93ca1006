"""The limit of a process's memory that its control group sets, and the numbers of a line."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from roadtrain.environment import control_group_limit
from roadtrain.servers.trace import flat_numbers
from roadtrain.servers.usage import process_usage


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "3000"}, 3000),
        ("0::/a/b\n", {"a/b/memory.max": "2000", "a/memory.max": "3000"}, 2000),
        ("0::/a\n", {"a/memory.max": "max"}, None),
        # a container that sees only its own group, at the top
        ("0::/docker/abc\n", {"memory.max": "500"}, 500),
        ("4:cpu:/x\n7:memory:/x\n", {"memory/x/memory.limit_in_bytes": "900"}, 900),
        ("7:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("4:cpu:/x\n", {"x/memory.max": "900"}, None),
        ("", {}, None),
    ],
)
def test_the_smallest_limit_counts(
    groups: str, files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert control_group_limit(tmp_path / "groups", tmp_path / "root") == limit


def test_a_limit_of_the_process_is_its_budget() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (123 << 30, before[1]))
    try:
        found = process_usage()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert found["budget"] is not None and 0 < found["budget"] <= 123 << 30
    assert found["bytes"] is not None and found["bytes"] > 10 << 20


def test_nested_numbers_get_one_name_each() -> None:
    line = {"step": 2, "loss": None, "stages": {"Fetch": {"seconds": 0.5, "bytes": 7}}}
    assert flat_numbers(line | {"lossy": {"downcast": "bf16", "error_feedback": True}}) == {
        "step": 2,
        "stages/Fetch/seconds": 0.5,
        "stages/Fetch/bytes": 7,
    }
