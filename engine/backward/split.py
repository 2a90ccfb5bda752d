"""The split backward: input gradients (I) apart from weight gradients (W)."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from weft.engine.backward.offload import MovableActivations
from weft.engine.backward.products import match
from weft.engine.backward.tape import Tape

_log = logging.getLogger(__name__)


class SavedForward:
    """The state of a micro-batch's forward on a virtual stage that its backward needs."""

    def __init__(self, hidden: Tensor | None, *, split: bool) -> None:
        self.hidden = hidden
        """The stage's input, a leaf, or None on the first stage."""
        self.waits = False
        """True until its backward begins."""
        self.root: GradientEdge | None = None
        """The end of its graph, without the output's memory. None if the output needs no gradient."""
        self.in_pair = False
        """True if its backward is interleaved with a forward, so that a part of the graph may be alive."""
        self.tape = Tape() if split else None
        """Deferred weight gradients, or None if they are computed with the input gradient."""
        self.activation_bytes = 0
        """Memory of the stage's input and of the tensors that the forward's graph saves."""
        self.kept_bytes = 0
        """Memory kept between input-gradient and weight-gradient backward."""
        self.movable: MovableActivations | None = None
        """The saved tensors, if they go to host memory."""

    def coming(self) -> Counter[nn.Parameter] | None:
        """Count the gradients of each parameter that the backward will accumulate. None means one for each parameter.

        If a parameter on the tape is also used outside of recorded products, it has one gradient in I and another
        in W.
        """
        if self.tape is None:
            return None
        return self.tape.coming + Counter(() if self.root is None else _leaves(self.root))

    @property
    def holds_activation(self) -> bool:
        """True if the forward's graph is still alive."""
        return self.waits or self.in_pair

    @property
    def live_bytes(self) -> int:
        """Bytes that saved forwards hold now."""
        away = 0 if self.movable is None else self.movable.away_bytes
        return self.activation_bytes - away if self.holds_activation else self.kept_bytes


