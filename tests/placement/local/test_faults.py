"""Faults around a training loop: each raises a typed error that names the problem and its place, and
the last committed step stays usable (Rules 3 to 5). Also calls between steps that change no
number."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import roadtrain
from roadtrain import Files, TopK
from roadtrain.errors import (
    BudgetError,
    ConfigError,
    DamagedError,
    DeadlineError,
    ForeignError,
    FullError,
    GoneError,
    LoopError,
    LostError,
    WireError,
)
from roadtrain.placement import session_plan
from roadtrain.servers.protocol import messages
from roadtrain.servers.protocol.queues import Trial
from roadtrain.units import parse_bytes
from tests.support.models import VOCAB, Case, Net, build, new_scaler, one_step, place, run

PLAIN = Case(clip=0.5)
QUIET = {"report": lambda _: None, "deadline_s": 30}
SMALL = {"host_budget": "60MiB", "chunk_elements": 1 << 16}


def train(store, until, case=PLAIN, **options):
    """Return losses of the steps up to `until`, resumed from `store`."""
    model, placed, scaler = place(case, store, **{**SMALL, **options})
    with placed:
        return run(case, model, placed, scaler, placed.steps_done, until)


def reference(until, case=PLAIN):
    return train(None, until, case, host_budget="128MiB")


@pytest.fixture
def nothing_resident(monkeypatch):
    """Keep no record in memory, so that every read and write goes to the files."""
    real = session_plan.derive

    def derive(*args):
        budgets = real(*args)
        records = replace(budgets.records, resident=frozenset(), weights_resident=frozenset())
        return replace(budgets, records=records)

    monkeypatch.setattr(session_plan, "derive", derive)


def slot_files(store):
    return sorted(store.glob("gen-*/slot*.bin"))


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


# bytes at rest


def test_a_flipped_bit_is_detected_and_its_chunk_named(tmp_path):
    train(tmp_path / "s", 2)
    for path in slot_files(tmp_path / "s"):  # either of the two slots may hold the committed bytes
        flip(path, 4096 + 17)
    with pytest.raises(DamagedError, match=r"slot\d\.bin: chunk \d+.*written at step 2.*checksum"):
        train(tmp_path / "s", 4)
    for path in slot_files(tmp_path / "s"):
        flip(path, 4096 + 17)
    assert train(tmp_path / "s", 4) == reference(4)[2:], "the repaired store does not resume"


def test_a_flipped_bit_is_detected_during_a_step(tmp_path, nothing_resident):
    case = Case()
    model, placed, scaler = place(case, tmp_path / "s", **SMALL)
    losses = run(case, model, placed, scaler, 0, 2)
    placed.flush()
    good = {p: p.read_bytes() for p in tmp_path.glob("s/gen-*/*") if p.is_file()}
    for path in slot_files(tmp_path / "s"):
        for offset in range(100, path.stat().st_size, 4096):
            flip(path, offset)
    with pytest.raises(DamagedError, match=r"slot\d\.bin: chunk \d+.*step"):
        run(case, model, placed, scaler, 2, 6)
    with pytest.raises(DamagedError):
        placed.close()
    for path, data in good.items():
        path.write_bytes(data)
    assert losses + train(tmp_path / "s", 4, case) == reference(4, case)


@pytest.mark.parametrize("left", [0, 4096, 100_000])
def test_a_truncated_file_is_named(tmp_path, left):
    train(tmp_path / "s", 1)
    for path in slot_files(tmp_path / "s"):
        os.truncate(path, left)
    with pytest.raises(DamagedError, match=r"slot\d\.bin.*truncated"):
        train(tmp_path / "s", 2)


def test_a_store_with_a_torn_ledger_goes_back_one_step(tmp_path):
    train(tmp_path / "s", 3)
    newest = max(tmp_path.glob("s/gen-*/ledger.*"), key=lambda p: p.stat().st_mtime_ns)
    flip(newest, 70)
    lines = []
    model, placed, scaler = place_reporting(tmp_path / "s", lines)
    with placed:
        assert placed.steps_done == 2 and any("torn record" in line for line in lines)
        assert run(PLAIN, model, placed, scaler, 2, 4) == reference(4)[2:]


def place_reporting(store, lines):
    model, optimizer = build(PLAIN)
    placed = roadtrain.place(
        model, optimizer, store=store, deadline_s=30, report=lines.append, **SMALL
    )
    return model, placed, new_scaler(PLAIN)


@pytest.mark.parametrize("other", ["depth", "width", "frozen", "error feedback"])
def test_the_store_of_another_model_is_refused(tmp_path, other):
    train(tmp_path / "s", 1)
    model = (
        Net(depth=4)
        if other == "depth"
        else Net(width=32)
        if other == "width"
        else Net(frozen=other == "frozen")
    )
    options = (
        {"compress": TopK(0.25, error_feedback=True), "host_budget": "200MiB"}
        if other == "error feedback"
        else {}
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    first = {
        "depth": r"layers\.3\.",
        "width": r"embed\.weight is .*50, 64.*50, 32",
        "frozen": r"embed\.weight is .*frozen",
        "error feedback": "residual:",
    }[other]
    with pytest.raises(ForeignError, match=f"another model: {first}"):
        roadtrain.place(model, optimizer, store=tmp_path / "s", **QUIET, **options)
    assert train(tmp_path / "s", 2) == reference(2)[1:]


@pytest.mark.parametrize(
    "make", [torch.optim.Adagrad, lambda p: torch.optim.AdamW(p, amsgrad=True)]
)
def test_the_store_of_another_optimizer_is_refused(tmp_path, make):
    train(tmp_path / "s", 1)
    model = Net()
    with pytest.raises(ForeignError, match=r"holds state of \['adamw'\]"):
        roadtrain.place(model, make(model.parameters()), store=tmp_path / "s", **QUIET)
    assert train(tmp_path / "s", 2) == reference(2)[1:]


def test_a_missing_directory_is_named_at_the_start(tmp_path):
    dirs = [tmp_path / d for d in "abc"]
    train(dirs, 2)
    for missing in (1, 0):
        (tmp_path / "abc"[missing]).rename(tmp_path / "away")
        with pytest.raises(
            GoneError,
            match=f"{tmp_path / 'abc'[missing]}|the first directory of this store is not in",
        ):
            train(dirs, 3)
        shutil.rmtree(tmp_path / "abc"[missing], ignore_errors=True)
        (tmp_path / "away").rename(tmp_path / "abc"[missing])
    assert train(dirs, 4) == reference(4)[2:]


def test_a_directory_that_vanishes_during_a_step_is_named(tmp_path):
    model, placed, scaler = place(PLAIN, tmp_path / "s", **SMALL)
    run(PLAIN, model, placed, scaler, 0, 2)
    placed.flush()
    shutil.copytree(tmp_path / "s", tmp_path / "kept")
    shutil.rmtree(tmp_path / "s")
    with pytest.raises(GoneError, match=str(tmp_path / "s")):
        run(PLAIN, model, placed, scaler, 2, 9)
    with pytest.raises(GoneError):
        placed.close()
    (tmp_path / "kept").rename(tmp_path / "s")
    assert train(tmp_path / "s", 4) == reference(4)[2:]


@pytest.fixture
def small_disk(tmp_path):
    """A separate file system whose free space a test can use up."""
    if os.geteuid() != 0:
        pytest.skip("not root")
    where = tmp_path / "disk"
    where.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "none", where], capture_output=True
    ).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_a_store_without_room_is_refused(small_disk):
    ballast(small_disk, 256 << 10)
    with pytest.raises(FullError, match=rf"{small_disk}.*needs [\d.]+ \w+.*[\d.]+ \w+ are free"):
        train(small_disk / "s", 1)
    (small_disk / "ballast").unlink()
    assert train(small_disk / "s", 2) == reference(2)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        (Case(clip=0.5, accumulate=2), r"spill\.bin: allocating"),
        (Case(eager=True), r"ledger\.\d: writing the record of step \d+"),
    ],
    ids=["spilled gradients", "the commit record"],
)
def test_a_disk_that_fills_during_training_loses_no_step(small_disk, case, what):
    """Slots are allocated when the store is created; spilled gradients and the job's own state may
    still need room."""
    extra = Growing()
    losses = train_with(extra, small_disk / "s", 2, case)
    ballast(small_disk, 64 << 10)
    model, placed, scaler = place_with(extra, small_disk / "s", case)
    extra.nbytes = 1 << 20
    begin = placed.steps_done
    with pytest.raises(FullError, match=rf"{small_disk}.*{what} needs .* are free"):
        run(case, model, placed, scaler, begin, 9)
    with pytest.raises(FullError):
        placed.close()
    (small_disk / "ballast").unlink()
    extra.nbytes = 0
    model, placed, scaler = place_with(extra, small_disk / "s", case)
    resumed_at, extra.nbytes = placed.steps_done, 0
    assert resumed_at == begin == 2, "the failed step was counted"
    with placed:
        losses += run(case, model, placed, scaler, resumed_at, 4)
    assert losses == reference(4, case)


class Growing:
    """A user's object of any size whose state is committed with each step."""

    nbytes = 0

    def state_dict(self):
        return {"data": torch.zeros(self.nbytes, dtype=torch.uint8)}

    def load_state_dict(self, state):
        self.nbytes = state["data"].numel()


