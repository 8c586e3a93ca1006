"""Order of a worker's messages: each update is released right after its chunk's gradient, and no
message mentions a gradient that is still being copied from the device. There is no device here, so
the copies are made slow."""

import time

import pytest
import torch

import roadtrain
from roadtrain import TopK
from roadtrain.device.copies import CopyCallbacks, HostBuffer
from roadtrain.servers.protocol import messages
from roadtrain.servers.worker import Worker
from tests.support.models import Case, Net, contents, new_scaler, place, run


def test_each_chunk_is_released_right_after_its_gradient(monkeypatch):
    sent, case = [], Case(eager=True)
    model = Net(width=256)
    placed = roadtrain.place(
        model,
        torch.optim.AdamW(model.parameters(), foreach=False),
        backwards_per_step=1,
        chunk_elements=1 << 16,
        report=lambda _: None,
    )
    with placed:
        for link in placed.session.worker.links.values():
            monkeypatch.setattr(link, "send", lambda m, send=link.send: (sent.append(m), send(m)))
        run(case, model, placed, new_scaler(case), 0, 2)
    blocks = {c.id: c.block for c in placed.table.chunks}
    pairs = [
        (type(m).__name__, m.chunk)
        for m in sent
        if isinstance(m, (messages.Push, messages.ApplyUpdate)) and blocks[m.chunk]
    ]
    # blocks of several chunks
    assert len({chunk for _, chunk in pairs}) > 2 * len(set(blocks.values()))
    for (kind, chunk), (other, same) in zip(pairs[::2], pairs[1::2], strict=True):
        assert (kind, other, chunk) == ("Push", "ApplyUpdate", same)


@pytest.fixture
def slow_copies(monkeypatch):
    """Simulate copies to and from a device.

    `from_device` returns an event for which a thread of the worker waits, and each copy to the
    device still runs when its host buffer is about to be written again. No thread waits with the
    lock.
    """
    workers = []

    class Event:
        def synchronize(self):
            assert not any(worker._lock._is_owned() for worker in workers)
            time.sleep(0.005)

    real_init = Worker.__init__

    def init(self, *args, **options):
        real_init(self, *args, **options)
        self._after = {
            direction: CopyCallbacks(f"worker {direction}", self._copy_failed)
            for direction in ("push", "pull")
        }
        workers.append(self)

    monkeypatch.setattr(Worker, "__init__", init)
    monkeypatch.setattr(HostBuffer, "from_device", lambda self, nbytes: Event())
    monkeypatch.setattr(HostBuffer, "copying", lambda self: Event())


@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case(eager=True), {}),
        (Case(eager=True, dtype=torch.bfloat16, frozen=True), {}),
        (Case(clip=0.5, accumulate=2), {}),
        (Case(clip=0.5, scaler=True), {}),
        (Case(eager=True), {"compress": TopK(0.1, error_feedback=True)}),
        (Case(eager=True, staleness=1), {}),
    ],
    ids=["eager", "frozen", "clipped", "scaler", "top-k", "late"],
)
def test_no_message_mentions_a_gradient_before_its_copy_has_ended(case, options, request):
    results = []
    for slow in (False, True):
        if slow:
            request.getfixturevalue("slow_copies")
        model, placed, scaler = place(case, None, **options)
        with placed:
            losses = run(case, model, placed, scaler, 0, 5)
            results.append(
                (losses, {name: value.tobytes() for name, value in contents(model, placed).items()})
            )
    assert results[0] == results[1]
