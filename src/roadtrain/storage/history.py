"""History: the sessions that have trained a store on servers. Decides whether a start of training
may continue from the steps that the servers hold. Does no I/O.

Every session that begins to train appends a link with a random id. Each of its servers stores the
link durably before the session's first commit. A step is committed only when all these servers hold
it.

Note "empty links": a link is empty if its session has trained no step. This is certain if one of
its servers holds no step of the session, or never stored the link. Empty links at the end of a
history are ignored.

Note "forked": after the empty links at their ends are removed, one of two histories must be the
beginning of the other. Otherwise the histories have forked. Only the user can tell which history to
continue, so the start is refused.

Note "who may hold more": a server that has not answered may hold a later step. Such a step can only
have been trained together with a server of the last link. So a start is safe if all servers of the
last link have answered. With three or more servers, a majority that has a history suffices: every
session had a majority, and any two majorities share a server.

If a job has two servers and only one has answered, the missing server may have been trained
without the other. A witness must rule this out. The witness is the file mark.json (storage/mark.py)
in the run directory, if this run began the last session. If there is no such file, the witness is
worker 0 of the last session, as long as its process lives. Worker 0 lets at most one server
continue without the other. Without a witness, the user must decide (argument `given_up` of
`Histories.resume`).
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
    step: int  # the step from which the session continued; -1 if unknown
    members: tuple[int, ...] = ()  # participating servers; the first of them commits
    at: int = 0  # time when the session began, in seconds since 1970; 0 if unknown

    def __str__(self) -> str:
        return f"session {self.id}, started at step {self.step} ({_utc(self.at)})"


@dataclass(frozen=True)
class ServerHoldings:
    """The steps and the history of a server's store, as reported by the server."""

    newest: int = -1  # its newest step; -1 if there is none
    history: tuple[HistoryLink, ...] = ()
    kept: int = -1  # newest step of its snapshots; -1 if there is none
    # servers of the last link without which this server may continue, because a witness allowed it
    without: tuple[int, ...] = ()


@dataclass(frozen=True)
class Witness:
    """A run directory's record of the last session that the run began, and of the session before
    it."""

    before: str  # id of the session before `last`; "" if there was none
    last: str  # id of the last session that this run began
    members: tuple[int, ...]  # servers that were to take part in `last`

    def __str__(self) -> str:
        return f"{self.before or '-'} {self.last} {','.join(map(str, self.members))}"

    @staticmethod
    def of(text: str) -> Witness | None:
        """Parse a text that `str` has made from a witness. Returns None for any other text."""
        words = text.split(" ")
        if len(words) != 3 or not all(number.isdigit() for number in words[2].split(",")):
            return None
        return Witness(words[0].replace("-", ""), words[1], tuple(map(int, words[2].split(","))))


@dataclass(frozen=True)
class Resume:
    """The decision to continue from `step`, which all `members` hold. The other servers are filled
    with copies from the members."""

    step: int
    members: tuple[int, ...]
    history: tuple[HistoryLink, ...]  # the history to which the start appends its link


@dataclass(frozen=True)
class Unclear:
    """The decision that a start must wait for more servers or for more information."""

    why: str
    hint: str = ""
    lost: tuple[int, ...] = ()  # servers that should hold the missing chunks


