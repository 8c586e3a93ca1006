"""A process that places a model again, as a notebook cell does when it is run again; placed optimizers
that are dropped; placed models in forked children."""

import gc
import os
import signal
import threading
import time

import pytest
import torch

import roadtrain
from roadtrain.errors import LoopError, StoreError
from roadtrain.storage import lock
from roadtrain.storage.lock import Locks
from tests.support.models import VOCAB, Case, contents, one_step, place, run
from tests.support.processes import open_files

CASE = Case()
EAGER = Case(eager=True)


@pytest.fixture(autouse=True)
def interrupts():
    """Make Ctrl-C interrupt even if the tests run in a background job of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def plain_losses(steps):
    """Return the losses of the same steps without an interruption."""
    model, placed, scaler = place(CASE, None)
    with placed:
        return run(CASE, model, placed, scaler, 1, steps + 1)


def place_again(store, model=None, case=CASE, **options):
    """Do what the cell does; return the model, the placed optimizer and the printed lines."""
    lines = []
    if model is None:
        model, placed, _ = place(case, store, report=lines.append, **options)
        return model, placed, lines
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    eager = 1 if case.eager else None
    placed = roadtrain.place(
        model, optimizer, store=store, report=lines.append, backwards_per_step=eager, **options
    )
    return model, placed, lines


@pytest.mark.parametrize("same_model", [False, True])
def test_placing_again_closes_the_first_session(same_model, tmp_path):
    model, first, scaler = place(CASE, tmp_path)
    losses = run(CASE, model, first, scaler, 1, 4)
    again, second, lines = place_again(tmp_path, model if same_model else None)
    with second:
        assert "placed again in this process: the earlier session was closed" in lines
        assert first.closed and second.steps_done == 3
        losses += run(CASE, again, second, scaler, 4, 6)
        for use in (first.step, first.flush, first.state_dict, lambda: first.read("embed.weight")):
            with pytest.raises(LoopError, match="placed again in this process"):
                use()
        first.close()  # another close is allowed
        losses += run(CASE, again, second, scaler, 6, 7)
    assert losses == plain_losses(6)


def test_placing_again_closes_the_first_session_on_servers(hosts):
    """Otherwise the servers would be busy with the first session."""
    store = roadtrain.Servers([hosts(1)[0].where])
    model, first, scaler = place(CASE, store)
    losses = run(CASE, model, first, scaler, 1, 4)
    again, second, lines = place_again(store)
    with second:
        assert "placed again in this process: the earlier session was closed" in lines
        losses += run(CASE, again, second, scaler, 4, 6)
        with pytest.raises(LoopError, match="placed again in this process"):
            first.step()
    assert losses == plain_losses(5)


def test_a_model_in_ram_is_not_replaced(tmp_path):
    """Rule 3. State in RAM is not discarded for another store."""
    with place_again(tmp_path)[1]:
        pass
    model, placed, scaler = place(CASE, None)
    with placed:
        run(CASE, model, placed, scaler, 1, 3)
        with pytest.raises(LoopError, match=r"already placed, at step 2, .* in RAM"):
            place_again(tmp_path, model)
        run(CASE, model, placed, scaler, 3, 4)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("same_model", [False, True])
@pytest.mark.parametrize("case", [CASE, EAGER], ids=["plain", "eager"])
def test_an_interrupted_cell_resumes(where, same_model, case, tmp_path):
    model, first, scaler = place(case, tmp_path)
    losses = run(case, model, first, scaler, 1, 4)
    hook = model.layers[1].norm1.register_forward_hook(
        lambda *_: signal.raise_signal(signal.SIGINT) if backward() or where == "forward" else None
    )

    def backward():  # a block is recomputed there
        return torch._C._current_graph_task_id() != -1  # noqa: SLF001

    with pytest.raises(KeyboardInterrupt) as kept:  # as IPython keeps the last traceback
        one_step(case, model, first, scaler, 4)
    hook.remove()
    start = time.monotonic()
    model, second, lines = place_again(tmp_path, model if same_model else None, case)
    assert time.monotonic() - start < 30 and second.steps_done == 3, lines
    with second:
        losses += run(case, model, second, scaler, 4, 7)
    assert losses == plain_losses(6)
    del kept


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_dropped_optimizer_frees_everything(in_thread, tmp_path):
    """It frees threads, descriptors and the lock, and commits its last step."""
    gc.collect()
    threads, files = set(threading.enumerate()), open_files()
    model, placed, scaler = place(CASE, tmp_path)
    run(CASE, model, placed, scaler, 1, 4)
    del model, placed, scaler
    if in_thread:
        collecting = threading.Thread(target=gc.collect)
        collecting.start()
        collecting.join()
    else:
        gc.collect()
    until = time.monotonic() + 30
    while not set(threading.enumerate()) <= threads:
        assert time.monotonic() < until
        time.sleep(0.01)
    gc.collect()
    assert set(open_files().values()) <= set(files.values())
    Locks([tmp_path]).close()
    _, again, lines = place_again(tmp_path)
    with again:
        assert again.steps_done == 3 and not any("placed again" in line for line in lines)


def test_a_lock_names_the_process_that_holds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LOCK_WAIT_S", 0.1)
    held = Locks([tmp_path])
    with pytest.raises(StoreError, match="in use by this process"):
        Locks([tmp_path])
    read, write = os.pipe()
    child = in_child(lambda: _error_of(lambda: Locks([tmp_path])), write)
    assert f"in use by another process, {os.getpid()} (" in result_of_child(child, read)
    held.close()


# forked children


def _error_of(use):
    try:
        use()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def in_child(use, write):
    """Fork a child that writes the result of `use` and exits, by SIGALRM after 20 s; return its pid."""
    child = os.fork()
    if child == 0:
        # without the handler of the test's timeout: a child that raised would run the other tests
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        os.write(write, str(use()).encode())
        os._exit(0)
    return child


def result_of_child(child, read):
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child hung or was killed"
    text = os.read(read, 65536).decode()
    os.close(read)
    return text


USES = {
    "forward": lambda model, placed: model(torch.zeros(1, 4, dtype=torch.long)),
    "block": lambda model, placed: model.layers[0](torch.zeros(1, 4, 64)),
    "no grad": lambda model, placed: torch.no_grad()(model)(torch.zeros(1, 4, dtype=torch.long)),
    "root parameter": lambda model, placed: model.head.weight.sum(),
    "block parameter": lambda model, placed: model.layers[0].norm1.weight.sum(),
    "state": lambda model, placed: model.state_dict(),
    "optimizer's state": lambda model, placed: placed.state_dict(),
    "whole state": lambda model, placed: placed.state_dict(gather=True),
    "step": lambda model, placed: placed.step(),
    "read": lambda model, placed: placed.read("head.weight"),
    "flush": lambda model, placed: placed.flush(),
    "norm": lambda model, placed: placed.grad_norm(),
    "stages": lambda model, placed: placed.stages(),
    "load": lambda model, placed: model.load_state_dict(
        {"head.bias": torch.zeros(VOCAB)}, strict=False
    ),
    "load optimizer": lambda model, placed: placed.load_state_dict({"state": {}}),
    "close": lambda model, placed: placed.close(),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12 warns of threads at a fork
@pytest.mark.parametrize(
    "after_a_step",
    [
        pytest.param(False, marks=pytest.mark.exhaustive, id="at rest"),
        pytest.param(True, id="after a step"),
    ],
)
@pytest.mark.parametrize("name", USES)
def test_a_forked_child_is_refused_at_once(name, after_a_step, tmp_path):
    """Rule 5. The error names the process that has the model; the parent continues."""
    model, placed, scaler = place(CASE, tmp_path)
    with placed:
        losses = run(CASE, model, placed, scaler, 1, 3 if after_a_step else 1)
        read, write = os.pipe()
        # simulates a fork while another thread holds the lock
        held = placed._worker._lock  # noqa: SLF001
        held.acquire()
        try:
            child = in_child(lambda: _error_of(lambda: USES[name](model, placed)), write)
        finally:
            held.release()
        os.close(write)
        message = result_of_child(child, read)
        assert message.startswith(
            f"LoopError: the model was placed in process {os.getpid()}, but this is its forked child {child}"
        ), message
        assert "DataLoader's workers" in message
        losses += run(CASE, model, placed, scaler, 3 if after_a_step else 1, 5)
    assert losses == plain_losses(4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_that_drops_the_model_changes_nothing(tmp_path):
    model, placed, scaler = place(CASE, tmp_path)
    with placed:
        losses = run(CASE, model, placed, scaler, 1, 3)
        before = contents(model, placed)
        read, write = os.pipe()

        def drop():
            nonlocal model, placed
            model = placed = None
            gc.collect()
            return "dropped"

        assert result_of_child(in_child(drop, write), read) == "dropped"
        os.close(write)
        assert all((value == before[name]).all() for name, value in contents(model, placed).items())
        losses += run(CASE, model, placed, scaler, 3, 5)
    assert losses == plain_losses(4)
