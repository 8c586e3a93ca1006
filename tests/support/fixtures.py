"""Fixtures for all tests: a single torch thread, leak checks, hosts that serve."""

import gc
import threading

import pytest
import torch
from hypothesis import settings

from tests.support.ports import DIRECTORY
from tests.support.processes import HostProcess, open_files

# Models are tiny: a second thread would only spin, and torch's sums depend on the number of
# threads.
torch.set_num_threads(1)
# The time of an example depends on the load of the machine.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


def pytest_addoption(parser):
    about = "make the screenshots in docs/ anew"
    parser.addoption("--screenshots", action="store_true", help=about)


@pytest.fixture(scope="module", autouse=True)
def freeze_what_is_loaded():
    """Exclude modules and tests, which live until the end, from garbage collection: each full
    collection would visit a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request):
    """Check that no thread and no descriptor outlives a test with processes."""
    if "local" not in request.keywords:
        yield
        return
    threads, files = set(threading.enumerate()), open_files()
    yield
    new = [
        t
        for t in threading.enumerate()
        if t not in threads and not t.name.startswith(("pymp", "numba", "tqdm_monitor"))
    ]
    # threads of libraries; ours have names
    if any(t.name.startswith("ThreadPoolExecutor-") for t in new):
        gc.collect()  # transformers loads with a thread pool that ends when it is collected
    for thread in new:  # a thread that is about to end is not left behind
        thread.join(5.0)
    left = [t.name for t in new if t.is_alive()]
    assert not left, f"threads left: {left}"
    new = {
        n: f
        for n, f in open_files().items()
        if n not in files
        and f.startswith("/")
        and "/dev/" not in f
        and not f.startswith(f"{DIRECTORY}/")  # locks of ports, held until the end of the tests
    }
    assert not new, f"descriptors left: {new}"


@pytest.fixture
def hosts(tmp_path):
    """`hosts(n)` starts n more serving processes, each with its own directory; `hosts.all` lists
    all of them."""
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
    """Like `hosts`, but returns their addresses."""

    def make(n, **options):
        return [host.where for host in hosts(n, **options)]

    make.all = hosts.all
    return make
