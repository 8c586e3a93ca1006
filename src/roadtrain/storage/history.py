"""History: which sessions a store has been through, and whether what is found of it may be gone on
from. Pure.

Every session that begins to train gives the history one more link, with an identity of its own.
Each server that takes part has the link durably before the session's first commit, and a step is
committed only when all of them hold it. So:

Note "empty links": a server that takes part in a link and holds no step after it proves that the
link has no step; so does one that should have taken part and never wrote the link down. Such links
at the end of a history do not count.

Note "forked": of two histories that count, one is a part of the other, else both went on from the
same step without each other. Nobody can say which one is meant, so a start that sees both is
refused.

Note "who may hold more": later steps than those that are found can only have been made with a
server that took part in the last link known here. So a start is safe when all of these are here.
With three or more servers a majority that has a history is enough too: every session had one, and
two majorities share a server. With two servers somebody else must know that the other one did not
go on alone: the witness of the last link. That is whoever began it: the mark of its run directory,
or, where there is none, its worker 0 while it lives, which says to one server at most that it may
go on without the other (`Without` in servers/frames.py). Without a witness the two cases "the other
died" and "the other went on alone" look the same, and only a person knows (`given_up`).

Assumes: what a server says of itself is whole. Does NOT know how it was asked, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from roadtrain.errors import ForkedError, StaleError


@dataclass(frozen=True)
class HistoryLink:
    """A session that began to train."""

    id: str  # random
    step: int  # from which it went on; -1: not known
    members: tuple[int, ...] = ()  # the servers that took part, the first of them committed
    at: int = 0  # when, in seconds since 1970; 0: not known

    def __str__(self) -> str:
        return f"session {self.id}, begun at step {self.step} ({_utc(self.at)})"


@dataclass(frozen=True)
class ServerHoldings:
    """What a server that answers says of its store."""

    newest: int = -1  # its newest step, -1: there is none
    history: tuple[HistoryLink, ...] = ()
    kept: int = -1  # the newest step of its snapshots
    # servers of the last link that it may go on without, as a witness told it
    without: tuple[int, ...] = ()


@dataclass(frozen=True)
class Witness:
    """What a run directory knows: the last link that a start of this run began, and the one
    before it."""

    before: str
    last: str
    members: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.before or '-'} {self.last} {','.join(map(str, self.members))}"

    @staticmethod
    def of(text: str) -> Witness | None:
        """None where the text does not say what a witness does."""
        words = text.split(" ")
        if len(words) != 3 or not all(number.isdigit() for number in words[2].split(",")):
            return None
        return Witness(words[0].replace("-", ""), words[1], tuple(map(int, words[2].split(","))))


@dataclass(frozen=True)
class Resume:
    """A start may go on from `step`, which each of `members` holds; the other servers are
    filled up from these."""

    step: int
    members: tuple[int, ...]
    history: tuple[HistoryLink, ...]  # that counts: the new link comes after it


@dataclass(frozen=True)
class Doubt:
    """A start has to wait for more servers, or to be told more."""

    why: str
    hint: str = ""
    lost: tuple[int, ...] = ()  # servers whose chunks nobody who is here holds


class Histories:
    """What the servers in `found` (number -> what it says) have been through. `names`: of all
    servers of the job;
    `holders`: for every chunk the servers that hold it. Raises ForkedError."""

    def __init__(
        self,
        found: Mapping[int, ServerHoldings],
        names: Sequence[str],
        holders: Collection[tuple[int, ...]],
    ) -> None:
        self.found = {n: held for n, held in found.items() if held.newest >= 0 or held.history}
        self.names, self.holders = names, holders
        self.silent = set(range(len(names))) - found.keys()
        self.counting = {number: self._counting(number) for number in self.found}
        self._refuse_forks()
        self.history = max(self.counting.values(), key=len, default=())
        ends = {n for n in self.found if _same(self.counting[n], self.history)}
        self.at_end = {n for n in ends if self.found[n].newest >= 0}
        self.committed = max(map(self._committed, self.found), default=-1)

    def resume(
        self, witness: Witness | None = None, given_up: Collection[int] = ()
    ) -> Resume | Doubt:
        """Whether and where a start goes on. `given_up`: servers that are not in `found`, since
        what they hold is not to count. Raises StaleError where the run directory knows of a session
        that nobody here knows of.
        """
        members = tuple(n for n in sorted(self.at_end) if self.found[n].newest >= self.committed)
        if lost := lost_chunks(self.holders, members):
            return self._not_held(members, lost)
        unknown = self._unknown(witness, members) if witness and not given_up else None
        if unknown is not None:
            return unknown
        if not (self._complete(given_up) or self._witnessed(witness)):
            return self._alone(members, "nobody who is here knows whether it went on alone")
        step = min(self.found[n].newest for n in members)
        assert step >= self.committed, "a committed step is gone on from"
        return Resume(step, members, self.history)

    # what one server says

    def _counting(self, number: int) -> tuple[HistoryLink, ...]:
        """The history of a server, without links that surely have no step."""
        links = self.found[number].history
        while links and self._is_empty(links[-1], number):
            links = links[:-1]
        return links

    def _is_empty(self, link: HistoryLink, number: int) -> bool:
        """Of the last link of a server. See Note "empty links"."""
        here = {number, *link.members} & self.found.keys()
        proving = [self.found[n].newest for n in here if self._lacks_steps_of(link, n)]
        most = link.step if link.step >= 0 else max(proving, default=-1)
        return bool(proving) and self._committed(number) <= most

    def _lacks_steps_of(self, link: HistoryLink, number: int) -> bool:
        held, links = self.found[number], self.found[number].history
        if held.newest < 0:
            return False  # its memory was lost: what it has trained is not known
        return link.id not in {one.id for one in links} or (
            links[-1] == link and held.newest <= link.step
        )

    def _committed(self, number: int) -> int:
        """The highest step that the server knows to be committed: a step is prepared after the
        commit of the one before, the first server commits, and what a session goes on from
        counts."""
        held, links = self.found[number], self.found[number].history
        first, base = (links[-1].members[:1], links[-1].step) if links else ((0,), -1)
        surely = held.newest if held.newest <= base or number in first else held.newest - 1
        return max(surely, held.kept)

    # what they say together

    def _refuse_forks(self) -> None:
        for one in self.found:
            for other in self.found:
                if one < other and not self._agree(one, other):
                    raise ForkedError(
                        f"{self._told(one, other)}; {self._told(other, one)}: neither goes on from"
                        " the other",
                        hint=self._way_out(one, other),
                    )

    def _way_out(self, *forked: int) -> str:
        """The hint for servers of which neither goes on from the other: whom to give up so that all
        who are left agree and hold every chunk."""
        spare: list[str] = []
        for kept in forked:
            side = [kept]
            for number in self.found:
                if all(self._agree(number, other) for other in side):
                    side.append(number)
            if self._can_do_with(side):
                spare.append(self._names([n for n in self.found if n not in side]))
        if not spare:
            return (
                "nothing was changed: each side holds chunks that no other server has, so none can"
                " be given up. Start them with the directories that were trained together, of one"
                " copy of the store"
            )
        return (
            "nothing was changed. Give the servers of one side up: give_up=[...]"
            f" (--servers.give_up) with the address of {' or of '.join(spare)}; what they hold is"
            " moved aside and they are filled up from the others"
        )

    def _can_do_with(self, side: Collection[int]) -> bool:
        """Whether a start goes on with these alone. A silent server may hold its chunks."""
        if self.silent:
            return not lost_chunks(self.holders, {*self.silent, *side})
        found = {n: self.found[n] for n in side}
        given_up = self.found.keys() - found.keys()
        with suppress(ForkedError):
            histories = Histories(found, self.names, self.holders)
            return isinstance(histories.resume(None, given_up), Resume)
        return False

    def _agree(self, one: int, other: int) -> bool:
        """Whether one of the two goes on from the other."""
        return self._goes_on_from(one, other) or self._goes_on_from(other, one)

    def _goes_on_from(self, later: int, earlier: int) -> bool:
        mine, its = self.counting[later], self.counting[earlier]
        if not _same(mine[: len(its)], its):
            return False
        branch = mine[len(its)].step if len(mine) > len(its) else -1
        return branch < 0 or self._committed(earlier) <= branch

    def _told(self, number: int, other: int) -> str:
        """Where the history of a server leaves that of another."""
        mine, its = self.counting[number], {link.id for link in self.counting[other]}
        link = next((one for one in mine if one.id not in its), mine[-1] if mine else None)
        since = when = ""
        if link is not None:
            since = f" on a history of its own since step {link.step}" if link.step >= 0 else ""
            when = f", begun at {_utc(link.at)}" if link.at else ""
        newest = max(self.found[number].newest, self.found[number].kept)
        return f"{self.names[number]} is at step {newest}{since}{when}"

    def _complete(self, given_up: Collection[int]) -> bool:
        """See Note "who may hold more"."""
        here = {n for n in self.found if _same(self.counting[n], self.history)} | set(given_up)
        n_servers = len(self.names)
        if len(here) == n_servers or (n_servers > 2 and 2 * len(self.found) > n_servers):
            return True
        return bool(self.at_end) and all(
            bool(links := self.found[n].history)
            and set(links[-1].members) <= here | self._without(n)
            for n in self.at_end
        )

    def _without(self, number: int) -> set[int]:
        return set(self.found[number].without) if len(self.names) == 2 else set()

    def _witnessed(self, witness: Witness | None) -> bool:
        """Whether the run directory knows that nobody went on after what one of two servers
        holds."""
        if witness is None or len(self.names) > 2:
            return False
        for number in self.at_end:
            last = (self.found[number].history or (HistoryLink("", -1),))[-1]
            ours = last.id == witness.last or (
                last.id == witness.before and number in witness.members
            )
            if ours and number in last.members:
                return True
        return False

    def _unknown(self, witness: Witness, members: Sequence[int]) -> Doubt | None:
        """Where the run's last session is in no history here, and nobody here can say that it
        has no step."""
        if any(witness.last == link.id for held in self.found.values() for link in held.history):
            return None
        if any(n in witness.members and witness.before in self._ends(n) for n in self.at_end):
            return None
        if any(n not in self.found for n in witness.members):
            return self._alone(
                members, f"the run's last session was with {self._names(witness.members)}"
            )
        raise StaleError(
            f"the run's last session, with {self._names(witness.members)}, is in the history of"
            f" nobody here: they are at step {max(held.newest for held in self.found.values())}",
            hint=(
                "nothing was changed: was an older copy put back? Start the servers with the"
                " directories that hold the run; --new-store goes back to what is there"
            ),
        )

    def _ends(self, number: int) -> set[str]:
        """The last link of a server, and the last that counts; "" before the first."""
        return {
            (links or (HistoryLink("", -1),))[-1].id
            for links in (self.found[number].history, self.history)
        }

    def _not_held(self, members: Sequence[int], lost: Sequence[int]) -> Doubt:
        held = f"step {self.committed} of a store is held by {self._names(members) or 'nobody'}"
        return Doubt(
            f"{held}, not by {self._names(lost)}: nobody holds the rest of it", lost=tuple(lost)
        )

    def _alone(self, members: Sequence[int], why: str) -> Doubt:
        others = [n for n in range(len(self.names)) if n not in self.at_end]
        if len(self.names) > 2:
            why = (
                f"{len(members)} of {len(self.names)} servers hold the last step known, a majority"
                " is needed"
            )
        newest = max((self.found[n].newest for n in members), default=-1)
        return Doubt(
            f"{self._names(members)} is at step {newest}; {self._names(others)} may hold a later"
            f" one: {why}",
            "start what is missing, with what it held; if that is lost for good: give_up=[...]"
            f" (--servers.give_up) with the address of {self._names(others)} goes on from step"
            f" {newest}",
        )

    def _names(self, numbers: Collection[int]) -> str:
        return ", ".join(self.names[number] for number in numbers)


def back_to(history: Sequence[HistoryLink], step: int) -> tuple[HistoryLink, ...]:
    """What of a history counts where a start goes back to a snapshot of `step`."""
    links = tuple(history)
    while links and links[-1].step > step:
        links = links[:-1]
    return links


def lost_chunks(holders: Collection[tuple[int, ...]], members: Collection[int]) -> list[int]:
    """Who held chunks that none of `members` holds."""
    return sorted({server for some in holders if not set(some) & set(members) for server in some})


def _same(mine: Sequence[HistoryLink], its: Sequence[HistoryLink]) -> bool:
    return [link.id for link in mine] == [link.id for link in its]


def _utc(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
