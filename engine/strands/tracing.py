"""The segments of a model's strands, traced on the meta device: work between collectives, and deferrable work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedConfig, PreTrainedModel

from weft.comm.channel import Completed, Handle
from weft.conf.schema import ContextExchange, LoraConfig, SplitKind
from weft.engine.backward import SplitBackward
from weft.engine.backward.tape import DeferredProduct
from weft.engine.models.batch import attach_packed_rows
from weft.engine.models.objective import Minimised, Objective, next_token_loss
from weft.engine.models.sizes import meta_model
from weft.engine.models.skeleton import decoder_layers, hf_model, set_dtype
from weft.engine.models.tracing import layers_alike
from weft.engine.parallel import attention as context_attention
from weft.engine.parallel import blocks
from weft.engine.parallel.axis import AXES, AxisGroups
from weft.engine.parallel.blocks import Block, Gradients, Partial
from weft.engine.parallel.experts import expert_modules
from weft.engine.stages.cutting.context import part_of
from weft.engine.stages.cutting.from_model import stages_from_model
from weft.engine.stages.cutting.split import split_layers
from weft.engine.stages.cutting.stage import Stage
from weft.pipeline.strands.work import PartWork, SegmentWork, StrandWork, Traffic, Work


def trace_strands(
    trained: PreTrainedConfig | nn.Module,
    sizes: Mapping[str, int],
    *,
    microbatch_size: int,
    sequence_length: int,
    exchange: ContextExchange = ContextExchange.gather,
    checkpointing: bool = False,
    lora: LoraConfig | None = None,
    dtype: torch.dtype = torch.bfloat16,
    own_loss: bool = True,
    loss_chunk_bytes: float = 0.0,
) -> StrandWork:
    """Trace the computations and collectives of one rank in a forward and a backward.

    The model's own forward runs, cut as for training, with a recording group on each axis. Backwards are split as in
    the engine. Experts receive equally many tokens.

    Args:
        trained: the config of the whole model, or a model (or peft's around one), which is not changed.
        exchange: exchange between members of a context group, not auto.
        checkpointing: whether layers are recomputed in the backward, if ``trained`` is a config.
        lora: adapters to add, if ``trained`` is a config.
        dtype: type of weights and activations. Models with experts are traced in bf16, as torch supports no other type.
        own_loss: whether the model's own loss is minimised, not an objective, whose logits are of whole sequences.
        loss_chunk_bytes: see `Stage.compute_loss_in_chunks`.

    Raises:
        ValueError: the model cannot be built or shared so, its forward does not run without data, or the gradient
            of a first stage does not reach its embedding.
    """
    model = meta_model(trained, lora).train()
    inner = hf_model(model)
    inner.config._attn_implementation = "sdpa" if inner._supports_sdpa else "eager"
    if checkpointing and not isinstance(trained, nn.Module):
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    if type(inner)._can_set_experts_implementation():
        inner.set_experts_implementation("grouped_mm")
    if not any(weight.requires_grad for weight in inner.get_input_embeddings().parameters()):
        raise ValueError(
            f"model: the embedding of {type(inner).__name__} is frozen, so the backward of its first stage ends inside "
            "of a layer, which plans do not cover; strands alternate instead"
        )
    traced = torch.bfloat16 if any(True for _ in expert_modules(model)) else dtype
    set_dtype(inner, traced)
    recorder = _Recorder(dtype.itemsize / traced.itemsize)
    axes = AxisGroups(**{axis: TracedGroup(axis, sizes.get(axis, 1), recorder) for axis in AXES}, exchange=exchange)
    stage, kinds = _stage(model, axes)
    stage.objective = None if own_loss else _WholeLogits()
    stage.compute_loss_in_chunks(loss_chunk_bytes)
    batch = _batch(microbatch_size, sequence_length, axes)
    recorder.watch(stage, kinds)
    try:
        with recorder.running():
            _run(stage, batch, recorder)
    except Exception as error:  # any: it is Hugging Face's or the model's own code
        raise ValueError(
            f"model: {type(stage.hf_model).__name__} does not run without data ({type(error).__name__}: "
            f"{' '.join(str(error).split())}), so the segments of its strands are not known; set pipeline.pairs=never"
        ) from error
    before, *layers, after = [recorder.part(kinds.get(number, number)) for number in range(recorder.num_parts)]
    return StrandWork.of(before, layers, after)


class TracedGroup:
    """An axis group whose operations are recorded, and return tensors of the right shape."""

    def __init__(self, axis: str, size: int, recorder: _Recorder) -> None:
        self.axis, self.size, self.index = axis, size, 0
        self._recorder = recorder

    def all_gather(self, shard: Tensor) -> Handle:
        """See `AxisGroup`."""
        return self._noted("all_gather", shard.new_empty((self.size * shard.shape[0], *shard.shape[1:])))

    def reduce_scatter(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        part = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        return self._noted("reduce_scatter", part, tensor)

    def all_reduce(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return self._noted("all_reduce", tensor)

    maximum = all_reduce

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        """See `AxisGroup`."""
        return self._noted("all_to_all", tensor.new_empty((sum(receive), *tensor.shape[1:])), tensor)

    def shift(self, tensor: Tensor) -> Handle:
        """See `AxisGroup`."""
        return self._noted("shift", torch.empty_like(tensor))

    def _noted(self, primitive: str, answer: Tensor, whole: Tensor | None = None) -> Handle:
        if self.size > 1:
            num_bytes = self._recorder.bytes_of(answer if whole is None else whole)
            self._recorder.communicate(Traffic(self.axis, primitive, num_bytes))
        return Completed(answer)


class _Recorder(TorchDispatchMode):
    """Counts work by part and segment: part 0 is before the layers, then each layer, and the last after them."""

    def __init__(self, widening: float) -> None:
        """Begin before the layers.

        Args:
            widening: how much larger numbers are that are traced in bf16.
        """
        super().__init__()
        self._widening = widening
        self._work = Work()
        self._at: tuple[int, bool] = (0, True)
        self._segments: dict[tuple[int, bool], list[SegmentWork]] = {}
        self._deferred: list[tuple[int, int, DeferredProduct]] = []
        self._weights: dict[int, list[tuple[int, Work]]] = {}
        self.num_parts = 0

    def watch(self, stage: Stage, kinds: Mapping[int, int]) -> None:
        """Record where each layer begins and ends. Layers that an earlier one represents return their input."""
        layers = list(stage.hf_model.get_submodule(decoder_layers(stage.hf_model)).children())
        self.num_parts = len(layers) + 2
        for number, layer in enumerate(layers, start=1):
            layer.register_forward_pre_hook(partial(self._begins, number), with_kwargs=True)
            if number in kinds:
                layer.forward = _hand_on
        layers[-1].register_forward_hook(partial(self._ends, len(layers) + 1))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the operations in this context, with attention that stores no scores."""
        attention = patch.object(nn.functional, "scaled_dot_product_attention", self._attend)
        bias = patch.object(context_attention, "causal_lower_right", lambda *_: True)  # torch's is no traceable tensor
        of_blocks = patch.object(blocks, "kernel_for", lambda *_, **__: _TracedKernel(self))
        with attention, bias, of_blocks, self:
            yield

    def part(self, number: int) -> PartWork:
        forward, backward = (tuple(self._segments.get((number, way), [SegmentWork(Work())])) for way in (True, False))
        return PartWork(forward, backward, tuple(self._weights.get(number, ())))

    def bytes_of(self, tensor: Tensor) -> float:
        """Return the bytes that a tensor has in training."""
        return tensor.nbytes * (self._widening if tensor.dtype is torch.bfloat16 else 1.0)

    def communicate(self, traffic: Traffic) -> None:
        """End a segment with a collective."""
        self._append(self._segment(traffic))

    def enter(self, number: int, *, forward: bool) -> None:
        """Assign the following operations to another part, or to its backward."""
        self._append(self._segment(None))
        self._at = number, forward

    def defer(self, product: DeferredProduct) -> None:
        """Record that a weight gradient can be deferred from this point on."""
        self._deferred.append((self._at[0], len(self._segments.get(self._at, ())), product))

    def play_weights(self) -> None:
        """Count the deferred products, those of each parameter together, in the order of the last one of each."""
        parameters: dict[Any, list[tuple[int, int, DeferredProduct]]] = {}
        for entry in self._deferred:  # what stages tie is a parameter of each of them
            key = entry[0], entry[2].parameter
            parameters[key] = [*parameters.pop(key, []), entry]
        for entries in parameters.values():
            for *_, product in entries:
                list(product.seed())
            number, after, _ = entries[-1]
            self._weights.setdefault(number, []).append((after, self._taken()))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pairs: float, times: float) -> None:
        """Count attention of queries [B, heads, S, D] to ``pairs`` pairs of positions, ``times`` times."""
        flops = 2 * query.shape[0] * query.shape[1] * pairs * (query.shape[-1] + value.shape[-1])
        moved = sum(map(self.bytes_of, (query, key, value, query)))
        self._work += Work(0.0, times * flops, times * moved)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet is torch.ops.aten._grouped_mm:
            self._work += Work(_grouped_flops(*args[:2]))
        elif packet in flop_registry:
            self._work += Work(float(flop_registry[packet](*args, **(kwargs or {}), out_val=out)))
        elif not _is_free(func):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            self._work += Work(moved_bytes=sum(map(self.bytes_of, tensors)))
        return out

    def _append(self, segment: SegmentWork) -> None:
        self._segments.setdefault(self._at, []).append(segment)

    def _segment(self, traffic: Traffic | None) -> SegmentWork:
        """Return the operations since the last segment."""
        return SegmentWork(self._taken(), traffic)

    def _taken(self) -> Work:
        taken, self._work = self._work, Work()
        return taken

    def _begins(self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._boundary(number, next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)))

    def _ends(self, number: int, module: nn.Module, args: Any, answer: Any) -> None:
        self._boundary(number, answer if isinstance(answer, Tensor) else answer[0])

    def _boundary(self, number: int, hidden: Tensor) -> None:
        """Switch from the part before ``number`` to this one in the forward, and back when the gradient passes."""
        if not self._at[1]:
            return  # computed again
        self.enter(number, forward=True)
        hidden.register_hook(lambda _: self.enter(number - 1, forward=False))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        rows, columns = query.shape[-2], key.shape[-2]
        causal = is_causal or attn_mask is not None
        pairs = float(rows * columns - rows * (rows - 1) / 2 if causal else rows * columns)
        return _Attention.apply(query, key, value, pairs, self)


