"""The sharded optimizer over several ranks (gloo): bits, copies in several stages, pieces at other
widths, and ranks that exit, hang or differ."""

import io
import itertools
import os
import time
from datetime import timedelta
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from roadtrain.errors import DeadlineError, LoopError, LostError, ModelError, RoadtrainError
from roadtrain.stages.data_group import SharedCopies
from roadtrain.stages.pieces import VALUE
from roadtrain.stages.sharded_optimizer import ShardedOptimizer, ShardedOptions
from tests.support.models import Case, Net, build, place
from tests.support.world import run

pytestmark = pytest.mark.slow
REST = pytest.mark.exhaustive  # further cases of the same rules

STEPS = 4
MICRO = 2
SMALL = 32 << 10
CPU = torch.device("cpu")
LATE_S = 3  # the deadline of a group whose other rank exits or hangs


def join_group(timeout_s=None):
    """Join a group of all ranks. Joining leaves time to import this module; operations of the group
    have timeout_s."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if timeout_s is None:
        return dist.group.WORLD
    return dist.new_group(timeout=timedelta(seconds=timeout_s))


def micro_loss(model, step, micro, count):
    generator = torch.Generator().manual_seed(100 * step + micro)
    x = torch.randint(0, 50, (4, 16), generator=generator)
    return (
        nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.roll(1, 1).flatten()) / count
    )


def train(model, optimizer, group, first, last, micro=MICRO, clip=None):
    """Return the losses of this rank's micro-batches."""
    rank, width = dist.get_rank(group), dist.get_world_size(group)
    losses = []
    for step in range(first, last):
        own = range(rank, micro, width)
        optimizer.begin_step(len(own))
        for i in own:
            loss = micro_loss(model, step, i, micro)
            loss.backward()
            losses.append(loss.item())
        scale = 1.0
        if clip is not None:
            squares = torch.tensor(optimizer.sum_squares(), dtype=torch.float64)
            dist.all_reduce(squares, group=group)
            scale = min(1.0, clip / float(squares.sqrt()))
        optimizer.step(scale)
    return losses


def built(case):
    model, optimizer = build(case)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model if case.dtype is None else model.to(case.dtype), optimizer


def values(model):
    return {n: p.detach().float().numpy().copy() for n, p in model.named_parameters()}


class LocalSums:
    """A stand-in for the summation service: each rank adds the gradients of all in rank order."""

    def __init__(self, group):
        self.group = group

    def sum(self, number, identity, grads):
        rows = [torch.empty_like(grads) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(rows, grads, group=self.group)
        return SimpleNamespace(wait=lambda: sum(rows[1:], rows[0]))

    def close(self):
        pass


def shard_child(case, overlap, micro, rank, whole=False):
    group = join_group()
    sums = LocalSums(dist.new_group()) if whole else None
    model, user = built(case)
    lines = []
    optimizer = ShardedOptimizer(
        model,
        user,
        group,
        options=ShardedOptions(bucket_bytes=SMALL, overlap=overlap, sums=sums),
        report=lines.append,
    )
    losses = train(model, optimizer, group, 0, STEPS, micro, case.clip)
    optimizer.wait_parameters()
    kept = sum(array.numel() for state in optimizer.states for array in state.arrays)
    out = losses, values(model), kept, len(optimizer.states), lines
    # extents() gives a share and needed() everything; loading its own pieces changes nothing
    if whole:
        optimizer.load([optimizer.piece(extent) for extent in optimizer.needed()], STEPS)
        assert same(values(model), out[1])
        out += ([(extent.name, extent.start, extent.stop) for extent in optimizer.extents()],)
    optimizer.close()
    return out


def same(a, b):
    return a.keys() == b.keys() and all((a[n] == b[n]).all() for n in a)


CASES = {
    "plain": Case(),
    "groups": Case(groups=True),
    "tied": Case(tied=True),
    "frozen": Case(frozen=True),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=REST if n in ("plain", "groups") else ()) for n in CASES],
)
def test_two_ranks_have_the_bits_of_a_placed_run(name):  # Rule 1
    """One worker adds two micro-batches and two ranks add one each, so the sums are equal."""
    case = CASES[name]
    ranks = run(2, partial(shard_child, case, True, MICRO))
    assert all(len(found) == 5 for found in ranks), ranks
    model, placed, _ = place(case, None)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    losses = []
    with placed:
        for step in range(STEPS):
            for i in range(MICRO):
                loss = micro_loss(model, step, i, MICRO)
                loss.backward()
                losses.append(loss.item())
            placed.step()
            placed.zero_grad()
        expected = {n: placed.read(n) for n, _ in model.named_parameters()}
    assert in_order(ranks) == losses
    for rank in ranks:
        assert same(rank[1], expected)
        assert rank[3] > 2 - 2 * case.frozen and not rank[4]


