"""In which order a worker speaks: an update is released right behind its chunk's gradient, and
nothing is said of a gradient that is still on its way from the device (there is none here:
copies are made slow)."""

import time

import pytest
import torch

import roadtrain
from roadtrain import TopK
from roadtrain.device.copies import CopyCallbacks, HostBuffer
from roadtrain.servers.protocol import messages
from roadtrain.servers.worker import Worker
from tests.support.models import Case, Net, contents, new_scaler, place, run


def test_each_chunk_is_released_right_behind_its_gradient(monkeypatch):
    said, case = [], Case(eager=True)
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
            monkeypatch.setattr(link, "send", lambda m, send=link.send: (said.append(m), send(m)))
        run(case, model, placed, new_scaler(case), 0, 2)
    blocks = {c.id: c.block for c in placed.table.chunks}
    spoken = [
        (type(m).__name__, m.chunk)
        for m in said
        if isinstance(m, (messages.Push, messages.ApplyUpdate)) and blocks[m.chunk]
    ]
    # blocks of several chunks
    assert len({chunk for _, chunk in spoken}) > 2 * len(set(blocks.values()))
    for (kind, chunk), (other, same) in zip(spoken[::2], spoken[1::2], strict=True):
        assert (kind, other, chunk) == ("Push", "ApplyUpdate", same)


@pytest.fixture
def slow_copies(monkeypatch):
    """As if gradients came from a device: `from_device` gives an event, the worker's own thread
    waits for it; and as if each copy to the device still ran when its host side is to be written
    again. Nobody waits with the lock.
    """
    workers = []

    class Event:
        def synchronize(self):
            assert not any(worker._lock._is_owned() for worker in workers)
            time.sleep(0.005)

    made = Worker.__init__

    def started(self, *args, **options):
        made(self, *args, **options)
        self._after = {
            of: CopyCallbacks(f"worker {of}", self._copy_failed) for of in ("push", "pull")
        }
        workers.append(self)

    monkeypatch.setattr(Worker, "__init__", started)
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
def test_nothing_is_said_of_a_gradient_before_it_has_left(case, options, request):
    found = []
    for slow in (False, True):
        if slow:
            request.getfixturevalue("slow_copies")
        model, placed, scaler = place(case, None, **options)
        with placed:
            losses = run(case, model, placed, scaler, 0, 5)
            found.append(
                (losses, {name: value.tobytes() for name, value in contents(model, placed).items()})
            )
    assert found[0] == found[1]