class _Attention(torch.autograd.Function):
    """Attention that saves queries, keys, values and its output. The backward recomputes the scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, pairs: float, recorder: _Recorder) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.pairs, ctx.recorder = pairs, recorder
        recorder.attend(query, key, value, pairs, 1.0)
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        ctx.recorder.attend(query, key, value, ctx.pairs, 2.5)  # five products where the forward has two
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


@dataclass(frozen=True)
class _TracedKernel:
    """Attention to one block of a ring, see `blocks.Kernel`."""

    recorder: _Recorder

    def forward(self, block: Block) -> Partial:
        query = block.query
        self._noted(block, 1.0)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        return Partial(query.new_empty((*query.shape[:-1], block.value.shape[-1])), sums)

    def backward(
        self, block: Block, gradient: Tensor, output: Tensor, sums: Tensor, seeds: tuple[Tensor, ...]
    ) -> Gradients:
        self._noted(block, 2.5)  # five products where the forward has two
        return torch.empty_like(block.query), torch.empty_like(block.key), torch.empty_like(block.value)

    def _noted(self, block: Block, times: float) -> None:
        rows, columns = block.query.shape[2], block.key.shape[2]
        pairs = rows * (rows + 1) / 2 if block.causal else rows * columns
        self.recorder.attend(block.query, block.key, block.value, pairs, times)


def _stage(model: nn.Module, axes: AxisGroups) -> tuple[Stage, dict[int, int]]:
    """Return one rank's part of the model as a single stage, and for each layer an earlier layer that equals it."""
    inner = hf_model(model)
    layers = inner.get_submodule(decoder_layers(inner))
    assert isinstance(layers, nn.ModuleList)
    kinds = {n + 1: first + 1 for n, first in enumerate(layers_alike(inner, layers)) if first != n}
    (stage,) = stages_from_model(model, split_layers(inner.config, 1, SplitKind.even), [0], axes)
    for part in stage.modules():
        if isinstance(part, PreTrainedModel):  # some look for padding in the ids, to warn of it
            part.warn_if_padding_and_no_attention_mask = lambda *_: None
    return stage, kinds


