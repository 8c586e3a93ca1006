"""Agents and the engine over them, with real processes: what ends, what is told, what is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from roadtrain.errors import LaunchError
from roadtrain.launch.agent_link import AgentHost
from roadtrain.launch.agents import HostAgents
from roadtrain.launch.processes import HostFile, Process, Role, WorkerSet
from roadtrain.launch.protocol.run_events import (
    HostJoined,
    HostLost,
    Output,
    ProcessEnded,
    WorkersEnded,
)
from roadtrain.launch.supervisor import PUT_FILE

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
# becomes a leader of a session of its own, as a daemon does: its parent's group is not its group
DAEMON = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c',"
    " 'import time; time.sleep(60)', 'daemon of ' + sys.argv[1]], start_new_session=True);"
    " print('up', flush=True); time.sleep(60)"
)
DEADLINE_S, EVENTS_S = 20.0, 60.0


def process(name, code, *words, host="a", role=Role.SERVER, files=(), directory="/tmp"):
    return Process(name, role, host, ("-c", code, *words), directory, files=files)


def worker_set(*codes, attempt=0, hosts="ab"):
    return WorkerSet(
        attempt,
        tuple(
            process(f"worker {n}", code, host=hosts[n % len(hosts)], role=Role.WORKER)
            for n, code in enumerate(codes)
        ),
    )


def running(word):
    """Processes that have this word, or a word that holds it, on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if word.encode() in words and int(path.name) != os.getpid():
            found.append(int(path.name))
    return found


def wait_until(true, what):
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def events_until(agents, kind, seen=None, name=None):
    """All events up to the first of this kind, of the process of this name."""
    seen = [] if seen is None else seen
    new, deadline = list(seen), time.monotonic() + EVENTS_S
    while not any(isinstance(e, kind) and (name is None or e.name == name) for e in new):
        assert time.monotonic() < deadline, f"no {kind.__name__} in {seen[-20:]}"
        new = agents.events(0.5)
        seen += new
    return seen


def only(events, kind):
    (one,) = [event for event in events if isinstance(event, kind)]
    return one


def lines(events, name):
    return [event.line for event in events if isinstance(event, Output) and event.name == name]


@pytest.fixture
def mark(tmp_path):
    return f"test {tmp_path}"


@pytest.fixture
def agents(mark):
    made = HostAgents([AgentHost(name, "127.0.0.1", workers=1) for name in "ab"], mark)
    yield made
    made.close()
    wait_until(lambda: not running(f"{mark}/"), "an agent is left")


def test_a_service_says_lines_and_its_end(agents, tmp_path):
    secret = tmp_path / "home" / "token"
    code = "import sys; print(open('token').read()); print('why', file=sys.stderr); sys.exit(3)"
    files = (HostFile(str(secret), "geheim", secret=True),)
    agents.start(process("server a", code, files=files, directory=str(tmp_path / "home")))
    seen = events_until(agents, ProcessEnded)
    end = only(seen, ProcessEnded)
    assert (end.name, end.code, end.last_line) == ("server a", 3, "why")
    assert lines(seen, "server a") == ["geheim", "why"] or lines(seen, "server a") == [
        "why",
        "geheim",
    ]
    assert secret.stat().st_mode & 0o777 == 0o600  # Rule 8


def test_the_sentence_of_an_error_is_what_a_process_said_last(agents):
    code = "import sys; sys.exit('roadtrain: the store is full\\nhint: free space')"
    agents.start(process("server a", code))
    assert only(events_until(agents, ProcessEnded), ProcessEnded).last_line == (
        "roadtrain: the store is full"
    )


def test_what_cannot_be_begun_ends_with_a_sentence(agents, tmp_path):
    (tmp_path / "file").touch()
    agents.start(process("server a", SLEEP, directory=str(tmp_path / "file" / "below")))
    end = only(events_until(agents, ProcessEnded), ProcessEnded)
    assert end.code and str(tmp_path) in end.last_line


