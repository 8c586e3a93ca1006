"""Model of parameters on their way from the server through a switch to the workers, for the
exploration (explore.py). The switch merges the heartbeats of the workers.

benchmarks/fanin/model.py states the assumptions about network, restarts and termination.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from benchmarks.fanin.explore import Action, Parts, State, Step
from benchmarks.fanin.machines import (
    RESTART,
    SEND,
    SILENT,
    ReceiverStep,
    SwitchStep,
    beat_of,
    eager_step,
    earlier_beats,
    sender_state,
    sender_step,
)
from benchmarks.fanin.upwards import Variant, with_part
from roadtrain.switch.protocol.numbered import NOTHING, Heartbeat, NumberedSender, combined, merged
from roadtrain.switch.protocol.switch import SwitchStateMachine


class HastySwitch(SwitchStateMachine):
    """A switch with a deliberate fault: it sends merged heartbeats before all children have sent
    theirs.
    """

    def child_beat(self, child: int, beat: Heartbeat) -> Heartbeat | None:
        super().child_beat(child, beat)
        return merged(list(self.beats.values()))


SENDER, SWITCH, SENT_UP, RECEIVERS = 0, 1, 2, 3  # indices into a state


class Downwards:
    def __init__(
        self, workers: int, window: int, numbers: int, variant: Variant, eager: bool = False
    ) -> None:
        self.workers, self.window, self.numbers = workers, window, numbers
        sender = NumberedSender()
        sender.may_send(numbers)
        self.senders = Parts(sender_state(sender), eager_step if eager else sender_step)
        machine = HastySwitch if variant is Variant.HASTY else SwitchStateMachine
        kind = SwitchStep(machine, window, workers)
        self.switch = Parts(kind.first, kind)
        self.sent_up = Parts(NOTHING, lambda sent, beat: (combined(sent, beat), None))
        self.receivers = Parts((0, 0), ReceiverStep(window))
        self.possible_beats = cache(self._possible_beats)
        self.merged_beats = cache(self._merged_beats)

    def first(self) -> State:
        first = self.senders.first, self.switch.first, self.sent_up.first
        return (*first, *(self.receivers.first for _ in range(self.workers)))

    def done(self, state: State) -> bool:
        return self.senders.states[state[SENDER]][0] == self.numbers

    # --- steps -----------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[Step]:
        yield from self._sender(state)
        for worker in range(self.workers):
            yield from self._worker(state, worker)
        restarted, _ = self.switch.step(state[SWITCH], self.switch.event(RESTART))
        if restarted != state[SWITCH]:
            yield ("restarts",), with_part(state, SWITCH, restarted), ""

    def _sender(self, state: State) -> Iterator[Step]:
        """Yield every step of the sender: it sends a packet or receives a heartbeat."""
        part = state[SENDER]
        to, number = self.senders.step(part, self.senders.event(SEND))
        if to != part:
            yield ("sends", number), with_part(state, SENDER, to), self._beyond(state, number)
        for beat in self.merged_beats(state[SENT_UP]):
            to, _ = self.senders.step(part, self.senders.event(beat))
            if to != part:
                last = self.senders.states[to][4] - 1  # the greatest number sent by then
                yield ("beat", beat), with_part(state, SENDER, to), self._beyond(state, last)

    def _worker(self, state: State, worker: int) -> Iterator[Step]:
        """Yield every step of a worker: it receives a packet, or its heartbeat arrives at the
        switch.
        """
        at = RECEIVERS + worker
        for number in range(self.senders.states[state[SENDER]][4]):
            to, new = self.receivers.step(state[at], self.receivers.event(number))
            if new:
                yield ("packet", worker, number), with_part(state, at, to), ""
        for beat in self.possible_beats(state[at]):
            after, merged_beat = self._merge(state, worker, beat)
            if after != state:
                wrong = self._untrue(state, merged_beat)
                yield ("merges", worker, beat, merged_beat), after, wrong

    def _merge(self, state: State, worker: int, beat: Heartbeat) -> tuple[State, Heartbeat | None]:
        event = self.switch.event((worker, beat))
        to, (out, _) = self.switch.step(state[SWITCH], event)
        state = with_part(state, SWITCH, to)
        if not isinstance(out, Heartbeat):
            return state, None
        sent, _ = self.sent_up.step(state[SENT_UP], self.sent_up.event(out))
        return with_part(state, SENT_UP, sent), out

    def _beats(self, state: State) -> list[Heartbeat]:
        return [beat_of(self.receivers.states[part], self.window) for part in state[RECEIVERS:]]

    def _beyond(self, state: State, number: int) -> str:
        credit = min(beat.credit for beat in self._beats(state))
        return f"{number} is beyond a worker's credit of {credit}" if number > credit else ""

    def _untrue(self, state: State, beat: Heartbeat | None) -> str:
        """Return the error in a heartbeat that the switch sent up, "" if there is none. The switch
        must not acknowledge a packet that a worker has not acknowledged, or allow a packet that a
        worker does not allow.
        """
        true = merged(self._beats(state))
        if beat is None or combined(true, beat) == true:
            return ""
        return f"the switch claims {beat}, but only {true} is true"

    def _possible_beats(self, receiver: int) -> list[Heartbeat]:
        return earlier_beats(self.receivers.states[receiver], self.window)

    def _merged_beats(self, sent: int) -> list[Heartbeat]:
        beat = self.sent_up.states[sent]
        if beat == NOTHING:
            return []
        found = earlier_beats((beat.ack, beat.have), self.window)
        return [replace(earlier, credit=min(earlier.credit, beat.credit)) for earlier in found]

    # --- a round without loss --------------------------------------------------------------------

    def round(self, state: State) -> State:
        state = self._beats_up(state)
        sender, _ = self.senders.step(state[SENDER], self.senders.event(SILENT))
        number = 0
        while number >= 0:
            sender, number = self.senders.step(sender, self.senders.event(SEND))
            for at in range(RECEIVERS, len(state) if number >= 0 else 0):
                to, _ = self.receivers.step(state[at], self.receivers.event(number))
                state = with_part(state, at, to)
        return self._beats_up(with_part(state, SENDER, sender))

    def _beats_up(self, state: State) -> State:
        """Deliver each worker's heartbeat to the switch, and then the merged heartbeat to the
        sender.
        """
        out = None
        for worker, beat in enumerate(self._beats(state)):
            state, out = self._merge(state, worker, beat)
        assert out is not None, "all children have sent heartbeats"
        sender, _ = self.senders.step(state[SENDER], self.senders.event(out))
        return with_part(state, SENDER, sender)

    # --- words -----------------------------------------------------------------------------------

    def describe(self, action: Action) -> str:
        match action:
            case ("sends", number):
                return f"the server sends {number}"
            case ("beat", beat):
                return f"the server receives {beat}"
            case ("packet", worker, number):
                return f"worker {worker} receives {number}"
            case ("merges", worker, beat, out):
                sent = "nothing" if out is None else str(out)
                return f"the switch receives {beat} of worker {worker} and sends {sent}"
            case ("restarts",):
                return "the switch restarts"
        raise AssertionError(action)