class SplitBackward:
    """Runs the backwards of one virtual stage, in one or two parts.

    Inside the forward of a module that owns matrices (nn.Linear, GPT-2's Conv1D, LoRA's adapters, a
    router, fused experts, an embedding), a product of an activation and a parameter is replaced by
    one whose backward returns the activation's gradient and records the computation of the parameter's
    gradient on a tape. All other parameters, such as those of norms, get their gradient in I. Parameters
    without a gradient cost nothing. With gradient checkpointing the layer is recomputed once, in I.

    torch.distributed.pipelining cuts the autograd graph instead. That needs no rule per product, but
    keeps the whole graph of a micro-batch until W, and with checkpointing recomputes in both I and W.
    The split is that of "Zero Bubble Pipeline Parallelism", section 2.
    """

    def __init__(self, module: nn.Module) -> None:
        """Create the backwards. The first split forward hooks the modules that own matrices; `remove` removes hooks."""
        self._module = module
        self._strand = _Strand()
        self._played: Tape | None = None
        """Tape of the running backward, which autograd may run, with its recomputation, in a separate thread."""
        self._mode = _Intercept(self)
        self._hooks: list[Any] = []
        self._unsplit: tuple[str, ...] | None = None
        self._activation_bytes: dict[tuple[torch.Size | None, bool], int] = {}

    @property
    def unsplit(self) -> tuple[str, ...]:
        """Names of trainable parameters whose gradient is computed in I. Available after the first split forward."""
        return self._unsplit or ()

    def forward(
        self,
        run: Callable[[], Tensor],
        hidden: Tensor | None,
        *,
        split: bool = True,
        movable: bool = False,
        shared: Iterable[Tensor] = (),
    ) -> tuple[Tensor, SavedForward]:
        """Run a micro-batch's forward.

        Args:
            run: computes the stage's output or loss from ``hidden``.
            hidden: the stage's input, a leaf that requires a gradient, or None on the first stage.
            split: whether the backward may run in two parts. Otherwise the forward is plain autograd,
                and only `full_backward` may follow.
            movable: whether the saved tensors may go to host memory. See `MovableActivations`.
            shared: tensors that others refer to as well, which stay.

        Returns:
            The output, and the saved state for the micro-batch's backward.
        """
        if split and not self._hooks:
            self._hook_matrices()
        saved = SavedForward(hidden, split=split)
        with self._recording(saved.tape):
            output = self._stored(run, saved, shared) if movable else self._measured(run, saved)
        saved.waits, saved.root = True, get_gradient_edge(output) if output.requires_grad else None
        if saved.tape and self._unsplit is None:
            self._report(saved.tape)
        return output, saved

    def input_backward(self, saved: SavedForward, gradient: Tensor) -> Tensor | None:
        """Run ``I``: compute the gradient of the stage's input, and keep what W needs.

        Args:
            gradient: the gradient of the output. The gradient of a loss is the loss scale.

        Returns:
            The gradient of ``hidden``, or None on the first stage.
        """
        assert saved.waits, "the input gradient of this micro-batch has been computed"
        root, hidden = saved.root, saved.hidden
        saved.waits, saved.root, saved.hidden = False, None, None
        if saved.movable is not None:
            saved.movable.begin_backward()
        if saved.tape:
            saved.tape.begin_backward()
        if root is not None:
            with self._playing(saved.tape):  # a checkpointed layer reruns its forward
                torch.autograd.backward(root, gradient)
        if saved.tape:
            saved.kept_bytes = saved.tape.kept_bytes
        return None if hidden is None else hidden.grad

    def weight_backward(self, saved: SavedForward) -> None:
        """Run ``W``: compute and accumulate the deferred weight gradients."""
        assert not saved.holds_activation, "the input gradient comes first"
        if saved.tape:
            saved.tape.accumulate()
            saved.kept_bytes = 0

    def full_backward(self, saved: SavedForward, gradient: Tensor) -> Tensor | None:
        """Run ``B``, which is I and W together, with the arguments and the result of `input_backward`."""
        below = self.input_backward(saved, gradient)
        self.weight_backward(saved)
        return below

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook_matrices(self) -> None:
        """Intercept products of the modules that own matrices. Hooks cost host time that other forwards do without."""
        for child in self._module.modules():
            if any(p.dim() >= 2 for p in child.parameters(recurse=False)):
                self._hooks += [
                    child.register_forward_pre_hook(self._enter, prepend=True),
                    child.register_forward_hook(self._exit, always_call=True, prepend=True),
                ]

    def _report(self, tape: Tape) -> None:
        self._unsplit = tuple(
            name for name, p in self._module.named_parameters() if p.requires_grad and p not in tape.parameters
        )
        if self._unsplit:
            _log.info("gradients computed in I instead of W: %s", ", ".join(self._unsplit))

    def _stored(self, run: Callable[[], Tensor], saved: SavedForward, shared: Iterable[Tensor]) -> Tensor:
        """Run a forward whose saved tensors can move."""
        with MovableActivations((*self._module.parameters(), *self._module.buffers())) as movable:
            output = run()
        received = 0 if saved.hidden is None or movable.holds(saved.hidden) else saved.hidden.nbytes
        movable.keep((saved.hidden, output, *shared))
        saved.movable, saved.activation_bytes = movable, movable.total_bytes + received
        return output

    def _measured(self, run: Callable[[], Tensor], saved: SavedForward) -> Tensor:
        """Run a forward, and set ``activation_bytes``. They are measured once per input shape to save host time."""
        key = saved.hidden.shape if saved.hidden is not None else None, saved.tape is not None
        if key in self._activation_bytes:
            output = run()
        else:
            with SavedBytes((*self._module.parameters(), *self._module.buffers())) as meter:
                output = run()
            if saved.hidden is not None:
                meter.count(saved.hidden)
            self._activation_bytes[key] = meter.total
        saved.activation_bytes = self._activation_bytes[key]
        return output

    @property
    def _tape(self) -> Tape | None:
        """The tape of the micro-batch that this thread computes, or None."""
        return self._strand.tape if self._strand.is_recording else self._played

    def _recording(self, tape: Tape | None) -> AbstractContextManager[None]:
        """Return the context in which this thread records on a tape. Without hooks nothing reads the tape."""
        return self._on_strand(tape) if self._hooks else nullcontext()

    @contextmanager
    def _on_strand(self, tape: Tape | None) -> Iterator[None]:
        strand, before = self._strand, (self._strand.is_recording, self._strand.tape)
        strand.is_recording, strand.tape = True, tape
        try:
            yield
        finally:
            strand.is_recording, strand.tape = before

    @contextmanager
    def _playing(self, tape: Tape | None) -> Iterator[None]:
        before, self._played = self._played, tape
        try:
            with self._recording(tape):
                yield
        finally:
            self._played = before

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._tape is not None:
            self._mode.__enter__()

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._tape is not None:
            self._mode.__exit__(None, None, None)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a torch function of a hooked module, and defer its weight gradient if it is a matching product."""
        found, tape = match(function, args, kwargs), self._tape
        if found is None or tape is None:
            return function(*args, **kwargs)
        return tape.record(lambda: function(*args, **kwargs), *found)


def _leaves(root: GradientEdge) -> Iterator[nn.Parameter]:
    """Yield the parameters whose gradients autograd computes itself."""
    seen, ahead = set(), [root.node]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead.extend(below for below, _ in node.next_functions)
            if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
                yield leaf


class _Strand(threading.local):
    """State per thread, because the two strands of a pair may run on one stage at once, for different micro-batches."""

    is_recording = False
    tape: Tape | None = None

    def __reduce__(self) -> tuple[type[_Strand], tuple[()]]:
        """Copy as an idle strand."""
        return _Strand, ()


class _Intercept(TorchFunctionMode):
    """Passes the torch functions of a hooked module's forward to its `SplitBackward`."""

    def __init__(self, owner: SplitBackward) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._owner.call(func, args, kwargs or {})


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Context that counts the bytes of the tensors that autograd saves. Shared storage counts once.

    A checkpointed region counts with its inputs only, without what is recomputed. Parameters and buffers
    do not count.
    """

    def __init__(self, resident: Iterable[Tensor]) -> None:
        """Start at 0. The ``resident`` tensors are not counted, because they are alive anyway."""
        self._resident = {tensor.untyped_storage()._cdata for tensor in resident}
        self._sizes: dict[int, int] = {}
        super().__init__(self.count, lambda tensor: tensor)

    def __enter__(self) -> SavedBytes:
        super().__enter__()
        return self

    def count(self, tensor: Tensor) -> Tensor:
        """Count a tensor, and return it."""
        for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
            storage = part.untyped_storage()
            # Identify by storage object, not by address: sharded weights are freed and allocated again.
            if storage._cdata not in self._resident:
                self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def total(self) -> int:
        """Bytes counted so far."""
        return sum(self._sizes.values())