def test_stop_interrupts_first_and_kills_after_the_grace(agents):
    orderly = (
        "import time\ntry:\n print('up', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n print('committed'); raise SystemExit(130)"
    )
    deaf = f"import signal; signal.signal(2, signal.SIG_IGN); {SLEEP}"
    for name, code, expected, grace_s in (
        ("server a", orderly, 130, 60.0),
        ("server b", deaf, -9, 0.5),
    ):
        agents.start(process(name, code))
        events_until(agents, Output)
        agents.stop(name, grace_s)
        seen = events_until(agents, ProcessEnded)
        assert only(seen, ProcessEnded).code == expected
        assert lines(seen, name) == (["committed"] if expected == 130 else [])


def test_a_grace_of_years_ends_no_agent(agents):
    """A node is drained with whatever deadline its cluster says: `select` takes no such wait."""
    deaf = f"import signal; signal.signal(2, signal.SIG_IGN); {SLEEP}"
    agents.start(process("server a", deaf))
    events_until(agents, Output)
    agents.stop("server a", 1e12)
    assert not agents.events(1.0)  # no lost host
    agents.stop("server a", 0.5)
    assert only(events_until(agents, ProcessEnded), ProcessEnded).code == -9


def test_workers_end_together_and_the_first_that_failed_is_named(agents):
    fails = "import sys, time; time.sleep(0.5); print('bad disk', file=sys.stderr); sys.exit(7)"
    agents.start_workers(worker_set(SLEEP, fails, SLEEP, attempt=4))
    seen = events_until(agents, WorkersEnded)
    end = only(seen, WorkersEnded)
    assert (end.attempt, end.code, end.first, end.last_line) == (4, 7, "worker 1", "bad disk")
    agents.start_workers(worker_set("", "import time; time.sleep(0.3)", attempt=5))
    end = only(events_until(agents, WorkersEnded), WorkersEnded)
    assert (end.attempt, end.code) == (5, 0)


def test_interrupted_workers_all_finish_their_step(agents):
    commits = (
        "import time\ntry:\n print('up', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n time.sleep({0}); print('committed'); raise SystemExit(130)"
    )
    agents.start_workers(worker_set(commits.format(0), commits.format(0.5)))
    seen = []
    while len(lines(seen, "worker 0") + lines(seen, "worker 1")) < 2:
        seen += agents.events(1.0)
    agents.stop("workers", 20)
    seen = events_until(agents, WorkersEnded)
    assert only(seen, WorkersEnded).code == 130
    assert lines(seen, "worker 0") == lines(seen, "worker 1") == ["committed"]


def test_what_a_process_started_ends_with_it(agents, tmp_path):
    sign = f"daemon of {tmp_path}"
    agents.start(process("server a", DAEMON, str(tmp_path)))
    events_until(agents, Output)
    wait_until(lambda: running(sign), "the daemon does not run")
    agents.stop("server a", 0)
    events_until(agents, ProcessEnded)
    assert not running(sign)


def test_a_flood_blocks_nobody(agents):
    flood = (
        "import sys, time\nt = time.monotonic() + 0.8\n"
        "while time.monotonic() < t: sys.stdout.write('x' * 99 + '\\n')\n"
        "print('y' * 100_000, flush=True)\ntime.sleep(0.1)\nprint('last')"
    )
    agents.start(process("server a", flood))
    agents.start(process("server b", "print('heard')", host="b"))
    seen = events_until(agents, ProcessEnded, name="server b")
    assert lines(seen, "server b") == ["heard"]
    seen = events_until(agents, ProcessEnded, seen, name="server a")
    said = lines(seen, "server a")
    assert said[-1] == "last" or any("lines dropped" in line for line in said)
    assert max(map(len, said)) < 10_000


def test_an_agent_that_is_killed_is_a_lost_host_that_comes_back(agents, mark, tmp_path):
    agents.start(process("server a", DAEMON, str(tmp_path)))
    agents.start_workers(worker_set(SLEEP, SLEEP))
    wait_until(lambda: running(f"daemon of {tmp_path}"), "the daemon does not run")
    found = [p for p in running(f"{mark}/a") if "agent" in Path(f"/proc/{p}/cmdline").read_text()]
    # what it starts looks like it until it has become another program
    (pid,) = [p for p in found if psutil.Process(p).ppid() == os.getpid()]
    os.kill(pid, signal.SIGKILL)
    seen = events_until(agents, HostJoined, events_until(agents, WorkersEnded))
    lost, came, workers = (only(seen, kind) for kind in (HostLost, HostJoined, WorkersEnded))
    assert (lost.host, lost.why) == ("a", "its agent ended (signal 9)")
    assert (workers.code, workers.first, workers.last_line) == (
        -9,
        "worker 0",
        "its host a was lost",
    )
    assert (came.host, came.workers) == ("a", 1)
    assert seen.index(lost) < seen.index(workers)
    assert not running(f"daemon of {tmp_path}")
    agents.start(process("server a", "print('again')"))
    assert lines(events_until(agents, ProcessEnded), "server a") == ["again"]