def place_with(extra, store, case):
    model, optimizer = build(case)
    placed = roadtrain.place(
        model,
        optimizer,
        store=store,
        extra={"mine": extra},
        **QUIET,
        **SMALL,
        backwards_per_step=1 if case.eager else None,
    )
    return model, placed, new_scaler(case)


def train_with(extra, store, until, case):
    model, placed, scaler = place_with(extra, store, case)
    with placed:
        return run(case, model, placed, scaler, placed.steps_done, until)


def ballast(directory, leave):
    free = os.statvfs(directory)
    with open(directory / "ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - leave)


# peers


@pytest.mark.alone
def test_a_wait_for_a_hanging_device_ends_at_the_deadline(tmp_path, nothing_resident):  # Rule 5
    case = Case()
    train(tmp_path / "s", 1, case)
    before = set(threading.enumerate())
    model, optimizer = build(case)
    placed = roadtrain.place(
        model, optimizer, store=tmp_path / "s", report=lambda _: None, deadline_s=3, **SMALL
    )
    tier, go_on = placed.session.servers.store.tiers[0], threading.Event()
    real = tier.read
    tier.read = lambda *args: (go_on.wait(30), real(*args))
    begin = time.monotonic()
    with pytest.raises(
        DeadlineError,
        match=r"(?s)waited 3 s for .*'(layers\.\d|root)'.*in step \d.*server 0 \(.*/s\)",
    ):
        run(case, model, placed, new_scaler(case), 1, 9)
    second_wait = time.monotonic()
    with pytest.raises(DeadlineError, match=r"waited 3 s for .*'(layers\.\d|root)'"):
        placed.flush()
    assert time.monotonic() - second_wait < 2, "the second wait took as long as the first"
    with pytest.raises(DeadlineError, match=r"waited 3 s for threads to end: server 0 .* io\d"):
        placed.close()
    assert time.monotonic() - begin < 20
    go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert train(tmp_path / "s", 3, case) == reference(3, case)[1:]


# the loop


@pytest.mark.parametrize("store", [False, True], ids=["RAM", "files"])
def test_a_forgotten_zero_grad_is_refused(tmp_path, store):
    case = Case()
    model, placed, _ = place(case, tmp_path / "s" if store else None, host_budget="128MiB")
    x = torch.randint(0, VOCAB, (4, 16))
    with pytest.raises(LoopError, match=r"(?s)block 'layers\.\d' got a gradient.*zero_grad"):
        for _ in range(2):
            model(x).sum().backward()
            placed.step()
    placed.close()


def test_a_forgotten_zero_grad_on_the_root_adds_up_as_in_plain_torch():
    """The gradients of the root block are ordinary tensors, so torch's own rule holds for a model that
    has no other block."""
    sides = []
    for placed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if placed:
            optimizer = roadtrain.place(model, optimizer, host_budget="128MiB", **QUIET)
        for _ in range(3):
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
        sides.append(
            torch.from_numpy(optimizer.read("weight")) if placed else model.weight.detach()
        )
        if placed:
            optimizer.close()
    torch.testing.assert_close(*sides)


def test_a_second_backward_pass_after_a_promise_of_one_is_refused(tmp_path):
    case = Case(eager=True)
    losses = train(tmp_path / "s", 2, case)
    model, placed, _ = place(case, tmp_path / "s", **SMALL)
    torch.manual_seed(1)
    x = torch.randint(0, VOCAB, (4, 16))
    model(x).sum().backward()
    # accumulates although a single backward pass was promised
    with pytest.raises(LoopError, match="backwards_per_step=N"):
        model(x).sum().backward()
    placed.close()
    assert losses + train(tmp_path / "s", 4, case) == reference(4, case)


@pytest.mark.parametrize("what", ["clip", "lr"])
def test_a_change_to_clipping_or_rates_after_an_eager_update_is_refused(tmp_path, what):
    case = Case(eager=True)
    losses = train(tmp_path / "s", 2, case)
    model, placed, _ = place(case, tmp_path / "s", **SMALL)
    model(torch.randint(0, VOCAB, (4, 16))).sum().backward()
    if what == "clip":
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    elif what == "lr":
        placed.param_groups[0]["lr"] *= 0.5
    with pytest.raises(LoopError, match="backwards_per_step"):
        placed.step()
    placed.close()
    assert losses + train(tmp_path / "s", 4, case) == reference(4, case)


def test_parameter_groups_cannot_be_added():
    model, placed, _ = place(Case(), None, host_budget="128MiB")
    with placed, pytest.raises(LoopError, match="groups cannot be added"):
        placed.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    del model


# the call


@pytest.mark.parametrize("store", [False, True], ids=["RAM", "files"])
def test_the_error_of_a_small_budget_names_a_sufficient_budget(tmp_path, store):
    case, where = Case(), tmp_path / "s" if store else None
    with pytest.raises(BudgetError, match=r"at least \d+ MiB .*the budget is 5\.0 MiB") as caught:
        place(case, where, host_budget="5MiB")
    assert not (tmp_path / "s").exists()
    sufficient = str(caught.value).split("at least ")[1].split(" of ")[0]
    model, placed, scaler = place(case, where, host_budget=sufficient)
    with placed:
        assert run(case, model, placed, scaler, 0, 2) == reference(2, case)
        assert placed.memory()["resident"] <= parse_bytes(sufficient)


def test_unknown_block_names_are_refused_with_a_suggestion():
    for pattern, hint in (("layer.*", "layers"), ("layers.7", r"layers\.")):
        model, optimizer = build(Case())
        with pytest.raises(
            ConfigError, match=rf"(?s){pattern.replace('*', '.')}.*did you mean `{hint}"
        ):
            roadtrain.place(model, optimizer, blocks=[pattern], **QUIET)
    one_step(Case(), model, optimizer, new_scaler(Case()), 0)  # the refusal changed nothing


def test_an_optimizer_of_another_model_is_refused():
    model, _ = build(Case())
    _, foreign = build(Case())
    with pytest.raises(
        ConfigError, match=r"39 of the optimizer's 39 parameters are not in the model"
    ):
        roadtrain.place(model, foreign, **QUIET)


def test_a_model_cannot_be_placed_twice(tmp_path):
    model, placed, scaler = place(Case(), tmp_path / "s", host_budget="128MiB")
    with placed:
        with pytest.raises(ConfigError, match="already placed"):
            roadtrain.place(model, placed, host_budget="128MiB", **QUIET)
        with pytest.raises(ConfigError, match="hold no values"):
            roadtrain.place(
                model, torch.optim.AdamW(model.parameters()), host_budget="128MiB", **QUIET
            )
        losses = run(Case(), model, placed, scaler, 0, 2)
    # the remaining NaN values cannot be trained
    with pytest.raises(ConfigError, match="hold no values"):
        roadtrain.place(
            model, torch.optim.AdamW(model.parameters()), store=tmp_path / "new", **QUIET
        )
    assert not (tmp_path / "new").exists()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with roadtrain.place(model, optimizer, store=tmp_path / "s", **SMALL, **QUIET) as placed:
        assert losses + run(Case(), model, placed, scaler, 2, 4) == reference(4, Case())


def test_an_optimizer_that_has_taken_steps_is_refused():
    """Its state would be lost, so it is refused instead of silently reset."""
    model, optimizer = build(Case())
    one_step(Case(), model, optimizer, new_scaler(Case()), 0)
    with pytest.raises(ConfigError, match="has already taken steps: its state would be lost"):
        roadtrain.place(model, optimizer, host_budget="128MiB", **QUIET)
    optimizer.state.clear()
    roadtrain.place(model, optimizer, host_budget="128MiB", **QUIET).close()


def test_a_store_may_have_more_directories_than_chunks(tmp_path):
    dirs = [tmp_path / str(i) for i in range(24)]
    few = {"host_budget": "3GiB", "chunk_elements": 1 << 20}
    losses = (
        train(dirs, 2, **few)
        + train(dirs, 3, **few)
        + train(Files(dirs[:2], moved_from=dirs[2:]), 4, **few)
        + train(dirs, 5, **few)
    )
    assert losses == reference(5)


def test_bursts_are_tried_and_change_no_loss(tmp_path, nothing_resident, monkeypatch):
    lines = []
    monkeypatch.setattr(Trial, "LEAST", 1)
    losses = train(tmp_path, 8, report=lines.append)
    assert losses == reference(8)
    chosen = [line for line in lines if "measured: mixed" in line]
    assert len(chosen) == 1 and "alternating" in chosen[0]


def test_chunks_are_spread_by_rates_once(tmp_path):
    dirs = [tmp_path / "fast", tmp_path / "slow"]
    losses = train(Files(dirs, rates=[3, 1]), 2)
    sizes = [slot_files(d)[0].stat().st_size for d in dirs]
    assert 2.2 < sizes[0] / sizes[1] < 4
    lines = []
    # an existing store keeps its spread
    losses += train(Files(dirs, rates="measured"), 4, report=lines.append)
    assert [slot_files(d)[0].stat().st_size for d in dirs] == sizes and not any(
        "converted" in printed for printed in lines
    )
    assert losses == reference(4)
    for wrong in ([1.0], [1.0, float("nan")], [1, -1], "fast"):
        with pytest.raises(ConfigError, match=r"rates.* (do not fit 2 directories|cannot be)"):
            Files([tmp_path / "a", tmp_path / "b"], rates=wrong)


def test_rates_are_measured_for_a_new_store(tmp_path):
    lines = []
    train(Files([tmp_path / "a", tmp_path / "b"], rates="measured"), 1, report=lines.append)
    assert any(line.startswith("measured: ") and "B/s" in line for line in lines)
    assert not list(tmp_path.glob("**/probe-*"))


def test_parameters_in_no_group_are_reported(tmp_path):
    lines = []
    model, _ = build(Case())
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    with roadtrain.place(
        model, optimizer, store=tmp_path, host_budget="128MiB", report=lines.append
    ):
        pass
    assert any(
        "3 parameters are in no parameter group (the first is 'embed.weight')" in line
        for line in lines
    )


@pytest.mark.parametrize("when", ["before place", "after", "each block"])
def test_a_compiled_model_trains_with_the_same_bits(when, recwarn):
    sides = []
    for compiled in (False, True):
        model, optimizer = build(Case())
        if compiled and when == "before place":
            model = torch.compile(model, backend="eager")
        if compiled and when == "each block":
            for layer in model.layers:
                layer.compile(backend="eager")
        with roadtrain.place(model, optimizer, host_budget="128MiB", **QUIET) as placed:
            run_as = (
                torch.compile(model, backend="eager") if compiled and when == "after" else model
            )
            sides.append(run(Case(), run_as, placed, new_scaler(Case()), 0, 3))
    assert sides[0] == sides[1]
    assert not [w for w in recwarn if "recompile" in str(w.message)]


def test_frozen_blocks_do_not_depend_on_the_placement(tmp_path):
    sides = []
    for store in ("plain", None, tmp_path / "s"):
        model, _ = build(Case())
        model.layers.requires_grad_(False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if store != "plain":
            optimizer = roadtrain.place(
                model, optimizer, store=store, host_budget="128MiB", **QUIET
            )
        sides.append(run(Case(), model, optimizer, new_scaler(Case()), 0, 4))
        if store != "plain":
            optimizer.close()
    assert sides[1] == sides[2]
    np.testing.assert_allclose(sides[0], sides[1], rtol=1e-5)


# between steps


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=12),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
        o, 3
    ),
}


