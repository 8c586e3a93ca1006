"""BlockStream: runs a model's blocks on fetched parameters, in forward and backward. Does NOT
support double backward through a block, and does NOT average gradients over workers.

The forward of a block fetches the block's parameters, runs the block, and releases the parameters.
If gradients are needed, only the block's inputs are kept. The backward fetches the parameters
again, recomputes the block, and pushes the block's gradients as one flat buffer. Parameters of the
root stay in memory.

Note SAME GRAPH. The forward runs the block with gradients enabled, but drops all tensors that
autograd saves. So the block runs the same kernels as in plain training. The run also shows
gradients that would be lost, because they flow to a tensor that is neither an argument nor a
parameter. Such a gradient raises an error.

Assumes that blocks are called; that the results of a block depend only on arguments, parameters,
buffers and RNG; and that blocks return tensors in tuples, lists, dicts or types registered with
torch.utils._pytree.
"""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from roadtrain.chunks import ChunkTable
from roadtrain.errors import LoopError, ModelError
from roadtrain.streaming.activations import Activations, KeptTensor, version_of
from roadtrain.streaming.fetched import FetchedParameters
from roadtrain.streaming.grads import GradBook, PlacedGrad
from roadtrain.streaming.leaves import check_device, check_opaque, distinct, flatten, pristine
from roadtrain.streaming.released import check_unchanged
from roadtrain.streaming.replay import BufferCopy, ForwardState, keeping_nothing
from roadtrain.streaming.split import ModulePart, Split


class BlockSource(GradBook, Protocol):
    """The object from which a BlockStream fetches parameters, and to which the BlockStream pushes
    gradients. In all methods, `block` is the index of a block in the ChunkTable."""

    def fetch(self, block: int) -> tuple[torch.Tensor, int]:
        """Wait for the parameters of a block, and return (parameters, version of the parameters).

        The parameters are one uint8 tensor on the compute device, in the ChunkTable's layout.
        """

    def release(self, block: int) -> None:
        """End one use of the block. The caller must have dropped all views of the block's tensor.
        The memory becomes free when the current stream has finished its work."""

    def lay_out(self, block: int, write: Callable[[torch.Tensor], None]) -> Any:
        """Wait for a buffer for the block's gradients, an uninitialized uint8 tensor of shape
        [push_nbytes], and call `write` with it. Returns a handle of the buffer for `push`."""

    def push(self, block: int, flat: Any, present: Sequence[int]) -> None:
        """Receive all gradients of one backward of `block`, before `p.grad` is set.

        `present` has the indices of the parameters with a gradient. The gradients of all other
        parameters are zero. BlockStream.pending no longer counts this backward.
        """


