"""Fixtures of all tests: one thread for torch, nothing left behind, hosts that serve."""

import gc
import threading

import pytest
import torch
from hypothesis import settings

from tests.support.ports import DIRECTORY
from tests.support.processes import HostProcess, open_files

# Tiny models: a second thread only spins, and sums inside torch depend on their number.
torch.set_num_threads(1)
# How long an example takes is up to whatever else runs here.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


@pytest.fixture(scope="module", autouse=True)
def freeze_what_is_loaded():
    """Keep the garbage collector off what lives until the end: modules, and all tests. Each full
    collection would visit a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    """No thread and no descriptor outlives a test with processes."""
    if "local" not in request.keywords:
        yield
        return
    threads, files = set(threading.enumerate()), open_files()
    yield
    new = [
        t
        for t in threading.enumerate()
        if t not in threads and not t.name.startswith(("pymp", "numba"))
    ]
    # not ours, those have names
    if any(t.name.startswith("ThreadPoolExecutor-") for t in new):
        gc.collect()  # transformers loads with one: its threads end when it is collected
    for thread in new:  # one that says its last word when the test ends is not left behind
        thread.join(5.0)
    left = [t.name for t in new if t.is_alive()]
    assert not left, f"threads left: {left}"
    new = {
        n: f
        for n, f in open_files().items()
        if n not in files
        and f.startswith("/")
        and "/dev/" not in f
        and not f.startswith(f"{DIRECTORY}/")  # locks of ports, held to the end of the tests
    }
    assert not new, f"descriptors left: {new}"


@pytest.fixture
def hosts(tmp_path):
    """`hosts(n)`: n more processes that serve, each with a directory of its own; `hosts.all`:
    those so far."""
    made = []

    def make(n, **options):
        for _ in range(n):
            directory = options.get("directory", tmp_path / f"host{len(made)}")
            made.append(HostProcess(**{**options, "directory": directory}))
        return made[-n:]

    make.all = made
    yield make
    for host in made:
        host.kill()


@pytest.fixture
def addresses(hosts):
    """The same, by their addresses."""

    def make(n, **options):
        return [host.where for host in hosts(n, **options)]

    make.all = hosts.all
    return make