def scheduled(model, optimizer, scheduler, steps):
    losses, rates = [], []
    for i in range(steps):
        losses.append(one_step(Case(clip=0.5), model, optimizer, new_scaler(Case()), i))
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return losses, rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_works_as_in_plain_torch(name):
    model, optimizer = build(Case())
    plain = scheduled(model, optimizer, SCHEDULERS[name](optimizer), 6)
    for early in (False, True):
        model, optimizer = build(Case())
        scheduler = SCHEDULERS[name](optimizer) if early else None
        with roadtrain.place(model, optimizer, host_budget="128MiB", **QUIET) as placed:
            losses, rates = scheduled(model, placed, scheduler or SCHEDULERS[name](placed), 6)
        assert rates == plain[1]
        np.testing.assert_allclose(losses, plain[0], rtol=0, atol=2e-4)


@pytest.mark.parametrize("early", [False, True], ids=["built after place", "built before place"])
def test_a_scheduler_resumes(tmp_path, early):
    def part(store, steps):
        model, optimizer = build(Case())
        if early:
            scheduler = SCHEDULERS["OneCycleLR"](optimizer)
            placed = roadtrain.place(
                model, optimizer, store=store, extra={"scheduler": scheduler}, **SMALL, **QUIET
            )
        else:
            holder = Later()
            placed = roadtrain.place(
                model, optimizer, store=store, extra={"scheduler": holder}, **SMALL, **QUIET
            )
            scheduler = holder.take(SCHEDULERS["OneCycleLR"], placed)
        losses = []
        with placed:
            for i in range(placed.steps_done, steps):
                losses.append(one_step(Case(), model, placed, new_scaler(Case()), i))
                scheduler.step()
        return losses

    whole = part(tmp_path / "whole", 6)
    assert part(tmp_path / "s", 3) + part(tmp_path / "s", 6) == whole