class _Block:
    """A block of the BlockStream, with its original forward."""

    def __init__(
        self, index: int, part: ModulePart, fetched: FetchedParameters, shared: list[nn.Parameter]
    ) -> None:
        self.index, self.name, self.module = index, part.name, part.module
        self.fetched, self.shared = fetched, shared
        self.modules = list(part.module.modules())
        self.params = part.params
        self.original = part.module.forward
        self.own_forward = part.module.__dict__.get("forward")
        self.depth = 0  # above 0 while the block is fetched
        self.open: set[int] = set()  # serial numbers of recorded calls that wait for their backward
        self.graph_known = False  # whether `_check_graph` has checked the block
        self.buffers: dict[tuple[int, str], BufferCopy] = {}  # latest copies, for ForwardState

    def run(self, leaves: list[Any], spec: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return self.original(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise LoopError(
            "a placed model cannot be copied or pickled: its parameters are not in memory",
            hint="read the parameters from the optimizer, or export the store",
        )


class BlockStream:
    def __init__(
        self,
        split: Split,
        table: ChunkTable,
        source: BlockSource,
        device: torch.device | str,
        on_pass_end: Callable[[], None] | None = None,
        *,
        activation_bytes: int,
        device_bytes: int = 0,
        scratch_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Create a BlockStream. For the last three arguments see Activations."""
        self.split, self.table, self.source = split, table, source
        self.on_pass_end = on_pass_end
        self.device = torch.device(device)
        self.activations = Activations(activation_bytes, scratch_dir, device, device_bytes)
        parts = (split.root, *split.blocks)
        first = list(itertools.accumulate((len(part.params) for part in parts), initial=0))
        lots = []
        for block, part, at in zip(table.blocks, parts, first):
            params = {at + k: p for k, (_, p) in enumerate(part.params)}
            lots.append(FetchedParameters(table, block, params, self.device))
        self.root = lots[0]
        mine = {id(p) for _, p in self.root.trainable}
        self._blocks = {
            i: _Block(i, part, lots[i], [p for p in part.module.parameters() if id(p) in mine])
            for i, part in enumerate(parts)
            if i > 0
        }
        self._serial = itertools.count()
        self._pass = -1  # the autograd pass at whose end `on_pass_end` will be called
        self._hooks: dict[int, Any] = {}
        # an input of every node, so that blocks are recorded even if no argument needs gradients
        self.gate = torch.empty(0, requires_grad=True)
        self.gate_node = torch.autograd.graph.get_gradient_edge(self.gate).node

    # -- public methods

    def attach(self, root: torch.Tensor, *, compile: bool = False) -> None:
        """Replace the forward of each block, and release the parameters of all blocks.

        The BlockSource must already have the values of all parameters. The root's parameters become
        views of `root`, a uint8 tensor of shape [pull_nbytes] that must not be freed. With
        `compile`, the blocks' own forwards run under torch.compile.
        """
        # if the forward were traced, the trace would keep fetched memory
        forward = torch.compiler.disable(self._forward)
        for block in self._blocks.values():
            block.fetched.settle()
            run = functools.partial(forward, block)
            block.module.forward = functools.wraps(block.original)(run)
            if compile:
                block.original = _compiled(block.original, block.name)
        self._watch_root()
        self.root.point(root)
        self._watch_root()

    def detach(self) -> None:
        """Restore the blocks' own forwards, and drop the kept inputs. The blocks' parameters stay
        released: their values are not in memory."""
        self.activations.close()
        for block in self._blocks.values():
            if block.own_forward is not None:
                block.module.forward = block.own_forward
            else:
                block.module.__dict__.pop("forward", None)
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def pending(self, block: int) -> int:
        """Return the number of recorded forwards of `block` whose backward can still run."""
        return len(self._blocks[block].open)

    # -- a pass

    def _watch_root(self) -> None:
        me = weakref.ref(self)  # the garbage collector cannot see torch's reference to the hook
        for index, p in self.root.trainable:
            if index not in self._hooks and p.requires_grad and not p.is_meta:
                hook = p.register_post_accumulate_grad_hook(lambda _: _pass_runs(me()))  # type: ignore[no-untyped-call]
                self._hooks[index] = hook

    def pass_runs(self) -> None:
        """Let autograd call `on_pass_end` once at the end of the backward that is running."""
        now = torch._C._current_graph_task_id()
        if now != self._pass and self.on_pass_end is not None:
            self._pass = now
            torch.autograd.Variable._execution_engine.queue_callback(self.on_pass_end)

    # -- a block

    @contextmanager
    def fetched_block(self, block: _Block) -> Iterator[tuple[torch.Tensor, int]]:
        """Fetch the parameters of `block` for the duration of the context."""
        buffer, version = self.source.fetch(block.index)
        block.depth += 1
        try:
            with keeping_nothing(block.modules):
                block.fetched.point(buffer)
                versions = [p._version for _, p in block.params]
                yield buffer, version
                check_unchanged(block.params, versions)
        finally:
            block.depth -= 1
            block.fetched.drop()
            self.source.release(block.index)

    def _forward(self, block: _Block, *args: Any, **kwargs: Any) -> Any:
        if block.depth:  # a block that calls itself is already fetched
            return block.original(*args, **kwargs)
        _check_frozen(block)
        if torch.is_grad_enabled():
            leaves, spec = flatten((args, kwargs))
            inputs, slots = distinct(leaves)
            check_device(inputs, self.device, f"block {block.name!r}")
            wants = [t for t in (*inputs, *block.shared) if t.requires_grad]
            if wants or any(p.requires_grad for _, p in block.fetched.trainable):
                fresh = [(i, pristine(leaf, block.name)) for i, leaf in slots]
                call = _Call(self, block, inputs, fresh, spec)
                outputs = _Node.apply(call, self.gate, *wants)  # type: ignore[no-untyped-call]
                return call.returned(outputs)
        with self.fetched_block(block) as (buffer, _), torch.no_grad():
            out = block.original(*args, **kwargs)
            leaves, spec = flatten(out)
            owned = [_own(x, buffer=buffer) if isinstance(x, torch.Tensor) else x for x in leaves]
            same = all(a is b for a, b in zip(owned, leaves))
            return out if same else pytree.tree_unflatten(owned, spec)


def _compiled(forward: Callable[..., Any], block: str) -> Callable[..., Any]:
    """Compile the forward of a block. Blocks of a class share their compiled code, because torch
    keeps it with the class's forward and passes parameters as arguments."""
    compiled = torch.compile(forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            reason = " ".join(str(error).partition("\n\n")[0].split())
            raise ModelError(
                f"torch.compile failed in block {block!r}: {reason}",
                hint="remove the cause, such as a missing C++ compiler, or leave out compile=True",
            ) from error

    return run


def _pass_runs(stream: BlockStream | None) -> None:
    if stream is not None:
        stream.pass_runs()


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, gate: torch.Tensor, *wants: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs, differentiable = call.forward()
        ctx.mark_non_differentiable(*(o for o, yes in zip(outputs, differentiable) if not yes))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.call.backward(grads)


class _Call:
    """A recorded run of a block, which lives as long as its node in the autograd graph. `slots` has
    a pair for each leaf of the arguments; see `leaves.distinct`."""

    def __init__(
        self,
        stream: BlockStream,
        block: _Block,
        inputs: list[torch.Tensor],
        slots: list[tuple[int, Any]],
        spec: Any,
    ) -> None:
        self.stream, self.block, self.slots, self.spec = stream, block, slots, spec
        self.serial = next(stream._serial)
        self.tickets: list[KeptTensor] = []
        self.closed = False
        # whether the call was recorded during a backward, when a checkpoint was recomputed
        self.inside = torch._C._current_graph_task_id() != -1
        if self.inside:
            stream.pass_runs()
        self.needs = [t.requires_grad for t in inputs]
        self.shared = [p for p in block.shared if p.requires_grad]
        self.shared_versions = [p._version for p in self.shared]
        self.trained = [(i, p) for i, p in block.fetched.trainable if p.requires_grad]
        self.inputs = inputs  # emptied when the forward has run
        self.version = -1
        # the structure of the result, until the result is returned
        self.out: tuple[list[tuple[int, Any]], Any] | None = None
        self.n_outputs = 0

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True
        self.block.open.discard(self.serial)
        while self.tickets:
            self.stream.activations.free(self.tickets.pop())

    # forward

    def forward(self) -> tuple[list[torch.Tensor], list[bool]]:
        block, inputs = self.block, self.inputs
        for tensor in inputs:
            self.tickets.append(self.stream.activations.save(tensor))
        versions = [version_of(t) for t in inputs]
        with self.stream.fetched_block(block) as (buffer, self.version):
            self.when = ForwardState(block.modules, self.stream.device, block.buffers)
            leaves, tensors = self._leaves(inputs)
            refuse = functools.partial(_refuse, block.name)
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda _: None, refuse)
            with torch.enable_grad(), hooks:  # SAME GRAPH
                out = block.run(leaves, self.spec)
            self.when.forward_ended()
            if [version_of(t) for t in inputs] != versions:
                hint = "change a copy of the input in the block (x = x + y instead of x += y)"
                raise ModelError(
                    f"block {block.name!r} changes one of its inputs in place", hint=hint
                )
            of_out, spec = flatten(out)
            outputs, form = distinct(of_out)
            check_device(outputs, self.stream.device, f"block {block.name!r}", "returned")
            for i, leaf in form:
                if i < 0:
                    check_opaque(leaf, block.name)
            self.out = (form, spec)
            if not block.graph_known:
                self._check_graph(outputs, tensors)
                block.graph_known = True
            differentiable = [o.requires_grad for o in outputs]
            outputs = [_own(o.detach(), buffer=buffer) for o in outputs]
            del out, of_out, leaves, tensors
        self.inputs = []
        self.n_outputs = len(outputs)
        block.open.add(self.serial)
        return outputs, differentiable

    def _leaves(self, inputs: Sequence[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
        """Return the leaves of the arguments, with tensors detached from their graph, and these
        tensors alone."""
        tensors = [t.detach().requires_grad_(needs) for t, needs in zip(inputs, self.needs)]
        name = self.block.name
        return [tensors[i] if i >= 0 else pristine(leaf, name) for i, leaf in self.slots], tensors

    def returned(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        assert self.out is not None
        (form, spec), self.out = self.out, None
        return pytree.tree_unflatten([outputs[i] if i >= 0 else leaf for i, leaf in form], spec)

    def _check_graph(self, outputs: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        """Raise ModelError if a gradient would be lost, because it flows to a tensor that is
        neither an argument nor a parameter of the block."""
        expected = {id(t) for t in (*tensors, *self.block.module.parameters())}
        todo: list[Any] = [o.grad_fn for o in outputs if o.grad_fn is not None]
        seen = set(todo)
        while todo:
            node = todo.pop()
            if hasattr(node, "variable") and id(node.variable) not in expected:
                raise ModelError(
                    f"block {self.block.name!r} uses a tensor of shape {tuple(node.variable.shape)}"
                    " that needs gradients and is neither an argument nor a parameter of the block",
                    hint="pass the tensor as an argument, or choose larger blocks that contain it",
                )
            for above, _ in node.next_functions:
                if above is not None and above not in seen:
                    seen.add(above)
                    todo.append(above)

    # backward

    def backward(self, grads: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        stream, block = self.stream, self.block
        if not self.inside:
            stream.pass_runs()
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        if self.closed:
            raise LoopError(
                f"backward ran a second time through block {block.name!r}",
                hint="set retain_graph=True in the first backward",
            )
        if [p._version for p in self.shared] != self.shared_versions:
            raise self._changed()
        trained = self.trained if torch._C._will_engine_execute_node(stream.gate_node) else []
        self._check_handles(trained)
        with stream.fetched_block(block) as (_, version):
            if version != self.version:
                raise self._changed()
            found, n_wants = self._differentiate(grads, trained)
            held = {i: g for (i, _), g in zip(trained, found[n_wants:]) if g is not None}
            flat = None
            if held:
                write = functools.partial(block.fetched.lay_out, grads=held)
                flat = stream.source.lay_out(block.index, write)
                del write
            upstream = list(found[:n_wants])
            present = list(held)
            del found, held
        block.open.discard(self.serial)
        if not keep_graph:
            self.close()
        if flat is not None:
            stream.source.push(block.index, flat, present)
            self._leave_handles(set(present))
        return upstream

    def _differentiate(
        self, grads: tuple[torch.Tensor | None, ...], trained: list[tuple[int, nn.Parameter]]
    ) -> tuple[Sequence[torch.Tensor | None], int]:
        """Recompute the block, and return (gradients, n). The first n belong to inputs and shared
        parameters, the others to `trained`."""
        try:
            inputs = [self.stream.activations.load(t) for t in self.tickets]
        except ModelError as error:
            raise ModelError(f"block {self.block.name!r}: {error}") from None
        with self.when.replay():
            leaves, tensors = self._leaves(inputs)
            with torch.enable_grad(), self.when.replay_autocast():
                out_leaves, _ = flatten(self.block.run(leaves, self.spec))
                outputs, _ = distinct(out_leaves)
            if len(outputs) != self.n_outputs:
                raise ModelError(
                    f"block {self.block.name!r} returned {self.n_outputs} tensors in forward but"
                    f" {len(outputs)} when it was recomputed",
                    hint="remove state that is not restored, such as Python's random numbers",
                )
            ends = [(o, g) for o, g in zip(outputs, grads) if g is not None and o.requires_grad]
            wants = [t for t in tensors if t.requires_grad] + self.shared
            targets = [*wants, *(p for _, p in trained)]
            if not ends or not targets:
                return [None] * len(targets), len(wants)
            ys, gs = zip(*ends)
            return torch.autograd.grad(ys, targets, gs, allow_unused=True), len(wants)

    def _changed(self) -> LoopError:
        return LoopError(
            f"parameters changed between forward and backward of block {self.block.name!r}",
            hint="run backward before step(), or run the forward again after step()",
        )

    def _check_handles(self, trained: list[tuple[int, nn.Parameter]]) -> None:
        for index, p in trained:
            if p.grad is not None and (not isinstance(p.grad, PlacedGrad) or p.grad.scale != 1.0):
                raise LoopError(
                    f"the gradient of {self.stream.table.params[index].name!r} was set or scaled"
                    " (clipped, unscaled) before another backward pass added to it",
                    hint="clip or unscale once, after the last backward pass of a step; then call"
                    " zero_grad()",
                )

    def _leave_handles(self, present: set[int]) -> None:
        for index, p in self.trained:
            if index in present and p.grad is None:
                name = self.stream.table.params[index].name
                p.grad = PlacedGrad(p, index, self.stream.source, name)


def _refuse(name: str, _: None) -> Any:
    raise ModelError(
        f"a tensor computed in block {name!r} was differentiated, but the block did not return it",
        hint="return this tensor from the forward (in tuples, lists, dicts, registered pytrees)",
    )


def _own(tensor: torch.Tensor, *, buffer: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a copy if the tensor is a view of `buffer`, whose memory will be
    reused."""
    if tensor.device == buffer.device and tensor.layout == torch.strided:
        at = tensor.untyped_storage().data_ptr()
        if at and at == buffer.untyped_storage().data_ptr():
            return tensor.detach().clone()
    return tensor


def _check_frozen(block: _Block) -> None:
    for p in block.fetched.frozen:
        if p.requires_grad:
            raise LoopError(
                f"a parameter of block {block.name!r} was frozen when the model was placed, but"
                " is trainable now",
                hint="place the model again, with this parameter in the optimizer",
            )