class Histories:
    """The histories of the servers that have answered.

    Args:
        found: The report of each server that has answered, by server number (the server's index in
            `names`).
        names: The names of all servers of the job.
        holders: For every chunk, the servers that should hold the chunk.

    Raises:
        ForkedError: Two servers were trained separately (Note "forked").
    """

    def __init__(
        self,
        found: Mapping[int, ServerHoldings],
        names: Sequence[str],
        holders: Collection[tuple[int, ...]],
    ) -> None:
        self.found = {n: held for n, held in found.items() if held.newest >= 0 or held.history}
        self.names, self.holders = names, holders
        self.silent = set(range(len(names))) - found.keys()
        self.effective = {number: self._effective(number) for number in self.found}
        self._refuse_forks()
        self.history = max(self.effective.values(), key=len, default=())
        ends = {n for n in self.found if _same(self.effective[n], self.history)}
        self.at_end = {n for n in ends if self.found[n].newest >= 0}
        self.committed = max(map(self._committed, self.found), default=-1)

    def resume(
        self, witness: Witness | None = None, given_up: Collection[int] = ()
    ) -> Resume | Unclear:
        """Decide whether training can continue, and from which step.

        Args:
            witness: The witness that the run directory contains, or None.
            given_up: Numbers of the servers whose stored data is to be discarded. The argument
                `found` of Histories must not contain these servers.

        Returns:
            A `Resume` with the step to continue from, or an `Unclear` with the reason to wait.

        Raises:
            StaleError: The run directory names a session that is in no server's history.
        """
        members = tuple(n for n in sorted(self.at_end) if self.found[n].newest >= self.committed)
        if lost := lost_chunks(self.holders, members):
            return self._not_held(members, lost)
        unknown = self._unknown(witness, members) if witness and not given_up else None
        if unknown is not None:
            return unknown
        if not (self._complete(given_up) or self._witnessed(witness)):
            return self._alone(members, "it cannot be ruled out that it was trained alone")
        step = min(self.found[n].newest for n in members)
        assert step >= self.committed, "a start continues from a committed step"
        return Resume(step, members, self.history)

    # the history of one server

    def _effective(self, number: int) -> tuple[HistoryLink, ...]:
        """Return the history of server `number` without empty links at its end (Note "empty
        links")."""
        links = self.found[number].history
        while links and self._is_empty(links[-1], number):
            links = links[:-1]
        return links

    def _is_empty(self, link: HistoryLink, number: int) -> bool:
        """Whether `link`, the last link of server `number`, is certainly empty (Note "empty
        links")."""
        here = {number, *link.members} & self.found.keys()
        proving = [self.found[n].newest for n in here if self._lacks_steps_of(link, n)]
        most = link.step if link.step >= 0 else max(proving, default=-1)
        return bool(proving) and self._committed(number) <= most

    def _lacks_steps_of(self, link: HistoryLink, number: int) -> bool:
        held, links = self.found[number], self.found[number].history
        if held.newest < 0:
            return False  # the server's memory was lost, so its trained steps are unknown
        return link.id not in {own.id for own in links} or (
            links[-1] == link and held.newest <= link.step
        )

    def _committed(self, number: int) -> int:
        """Return the highest step that is certainly committed according to server `number`.

        Only the newest step may be uncommitted. It is certainly committed if the session began at
        this step, or if the server is the session's first member, which commits for all. Steps of
        snapshots are committed.
        """
        held, links = self.found[number], self.found[number].history
        first, base = (links[-1].members[:1], links[-1].step) if links else ((0,), -1)
        surely = held.newest if held.newest <= base or number in first else held.newest - 1
        return max(surely, held.kept)

    # the histories of all servers

    def _refuse_forks(self) -> None:
        for number in self.found:
            for other in self.found:
                if number < other and not self._agree(number, other):
                    raise ForkedError(
                        f"{self._describe(number, other)}; {self._describe(other, number)}: these"
                        " two servers were trained separately",
                        hint=self._fork_hint(number, other),
                    )

    def _fork_hint(self, *forked: int) -> str:
        """Return a hint that names servers to give up, so that the remaining servers agree and
        together hold every chunk."""
        spare: list[str] = []
        for kept in forked:
            side = [kept]
            for number in self.found:
                if all(self._agree(number, other) for other in side):
                    side.append(number)
            if self._suffices(side):
                spare.append(self._names([n for n in self.found if n not in side]))
        if not spare:
            return (
                "nothing was changed: each side holds chunks that no other server has, so none can"
                " be given up. Start the servers with directories that were trained together, all"
                " from the same copy of the store"
            )
        return (
            "nothing was changed. Give up the servers of one side: give_up=[...]"
            f" (--servers.give_up) with the address of {' or of '.join(spare)}; their stores are"
            " set aside and filled again from the other servers"
        )

    def _suffices(self, side: Collection[int]) -> bool:
        """Whether training can continue if only the servers in `side` are kept of those that have
        answered. All other servers are assumed to hold their chunks."""
        if self.silent:
            return not lost_chunks(self.holders, {*self.silent, *side})
        found = {n: self.found[n] for n in side}
        given_up = self.found.keys() - found.keys()
        with suppress(ForkedError):
            histories = Histories(found, self.names, self.holders)
            return isinstance(histories.resume(None, given_up), Resume)
        return False

    def _agree(self, number: int, other: int) -> bool:
        """Whether the history of one of two servers continues the history of the other server."""
        return self._continues(number, other) or self._continues(other, number)

    def _continues(self, later: int, earlier: int) -> bool:
        mine, its = self.effective[later], self.effective[earlier]
        if not _same(mine[: len(its)], its):
            return False
        branch = mine[len(its)].step if len(mine) > len(its) else -1
        return branch < 0 or self._committed(earlier) <= branch

    def _describe(self, number: int, other: int) -> str:
        """Describe, for a message, where server `number` stands, and where its history leaves that
        of `other`."""
        mine, its = self.effective[number], {link.id for link in self.effective[other]}
        link = next((own for own in mine if own.id not in its), mine[-1] if mine else None)
        since = when = ""
        if link is not None:
            since = f" on a history of its own since step {link.step}" if link.step >= 0 else ""
            when = f", started at {_utc(link.at)}" if link.at else ""
        newest = max(self.found[number].newest, self.found[number].kept)
        return f"{self.names[number]} is at step {newest}{since}{when}"

    def _complete(self, given_up: Collection[int]) -> bool:
        """Whether no server outside `found` can hold a later step (Note "who may hold more")."""
        here = {n for n in self.found if _same(self.effective[n], self.history)} | set(given_up)
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
        """Whether there are two servers, and `witness` proves that the missing server was not
        trained alone."""
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

    def _unknown(self, witness: Witness, members: Sequence[int]) -> Unclear | None:
        """Return None if some server knows the run's last session, or if this session trained no
        step. Otherwise return the reason to wait for a server that has not answered.

        Raises:
            StaleError: All servers of the session have answered, and none knows the session.
        """
        if any(witness.last == link.id for held in self.found.values() for link in held.history):
            return None
        if any(n in witness.members and witness.before in self._ends(n) for n in self.at_end):
            return None
        if any(n not in self.found for n in witness.members):
            return self._alone(
                members, f"the run's last session included {self._names(witness.members)}"
            )
        raise StaleError(
            f"the last session of this run, with the servers {self._names(witness.members)}, is in"
            " no server's history; the newest step that a server holds is"
            f" {max(held.newest for held in self.found.values())}",
            hint="nothing was changed. The servers may hold an older copy of the store: start the"
            " servers with the directories that this run has trained; --new-store goes"
            " back to the step that the servers hold",
        )

    def _ends(self, number: int) -> set[str]:
        """Return the ids of the last sessions in the history of server `number` and in
        `self.history`; "" for an empty history."""
        return {
            (links or (HistoryLink("", -1),))[-1].id
            for links in (self.found[number].history, self.history)
        }

    def _not_held(self, members: Sequence[int], lost: Sequence[int]) -> Unclear:
        held = f"step {self.committed} of a store is held by {self._names(members) or 'no server'}"
        return Unclear(
            f"{held}, but the rest, on {self._names(lost)}, is missing", lost=tuple(lost)
        )

    def _alone(self, members: Sequence[int], why: str) -> Unclear:
        others = [n for n in range(len(self.names)) if n not in self.at_end]
        if len(self.names) > 2:
            why = (
                f"{len(members)} of {len(self.names)} servers hold the last known step, but a"
                " majority is needed"
            )
        newest = max((self.found[n].newest for n in members), default=-1)
        return Unclear(
            f"{self._names(members)} is at step {newest}; {self._names(others)} may hold a later"
            f" step: {why}",
            "start the missing servers with their stores; if the stores are lost for good, give_up="
            f"[...] (--servers.give_up) with the address of {self._names(others)} continues from"
            f" step {newest}",
        )

    def _names(self, numbers: Collection[int]) -> str:
        return ", ".join(self.names[number] for number in numbers)


def back_to(history: Sequence[HistoryLink], step: int) -> tuple[HistoryLink, ...]:
    """Return a history without the last sessions that began after `step`, for a return to a
    snapshot of `step`."""
    links = tuple(history)
    while links and links[-1].step > step:
        links = links[:-1]
    return links


def lost_chunks(holders: Collection[tuple[int, ...]], members: Collection[int]) -> list[int]:
    """Return the servers that should hold the lost chunks: the chunks that no server in `members`
    holds. `holders` lists, for every chunk, the servers that should hold the chunk."""
    return sorted({server for some in holders if not set(some) & set(members) for server in some})


def _same(mine: Sequence[HistoryLink], its: Sequence[HistoryLink]) -> bool:
    return [link.id for link in mine] == [link.id for link in its]


def _utc(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