def test_whole_sums_change_no_bit():  # Rules 1, 7
    """Every rank keeps and updates everything; norms and extents still cover the rank's share."""
    case, width, micro = Case(clip=0.5, groups=True, dtype=torch.bfloat16), 3, 4
    shares = run(width, partial(shard_child, case, True, micro))
    ranks = run(width, partial(shard_child, case, True, micro, whole=True))
    assert all(len(found) == 6 for found in ranks), ranks
    for rank, share in zip(ranks, shares):
        assert rank[0] == share[0] and same(rank[1], share[1])
        assert rank[2] == width * share[2] and rank[3] == share[3] > 2
    extents = sorted(extent for rank in ranks for extent in rank[5])
    ends = dict.fromkeys(ranks[0][1], 0)
    for name, start, stop in extents:
        assert start == ends[name], "an element belongs to no extent or to several"
        ends[name] = stop
    assert ends == {name: value.size for name, value in ranks[0][1].items()}


@pytest.mark.parametrize(
    ("width", "dtype", "micro"),
    [
        pytest.param(2, None, 4, marks=REST),
        pytest.param(3, torch.bfloat16, 4, marks=REST),
        (3, None, 2),
    ],
)
def test_overlap_changes_no_bit(width, dtype, micro):  # Rule 1
    """Ranks may have different numbers of micro-batches, or none."""
    case = Case(clip=0.5, groups=True, dtype=dtype)
    on, off = (run(width, partial(shard_child, case, overlap, micro)) for overlap in (True, False))
    assert all(len(found) == 5 for found in (*on, *off)), (on, off)
    for a, b in zip(on, off):
        assert a[0] == b[0] and same(a[1], b[1]) and same(a[1], on[0][1])
        assert a[2] == b[2]
    model, user = built(case)
    numel = 2 * sum(p.numel() for p in model.parameters())
    # each rank keeps its share of the state plus the padding of the buckets
    assert all(numel / width <= rank[2] < numel / width * 1.2 for rank in on)
    plain = []
    if dtype is None:
        for step in range(STEPS):
            total = [micro_loss(model, step, i, micro) for i in range(micro)]
            torch.stack(total).sum().backward()
            plain += [loss.item() for loss in total]
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            user.step()
            user.zero_grad()
        losses = in_order(on, micro)
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain), atol=2e-4, rtol=2e-4)


# copies in two stages


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.inner = nn.Linear(24, 24)

    def forward(self, x):
        return self.inner(self.embed(x)).square().mean()


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.embed = nn.Embedding(50, 24)

    def forward(self, x):
        h = self.norm(nn.functional.one_hot(x % 24, 24).float())
        return (h @ self.embed.weight.T).logsumexp(-1).mean()


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = First(), Last()
        self.last.embed.weight = self.first.embed.weight

    def forward(self, x):
        return self.first(x) + self.last(x)


def inputs(step, micro):
    generator = torch.Generator().manual_seed(100 * step + micro)
    return torch.randint(0, 50, (3, 7), generator=generator)


def copies_child(widths, first_values, rank):
    join_group()
    bounds = [0, widths[0], sum(widths)]
    groups = [dist.new_group(list(range(a, b))) for a, b in itertools.pairwise(bounds)]
    stage = int(rank >= widths[0])
    torch.manual_seed(0)
    first, last = First(), Last()
    model = (first, last)[stage]
    if first_values:  # as when a pipeline cuts one model; otherwise the copies differ at the start
        last.embed.weight.data.copy_(first.embed.weight.data)
    lines = []
    optimizer = ShardedOptimizer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        groups[stage],
        shared=[(["embed.weight"], SharedCopies(dist.group.WORLD, tuple(widths), CPU))],
        options=ShardedOptions(bucket_bytes=1024),
        report=lines.append,
    )
    squares = []
    own, width = rank - bounds[stage], widths[stage]
    for step in range(STEPS):
        own_micros = range(own, 6, width)
        optimizer.begin_step(len(own_micros))
        for i in own_micros:
            (model(inputs(step, i)) / 6).backward()
        total = torch.tensor(optimizer.sum_squares(), dtype=torch.float64)
        dist.all_reduce(total)
        squares.append(total.item())
        optimizer.step()
    optimizer.wait_parameters()
    out = squares, values(model), lines
    optimizer.close()
    return out