class Later:
    """A stand-in for a scheduler that can only be created after the optimizer is placed."""

    saved = scheduler = None

    def take(self, make, optimizer):
        rates = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        self.scheduler = make(optimizer)
        if self.saved is not None:
            self.scheduler.load_state_dict(self.saved)
            for group, rate in zip(optimizer.param_groups, rates):
                group.update(rate)
        return self.scheduler

    def state_dict(self):
        return self.scheduler.state_dict() if self.scheduler else {}

    def load_state_dict(self, state):
        self.saved = state


@pytest.mark.parametrize("amsgrad", [False, True])
def test_state_dict_equals_that_of_torch(amsgrad, tmp_path):
    case, states = Case(), []
    for where in ("plain", None, tmp_path / "s"):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=amsgrad, foreach=False)
        if where != "plain":
            optimizer = roadtrain.place(
                model, optimizer, store=where, host_budget="128MiB", **QUIET
            )
        run(case, model, optimizer, new_scaler(case), 0, 3)
        states.append(optimizer.state_dict(**({} if where == "plain" else {"gather": True})))
        if where != "plain":
            optimizer.close()
    plain, ram, files = states
    assert ram["state"].keys() == plain["state"].keys()
    for placed_state in (ram, files):
        assert placed_state["param_groups"] == plain["param_groups"]
        for number, entries in plain["state"].items():
            assert placed_state["state"][number].keys() == entries.keys()
            for key, value in entries.items():
                found = placed_state["state"][number][key]
                assert found.shape == value.shape and found.dtype == value.dtype
                torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6)
    fresh = Net()
    torch.optim.AdamW(fresh.parameters(), amsgrad=amsgrad).load_state_dict(ram)


