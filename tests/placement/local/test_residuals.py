"""Error feedback of several workers over servers: each worker stores the values that it has not sent
beside itself and never loses them (Rule 3)."""

import itertools
import random
import shutil
import time

import pytest
import torch

import roadtrain
from roadtrain import Files, Servers, TopK
from roadtrain.errors import ConfigError, ForeignError
from roadtrain.streaming.split import split, table
from roadtrain.transport.tcp import TcpOptions
from tests.support.models import Case, build, new_scaler, one_step
from tests.support.processes import HostProcess, Workers, losses

CHUNK, KEPT = 1 << 16, 0.05
FEEDBACK = {"compress": TopK(KEPT, error_feedback=True)}
STEPS = 6


class NoUpdate:
    """An optimizer that only keeps the gradients."""

    param_groups: list = []

    def step(self, *_): ...

    def zero_grad(self): ...


def plain(workers, steps, local=1):
    """Return the losses of each worker of a torch loop. For each chunk the largest sums of gradient and
    residual are sent; those of a host's `local` workers are summed first."""
    torch.set_num_threads(1)  # as in the workers
    model, optimizer = build(Case())
    parts = split(model, None)
    params = [p for part in (parts.root, *parts.blocks) for _, p in part.params]
    chunks = [c for c in table(parts, dict.fromkeys(params, 0), None, CHUNK).chunks if c.trainable]
    residuals = [{c.id: torch.zeros(c.numel) for c in chunks} for _ in range(workers)]
    loss_lists = [[] for _ in range(workers)]
    for step in range(steps):
        sums = [{c.id: torch.zeros(c.numel) for c in chunks} for _ in range(workers // local)]
        for rank in range(workers):
            for p in params:
                p.grad = None
            loss = one_step(
                Case(),
                model,
                NoUpdate(),
                new_scaler(Case()),
                step,
                seed=1000 + workers * step + rank,
            )
            loss_lists[rank].append(loss)
            for chunk in chunks:
                residual = residuals[rank][chunk.id]
                for span in chunk.spans:
                    grad = params[span.param].grad.flatten()
                    residual[span.start : span.stop] += grad[
                        span.origin : span.origin + span.stop - span.start
                    ]
                k = max(1, round(KEPT * sum(s.stop - s.start for s in chunk.spans)))
                sent = residual.abs().topk(k).indices
                sums[rank // local][chunk.id][sent] += residual[sent]
                residual[sent] = 0.0
        for chunk, span in ((c, s) for c in chunks for s in c.spans):
            p = params[span.param]
            p.grad.flatten()[span.origin : span.origin + span.stop - span.start] = (
                sum(host[chunk.id][span.start : span.stop] for host in sums) / workers
            )
        optimizer.step()
    return loss_lists


@pytest.mark.parametrize(
    ("workers", "local", "ways"),
    [
        pytest.param(1, 1, [(2, {"relay": "64MiB"})], marks=pytest.mark.exhaustive),
        (2, 1, [(1, {}), (3, {"replicas": 2}), (2, {"relay": "64MiB"})]),
        (4, 2, [(2, {})]),
    ],
    ids=["one worker", "two workers", "two hosts of two"],
)
def test_error_feedback_has_the_losses_of_a_plain_loop(workers, local, ways, addresses, tmp_path):
    """They are equal to rounding, and bit-identical for any servers (Rule 1)."""
    expected, results = plain(workers, STEPS, local), []
    for number, (servers, options) in enumerate(ways):
        home = tmp_path / str(number)
        home.mkdir()
        run = Workers(
            Case(),
            addresses(servers),
            home,
            STEPS,
            workers,
            residuals=str(home / "left"),
            local=local,
            **FEEDBACK,
            **options,
        )
        assert run.join() == [0] * workers, run.errors()
        assert sorted(p.name for p in (home / "left").iterdir()) == [
            f"worker-{r}" for r in range(workers)
        ]
        results.append([losses(log) for log in run.logs])
        for log, expected_losses in zip(run.logs, expected):
            seen = [next(iter(losses(log)[str(step + 1)])).split()[0] for step in range(STEPS)]
            assert [float.fromhex(loss) for loss in seen] == pytest.approx(
                expected_losses, rel=3e-6
            )
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(eager=True), id="eager", marks=pytest.mark.exhaustive),
        pytest.param(Case(scaler=True, clip=0.5), id="a step is skipped"),
    ],
)
def test_a_stopped_run_resumes_with_its_residuals(case, addresses, tmp_path):
    """A skipped step leaves the residuals unchanged."""
    results = []
    for stops in ((4,), (2, 4)):
        home = tmp_path / str(len(stops))
        home.mkdir()
        servers = addresses(2)
        for session, stop in enumerate(stops):
            run = Workers(
                case,
                servers,
                home,
                stop,
                2,
                residuals=str(home / "left"),
                session=str(session),
                **FEEDBACK,
            )
            assert run.join() == [0, 0], run.errors()
        results.append(
            [
                {step: line for step, line in losses(log).items() if step != "end"}
                for log in run.logs
            ]
        )
        assert not any("start at zero" in line for line in run.notes())
    assert results[0] == results[1] and len(results[0][0]) == 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_kills_change_no_loss(replicas, addresses, tmp_path):  # Rules 3 and 5
    rng, servers = random.Random(replicas), addresses(2)
    options = {"residuals": str(tmp_path / "left"), "replicas": replicas, **FEEDBACK}
    for number in itertools.count():
        before = len(losses(tmp_path / "worker0.log"))
        last = number == 4
        run = Workers(
            Case(eager=True),
            servers,
            tmp_path,
            before + 5 if last else 10**6,
            2,
            session=str(number),
            **options,
        )
        if last:
            break
        until = time.monotonic() + 60
        while len(losses(run.logs[0])) <= before + 1 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3 * rng.random())
        victim = number % 4
        if victim < 2:
            run.processes[victim].kill()
        else:
            host = addresses.all[victim - 2]
            host.kill()
            run.join(60)
            addresses.all[victim - 2] = HostProcess(host.directory)
            servers = [host.where for host in addresses.all]
        run.join(60)
    assert run.join() == [0, 0], run.errors()
    for log in run.logs:
        steps = {int(step): lines for step, lines in losses(log).items() if step.isdigit()}
        assert set(steps) == set(range(1, max(steps) + 1))
        assert all(len(lines) == 1 for lines in steps.values()), "repeated with another loss"
    assert not any("start at zero" in line for line in run.notes())