@cache
def copies(widths, first_values):
    ranks = run(sum(widths), partial(copies_child, widths, first_values))
    assert all(len(found) == 3 for found in ranks), ranks
    return ranks


MORE_WIDTHS = [(3, 2), (1, 1), (2, 2), (1, 2)]


@pytest.mark.parametrize(
    "widths",
    [(2, 1), *(pytest.param(w, marks=REST) for w in MORE_WIDTHS)],
)
def test_copies_in_two_stages_stay_one_parameter(widths):  # Rule 1
    ranks = copies(widths, True)
    torch.manual_seed(0)
    model = Both()
    user = torch.optim.AdamW(model.parameters(), lr=1e-2)
    squares = []
    for step in range(STEPS):
        for i in range(6):
            (model(inputs(step, i)) / 6).backward()
        squares.append(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
        user.step()
        user.zero_grad()
    for found in ranks:
        assert found[0] == pytest.approx(squares, rel=1e-5)
        assert (found[1]["embed.weight"] == ranks[0][1]["embed.weight"]).all() and not found[2]
    whole = values(model)
    for name, value in ranks[0][1].items():
        torch.testing.assert_close(value, whole[f"first.{name}"], atol=2e-5, rtol=2e-5)
    for name, value in ranks[-1][1].items():
        if "embed" not in name:
            torch.testing.assert_close(value, whole[f"last.{name}"], atol=2e-5, rtol=2e-5)


def test_copies_that_differ_start_with_the_values_of_the_first_stage():
    ranks = copies((2, 1), False)
    embeds = [found[1]["embed.weight"] for found in ranks]
    assert all((embed == embeds[0]).all() for embed in embeds)
    assert all("parameters differ at the start" in found[2][0] for found in ranks)
    alike = copies((2, 1), True)
    assert (alike[0][1]["embed.weight"] == embeds[0]).all()


def three_stages_child(widths, rank):
    """Take a step in which each stage has a copy of `w` and each rank a known gradient."""
    join_group()
    bounds = [0, *itertools.accumulate(widths)]
    groups = [dist.new_group(list(range(a, b))) for a, b in itertools.pairwise(bounds)]
    stage = next(s for s, stop in enumerate(bounds[1:]) if rank < stop)
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(999))})
    optimizer = ShardedOptimizer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        groups[stage],
        shared=[(["w"], SharedCopies(dist.group.WORLD, widths, CPU))],
        options=ShardedOptions(bucket_bytes=1024),
        report=lambda line: None,
    )
    optimizer.begin_step(1)
    (model["w"] * known_gradient(rank)).sum().backward()
    squares = optimizer.sum_squares()
    optimizer.step()
    optimizer.wait_parameters()
    out = values(model)["w"], squares
    optimizer.close()
    return out


def known_gradient(rank):
    return torch.randn(999, generator=torch.Generator().manual_seed(rank))


def test_copies_in_three_stages_of_different_widths():  # Rule 1
    widths = (1, 3, 2)
    results = run(sum(widths), partial(three_stages_child, widths))
    assert all(len(result) == 2 for result in results), results
    bounds = [0, *itertools.accumulate(widths)]
    of_stages = []
    for first, stop in itertools.pairwise(bounds):
        total = known_gradient(first)
        for rank in range(first + 1, stop):
            total = total + known_gradient(rank)
        of_stages.append(total)
    total = of_stages[0] + of_stages[1] + of_stages[2]
    for value, _ in results:
        assert (value == (-total).numpy()).all()
    assert results[0][1] == pytest.approx(float(total.double().square().sum()), rel=1e-12)
    assert [squares for _, squares in results[1:]] == [0] * 5


# pieces


def saved_pieces(optimizer):
    """Return all pieces as bytes: tensors cannot be sent by a process that ends."""
    file = io.BytesIO()
    torch.save([optimizer.piece(extent) for extent in optimizer.extents()], file)
    return file.getvalue()


def pieces_of(ranks, step):
    states = (io.BytesIO(found[1][step]) for found in ranks)
    return [p for state in states for p in torch.load(state, weights_only=False)]