@pytest.mark.parametrize("store", [False, True], ids=["RAM", "files"])
def test_close_leaves_no_thread_and_no_stale_parameters(tmp_path, store):
    before = set(threading.enumerate())
    model, placed, scaler = place(Case(), tmp_path / "s" if store else None, host_budget="128MiB")
    run(Case(), model, placed, scaler, 0, 2)
    assert set(threading.enumerate()) > before
    placed.close()
    placed.close()
    assert set(threading.enumerate()) == before
    for p in model.layers.parameters():  # Rule 6: never stale values, never NaN
        with pytest.raises(LoopError, match="in memory only while its block runs"):
            p.sum()
    if store:
        leftovers = {p.name for p in tmp_path.rglob("*") if p.is_file()}
        assert leftovers == {
            "CURRENT",
            "store.json",
            "slot0.bin",
            "slot1.bin",
            "ledger.0",
            "ledger.1",
        }


@pytest.mark.parametrize("store", [False, True], ids=["RAM", "files"])
def test_evaluation_between_steps_changes_no_loss(tmp_path, store):
    case = Case(clip=0.5, accumulate=2)
    x = torch.arange(12).view(2, 6)
    plain_model, plain_optimizer = build(case)
    seen = {}
    for side in ("plain", "quiet", "evaluated"):
        model, optimizer = plain_model, plain_optimizer
        if side != "plain":
            model, optimizer, _ = place(
                case, tmp_path / side if store else None, **({} if not store else SMALL)
            )
        losses, scores = [], []
        for i in range(4):
            losses.append(one_step(case, model, optimizer, new_scaler(case), i))
            if side != "quiet":
                for guard in (torch.no_grad, torch.inference_mode):
                    model.eval()
                    with guard():
                        scores.append(
                            nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).item()
                        )
                    model.train()
        seen[side] = losses, scores
        if side != "plain":
            optimizer.close()
    assert seen["quiet"][0] == seen["evaluated"][0]
    assert seen["evaluated"][1][::2] == seen["evaluated"][1][1::2]
    np.testing.assert_allclose(seen["evaluated"][1], seen["plain"][1], rtol=0, atol=5e-4)


