"""`python -m roadtrain.launch.standby_main HOME`: the standby of a run's supervisor. Does NOT
import torch.

The standby waits until the supervisor is gone. If the run has not ended by then, the standby
becomes the supervisor, and starts all processes again, from the committed step.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from roadtrain.launch.home import RunHome
from roadtrain.launch.logs import RunLogs
from roadtrain.launch.protocol.run_events import FAILED
from roadtrain.launch.supervise import supervise_locked

TRIES = 6  # number of tries, as killed processes may keep ports and stores in use for a moment
AGAIN_S = 1.0  # pause between tries


def stand_by(home: RunHome) -> int:
    """Wait until the supervisor has ended. If the run has not ended, supervise it to its end.
    Return the run's exit code."""
    with home.taking_over():
        state = home.state()
        if state.phase == "ended":
            return state.code
        with RunLogs(home) as logs:
            logs.notify("the supervisor was killed; the standby goes on from the committed step")
        return _take_over(home)


def _take_over(home: RunHome) -> int:
    for _ in range(TRIES):
        code = supervise_locked(home)
        if home.state().phase == "ended":
            return code
        time.sleep(AGAIN_S)
    why = f"the supervisor was killed, and {TRIES} attempts to go on failed"
    home.write_ended(FAILED, why)
    return FAILED


if __name__ == "__main__":
    sys.exit(stand_by(RunHome(Path(sys.argv[1]))))
