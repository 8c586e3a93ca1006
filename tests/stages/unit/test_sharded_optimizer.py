"""The sharded optimizer on a single rank: hooks, waits, refusals, and bits equal to the update
rules."""

import threading
import time
from copy import deepcopy

import pytest
import torch
from torch import nn

from roadtrain.errors import DeadlineError, LoopError, ModelError, RuleError, StoreError
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.lab.emulated_device import EmulatedDevice
from roadtrain.stages.bucket_state import BucketState
from roadtrain.stages.op_queue import SideStream
from roadtrain.stages.parallel_parts import cast_and_move
from roadtrain.stages.pieces import VALUE, Extent, Piece
from roadtrain.stages.sharded_optimizer import ShardedOptimizer, ShardedOptions
from roadtrain.streaming.split import split

SMALL = ShardedOptions(bucket_bytes=2048)


class ReachedInto(nn.Module):
    """A model that calls the parts of its list items but never the items."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.pairs = nn.ModuleList(
            nn.ModuleDict({"one": nn.Linear(16, 16), "two": nn.Sequential(nn.Linear(16, 16))})
            for _ in range(3)
        )
        self.loose = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        h = self.embed(x)
        for pair in self.pairs:
            h = pair["two"](torch.tanh(pair["one"](h)))
        for linear in self.loose:
            h = h @ linear.weight
        return h[..., :11]


class Mixed(nn.Module):
    """Blocks, a module whose children are never called, and weights used without calling their
    module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(3)
        )
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = torch.tanh(block(h))
        h = h + self.attend(h, h, h)[0]
        return h @ self.head.weight.T + self.embed.weight.sum()


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 11, (2, 5), generator=generator)
    return nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())


def train(model, optimizer, steps, micro=2):
    losses = []
    for step in range(steps):
        optimizer.begin_step(micro)
        for i in range(micro):
            loss = loss_of(model, 10 * step + i) / micro
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    optimizer.wait_parameters()
    return losses


@pytest.fixture
def made():
    """`made(model, optimizer)` returns a sharded optimizer that the fixture closes."""
    all_made = []

    def make(model, optimizer, **options):
        blocks = [part.module for part in split(model).blocks]
        options = {"options": SMALL, "report": lambda line: None, "blocks": blocks, **options}
        all_made.append(ShardedOptimizer(model, optimizer, **options))
        return all_made[-1]

    yield make
    for sharded in all_made:
        sharded.close()


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_rules(model, optimizer, steps, micro=2):
    """Train with the plain reference of each update rule on whole parameters."""
    rules = rules_for(optimizer)
    state = {}
    losses = []
    for step in range(steps):
        for i in range(micro):
            loss = loss_of(model, 10 * step + i) / micro
            loss.backward()
            losses.append(loss.item())
        for rule, group in zip(rules, optimizer.param_groups):
            for p in group["params"]:
                if p.grad is None:
                    continue
                flat = p.detach().view(-1).numpy()
                new = [torch.zeros(p.numel()).numpy() for _ in rule.arrays]
                arrays, row = state.setdefault(
                    p, (new, torch.zeros(len(rule.scalars), dtype=torch.float64).numpy())
                )
                hyper = rule.hyper(group)
                if step == 0:
                    rule.start(flat, arrays, row, hyper)
                grad = p.grad.view(-1).numpy()
                rule.reference(flat, grad, "fp32", arrays, row, hyper, 1.0, None, None)
                p.grad = None
    return losses


def same_parameters(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


@pytest.mark.parametrize(
    "kind",
    [
        adamw,
        momentum,
        lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.5),
        lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    ],
    ids=["adamw", "sgd", "adagrad", "generic"],
)
def test_equals_the_rules_on_whole_parameters(made, kind):  # Rule 1
    mine, theirs = Mixed(), Mixed()
    optimizer = made(mine, kind(mine))
    assert len(optimizer.states) > 5
    assert train(mine, optimizer, 4) == by_rules(theirs, kind(theirs), 4)
    assert same_parameters(mine, theirs)


def test_overlap_changes_no_bit(made):  # Rule 1
    losses, models = [], []
    for overlap in (True, False):
        model = Mixed()
        options = ShardedOptions(bucket_bytes=2048, overlap=overlap)
        losses.append(train(model, made(model, adamw(model), options=options), 4))
        models.append(model)
    assert losses[0] == losses[1] and same_parameters(*models)


