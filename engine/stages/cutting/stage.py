"""A virtual stage: some decoder layers of a Hugging Face model, run by the model's own forward."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from weft.engine.models.batch import Batch
from weft.engine.models.lazy_logits import LazyHead, LazyLogits, whole_logits_reason
from weft.engine.models.objective import Minimised
from weft.engine.models.router import RouterLoss, wants_router_loss
from weft.engine.models.skeleton import decoder_layers, hf_model
from weft.engine.models.varlen import wanted_arguments
from weft.engine.parallel.attention import attend_over
from weft.engine.parallel.axis import AxisGroups, UnshareableError
from weft.engine.parallel.cut import Cut
from weft.engine.parallel.functions import all_sum, collect
from weft.engine.stages.cutting.boundary import Boundary, pack, packed_size, unpack
from weft.engine.stages.cutting.context import labels_to_predict, own_positions, whole_batch, whole_sequence
from weft.engine.stages.cutting.port import Port, StageEnded, require_as_predicted

_log = logging.getLogger(__name__)
HEAD_WEIGHT, HEAD = 1 << 29, 1 << 30
"""Numbers, above all stages, that mean the weight and the logits of the last stage's head."""
INPUTS = ("input_ids", "attention_mask", "position_ids")
"""Inputs of forwards that accept any."""


