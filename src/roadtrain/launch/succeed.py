"""`python -m roadtrain.launch.succeed HOME`: the standby of a run's supervisor. It waits until that
one is gone. Where the run had not ended, it is its supervisor from then on: what the one before had
started has ended with it, so all begins again at the committed step, which nobody has to type.

Does NOT import torch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from roadtrain.launch.home import RunHome
from roadtrain.launch.logs import RunLogs
from roadtrain.launch.supervise import supervise_locked
from roadtrain.launch.supervisor import FAILED

TRIES = 6  # to go on: ports and stores of processes that were killed may be in use for a moment
AGAIN_S = 1.0


def succeed(home: RunHome) -> int:
    """The run's exit code."""
    with home.succeeding():
        state = home.state()
        if state.phase == "ended":
            return state.code
        with RunLogs(home) as logs:
            logs.tell("the supervisor was killed, its standby goes on at the committed step")
        return _gone_on(home)


def _gone_on(home: RunHome) -> int:
    for _ in range(TRIES):
        code = supervise_locked(home)
        if home.state().phase == "ended":
            return code
        time.sleep(AGAIN_S)
    why = f"its supervisor was killed, and the run could not go on in {TRIES} tries"
    home.write_ended(FAILED, why)
    return FAILED


if __name__ == "__main__":
    sys.exit(succeed(RunHome(Path(sys.argv[1]))))