@pytest.mark.parametrize("store", [False, True], ids=["RAM", "files"])
def test_generation_between_steps_changes_no_loss(tmp_path, store):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40,
        n_positions=32,
        n_embd=32,
        n_layer=3,
        n_head=2,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    texts, losses = [], []
    x = torch.randint(1, 40, (2, 16), generator=torch.Generator().manual_seed(1))
    for side in ("plain", "quiet", "generating"):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        if side != "plain":
            optimizer = roadtrain.place(
                model,
                optimizer,
                store=tmp_path / side if store else None,
                host_budget="128MiB",
                **QUIET,
            )
        for i in range(4):
            torch.manual_seed(i)
            loss = model(input_ids=x, labels=x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if side != "quiet":
                model.eval()
                texts.append(model.generate(x[:, :4], max_new_tokens=8, do_sample=False).tolist())
                model.train()
        if side != "plain":
            optimizer.close()
    assert losses[4:8] == losses[8:]
    np.testing.assert_allclose(losses[:4], losses[4:8], rtol=0, atol=2e-4)
    assert texts[:4] == texts[4:]


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.AdamW])
def test_an_optimizer_without_a_compiled_rule_is_reported(make):  # Rule 6
    printed, model = [], nn.Linear(3, 2)
    with roadtrain.place(model, make(model.parameters()), report=printed.append):
        lines = [line for line in printed if "no compiled rule" in line]
    if make is torch.optim.NAdam:
        (line,) = lines
        assert "NAdam" in line and "speed class is generic" in line and "/s" in line
    else:
        assert lines == []


@pytest.mark.parametrize("kind", [LostError, WireError])
def test_the_error_of_a_lost_link_names_the_step_and_the_wait(kind):
    """Rule 5. This includes bytes that were corrupted on the way."""
    model, placed, scaler = place(PLAIN, None)
    with (
        pytest.raises(kind, match=r"^step 2, waiting for .*: server 0 \(there\): it broke$"),
        placed,
    ):
        run(PLAIN, model, placed, scaler, 0, 1)
        placed.session.worker.deliver(messages.Failed(0, kind("server 0 (there): it broke")))
        run(PLAIN, model, placed, scaler, 1, 2)


def test_the_error_of_a_link_that_accepts_no_message_names_the_step(monkeypatch):
    model, placed, scaler = place(PLAIN, None)
    link = placed.session.worker.links[0]

    def closed(message):
        raise LostError("cannot send: server 0 (there): ended without a goodbye")

    with (
        pytest.raises(LostError, match=r"^step 2, sending: cannot send: server 0 \(there\)"),
        placed,
    ):
        run(PLAIN, model, placed, scaler, 0, 1)
        placed.flush()
        with monkeypatch.context() as patch:
            patch.setattr(link, "send", closed)
            run(PLAIN, model, placed, scaler, 1, 2)
