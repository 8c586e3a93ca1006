"""All tests of a process fork their children from one server, which multiprocessing keeps."""

from __future__ import annotations

from multiprocessing import forkserver


def test_nothing_that_tests_import_changes_what_the_fork_server_loads() -> None:
    """A child of a server that has not loaded torch takes seconds to start."""
    server = forkserver._forkserver  # noqa: SLF001
    assert vars(server)["_preload_modules"] == ["pytest", "tests.support.preloaded"]
