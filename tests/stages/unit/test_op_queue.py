"""The thread that runs a rank's collective operations: a waiting caller gets its error."""

import threading

import pytest

from roadtrain.errors import LoopError, LostError
from roadtrain.stages.op_queue import CollectiveQueue, QueuedCollective


def fails():
    raise LostError("the peer is gone")


def job(what, begin=lambda: None, end=lambda: None):
    def run():
        yield begin()
        end()

    return QueuedCollective(what, run())


@pytest.mark.parametrize("wait", ["all", "one"])
def test_a_caller_that_waits_while_a_job_fails_gets_its_error(wait):  # Rule 6
    """The failure ends all jobs, so none is in progress any more, which must not count as
    success."""
    queue, go, done = CollectiveQueue("stage 1", 5.0), threading.Event(), []
    queue.put(job("a sum", lambda: go.wait(5) and fails()))
    queue.put(job("another", end=lambda: done.append(1)))
    threading.Timer(0.05, go.set).start()
    with pytest.raises(LostError, match="gone"):
        queue.wait_all("both") if wait == "all" else queue.wait(lambda: bool(done), "it")
    with pytest.raises(LostError, match="gone"):
        queue.wait_all("what was over before")
    with pytest.raises(LostError, match="gone"):
        queue.put(job("one more"))
    queue.close()  # the error has been raised once already
    assert not done


def test_jobs_are_abandoned_while_another_begins():
    queue, begun, go = CollectiveQueue("stage 1", 5.0), threading.Event(), threading.Event()
    queue.put(job("a sum", lambda: begun.set() or (go.wait(5) and None)))
    queue.put(job("never", fails))
    assert begun.wait(5)
    queue.abandon()
    go.set()
    queue.close()
    with pytest.raises(LoopError, match="stage 1: one more was queued after close"):
        queue.put(job("one more"))