def test_a_worker_reports_lost_residuals(addresses, tmp_path):
    servers, left = addresses(1), tmp_path / "left"
    run = Workers(Case(), servers, tmp_path, 2, 2, residuals=str(left), **FEEDBACK)
    assert run.join() == [0, 0], run.errors()
    shutil.rmtree(left / "worker-0")
    run = Workers(Case(), servers, tmp_path, 4, 2, residuals=str(left), session="2", **FEEDBACK)
    assert run.join() == [0, 0], run.errors()
    notes = [line for line in run.notes() if "start at zero" in line]
    assert len(notes) == 1 and "worker-0" in notes[0] and "lossy" in notes[0]


def test_residuals_of_a_copy_with_another_history_are_refused(hosts, tmp_path):
    """They have the same job and step as the contents of the servers."""

    def run(home, host, steps, session, left=None):
        left = str(tmp_path / (left or home) / "left")
        options = {"residuals": left, "session": session, **FEEDBACK}
        workers = Workers(Case(), [host.where], tmp_path / home, steps, 1, **options)
        return workers.join(), workers.errors()

    (tmp_path / "a").mkdir()
    ours = hosts(1, directory=tmp_path / "a" / "host")[0]
    assert run("a", ours, 2, "1")[0] == [0]
    ours.kill()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    ours, theirs = (hosts(1, directory=tmp_path / home / "host")[0] for home in "ab")
    assert run("a", ours, 4, "2")[0] == run("b", theirs, 4, "3")[0] == [0]
    codes, errors = run("a", ours, 6, "4", left="b")
    assert codes != [0] and "ForkedError" in errors[0] and "the residuals of worker 0" in errors[0]
    assert run("a", ours, 6, "5")[0] == [0]


def test_residuals_without_feedback_or_of_another_store_are_refused(addresses, tmp_path):
    def place(servers, residuals=None, **options):
        model, optimizer = build(Case())
        return roadtrain.place(
            model,
            optimizer,
            store=Servers(servers, link=TcpOptions(retry_s=5), residuals=residuals),
            host_budget="96MiB",
            chunk_elements=CHUNK,
            deadline_s=30,
            report=lambda _: None,
            **options,
        )

    with pytest.raises(ConfigError, match=r"error_feedback is True, but .* are not set"):
        place(["a:1"], **FEEDBACK)
    with pytest.raises(ConfigError, match="but 2 are named"):
        place(["a:1"], **FEEDBACK, residuals=Files([tmp_path / "a", tmp_path / "b"]))
    with pytest.raises(ConfigError, match=r"error_feedback is False, but .* are set"):
        place(["a:1"], residuals=tmp_path / "a", compress=TopK(0.05))
    first, second = addresses(1), addresses(1)
    with place(first, residuals=tmp_path / "left", **FEEDBACK) as placed:
        model = placed.model
        for step in range(2):
            one_step(Case(), model, placed, new_scaler(Case()), step)
    with pytest.raises(ForeignError, match=r"worker-0.*already holds step 2 of a store"):
        place(second, residuals=tmp_path / "left", **FEEDBACK)
    # the refusals lost nothing
    with place(first, residuals=tmp_path / "left", **FEEDBACK) as placed:
        assert placed.steps_done == 2