def pieces_child(case, at, first, stops, bucket_bytes, rank):
    """Return the losses of the steps from `first` on, and the state at each of `stops`."""
    group = join_group()
    model, user = built(case)
    optimizer = ShardedOptimizer(
        model, user, group, options=ShardedOptions(bucket_bytes), report=lambda line: None
    )
    if at is not None:
        for p in model.parameters():  # to detect initial values that remain
            p.data.fill_(7.0)
        optimizer.load(torch.load(at, weights_only=False), first)
    losses, states = [], {}
    for last in stops:
        losses += train(model, optimizer, group, first, last, case.accumulate)
        first, states[last] = last, saved_pieces(optimizer)
    out = losses, states, optimizer.steps_done
    optimizer.close()
    return out


def in_order(ranks, micro=MICRO):
    """Return the losses of all micro-batches in the order of a single rank."""
    losses = [iter(found[0]) for found in ranks]
    count = sum(len(found[0]) for found in ranks)
    return [next(losses[i % micro % len(ranks)]) for i in range(count)]


def whole_arrays(ranks, step):
    """Return (name, key) -> whole array, and check that every element occurs exactly once."""
    arrays = {}
    for piece in pieces_of(ranks, step):
        for key, array in piece.arrays.items():
            parts = arrays.setdefault((piece.extent.name, key), {})
            assert piece.extent.start not in parts
            parts[piece.extent.start] = array
        for key, value in piece.scalars.items():
            parts = arrays.setdefault((piece.extent.name, key), {0: torch.tensor([value])})
            assert parts[0].item() == value
    whole = {}
    for key, parts in arrays.items():
        at = 0
        for start in sorted(parts):
            assert start == at
            at += parts[start].numel()
        whole[key] = torch.cat([parts[start] for start in sorted(parts)])
    return whole


@pytest.mark.parametrize("widths", [(2, 1), (1, 2)])
def test_a_state_resumes_at_another_width(tmp_path, widths):  # Rule 3
    """With two micro-batches per step one rank and two ranks add the same values, so losses and state
    are equal."""
    case = Case(accumulate=2, groups=True, frozen=True)
    whole = run(widths[0], partial(pieces_child, case, None, 0, (3, 6), SMALL))
    assert all(len(found) == 3 for found in whole), whole
    torch.save(pieces_of(whole, 3), tmp_path / "state")
    after = run(widths[1], partial(pieces_child, case, tmp_path / "state", 3, (6,), 5000))
    assert in_order(after) == in_order(whole)[3 * MICRO :]
    resumed, uninterrupted = whole_arrays(after, 6), whole_arrays(whole, 6)
    assert resumed.keys() == uninterrupted.keys() and len({name for name, _ in resumed}) == len(
        dict(Net().named_parameters())
    )
    assert all(torch.equal(resumed[key], uninterrupted[key]) for key in resumed)
    assert {key for _, key in resumed} == {VALUE, "exp_avg", "exp_avg_sq", "step"}
    assert all(found[2] == 6 for found in after)


# ranks that differ, exit or hang


def unused_child(rank):
    """Train while only rank 1 has a gradient of `b`, no rank has it in step 1, and `c` has none."""
    group = join_group()
    model = nn.ParameterDict({n: nn.Parameter(torch.ones(40)) for n in "abc"})
    user = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    optimizer = ShardedOptimizer(
        model, user, group, options=ShardedOptions(bucket_bytes=256), report=lambda line: None
    )
    for step in range(3):
        optimizer.begin_step(1)
        loss = (model["a"] * (rank + 1)).sum()
        if rank == 1 and step != 1:
            loss = loss + model["b"].sum()
        loss.backward()
        optimizer.step()
    optimizer.wait_parameters()
    out = [p.detach().unique().tolist() for p in model.values()]
    optimizer.close()
    return out


def test_a_gradient_of_a_single_rank_updates_all_ranks():
    a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    user = torch.optim.SGD([a, b], lr=0.5, momentum=0.5)
    for step in range(3):
        a.grad = torch.tensor([3.0])
        b.grad = torch.tensor([1.0]) if step != 1 else None
        user.step()
    assert run(2, unused_child) == [[[a.item()], [b.item()], [1.0]]] * 2


