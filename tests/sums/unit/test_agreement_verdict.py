"""A verdict of the coordinator while the program of a worker goes on (sums/agreement.py)."""

from __future__ import annotations

import threading
from typing import Any

from roadtrain.errors import DifferError
from roadtrain.sums import sum_frames
from roadtrain.sums.agreement import Agreement


def silent(kind: int, fields: Any, payload: bytes = b"") -> None:
    """A coordinator's link that carries nothing."""


def test_what_begins_while_a_verdict_is_carried_out_is_of_the_new_epoch() -> None:  # Rule 5
    """The program hears of its sum that is given up, and is faster than who gives up the rest."""
    agreement = Agreement(0, True, 60.0, silent, lambda: None, lambda error: None)
    heard = threading.Event()
    errors: list[BaseException] = []
    goes_on = threading.Thread(target=lambda: heard.wait(10) and agreement.resume())

    def dropped(error: BaseException) -> None:
        errors.append(error)
        heard.set()
        goes_on.join(0.3)  # so much time it has, if it does not wait

    try:
        agreement.run(agreement.begin("a sum", "float32 [1]"), lambda: None, dropped)
        goes_on.start()
        agreement.take(sum_frames.MISMATCH, (1, "workers differ"))
        goes_on.join(10)
        later = agreement.begin("another sum", "float32 [1]")
    finally:
        agreement.close()
    assert [type(error) for error in errors] == [DifferError]
    assert later.error is None and later.epoch == 1