class _WholeLogits(Minimised):
    """Substitute for any objective, which may not run without data. All of them communicate equally."""

    def __init__(self) -> None:
        super().__init__(Objective.of(next_token_loss))
        self._looked = True


def _batch(rows: int, tokens: int, axes: AxisGroups) -> dict[str, Tensor]:
    ids = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
    whole = {"input_ids": ids, "labels": ids, "position_ids": torch.empty_like(ids)}
    batch = part_of(whole, axes.context, keep_whole=True)
    attach_packed_rows(batch["position_ids"], None)
    return batch


def _run(stage: Stage, batch: dict[str, Tensor], recorder: _Recorder) -> None:
    backward = SplitBackward(stage)
    num_items = torch.zeros((), dtype=torch.long, device="meta")
    loss, saved = backward.forward(lambda: stage(None, batch, num_items), None)
    recorder.enter(recorder.num_parts - 1, forward=False)
    assert saved.tape is not None
    defer: Callable[[DeferredProduct], None] = recorder.defer
    saved.tape.defer = defer  # type: ignore[method-assign, assignment]
    backward.input_backward(saved, torch.ones_like(loss))
    recorder.enter(recorder.num_parts, forward=False)
    recorder.play_weights()


def _hand_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states.view_as(hidden_states)  # of its own, so that its gradient comes by once


def _grouped_flops(one: Tensor, other: Tensor) -> float:
    """Return the FLOPs of rows [N, K] by experts' matrices [E, K, M], or of these matrices' gradients, [K, N] by [N,
    M]."""
    return 2.0 * one.numel() * other.shape[-1]


def _is_free(func: Any) -> bool:
    """True if an operator moves no data: a view, or allocation of uninitialised memory."""
    schema = func._schema
    is_view = any(value.alias_info is not None for value in schema.returns) and not schema.is_mutable
    return is_view or "empty" in schema.name