@pytest.fixture
def poisoned(monkeypatch):
    """Delay updates and fill a bucket with NaN until its update, so that code that does not wait
    reads NaN."""
    update = BucketState.update

    def late(self, *args):
        before = self.values.clone()
        self.values.fill_(float("nan"))
        time.sleep(0.01)
        self.values.copy_(before)
        update(self, *args)

    monkeypatch.setattr(BucketState, "update", late)


def test_a_model_that_is_never_called_as_a_whole(made, poisoned):  # Rule 6
    """The loop calls parts of the model and uses a weight directly."""

    def loss(model, step):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
        return (model["b"](model["a"](x)) @ model["c"].weight).square().sum() / 100

    torch.manual_seed(0)
    mine = nn.ModuleDict({name: nn.Linear(8, 8) for name in "abc"})
    theirs = deepcopy(mine)
    optimizer, reference = made(mine, momentum(mine)), momentum(theirs)
    for step in range(4):
        optimizer.begin_step(1)
        values = [loss(mine, step), loss(theirs, step)]
        torch.testing.assert_close(*values)
        for value, opt in zip(values, (optimizer, reference)):
            value.backward()
            opt.step()
        reference.zero_grad()


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.slow
def test_modules_wait_for_the_parameters_they_use(made, poisoned, checkpoint):  # Rule 6
    mine, theirs = Mixed(), Mixed()
    if checkpoint:
        for block in mine.blocks:
            run = block.forward
            block.forward = lambda h, run=run: torch.utils.checkpoint.checkpoint(
                run, h, use_reentrant=False
            )
    assert train(mine, made(mine, adamw(mine)), 4) == by_rules(theirs, adamw(theirs), 4)


def test_calling_parts_of_a_block_waits_for_it(made, poisoned):  # Rule 6
    mine, theirs = ReachedInto(), ReachedInto()
    options = {"foreach": False, "eps": 1.0}  # keeps rounding noise from growing
    assert train(mine, made(mine, adamw(mine, **options)), 4) == by_rules(
        theirs, adamw(theirs, **options), 4
    )


@pytest.mark.slow
def test_evaluation_and_state_dicts_wait(made, poisoned):  # Rule 6
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    model = nn.Sequential(nn.Linear(16, 16), layer)
    optimizer = made(model, adamw(model))
    x = torch.randn(2, 3, 16)
    for _ in range(3):
        optimizer.begin_step(1)
        model(x).sum().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():  # takes another path that bypasses the inner modules
            assert torch.isfinite(model(x)).all()
        model.train()
        optimizer.begin_step(1)
        model(x).sum().backward()
        optimizer.step()
        assert all(torch.isfinite(v).all() for v in model.state_dict().values())


class ReadsTied(nn.Module):
    """Two modules share a weight, and the forward reads it before calling either."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        shift = self.head.weight.mean()
        return self.head(torch.tanh(self.body(self.embed(x) + shift)))


def test_a_shared_weight_is_waited_for_before_either_module_runs(made, poisoned):  # Rule 6
    mine, theirs = ReadsTied(), ReadsTied()
    assert train(mine, made(mine, adamw(mine)), 4) == by_rules(theirs, adamw(theirs), 4)


class TwoWays(nn.Module):
    """In training uses the head's weight directly, like losses that never compute all logits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 11, bias=False)

    def forward(self, x):
        h = self.body(nn.functional.one_hot(x, 16).float())
        return h @ self.head.weight.T if self.training else self.head(h)


def test_an_evaluation_does_not_change_the_recorded_calls_of_training(made, poisoned):  # Rule 6
    mine, theirs = TwoWays(), TwoWays()
    optimizer = made(mine, momentum(mine), options=ShardedOptions(bucket_bytes=256))
    mine.eval()
    loss_of(mine, 0)
    mine.train()
    assert train(mine, optimizer, 3) == by_rules(theirs, momentum(theirs), 3)


