"""Recomputation of a layer's element-wise operations, from the results of its other operations.

This is torch's selective checkpointing (`create_selective_checkpoint_contexts`) with four differences. Kept results are
saved in autograd's graph, so that they count as saved tensors and can move to host memory. A kept result that is
changed in place is copied first. Random draws in place are kept. The last results are not kept, because
the recomputation stops before they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

_CHEAP = frozenset(
    (
        *("_fused_rms_norm", "_softmax", "native_layer_norm"),
        *("amax", "amin", "linalg_vector_norm", "mean", "sum", "var", "var_mean"),
        *("_reshape_alias", "_to_copy", "_unsafe_view", "cat", "constant_pad_nd", "repeat", "stack", "tril", "triu"),
        *("gather", "index", "index_add", "index_select", "scatter", "scatter_add"),
        *("copy_", "fill_", "index_add_", "index_put_", "masked_fill_", "scatter_", "scatter_add_", "zero_"),
        *("arange", "empty", "empty_strided", "eye", "full", "ones", "scalar_tensor", "zeros"),
        *("empty_like", "full_like", "ones_like", "zeros_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    )
)
"""Names of ATen's operations that are computed again, besides views and those that torch marks as pointwise: they move
each element a few times at most."""
_NARROW = 16
"""Inner dimension up to which a product is computed again, such as an adapter's second one: it computes less than it
reads and writes."""


def is_cheap(function: Any, args: tuple[Any, ...] = ()) -> bool:
    """Return True if an operation is computed again: it is a view, element-wise, or about as cheap, and draws nothing.

    All others are kept, such as matrix products, attention kernels, random draws, and operations of other libraries.
    """
    if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and len(args) > 1:
        return bool(args[-2].shape[-1] <= _NARROW)
    return _is_cheap(function)


@cache
def _is_cheap(function: Any) -> bool:
    if not isinstance(function, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in function.tags:
        return False
    if function.namespace == "bitsandbytes":
        return "dequantize" in function._opname
    pointwise = function.is_view or torch.Tag.pointwise in function.tags
    return pointwise or (function.namespace == "aten" and function._opname in _CHEAP)


@cache
def _written_arguments(function: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of each argument that an operation writes to."""
    if not isinstance(function, torch._ops.OpOverload) or not function._schema.is_mutable:
        return ()
    arguments = enumerate(function._schema.arguments)
    return tuple((at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a call writes to."""
    named = _written_arguments(function)
    found = [args[at] if at < len(args) else kwargs.get(name) for at, name in named]
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Argument(NamedTuple):
    """A result that is the tensor with this number among those that the call writes to."""

    number: int


class _Slot(NamedTuple):
    """A result, or a value of an argument after the call, with this number among the recorder's tensors."""

    number: int


@dataclass(frozen=True)
class _Kept:
    """Results of a call, and values that it wrote."""

    function: Any
    leaves: tuple[Any, ...]
    """The results: `_Slot`, `_Argument`, or a value that is not a tensor."""
    spec: TreeSpec
    written: tuple[_Slot | None, ...]
    """The values of the arguments that the call wrote. None: an argument from outside of the layer, which stays."""


class ResultRecorder(TorchDispatchMode):
    """Records the results of a layer's operations that are not cheap, while its forward runs."""

    def __init__(self, outside: Iterable[Tensor] = ()) -> None:
        """Start without results. ``outside`` tensors exist without the layer: its weights and inputs."""
        super().__init__()
        self._outside = {_storage(tensor) for tensor in outside}
        self._hooks: saved_tensors_hooks | None = None
        self._made: dict[int, int] = {}  # the time at which each storage was made, for those that still exist
        self._time = self._last_saved = 0
        self._slots: dict[int, list[int]] = {}  # slots of each storage
        self._times: list[int] = []
        self.tensors: list[Tensor] = []
        """The recorded tensors."""
        self.calls: list[_Kept | None] = []
        """Calls that are not cheap or that write, in order. None: the call runs again."""
        self.moved_bytes = 0.0
        """Bytes that cheap operations read and write."""

    def __enter__(self) -> ResultRecorder:
        """Also pass on what autograd saves to the hooks that are in force."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        pack, unpack = hooks or (lambda tensor: tensor,) * 2
        self._hooks = saved_tensors_hooks(partial(self._pack, pack), unpack)
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop recording."""
        super().__exit__(*error)
        assert self._hooks is not None
        self._hooks.__exit__(*error)
        self._hooks = None  # which would be a cycle with tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        for tensor in written:
            self._copy_before_write(tensor)
        out = func(*args, **kwargs)
        self._time += 1
        if not is_cheap(func, args) or any(_storage(tensor) not in self._made for tensor in written):
            self.calls.append(self._kept(func, out, written))
        else:
            self.calls += [None] * bool(written)
            self._note(func, args, out, written)
        for tensor in written:
            self._outside.discard(_storage(tensor))
            if _storage(tensor) in self._made:
                self._made[_storage(tensor)] = self._time
        return out

    def keep(self, *results: Tensor) -> None:
        """Record results of an operation that torch does not dispatch."""
        self._time += 1
        for result in results:
            self._made[_storage(result)] = self._time
            self._slot(result)

    def needed(self, slot: int) -> bool:
        """Return True if the recomputation uses a recorded tensor: autograd saves it or something that is made later.

        So the result of a layer's last product is not needed.
        """
        return self._times[slot] <= self._last_saved

    @property
    def kept_bytes(self) -> int:
        """Bytes of the recorded tensors that are needed. Shared storage counts once."""
        kept = (tensor.untyped_storage() for slot, tensor in enumerate(self.tensors) if self.needed(slot))
        return sum({storage._cdata: storage.nbytes() for storage in kept}.values())

    def _pack(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        storage = _storage(tensor)
        if storage not in self._outside:  # a tensor that no operation has returned may be made from all before it
            self._last_saved = max(self._last_saved, self._made.get(storage, self._time))
        return pack(tensor)

    def _note(self, func: Any, args: Any, out: Any, written: list[Tensor]) -> None:
        if func.is_view:
            return
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for leaf in leaves:
            if not written:
                self._made[_storage(leaf)] = self._time
        read = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if read and "empty" not in func._opname and "view" not in func._opname:
            self.moved_bytes += sum(tensor.nbytes for tensor in (*read, *leaves))

    def _kept(self, func: Any, out: Any, written: list[Tensor]) -> _Kept:
        leaves, spec = tree_flatten(out)
        found: list[Any] = []
        for leaf in leaves:
            at = next((at for at, tensor in enumerate(written) if tensor is leaf), None)
            if at is not None:
                found.append(_Argument(at))
            elif isinstance(leaf, Tensor):
                self._made[_storage(leaf)] = self._time
                found.append(self._slot(leaf))
            else:
                found.append(leaf)
        values = [self._slot(tensor) if _storage(tensor) in self._made else None for tensor in written]
        return _Kept(func, tuple(found), spec, tuple(values))

    def _slot(self, tensor: Tensor) -> _Slot:
        slot = len(self.tensors)
        self.tensors.append(tensor.detach())
        self._times.append(self._time)
        self._slots.setdefault(_storage(tensor), []).append(slot)
        return _Slot(slot)

    def _copy_before_write(self, tensor: Tensor) -> None:
        for slot in self._slots.pop(_storage(tensor), ()):
            self.tensors[slot] = self.tensors[slot].clone()
            self._slots.setdefault(_storage(self.tensors[slot]), []).append(slot)


class _ResultReplayer(TorchDispatchMode):
    """Returns recorded results in a recomputation, in place of the operations that made them."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Kept | None] = []
        self._not_kept: dict[int, Callable[[], Tensor]] = {}
        self._node: Any = None
        self._values: dict[int, Tensor] = {}

    def take(self, recorder: ResultRecorder) -> None:
        """Save what a recorder holds in a node of autograd, as the layer's operations save their tensors."""
        kept = {slot: tensor for slot, tensor in enumerate(recorder.tensors) if recorder.needed(slot)}
        self._not_kept = {slot: _form(tensor) for slot, tensor in enumerate(recorder.tensors) if slot not in kept}
        self._calls = recorder.calls[::-1]
        self._node = _Saved.apply(torch.empty(0, requires_grad=True), tuple(kept), *kept.values()).grad_fn
        recorder.tensors.clear()

    def __enter__(self) -> _ResultReplayer:
        if self._node is None:
            raise RuntimeError("pipeline.recompute=elementwise: a layer has had its backward, and has only one")
        node, self._node = self._node, None
        self._values = dict(zip(node.slots, node.saved_tensors, strict=True))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._values.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args, kwargs)
        if is_cheap(func, args) and not written:
            return func(*args, **kwargs)
        call = self._calls.pop() if self._calls else None
        if call is None and is_cheap(func, args):
            return func(*args, **kwargs)
        if call is None or call.function is not func:
            raise RuntimeError(
                f"pipeline.recompute=elementwise: a layer ran {func} in its recomputation, and "
                f"{call.function if call else 'no other operation'} in its forward; set pipeline.recompute=layers or "
                "none"
            )
        for tensor, slot in zip(written, call.written, strict=True):
            if slot is not None and slot.number in self._values:
                tensor.copy_(self._values.pop(slot.number))
        return tree_unflatten([self._result(leaf, written) for leaf in call.leaves], call.spec)

    def _result(self, leaf: Any, written: list[Tensor]) -> Any:
        if isinstance(leaf, _Argument):
            return written[leaf.number]
        if not isinstance(leaf, _Slot):
            return leaf
        if leaf.number in self._values:
            return self._values.pop(leaf.number).detach()
        return self._not_kept[leaf.number]()


def _form(tensor: Tensor) -> Callable[[], Tensor]:
    """Return a function that makes a tensor of the same form without values."""
    make = partial(torch.empty_strided, tensor.size(), tensor.stride())
    return partial(make, dtype=tensor.dtype, device=tensor.device)


class _Saved(torch.autograd.Function):
    """A node of autograd that owns tensors. It is in no graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, slots: tuple[int, ...], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.slots = slots
        return anchor.detach()


def recompute_elementwise(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``forward`` of a layer, whose backward computes the element-wise operations again."""
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    recorder, replayer = ResultRecorder(outside_tensors(layer, args, kwargs)), _ResultReplayer()
    output = checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (recorder, replayer), **kwargs)
    replayer.take(recorder)
    return output


def outside_tensors(layer: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that exist without a layer's forward: its weights, buffers and inputs."""
    inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return [*layer.parameters(), *layer.buffers(), *inputs]
