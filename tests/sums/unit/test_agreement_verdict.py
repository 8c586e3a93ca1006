"""A verdict of the coordinator arrives while a worker's program continues (sums/agreement.py)."""

from __future__ import annotations

import threading
from typing import Any

from roadtrain.errors import DifferError
from roadtrain.sums import sum_frames
from roadtrain.sums.agreement import Agreement


def silent(kind: int, fields: Any, payload: bytes = b"") -> None:
    """Stands for a coordinator's link and drops all messages."""


def test_a_sum_begun_while_a_verdict_is_applied_belongs_to_the_new_epoch() -> None:  # Rule 5
    """The program learns that its sum was dropped and resumes before the other sums are dropped."""
    agreement = Agreement(0, True, 60.0, silent, lambda: None, lambda error: None)
    dropped_sum = threading.Event()
    errors: list[BaseException] = []
    goes_on = threading.Thread(target=lambda: dropped_sum.wait(10) and agreement.resume())

    def dropped(error: BaseException) -> None:
        errors.append(error)
        dropped_sum.set()
        goes_on.join(0.3)  # long enough for the program to resume if it does not wait

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
