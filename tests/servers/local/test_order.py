"""Order of a worker's messages: each update is released right after its chunk's gradient, and no
message mentions a gradient that is still being copied from the device."""

from contextlib import nullcontext

import pytest
import torch

import roadtrain
from roadtrain import TopK
from roadtrain.lab.emulated_device import EmulatedDevice
from roadtrain.servers.protocol import messages
from tests.support.models import Case, Net, contents, new_scaler, place, run

CASES = {
    "eager": (Case(eager=True), {}),
    "frozen": (Case(eager=True, dtype=torch.bfloat16, frozen=True), {}),
    "clipped": (Case(clip=0.5, accumulate=2), {}),
    "scaler": (Case(clip=0.5, scaler=True), {}),
    "top-k": (Case(eager=True), {"compress": TopK(0.1, error_feedback=True)}),
    "late": (Case(eager=True, staleness=1), {}),
}


def test_each_block_is_released_with_its_gradient(monkeypatch):
    """A block has one message for its gradient and its update, whatever the number of chunks."""
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
    whole = {block.index: (1 << len(block.chunks)) - 1 for block in placed.table.blocks}
    assert max(whole.values()) > 3, "blocks of several chunks"
    pushes = [m for m in sent if isinstance(m, messages.BlockPush) and m.block]
    assert [m.block for m in pushes] == 2 * [*reversed(range(1, len(whole)))]
    for push in pushes:
        assert push.chunks == push.update.chunks == whole[push.block]
    assert not any(isinstance(m, messages.BlockUpdate) and m.block for m in sent)


@pytest.mark.parametrize(("case", "options"), CASES.values(), ids=CASES)
def test_a_device_changes_no_bit_and_no_thread_waits_for_it_with_a_lock(case, options, monkeypatch):
    """Rules 1, 6."""
    results, workers, device = [], [], EmulatedDevice()
    synchronize = type(device.new_event()).synchronize

    def waits(event):
        assert not any(worker._lock._is_owned() for worker in workers)
        synchronize(event)

    monkeypatch.setattr(type(device.new_event()), "synchronize", waits)
    for context in (nullcontext(), device.active()):
        with context:
            model, placed, scaler = place(case, None, **options)
            with placed:
                workers.append(placed.session.worker)
                losses = run(case, model, placed, scaler, 0, 5)
                results.append((losses, _bytes(model, placed)))
    assert results[0] == results[1] and device.races == []


def _bytes(model, placed):
    return {name: value.tobytes() for name, value in contents(model, placed).items()}