def test_a_failed_update_yields_no_pieces(made, monkeypatch):  # Rule 3
    """A snapshot of it would belong to no step."""
    model = Mixed()
    optimizer = made(model, adamw(model))
    train(model, optimizer, 1)
    extents = optimizer.extents()
    monkeypatch.setattr(BucketState, "update", lambda *_: 1 // 0)
    optimizer.begin_step(1)
    loss_of(model, 0).backward()
    optimizer.step()
    for wait in (lambda: optimizer.piece(extents[0]), optimizer.settle, optimizer.sum_squares):
        with pytest.raises(ZeroDivisionError):
            wait()


def test_by_default_a_large_model_has_several_buckets(made):
    model = nn.Sequential(*(nn.Linear(1536, 1536) for _ in range(3)))  # 27 MiB
    assert len(made(model, adamw(model), options=ShardedOptions()).states) == 2


def test_a_wait_for_parameters_names_the_step_that_changes_them(made, monkeypatch):
    model = Mixed()
    optimizer = made(model, adamw(model))
    train(model, optimizer, 3)
    optimizer.away.add(0)
    waits = []
    monkeypatch.setattr(optimizer.queue, "wait", lambda until, what: waits.append(what))
    optimizer.wait_parameters()
    assert waits == ["step 2: its parameters"]


def test_a_block_does_not_wait_for_others(made, monkeypatch):
    """The first block runs while the update of the last bucket is still pending."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32)) for _ in range(4)))
    optimizer = made(model, adamw(model), options=ShardedOptions(bucket_bytes=4096))
    x = torch.randn(2, 32)
    for _ in range(2):  # afterwards the order is known
        optimizer.begin_step(1)
        model(x).sum().backward()
        optimizer.step()
    optimizer.wait_parameters()
    update, release = BucketState.update, []
    held = optimizer.states[optimizer.hooks.order[0]]

    def slow(self, *args):
        deadline = time.monotonic() + 20
        while self is held and not release and time.monotonic() < deadline:
            time.sleep(0.001)
        update(self, *args)

    monkeypatch.setattr(BucketState, "update", slow)
    optimizer.begin_step(1)
    model(x).sum().backward()
    optimizer.step()
    assert torch.isfinite(model[0](x)).all()
    assert optimizer.away
    release.append(True)
    model(x)
    assert not optimizer.away


def test_a_parameter_without_a_gradient_is_left_alone(made):
    model, plain = Mixed(), Mixed()
    optimizer, reference = made(model, momentum(model)), momentum(plain)
    for net, opt in ((model, optimizer), (plain, reference)):
        for step in range(3):
            if net is model:
                opt.begin_step(1)
            net.blocks[1].requires_grad_(step != 1)
            loss_of(net, step).backward()
            opt.step()
            reference.zero_grad()
    optimizer.wait_parameters()
    steps = {e.name: optimizer.piece(e).scalars["step"] for e in optimizer.extents()}
    assert steps["blocks.1.0.weight"] == 2 and steps["blocks.0.0.weight"] == 3
    assert "head.bias" in steps and steps["head.bias"] == 0  # it is unused
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=1e-5, msg=name)


def test_narrow_parameters_have_wide_masters_and_gradients(made):
    """The bf16 gradients of micro-batches are added in fp32; masters keep bits that bf16 lacks."""
    model = nn.Linear(64, 64, bias=False).bfloat16()
    master = model.weight.detach().float().view(-1).clone()
    optimizer = made(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    for step in range(3):
        optimizer.begin_step(3)
        total = torch.zeros(64 * 64)
        for i in range(3):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + i))
            grad = torch.autograd.grad(model(x.bfloat16()).square().sum(), model.weight)[0]
            total += grad.float().view(-1)
            model(x.bfloat16()).square().sum().backward()
        assert model.weight.grad is None
        assert optimizer.sum_squares() == pytest.approx(
            float(total.double().square().sum()), rel=1e-12
        )
        optimizer.step(0.5)
        master += (-1e-4) * (total * 0.5)
        optimizer.wait_parameters()
        assert torch.equal(model.weight.view(-1), master.bfloat16())
    extents = optimizer.extents()
    kept = torch.cat([optimizer.piece(extent).arrays[VALUE] for extent in extents])
    assert torch.equal(kept, master)


def test_masters_of_converted_parameters_start_from_fp32_values(made):  # Rule 1
    """Masters start from the fp32 values, not from rounded ones, as in place(dtype=...)."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(True)
    model[1].bias.requires_grad_(False)
    wide = {name: p.detach().clone().view(-1) for name, p in model.named_parameters()}
    masters = cast_and_move(model, torch.device("cpu"), torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16 and not cast_and_move(
        model, torch.device("cpu"), None
    )
    optimizer = made(model, momentum(model), masters=masters)
    kept = {e.name: optimizer.piece(e).arrays[VALUE] for e in optimizer.extents()}
    assert torch.equal(kept.pop("1.bias"), model[1].bias.detach().float())  # it is never updated
    assert all(torch.equal(kept[name], wide[name]) for name in kept)


def test_the_learning_rate_of_the_users_group_is_read_at_each_step(made):
    models = [Mixed(), Mixed()]
    user = torch.optim.SGD(models[0].parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(user, 0.5)
    plain = torch.optim.SGD(models[1].parameters(), lr=0.1, foreach=False)
    optimizer = made(models[0], user)
    for step in range(3):
        plain.param_groups[0]["lr"] = 0.1 * 0.5**step
        optimizer.begin_step(1)
        for model, opt in zip(models, (optimizer, plain)):
            loss_of(model, step).backward()
            opt.step()
        plain.zero_grad()
        scheduler.step()
    optimizer.wait_parameters()
    for p, q in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(p, q)


def test_infinite_gradients_show_in_the_norm(made):
    model = Mixed()
    optimizer = made(model, adamw(model))
    optimizer.begin_step(1)
    (loss_of(model, 0) * float("inf")).backward()
    assert not torch.isfinite(torch.tensor(optimizer.sum_squares()))


def test_reading_gradients_or_state_joins_the_side_stream(made, monkeypatch):
    """Rule 6. On an accelerator the end of a job only means that its work was submitted. What
    overwrites gradients or reads parameters or state waits for the work itself."""
    joined = []
    monkeypatch.setattr(SideStream, "join", lambda self, _: joined.append(self) or True)
    model = Mixed()
    optimizer = made(model, adamw(model))
    optimizer.begin_step(1)
    loss_of(model, 0).backward()
    extents = optimizer.extents()
    for act in (
        optimizer.sum_squares,
        optimizer.settle,
        lambda: optimizer.piece(extents[0]),
        optimizer.close,
    ):
        joined.clear()
        act()
        assert joined == [optimizer.side]


def test_work_of_a_device_that_does_not_end_is_an_error(made):  # Rule 5
    model = Mixed()
    with EmulatedDevice().active() as device:
        optimizer = made(model, adamw(model))
        optimizer.group.deadline_s = 0.05
        optimizer.begin_step(1)
        loss_of(model, 0).backward()
        lost = device.new_event()
        lost.done = threading.Event()  # as of a sum for which a rank is missing
        optimizer.side.stream.wait_event(lost)
        with pytest.raises(
            DeadlineError, match=r"waited 0.1 s for step 0: the sum of the gradients, over a single"
        ) as caught:
            optimizer.sum_squares()
        assert "hint: a rank of the group" in str(caught.value)
        lost.done.set()
        assert optimizer.sum_squares() > 0


def test_more_gradients_than_in_the_first_step_are_refused(made):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = made(model, adamw(model))
    for _ in range(2):
        optimizer.begin_step(1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    optimizer.begin_step(1)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(LoopError, match="gradient 2 was added; the step has 1 backwards"):
        model(torch.ones(2, 4)).sum().backward()


def test_a_weight_with_two_gradients_per_backward_is_complete_after_both(made):
    """Two reentrant checkpoints of a module give two gradients per backward."""
    torch.manual_seed(0)
    inner = nn.Linear(8, 8)
    outer = nn.Linear(8, 8)
    model = nn.ModuleDict({"outer": outer, "inner": inner})
    plain = deepcopy(model)

    def forward(m, x):
        h = m["outer"](x)
        for _ in range(2):
            h = torch.utils.checkpoint.checkpoint(m["inner"], h, use_reentrant=True)
        return h.square().sum()

    optimizer, reference = made(model, momentum(model)), momentum(plain)
    for step in range(4):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
        optimizer.begin_step(2)
        for m in (model, plain):
            for _ in range(2):
                (forward(m, x) / 100).backward()
        optimizer.step()
        reference.step()
        reference.zero_grad()
    optimizer.wait_parameters()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p, q)


def test_without_a_number_of_backwards_the_step_ends_accumulation(made):
    mine, theirs = Mixed(), Mixed()
    optimizer = made(mine, adamw(mine))
    for step in range(2):
        for i in range(2):
            (loss_of(mine, 10 * step + i) / 2).backward()
        optimizer.step()
    optimizer.wait_parameters()
    by_rules(theirs, adamw(theirs), 2)
    assert same_parameters(mine, theirs)


def test_a_later_parameter_group_is_refused(made):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    user = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer = made(model, user)
    user.add_param_group({"params": list(model[1].parameters())})
    optimizer.begin_step(1)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(LoopError, match=r"have \[2, 2\] parameters, but had \[2\]"):
        optimizer.step()


class Layers(nn.Module):
    """Runs its layers in the order of their names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def test_sums_begin_during_the_last_backward_in_its_order(made, monkeypatch):
    model = Layers()
    optimizer = made(model, adamw(model), options=ShardedOptions(bucket_bytes=4096))
    assert len(optimizer.states) == 5
    begun = []
    put = optimizer.queue.put
    monkeypatch.setattr(optimizer.queue, "put", lambda job: (begun.append(job.what), put(job)))
    # the first step counts the gradients of each weight per backward, later steps overlap
    for step, (before, after) in enumerate([(0, 0), (0, 5), (0, 5)]):
        begun.clear()
        optimizer.begin_step(2)
        model(torch.ones(2, 32)).backward()
        assert len(begun) == before
        seen = []
        handles = [
            layer.weight.register_hook(lambda grad, i=i, seen=seen: seen.append((i, len(begun))))
            for i, layer in enumerate(model.layers)
        ]
        model(torch.ones(2, 32)).backward()
        assert [i for i, _ in seen] == [4, 3, 2, 1, 0]
        # each sum begins as soon as its gradient is ready
        assert [count for _, count in seen] == ([0, 0, 0, 0, 0] if step == 0 else [0, 1, 2, 3, 4])
        assert len(begun) == after
        assert all(f"bucket {4 - i} of 5" in what for i, what in enumerate(begun))
        optimizer.step()
        gathers = [what for what in begun if "all-gather" in what]
        assert len(gathers) == 5
        assert all(f"bucket {i} of 5" in what for i, what in enumerate(gathers))
        for handle in handles:
            handle.remove()


def test_a_stage_may_have_no_trainable_parameter(made):
    model = nn.Linear(4, 4).requires_grad_(False)
    model.weight.data = model.weight.data.T  # not contiguous
    other = nn.Linear(4, 4)
    user = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    user.param_groups[0]["params"] = []  # the parameters of other stages
    optimizer = made(model, user)
    for _ in range(2):
        optimizer.begin_step(1)
        x = torch.ones(2, 4, requires_grad=True)
        model(x).sum().backward()
        assert optimizer.sum_squares() == 0
        optimizer.step()
    assert optimizer.extents() == optimizer.needed()
    pieces = [optimizer.piece(extent) for extent in optimizer.extents()]
    with torch.no_grad():
        before = [p.clone() for p in model.parameters()]
        for p in model.parameters():
            p.zero_()
    optimizer.load(pieces, 2)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters()))


def test_parts_of_a_stage_share_an_optimizer(made):
    """Two virtual stages with separate backwards that share a weight."""

    def build():
        torch.manual_seed(0)
        first, last = (nn.ModuleDict({"own": nn.Linear(8, 8)}) for _ in range(2))
        first["own2"], last["own3"] = first.pop("own"), last.pop("own")
        first["both"] = last["both"] = nn.Linear(8, 8)
        return first, last

    parts, plain = nn.ModuleList(build()), build()
    params = {p: None for part in plain for p in part.parameters()}
    reference = torch.optim.SGD([*params], lr=0.1, momentum=0.9)
    own = {p: None for part in parts for p in part.parameters()}
    optimizer = made(parts, torch.optim.SGD([*own], lr=0.1, momentum=0.9))
    for step in range(4):
        optimizer.begin_step(2)
        for stage in (parts, plain):
            for part in (1, 0):
                for micro in range(2):
                    generator = torch.Generator().manual_seed(10 * step + micro)
                    h = torch.randn(3, 8, generator=generator)
                    for module in stage[part].values():
                        h = torch.tanh(module(h))
                    h.sum().backward()
        optimizer.step()
        reference.step()
        reference.zero_grad()
    optimizer.wait_parameters()
    for part, other in zip(parts, plain):
        for p, q in zip(part.parameters(), other.parameters()):
            torch.testing.assert_close(p, q)


def test_a_second_begin_step_without_a_step_is_refused(made):
    model = Mixed()
    optimizer = made(model, adamw(model))
    optimizer.begin_step(1)
    loss_of(model, 0).backward()
    with pytest.raises(LoopError, match=r"begin_step\(\) was called again"):
        optimizer.begin_step(1)


def test_a_frozen_parameter_cannot_start_to_train(made):
    model = Mixed()
    model.embed.weight.requires_grad_(False)
    optimizer = made(model, adamw(model))
    train(model, optimizer, 1)
    model.embed.weight.requires_grad_(True)
    optimizer.begin_step(1)
    loss_of(model, 0).backward()
    with pytest.raises(LoopError, match=r"'embed\.weight' was frozen"):
        optimizer.step()


def test_a_gradient_that_backward_did_not_add_is_refused(made):  # Rule 6
    model = Mixed()
    optimizer = made(model, adamw(model))
    optimizer.begin_step(1)
    loss_of(model, 0).backward()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    with pytest.raises(LoopError, match=r"'head\.weight' was set by hand"):
        optimizer.step()


def test_unsupported_arguments_are_refused():
    model = Mixed()
    quiet = {"report": lambda line: None}
    with pytest.raises(RuleError, match="LBFGS"):
        ShardedOptimizer(model, torch.optim.LBFGS(model.parameters()), **quiet)
    with pytest.raises(ModelError, match="1 parameters that are not in the stage"):
        strange = [*model.parameters(), nn.Parameter(torch.zeros(1))]
        ShardedOptimizer(model, torch.optim.SGD(strange, lr=1.0), **quiet)
    with pytest.raises(ModelError, match=r"torch\.float64"):
        wide = nn.Linear(2, 2).double()
        ShardedOptimizer(wide, adamw(wide), **quiet)


def test_pieces_carry_the_whole_state(made):  # Rule 3
    model = Mixed()
    model.attend.in_proj_bias.requires_grad_(False)
    optimizer = made(model, adamw(model))
    train(model, optimizer, 3)
    pieces = [optimizer.piece(extent) for extent in optimizer.extents()]
    numel = sum(p.numel() for p in model.parameters())
    assert sum(piece.extent.numel for piece in pieces) == numel
    other = Mixed()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    other.attend.in_proj_bias.requires_grad_(False)
    # other buckets, so the pieces are cut differently
    again = made(other, adamw(other), options=ShardedOptions(bucket_bytes=777))
    again.load(iter(pieces), 3)
    assert again.steps_done == 3 and same_parameters(model, other)
    assert train(model, optimizer, 2) == train(other, again, 2)
    assert same_parameters(model, other)


def test_pieces_with_values_alone_reset_the_state(made):
    model, fresh = Mixed(), Mixed()
    optimizer = made(model, adamw(model))
    train(model, optimizer, 2)
    first = [
        Piece(Extent(n, 0, p.numel()), {VALUE: p.detach().view(-1).clone()}, {})
        for n, p in fresh.named_parameters()
    ]
    optimizer.load(first, 0)
    assert train(model, optimizer, 2) == train(fresh, made(fresh, adamw(fresh)), 2)


def test_an_incomplete_state_is_refused(made):
    model = Mixed()
    optimizer = made(model, adamw(model))
    pieces = [optimizer.piece(extent) for extent in optimizer.extents()]
    with pytest.raises(StoreError, match="elements of the state are missing"):
        optimizer.load(pieces[1:], 1)
    own = Mixed()
    sgd = made(own, torch.optim.SGD(own.parameters(), lr=1.0))
    with pytest.raises(StoreError, match="sgd keeps none"):
        sgd.load(pieces, 1)
    with pytest.raises(StoreError, match="not kept on this rank"):
        optimizer.piece(Extent("head.weight", 0, 10**6))