def differing_child(what, rank):
    group = join_group(20)
    torch.manual_seed(rank if what == "values" else 0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8 + (rank if what == "shapes" else 0)))
    model[0].requires_grad_(False)
    model[0].weight.data = model[0].weight.data.T  # not contiguous
    user = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = []
    try:
        optimizer = ShardedOptimizer(model, user, group, report=lines.append)
    except RoadtrainError as error:
        return type(error), str(error)
    if what == "rate":
        user.param_groups[0]["lr"] *= rank + 1
    try:
        optimizer.begin_step(1)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.wait_parameters()
    except RoadtrainError as error:
        optimizer.close()
        return type(error), str(error)
    optimizer.close()
    return lines, values(model)


def test_ranks_that_differ_are_refused():  # Rule 6
    for what, kind, message in (
        ("shapes", ModelError, "ranks have different parameters, dtypes"),
        ("rate", LoopError, "step 0: the ranks of the group of ranks 0, 1 have different hyper"),
    ):
        for found in run(2, partial(differing_child, what)):
            assert found[0] is kind and message in found[1], found


def test_different_initial_values_become_those_of_the_first_rank():
    first, second = run(2, partial(differing_child, "values"))
    assert first[0] == second[0] and "those of the first rank are used" in first[0][0]
    assert same(first[1], second[1])


def leaving_child(how, at, rank):
    group = join_group(LATE_S)
    model, user = built(Case())
    optimizer = ShardedOptimizer(
        model, user, group, options=ShardedOptions(SMALL, label="stage 3"), report=lambda line: None
    )
    train(model, optimizer, group, 0, 2)
    optimizer.begin_step(1)
    loss = micro_loss(model, 2, rank, MICRO)
    if rank == 1 and at == "backward":
        leave(how)
    start = time.monotonic()
    try:
        loss.backward()  # raises if the other rank exited before its last bucket
        optimizer.sum_squares()
        if rank == 1:
            leave(how)
        optimizer.step()
        optimizer.wait_parameters()
    except RoadtrainError as error:
        failure = type(error), str(error), time.monotonic() - start
    try:
        model(torch.zeros(1, 4, dtype=torch.long))
        still_runs = True
    except RoadtrainError:
        still_runs = False
    optimizer.close()
    return *failure, still_runs, time.monotonic() - start


def absent_child(rank):
    group = join_group(LATE_S)
    if rank == 1:
        leave("hangs")
    model, user = built(Case())
    try:
        ShardedOptimizer(model, user, group, options=ShardedOptions(label="stage 3"))
    except RoadtrainError as error:
        return type(error), str(error)


@REST
def test_a_rank_that_never_starts_is_named():  # Rule 5
    kind, message = result_of_first(2, absent_child)
    assert kind is DeadlineError, message
    assert message.startswith("stage 3, the group of ranks 0, 1: the comparison of initial values")


def leave(how):
    if how == "hangs":
        time.sleep(60)  # this process is killed once the other rank has answered
    os._exit(0)


@pytest.mark.parametrize(
    ("how", "at"), [("ends", "backward"), ("hangs", "backward"), ("ends", "step")]
)
def test_a_rank_that_exits_or_hangs_is_named(how, at):  # Rule 5
    kind, message, took_s, still_runs, closed_s = result_of_first(
        2, partial(leaving_child, how, at)
    )
    assert kind is (DeadlineError if how == "hangs" else LostError), message
    assert message.startswith("stage 3: step 2: the ")
    assert "over the group of ranks 0, 1 failed" in message
    assert ("reduce-scatter of bucket" in message) == (at == "backward")
    assert took_s < 2 * LATE_S + 10 and closed_s < 2 * LATE_S + 11 and not still_runs


def copies_leaving_child(rank):
    join_group()
    groups = [dist.new_group([r]) for r in range(2)]
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(9))})
    optimizer = ShardedOptimizer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        groups[rank],
        shared=[(["w"], SharedCopies(dist.group.WORLD, (1, 1), CPU))],
        report=lambda line: None,
    )
    optimizer.begin_step(1)
    model["w"].sum().backward()
    if rank == 1:
        leave("ends")
    try:
        optimizer.sum_squares()
    except RoadtrainError as error:
        return type(error), str(error)


def test_the_ranks_of_another_stage_are_named():  # Rule 5
    kind, message = result_of_first(2, copies_leaving_child)
    assert kind is LostError
    assert "which parameters have gradients, over the copies in the group of ranks 0, 1" in message


def result_of_first(workers, work):
    """Return the result of rank 0; the other ranks return nothing."""
    result = run(workers, work, answers=1)[0]
    assert not isinstance(result, str), result
    return result