class Stage(nn.Module):
    """One virtual stage.

    The model's own forward runs on every stage. Layers of other stages are placeholders: the one before the stage's
    own layers returns the received hidden state, and the one after them ends the forward. So Hugging Face's code
    makes masks, rotary tables and other tensors that it derives from the batch on each stage.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        index: int,
        num_stages: int,
        port: Port,
        tied: frozenset[str] = frozenset(),
        prefix: str = "",
        axes: AxisGroups | None = None,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        """Wrap a pruned model.

        Args:
            model: a pruned Hugging Face model, or peft's wrapper around it.
            index: number of the virtual stage.
            num_stages: virtual stages of the whole model.
            port: passes the hidden state to the model.
            tied: names in ``model`` of parameters that another stage also has.
            prefix: added before names in ``model`` to make names in the whole model.
            axes: this rank's groups inside of a layer.
            cuts: parts of divided parameters in ``model``, by names in the whole model.
        """
        super().__init__()
        self.axes = axes or AxisGroups()
        self.cuts: Mapping[str, Cut] = cuts or {}
        """This rank's parts of divided parameters, by names in the whole model."""
        self.index, self.num_stages = index, num_stages
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.model = model
        self.prefix = prefix
        shared = tied if num_stages > 1 else frozenset[str]()
        self.tied = frozenset(prefix + name for name, _ in global_names(model) if name in shared)
        self.objective: Minimised | None = None
        """Objective of the last stage. None uses the model's own loss."""
        self._lazy_head: LazyHead | None = None
        self.router = RouterLoss(self.hf_model) if wants_router_loss(self.hf_model.config) else None
        if self.router is not None:
            self.router.shared_by = self.axes.tensor
        attend_over(self.axes, self.hf_model)
        if port.tracer is not None and self.axes.tensor.size > 1:
            raise UnshareableError(
                f"parallel.tensor={self.axes.tensor.size}: layers of {type(self.hf_model).__name__} hand each other "
                "more than the hidden state, which slices of the sequence do not cover; set pipeline.stages=1"
            )
        self._port = port
        self._arguments = accepted_arguments(self.hf_model)
        self._inputs = {*inspect.signature(self.hf_model.forward).parameters, *INPUTS} - {"labels"}
        self._weights_dtype: torch.dtype | None = None
        self._known_parts: dict[tuple[torch.Size, bool], list[tuple[torch.Size, torch.dtype]]] = {}
        """Results of `_parts`, by the shape of token ids and whether they leave."""

    @cached_property  # every forward needs it, and a search in modules costs host time
    def hf_model(self) -> PreTrainedModel:
        """The Hugging Face model, with peft's layers but without peft's wrapper."""
        return hf_model(self.model)

    def forward(
        self, hidden: Tensor | None, batch: Batch, num_items: Tensor | None = None, *, counts: bool = True
    ) -> Tensor:
        """Run the stage's layers.

        Args:
            hidden: tensor from the previous stage, as `hidden_spec` describes it. None on the first stage.
            batch: the micro-batch, the same on every stage.
            num_items: number of labels over which the loss is averaged. None averages over this micro-batch.
            counts: whether the micro-batch has items. Without items an objective's loss is 0.

        Returns:
            The next stage's input. The last stage returns the sum of the tokens' losses divided by ``num_items``.
        """
        if not self.is_last:
            return self._hidden(hidden, batch)
        if self.objective is None:
            with self._chunked_loss(batch):
                return self.output(hidden, batch, num_items).loss
        if not counts:
            return 0.0 * self.logits(hidden, batch).sum()
        assert num_items is not None
        whole = whole_batch(batch)
        loss = self.objective(lambda **more: self._whole_output(hidden, batch, **more), whole, num_items)
        return loss / self.axes.context.size  # members compute the same, and losses are summed

    def compute_loss_in_chunks(self, chunk_bytes: float) -> None:
        """Compute the model's own loss in chunks of so many bytes of logits, if the model allows it. 0: whole."""
        reason = whole_logits_reason(self.hf_model) if chunk_bytes else ""
        if reason:
            _log.info("%s: logits are computed whole, because %s", type(self.hf_model).__name__, reason)
        chunks = chunk_bytes and not reason
        self._lazy_head = LazyHead(self.hf_model, self.axes.tensor, chunk_bytes) if chunks else None

    def _chunked_loss(self, batch: Batch) -> AbstractContextManager[None]:
        """Return the context in which logits are computed together with the loss, if there are many."""
        head = self._lazy_head
        return head.deferred() if head is not None and head.wants(batch["input_ids"].numel()) else nullcontext()

    def output(self, hidden: Tensor | None, batch: Batch, num_items: Tensor | None = None) -> Any:
        """Return the output of the model's own forward on the last stage, with the loss."""
        assert self.is_last
        labels = {"labels": batch["labels"]} | labels_to_predict(batch)
        return self._output(hidden, batch, **labels, num_items_in_batch=num_items)

    def logits(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Return the last stage's logits [B, S, V] for evaluation, for whole sequences on each context member."""
        assert self.is_last
        return self.whole_logits(self._output(hidden, batch).logits)

    def logits_in_chunks(self, hidden: Tensor | None, batch: Batch) -> Iterator[Tensor]:
        """Yield logits [tokens, V] of all tokens, in order, each freed before the next. No ranks share the layers.

        They are chunks if `compute_loss_in_chunks` has set them.
        """
        with self._chunked_loss(batch):
            logits = self._output(hidden, batch).logits.flatten(0, -2)
            yield from logits.chunks() if isinstance(logits, LazyLogits) else (logits,)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Gather the logits of whole sequences over the whole vocabulary from all members' parts."""
        return whole_sequence(self.axes.context, collect(self.axes.tensor, logits, logits.dim() - 1))

    def hidden_spec(self, batch: Batch, *, leaving: bool = False) -> tuple[torch.Size, torch.dtype]:
        """Return shape and dtype of the tensor that this stage receives for a micro-batch.

        In most models this is the hidden state, [B, S, H]. If other tensors cross the cut as well, it is one tensor
        [elements] in which all are packed.

        Args:
            leaving: describe the stage's output instead, whose gradient has the same shape and dtype.
        """
        parts = self._parts(batch, leaving)
        dtype = parts[0][1]
        return (parts[0][0] if len(parts) == 1 else torch.Size([packed_size(parts, dtype)])), dtype

    def _parts(self, batch: Batch, leaving: bool) -> list[tuple[torch.Size, torch.dtype]]:
        """Return shapes and types of the tensors that cross the cut before the stage.

        ``leaving`` selects the one after it.
        """
        key = batch["input_ids"].shape, leaving
        if key not in self._known_parts:  # every slot needs them, and to read a config costs host time
            self._known_parts[key] = self._new_parts(batch, leaving)
        return self._known_parts[key]

    def _new_parts(self, batch: Batch, leaving: bool) -> list[tuple[torch.Size, torch.dtype]]:
        boundary = self._crossing(batch, leaving)
        if boundary is None:
            width = self.hf_model.config.get_text_config().hidden_size
            rows, length = batch["input_ids"].shape
            parts = [(torch.Size((rows, length // self.axes.tensor.size, width)), self._dtype())]
        else:
            parts = [(torch.Size(part.shape), part.dtype) for part in boundary]
        if self.router is not None:
            parts.append((torch.Size([self.router.num_sums]), torch.float32))
        return parts

    def _crossing(self, batch: Batch, leaving: bool) -> Boundary | None:
        cut = self._port.window.stop if leaving else self._port.window.start
        return self._port.crossing(cut, batch["input_ids"].shape, self._dtype())

    def _dtype(self) -> torch.dtype:
        """Return the smallest type of the weights, in which the model computes, because some weights stay in fp32."""
        if self._weights_dtype is None:  # every slot needs it, and a walk through all modules is slow
            kinds = {parameter.dtype for parameter in self.hf_model.parameters() if parameter.is_floating_point()}
            self._weights_dtype = min(kinds, key=lambda dtype: dtype.itemsize)
        return self._weights_dtype

    def _apply(self, *args: Any, **named: Any) -> Stage:
        self._weights_dtype = None  # this may convert the weights
        self._known_parts = {}
        return super()._apply(*args, **named)

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter once, with its name in the whole model."""
        for name, parameter in global_names(self.model):
            yield self.prefix + name, parameter

    def blocks(self) -> list[nn.Module]:
        """Return the stage's decoder layers and its head, if they have parameters, in order.

        Only their own forwards use their weights.
        """
        layers = self.hf_model.get_submodule(decoder_layers(self.hf_model))
        assert isinstance(layers, nn.ModuleList)
        head = self.hf_model.get_output_embeddings() if self.is_last else None
        return [block for block in (*layers, head) if block is not None and any(True for _ in block.parameters())]

    def _hidden(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        tensors, sums = self._received(hidden, batch)
        if self.router is None:
            left = self._left(tensors, batch)
        else:
            with self.router.listening():
                left = self._left(tensors, batch, output_router_logits=False)
        boundary = self._crossing(batch, leaving=True)
        if boundary is not None:
            require_as_predicted(left, boundary, type(self.hf_model).__name__)
        if self.router is not None:
            left.append(self._router_sums(sums, batch, left[0]))
        return left[0] if len(left) == 1 else pack(left, left[0].dtype)

    def _received(self, hidden: Tensor | None, batch: Batch) -> tuple[list[Tensor], Tensor | None]:
        """Unpack the tensors from the previous stage, and that stage's sums over routers, if the model has a router
        loss.
        """
        assert (hidden is None) == self.is_first
        if hidden is None:
            return [], None
        parts = self._parts(batch, leaving=False)
        tensors = [hidden] if len(parts) == 1 else list(unpack(hidden, parts))
        return tensors, None if self.router is None else tensors.pop()

    def _left(self, tensors: list[Tensor], batch: Batch, **more: Any) -> list[Tensor]:
        try:
            self._run(tensors, batch, **more)
        except StageEnded as end:
            return end.tensors
        raise AssertionError("the forward ran past the stage's last layer")

    def accepted(self, batch: Batch, **more: Any) -> dict[str, Any]:
        """Return the arguments for the model's own forward: the micro-batch's tensors without labels, and ``more``.

        They include further tensors that the forward names, such as ``token_type_ids``. Arguments that it does not
        accept are left out.
        """
        inputs = {name: value for name, value in batch.items() if name in self._inputs}
        if "position_ids" in batch:
            more = more | wanted_arguments(self.hf_model.config, batch["position_ids"])
        return {
            name: value for name, value in (inputs | more).items() if self._arguments is None or name in self._arguments
        }

    def _output(self, hidden: Tensor | None, batch: Batch, **more: Any) -> Any:
        """Return the last stage's outputs. Their loss includes the router's loss."""
        tensors, sums = self._received(hidden, batch)
        if self.router is None:
            return self._run(tensors, batch, **more)
        with self.router.listening():
            output = self._run(tensors, batch, **more, output_router_logits=False)
        totals = all_sum(self.axes.context, self._router_sums(sums, batch, output.logits))
        output.aux_loss = self.router.loss(totals)
        if output.loss is not None:
            output.loss = output.loss + self.router.weighted(output.aux_loss, batch, more.get("num_items_in_batch"))
        return output

    def _whole_output(self, hidden: Tensor | None, batch: Batch, **more: Any) -> Any:
        """Return the outputs for whole sequences, on every member of a context or tensor group.

        If an objective requests the model's own loss by ``labels``, that loss is computed from whole logits as well. So
        members exchange the same tensors for any objective, as plans of strand pairs require.
        """
        if self.axes.context.size == 1 and self.axes.tensor.size == 1:
            return self._output(hidden, batch, **more)
        labels, count = more.pop("labels", None), more.get("num_items_in_batch")
        output = self._output(hidden, batch, **more)
        output.logits = self.whole_logits(output.logits)
        if labels is not None:
            model, logits = self.hf_model, output.logits
            loss_of = ForCausalLMLoss if self.axes.tensor.size > 1 else model.loss_function
            output.loss = loss_of(logits, labels, vocab_size=logits.shape[-1], num_items_in_batch=count)
            if self.router is not None:
                output.loss = output.loss + self.router.weighted(output.aux_loss, whole_batch(batch), count)
        return output

    def _router_sums(self, before: Tensor | None, batch: Batch, like: Tensor) -> Tensor:
        assert self.router is not None
        return self.router.sums(before, own_positions(self.axes.context, batch.get("attention_mask")), like)

    def _run(self, tensors: list[Tensor], batch: Batch, **more: Any) -> Any:
        self._port.open(tensors, batch["input_ids"].shape, self._dtype())
        try:
            return self.hf_model(**self.accepted(batch, **more), use_cache=False)
        finally:
            self._port.close()


def global_names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter once, by its name in the whole model. A tied parameter has the name of its source.

    torch would choose the first name, which depends on the stage's other modules.
    """
    sources = tuple(set(hf_model(model).all_tied_weights_keys.values()))
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter not in names or name.endswith(sources):
            names[parameter] = name
    for parameter, name in names.items():
        yield name, parameter


def accepted_arguments(model: PreTrainedModel) -> frozenset[str] | None:
    """Return names of the arguments that the model's forward accepts, or None if it accepts any."""
    parameters = inspect.signature(model.forward).parameters.values()
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters) else frozenset(p.name for p in parameters)