def test_a_host_that_leaves_is_gone_in_time_until_it_comes(agents):
    agents.run_verb(["leaves", "b", "0.3"])
    seen = events_until(agents, HostLost)
    assert only(seen, HostLost).host == "b"
    assert [host.name for host in agents.hosts()] == ["a"]
    assert not [event for event in agents.events(1.0) if isinstance(event, HostJoined)]
    with pytest.raises(LaunchError, match="host b is down"):
        agents.ask("b", ["-c", "print(1)"], {})
    agents.run_verb(["comes", "b"])
    assert only(events_until(agents, HostJoined), HostJoined).host == "b"
    with pytest.raises(LaunchError, match="no host 'c'"):
        agents.run_verb(["hold", "c"])


def test_asking(agents, tmp_path):
    echo = "import json, sys; print(json.dumps([json.load(sys.stdin), sys.argv[1]]))"
    told = {"stores": ["/tmp"] * 20_000}  # more than a pipe holds
    assert agents.ask("b", ["-c", echo, "word"], told) == [told, "word"]
    with pytest.raises(LaunchError, match="code 2: no such disk"):
        agents.ask("a", ["-c", "import sys; print('no such disk', file=sys.stderr); exit(2)"], {})
    with pytest.raises(LaunchError, match="is not JSON"):
        agents.ask("a", ["-c", "print('hm')"], {})
    path = tmp_path / "x" / "reducers.txt"
    agents.ask("a", PUT_FILE, {"path": str(path), "content": "10.0.0.1:7000\n"})
    assert path.read_text() == "10.0.0.1:7000\n"
    with pytest.raises(LaunchError, match=r"put_file` on a ended with code 1: .*reducers.txt"):
        agents.ask("a", PUT_FILE, {"path": str(path / "below"), "content": ""})


SUPERVISOR = (
    "import sys, time\n"
    "from roadtrain.launch.agents import HostAgents, AgentHost\n"
    "from roadtrain.launch.processes import Process, Role\n"
    "agents = HostAgents([AgentHost('a', '')], sys.argv[1])\n"
    f"words = ('-c', {DAEMON!r}, sys.argv[2])\n"
    "agents.start(Process('server a', Role.SERVER, 'a', words, '/tmp'))\n"
    "print(agents.events(30), flush=True)\ntime.sleep(60)"
)


def test_nothing_is_left_when_the_supervisor_is_killed(mark, tmp_path):
    """Rule 3: a kill at any moment is what a run is made for."""
    words = [sys.executable, "-c", SUPERVISOR, mark, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert b"up" in process.stdout.readline()
        wait_until(lambda: running(f"daemon of {tmp_path}"), "the daemon does not run")
        process.kill()
    wait_until(lambda: not running(str(tmp_path)), "something is left")


def test_the_next_supervisor_ends_an_agent_that_stood_still(mark, tmp_path):
    """There are never two of anything: a supervisor is killed while its agent is stopped, and the
    run is resumed at once."""
    words = [sys.executable, "-c", SUPERVISOR, mark, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as before:
        assert b"up" in before.stdout.readline()
        (old,) = running(f"{mark}/a")
        os.kill(old, signal.SIGSTOP)
        before.kill()
    assert running(str(tmp_path))
    after = HostAgents([AgentHost("a", "")], mark)
    try:
        assert old not in running(f"{mark}/a")
        after.start(process("server a", SLEEP))
        assert [e.line for e in events_until(after, Output) if isinstance(e, Output)] == ["up"]
        assert after.events(0.5) == []
        # an agent that stands still when its run ends: all that it had started ends, too
        after.start(process("server b", DAEMON, str(tmp_path)))
        events_until(after, Output)
        (agent,) = running(f"{mark}/a")
        os.kill(agent, signal.SIGKILL)
    finally:
        after.close()
    wait_until(lambda: not running(str(tmp_path)), "something is left")
