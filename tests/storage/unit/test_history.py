"""Whether a start may resume from the states it finds: no committed step is lost and no fork is
missed (Rules 3 and 6)."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roadtrain.errors import ForkedError, StaleError
from roadtrain.storage.history import (
    Histories,
    HistoryLink,
    Resume,
    ServerHoldings,
    Unclear,
    Witness,
)

NAMES = [f"server {n} (host{n}:7000)" for n in range(5)]
A, B, C = (
    HistoryLink(name, step, (0, 1), 1_790_000_000) for name, step in (("a", 0), ("b", 5), ("c", 5))
)


def ring(n):
    """Holders of every chunk when each server has one replica."""
    return {(i, (i + 1) % n) for i in range(n)}


def histories(found, n=2):
    return Histories(found, NAMES[:n], ring(n))


def alone(link, *members):
    return HistoryLink(link.id, link.step, members, link.at)


def test_both_servers_resume_from_the_last_committed_step():
    both = {
        0: ServerHoldings(7, (A,)),
        1: ServerHoldings(8, (A,)),
    }  # 1 had prepared step 8, 0 had not committed it
    assert histories(both).resume() == Resume(7, (0, 1), (A,))
    begun = {
        0: ServerHoldings(0, (A,)),
        1: ServerHoldings(1, (A,)),
    }  # no step of the link was committed
    assert histories(begun).resume() == Resume(0, (0, 1), ())


def test_no_start_goes_back_behind_a_committed_step():
    """Server 0 holds a committed step; server 1 has dropped its record of it."""
    assert histories({0: ServerHoldings(8, (A,)), 1: ServerHoldings(7, (A,))}).resume() == Resume(
        8, (0,), (A,)
    )
    found = Histories(
        {0: ServerHoldings(8, (A,)), 1: ServerHoldings(7, (A,))}, NAMES[:2], {(0,), (1,)}
    ).resume()
    assert (
        isinstance(found, Unclear)
        and "step 8" in found.why
        and "the rest, on server 1 (host1:7000), is missing" in found.why
    )


def test_one_of_two_servers_does_not_resume_alone_without_a_witness():
    """It cannot tell whether the other died or continued alone in its absence."""
    holdings = {1: ServerHoldings(8, (A,))}
    doubt = histories(holdings).resume()
    assert (
        isinstance(doubt, Unclear)
        and "server 1 (host1:7000) is at step 8; server 0 (host0:7000) may" in doubt.why
    )
    assert "give_up" in doubt.hint and "step 8" in doubt.hint
    # an empty disk is no evidence
    assert isinstance(histories({**holdings, 0: ServerHoldings()}).resume(), Unclear)
    assert histories({1: ServerHoldings(8, (A,), without=(0,))}).resume() == Resume(8, (1,), (A,))
    assert histories(holdings).resume(Witness("", "a", (0, 1))) == Resume(8, (1,), (A,))
    assert histories(holdings).resume(given_up=[0]) == Resume(8, (1,), (A,))
    assert histories({1: ServerHoldings(8, (A, alone(B, 1)))}).resume() == Resume(
        8, (1,), (A, alone(B, 1))
    )


def test_a_server_that_lagged_does_not_resume_alone():
    lagged = {0: ServerHoldings(5, (A,))}
    began = Witness("a", "b", (1,))
    doubt = histories(lagged).resume(began)
    assert isinstance(doubt, Unclear) and "the run's last session included server 1" in doubt.why
    assert isinstance(histories(lagged).resume(Witness("b", "c", (1,))), Unclear)
    # from another run directory, after the last start of this one
    elsewhere = {1: ServerHoldings(8, (A, B))}
    assert isinstance(histories(elsewhere).resume(Witness("", "a", (0, 1))), Unclear)
    met = histories({**lagged, 1: ServerHoldings(9, (A, alone(B, 1)))})
    # server 0 has been filled again
    assert met.resume() == met.resume(began) == Resume(9, (1,), (A, alone(B, 1)))


def test_a_session_that_a_server_never_began_has_no_step():
    """The run died while it began: server 1 has the link, server 0 has not, and both hold the same
    contents."""
    found = {0: ServerHoldings(5, (A,)), 1: ServerHoldings(5, (A, B))}
    assert histories(found).resume() == Resume(5, (0, 1), (A,))
    assert histories({0: found[0]}).resume(Witness("a", "b", (0, 1))) == Resume(5, (0,), (A,))
    went_on = {0: ServerHoldings(9, (A, alone(C, 0))), 1: found[1]}
    assert histories(went_on).resume() == Resume(9, (0,), (A, alone(C, 0)))


def test_servers_that_trained_on_independently_are_refused_by_name():
    found = {0: ServerHoldings(9, (A, alone(B, 0))), 1: ServerHoldings(7, (A, alone(C, 1)))}
    with pytest.raises(ForkedError) as raised:
        histories(found)
    first, _, hint = str(raised.value).partition("\n")
    assert (
        "server 0 (host0:7000) is at step 9 on a history of its own since step 5, started at"
        " 2026-09-21" in first
    )
    assert "server 1 (host1:7000) is at step 7 on a history of its own since step 5" in first
    assert "give_up" in hint
    # steps 6 and 7 of the same link are committed there
    same_link = {0: ServerHoldings(9, (A, alone(B, 0))), 1: ServerHoldings(8, (A,))}
    with pytest.raises(ForkedError):
        histories(same_link)


@pytest.mark.parametrize(("n", "few"), [(3, 1), (4, 2), (5, 2)])
def test_of_three_or_more_a_majority_is_needed(n, few):
    link = HistoryLink("a", 0, tuple(range(n)))
    everything = {tuple(range(n))}  # every server holds every chunk, so the majority alone decides
    for count in range(1, n + 1):
        found = {i: ServerHoldings(4, (link,)) for i in range(count)}
        got = Histories(found, NAMES[:n], everything).resume(Witness("", "a", link.members))
        assert isinstance(got, Resume) == (count > few), count
        if count <= few:
            assert f"{count} of {n} servers" in got.why and "majority" in got.why
    empty = {0: ServerHoldings(4, (link,)), **{i: ServerHoldings() for i in range(1, n)}}
    assert isinstance(Histories(empty, NAMES[:n], everything).resume(), Unclear)


def test_an_older_copy_is_refused_by_the_run():
    """All servers were restored from a copy made before the last session."""
    with pytest.raises(
        StaleError, match="in no server's history; the newest step that a server holds is 8"
    ):
        histories({0: ServerHoldings(8, (A,)), 1: ServerHoldings(8, (A,))}).resume(
            Witness("b", "c", (0, 1))
        )


def test_a_store_without_a_history_resumes():
    no_replicas = {0: ServerHoldings(7), 1: ServerHoldings(8)}
    assert Histories(no_replicas, NAMES[:2], {(0,), (1,)}).resume() == Resume(7, (0, 1), ())


def test_a_witness_is_written_and_parsed():
    for witness in (Witness("", "a", (0, 1)), Witness("a", "b", (3,))):
        assert Witness.of(str(witness)) == witness
    assert Witness.of("") is None and Witness.of("a b c") is None


class World:
    """Servers whose disks hold a history and the two newest steps; the contents of a step list
    every session and step that made them. announced: Contents of the last step announced as
    committed."""

    def __init__(self, draw, n, marked):
        self.draw, self.n, self.marked = draw, n, marked
        self.disks = [None] * n
        self.copies = [None] * n  # backups that may be restored if the run has a mark
        self.witness, self.announced, self.count, self.starts = None, (), 0, 0
        self.given_up = set()  # servers that the user gave up never start alone
        everyone, link = tuple(range(n)), self.link(0, tuple(range(n)))
        for i in everyone:
            self.disks[i] = {"history": (link,), "records": {0: ()}, "without": ()}
        if marked:
            self.witness = Witness("", link.id, everyone)
        self.train(everyone, link, 0, ())

    def link(self, step, members):
        self.count += 1
        return HistoryLink(f"link{self.count}", step, members)

    def held(self, i):
        disk = self.disks[i]
        return (
            ServerHoldings()
            if disk is None
            else ServerHoldings(max(disk["records"]), disk["history"], -1, disk["without"])
        )

    def start(self, alive):
        """Start with the servers that answer; the start may end at any point. It must resume with
        all announced contents."""
        found, given_up = {i: self.held(i) for i in alive}, ()
        try:
            got = Histories(found, NAMES[: self.n], ring(self.n)).resume(self.witness)
            if isinstance(got, Unclear):
                if self.draw(st.integers(0, 9)):
                    return
                given_up = tuple(
                    i for i in range(self.n) if self.disks[i] is None or i not in alive
                )
                found = {i: held for i, held in found.items() if i not in given_up}
                got = Histories(found, NAMES[: self.n], ring(self.n)).resume(self.witness, given_up)
        except (ForkedError, StaleError):
            return
        if isinstance(got, Unclear):
            return
        contents = {self.disks[i]["records"].get(got.step) for i in got.members}
        assert len(contents) == 1 and None not in contents, "members differ"
        (base,) = contents
        if self.marked and got.step < len(self.announced) and not given_up:
            return  # the mark refuses this by the step alone
        if given_up:  # the user gives up the steps that are not in both
            both = [step for step, other in zip(self.announced, base) if step == other]
            self.announced = tuple(both)
            self.given_up = set() if self.marked else set(given_up)
        assert base[: len(self.announced)] == self.announced, (
            "a committed step is lost, or a fork was missed"
        )
        self.starts += 1
        self.begin(sorted(alive), got, base)

    def begin(self, alive, got, base):
        link, self.together = self.link(got.step, tuple(alive)), False
        for i in alive:
            if not self.draw(st.integers(0, 15)):
                return
            if i in got.members:
                disk = self.disks[i]
                disk["records"] = {s: r for s, r in disk["records"].items() if s <= got.step}
            else:
                self.disks[i] = {"history": got.history, "records": {got.step: base}, "without": ()}
        if self.marked:
            before = got.history[-1].id if got.history else ""
            self.witness = Witness(before, link.id, tuple(alive))
        ready = []
        for i in self.draw(st.permutations(alive)):
            if not self.draw(st.integers(0, 15)):
                self.testify(link, alive, ready)
                return
            self.disks[i] = {**self.disks[i], "history": (*got.history, link), "without": ()}
            ready.append(i)
        self.train(alive, link, got.step, base)

    def train(self, alive, link, step, base):
        self.together = len(alive) == self.n
        for _ in range(self.draw(st.integers(0, 3))):
            step, base = step + 1, (*base, (link.id, step + 1))
            for i in (*self.draw(st.permutations(alive[1:])), alive[0]):
                if not self.draw(st.integers(0, 9)):
                    self.testify(link, alive, alive)
                    return
                records = self.disks[i]["records"]
                self.disks[i]["records"] = {s: r for s, r in records.items() if s == step - 1} | {
                    step: base
                }
            self.announced = base
        self.testify(link, alive, alive)

    def testify(self, link, alive, ready):
        """Worker 0 sees (or believes) that one of two servers dies, or ends well, and permits the
        other to continue; or it dies too."""
        if self.n != 2 or self.marked or len(alive) != 2 or not self.draw(st.booleans()):
            return
        dead = self.draw(st.sampled_from(alive))
        other = self.disks[1 - dead]
        if dead in ready and other["history"][-1] == link:
            other["without"] = (dead,)

    def live(self):
        for _ in range(self.draw(st.integers(1, 8))):
            victim = self.draw(st.integers(0, self.n - 1))
            match self.draw(st.sampled_from(["nothing", "nothing", "wiped", "copied", "put back"])):
                case "wiped":
                    self.disks[victim] = None
                case "copied" if self.disks[victim] is not None:
                    self.copies[victim] = dict(self.disks[victim])
                case "put back" if self.marked and self.copies[victim] is not None:
                    self.disks[victim] = dict(self.copies[victim])
            late = self.draw(st.sets(st.integers(0, self.n - 1), max_size=self.n - 1))
            alive = {i for i in range(self.n) if i not in late}
            # without a mark no other start knows of it, only the user
            if not alive <= self.given_up:
                self.start(alive)


@pytest.mark.slow
@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.data(), st.integers(2, 5), st.booleans())
def test_no_step_is_lost_and_no_fork_unseen(data, n, marked):
    """In any order of starts, deaths, late answers and wiped disks of one or several servers."""
    World(data.draw, n, marked).live()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data(), st.integers(2, 5), st.booleans())
@pytest.mark.slow
def test_one_server_may_die_with_its_disk(data, n, marked):
    """A server dies while the run trains: the others resume without help from the last committed
    step."""
    world = World(data.draw, n, marked)
    for _ in range(4):
        dead, starts = data.draw(st.integers(0, n - 1)), world.starts
        world.disks[dead] = None
        if not marked and n == 2:
            world.disks[1 - dead]["without"] = (dead,)  # worker 0 saw it die
        world.start({i for i in range(n) if i != dead})
        assert world.starts == starts + 1
        for _ in range(3):  # the server returns with an empty disk
            world.start(set(range(n)))
        if not world.together:
            break  # that start was not finished, so only one copy exists


@pytest.mark.parametrize("replicas", [True, False])
def test_the_suggested_way_out_of_a_fork_works(replicas):
    """Servers without replicas cannot be given up, since no other server has their chunks (Rule
    6)."""
    holders = ring(2) if replicas else {(0,), (1,)}
    forked = {0: ServerHoldings(8, (A, alone(B, 0))), 1: ServerHoldings(8, (A, alone(C, 1)))}
    with pytest.raises(ForkedError, match="these two servers were trained separately") as raised:
        Histories(forked, NAMES[:2], holders)
    hint = str(raised.value).partition("hint: ")[2]
    assert ("give_up" in hint) is replicas
    assert replicas or "Start the servers with directories that were trained together" in hint


def ways_out(error):
    """The sets of servers that the hint of a fork allows to give up."""
    hint = str(error).partition("hint: ")[2]
    named = re.search("with the address of (.*); their stores", hint)
    ways = named.group(1).split(" or of ") if named else []
    return [{NAMES.index(name) for name in way.split(", ")} for way in ways], hint


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data(), st.integers(2, 5), st.booleans())
@pytest.mark.slow
def test_every_suggested_way_out_of_a_fork_works(data, n, replicas):  # Rule 6
    """Copies of a store that trained on independently are mixed, some of them behind."""
    first = HistoryLink("first", 0, tuple(range(n)))
    found = {}
    for number in range(n):
        copy = data.draw(st.sampled_from(["empty", "behind", "a", "b", "c"]))
        link = HistoryLink(copy, 5, tuple(range(n)))
        if copy == "empty":
            found[number] = ServerHoldings()
        elif copy == "behind":
            found[number] = ServerHoldings(5, (first,))
        else:
            found[number] = ServerHoldings(data.draw(st.integers(7, 9)), (first, link))
    holders = ring(n) if replicas else {(i,) for i in range(n)}
    try:
        Histories(found, NAMES[:n], holders)
    except ForkedError as error:
        ways, hint = ways_out(error)
    else:
        return
    for way in ways:
        left = {number: held for number, held in found.items() if number not in way}
        assert isinstance(Histories(left, NAMES[:n], holders).resume(None, way), Resume)
    assert replicas or not ways
    if not ways:
        assert "give_up" not in hint and "directories that were trained together" in hint


def test_a_silent_server_may_hold_the_chunks_to_be_given_up():
    forked = {0: ServerHoldings(8, (A, alone(B, 0))), 1: ServerHoldings(8, (A, alone(C, 1)))}
    with pytest.raises(ForkedError) as raised:
        Histories(forked, NAMES[:3], ring(3))
    assert ways_out(raised.value)[0] == [{1}, {0}]
    with pytest.raises(ForkedError) as raised:  # the server answers and is empty
        Histories({**forked, 2: ServerHoldings()}, NAMES[:3], ring(3))
    assert ways_out(raised.value)[0] == []
