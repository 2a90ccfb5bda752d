"""Floating-point operations and bytes of each layer, traced in the model's own forward on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.pytorch_utils import Conv1D

from weft.conf.schema import LoraConfig, ModelConfig
from weft.engine.models import batch as packed
from weft.engine.models.elementwise import ResultRecorder, outside_tensors
from weft.engine.models.lazy_logits import whole_logits_reason
from weft.engine.models.live_bytes import LiveBytes
from weft.engine.models.recomputation import attention_modules
from weft.engine.models.sizes import divided_parameters, meta_model, part_size
from weft.engine.models.skeleton import decoder_layers, hf_model, set_dtype
from weft.engine.parallel.experts import expert_modules
from weft.pipeline.workload import LayerWork, ModelWork, loss_work, received_work, temporary_gradients

assert packed  # transformers cannot detect packed rows on the meta device
_TRACED = "weft_traced"


def trace_model(
    given: PreTrainedConfig | nn.Module,
    sequence_length: int,
    *,
    name: str = "",
    dtype: torch.dtype = torch.bfloat16,
    lora: LoraConfig | None = None,
) -> ModelWork:
    """Count weights, operations and bytes of every layer without allocating weights.

    The model's own forward runs on the meta device. Torch's `FlopCounterMode` counts products, except those of experts,
    which it does not support; they are counted here. Autograd's hooks count saved activations. Attention is assumed to
    store no scores (as flash attention). Experts are assumed to compute only the tokens that are sent to them.

    Args:
        given: config of a model that will be made, or a model, which may have peft's wrapper.
        sequence_length: tokens of the one sequence that is traced.
        lora: adapters of a model that will be made.

    Raises:
        ValueError: the model cannot be built, or its forward does not run without data.
    """
    try:
        return _trace(given, sequence_length, name, dtype, lora, repeat=True)
    except ValueError:  # layers with further inputs from each other cannot represent others
        return _trace(given, sequence_length, name, dtype, lora, repeat=False)


def _trace(
    given: PreTrainedConfig | nn.Module,
    sequence_length: int,
    name: str,
    dtype: torch.dtype,
    lora: LoraConfig | None,
    *,
    repeat: bool,
) -> ModelWork:
    """Trace every layer. ``repeat`` traces one layer of each kind instead, and repeats its counts."""
    model = hf_model(meta_model(given, lora))
    cls = type(model)
    tracer = _Tracer()
    with tracer.as_attention():
        model.config._attn_implementation = _TRACED if cls._supports_attention_backend else "eager"
        model.gradient_checkpointing_disable()
        set_dtype(model, dtype)
        if cls._can_set_experts_implementation():
            model.set_experts_implementation("grouped_mm")
        path = decoder_layers(model)
        layers = model.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        kinds = layers_alike(model, layers) if repeat else list(range(len(layers)))
        tracer.watch(model, list(layers), kinds)
        try:
            tracer.run(model, sequence_length)
        except Exception as error:  # any: it is Hugging Face's or the model's own code
            raise ValueError(
                f"model: the forward of {cls.__name__} does not run without data ({type(error).__name__}: "
                f"{' '.join(str(error).split())}), so its costs are not known; measure them with `weft profile`"
            ) from error
    for number, first in enumerate(kinds):
        tracer.parts[number + 1] = tracer.parts[first + 1]
    return _work(model, path, tracer, name or model.config.model_type, sequence_length, dtype)


@dataclass
class _Part:
    """Operations and bytes of one part of the model."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    activation_bytes: float = 0.0
    deferred_bytes: float = 0.0
    widest_bytes: float = 0.0
    attention_bytes: float = 0.0
    attention_matmul_flops: float = 0.0
    attended_bytes: float = 0.0
    routed_bytes: float = 0.0
    forward_bytes: float = 0.0
    results_bytes: float = 0.0
    moved_bytes: float = 0.0


class _Attention(torch.autograd.Function):
    """Attention without values, which saves the tensors of flash attention: queries, keys, values, output and sums."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, keep: Callable[..., None]) -> Tensor:
        batch, heads, tokens, _ = query.shape
        out = query.new_empty(batch, tokens, heads, value.shape[-1])
        sums = query.new_empty(batch, heads, tokens, dtype=torch.float32)
        keep(out, sums)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # traced forwards have no backward
        raise NotImplementedError


class _Grouped(torch.autograd.Function):
    """Product of rows [T, K], each with one expert's weights of [E, K, N], without values.

    torch's own grouped product supports only bf16.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, keep: Callable[..., None]) -> Tensor:
        ctx.save_for_backward(rows, weights)
        out = rows.new_empty(rows.shape[0], weights.shape[-1])
        keep(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # traced forwards have no backward
        raise NotImplementedError


class _Tracer:
    """Counts of each part: the modules before the layers at index 0, then each layer, then the modules after the
    layers.
    """

    def __init__(self) -> None:
        self.parts: list[_Part] = [_Part()]
        self._known: dict[int, Any] = {}  # weights and saved tensors, kept alive so that no address is reused
        self._deferred: dict[int, Any] = {}  # inputs of products
        self._head: nn.Module | None = None
        self._grouped_flops = 0.0
        self._forms: dict[int, Any] = {}  # outputs of the first layer of each kind
        self._flops = FlopCounterMode(display=False)
        self._live = LiveBytes()
        self._recorder = ResultRecorder()
        self.shared_bytes = 0.0
        self.received_bytes = 0.0
        """Bytes of hidden states that a layer gets and does not save."""
        self._hidden: Any = None

    def watch(self, model: PreTrainedModel, layers: list[nn.Module], kinds: list[int]) -> None:
        """Hook the model to assign counts to parts. Skip layers whose kind an earlier layer represents."""
        self._head = model.get_output_embeddings()  # `loss_work` has the gradient of logits
        storages = (weight.untyped_storage() for weight in model.parameters())
        self._known = {storage._cdata: storage for storage in storages}
        self._live.alive.update(self._known)
        for number, layer in enumerate(layers):
            first = kinds[number]
            layer.register_forward_pre_hook(partial(self._enter_layer, number + 1, first == number), with_kwargs=True)
            if first == number:
                layer.register_forward_hook(lambda _, __, out, number=number: self._forms.update({number: out}))
                layer.forward = partial(self._recorded, layer, layer.forward)
            else:
                layer.forward = partial(self._passed_on, first)
        layers[-1].register_forward_hook(lambda *_: self._enter(len(layers) + 1))
        for layer in layers:
            for module in attention_modules(layer):
                module.register_forward_pre_hook(self._enter_attention, with_kwargs=True)
                module.register_forward_hook(self._leave_attention)
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D):
                module.register_forward_hook(self._note_width)
                if module.weight.requires_grad:
                    module.register_forward_hook(self._defer)
        for part in model.modules():
            if isinstance(part, PreTrainedModel):  # some examine the ids for padding
                part.warn_if_padding_and_no_attention_mask = lambda *_: None

    def run(self, model: PreTrainedModel, tokens: int) -> None:
        ids = torch.ones(1, tokens, dtype=torch.long, device="meta")
        saved = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        grouped = patch.object(torch.nn.functional, "grouped_mm", self._multiply)
        with self._live, self._flops, saved, grouped:
            model(input_ids=ids, use_cache=False)
        self._enter(len(self.parts) - 1)

    def _recorded(self, layer: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a layer's forward, and count what recomputation of its element-wise operations keeps and moves."""
        self._recorder = ResultRecorder(outside_tensors(layer, args, kwargs))
        with self._recorder:
            output = forward(*args, **kwargs)
        part = self.parts[-1]
        part.results_bytes, part.moved_bytes = float(self._recorder.kept_bytes), self._recorder.moved_bytes
        self._recorder = ResultRecorder()
        return output

    def _passed_on(self, kind: int, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        form = self._forms[kind]
        return hidden_states if isinstance(form, Tensor) else (hidden_states, *form[1:])

    @contextmanager
    def as_attention(self) -> Iterator[None]:
        """Context in which the attention implementation `_TRACED` reports to this tracer."""
        AttentionInterface.register(_TRACED, self._attend)
        AttentionMaskInterface.register(_TRACED, lambda *_, **__: None)
        try:
            yield
        finally:
            AttentionInterface._global_mapping.pop(_TRACED, None)
            AttentionMaskInterface._global_mapping.pop(_TRACED, None)

    def _enter(self, number: int) -> None:
        counted = sum(part.matmul_flops for part in self.parts[:-1])
        self.parts[-1].matmul_flops = float(self._flops.get_total_flops()) + self._grouped_flops - counted
        self.parts[-1].forward_bytes = float(self._live.peak - self._live.now)
        self._live.peak = self._live.now
        if isinstance(self._hidden, Tensor) and self._hidden.untyped_storage()._cdata not in self._known:
            self.received_bytes = max(self.received_bytes, float(self._hidden.nbytes))
        self._hidden = None
        self.parts += [_Part() for _ in range(len(self.parts), number + 1)]

    def _enter_layer(
        self, number: int, is_traced: bool, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._enter(number)
        hidden = args[0] if args else kwargs.get("hidden_states")
        self._hidden = hidden if is_traced else None
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor is not hidden:
                storage = tensor.untyped_storage()
                self.shared_bytes += 0 if storage._cdata in self._known else storage.nbytes()
                self._known[storage._cdata] = storage

    def _enter_attention(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._save(tensor)  # as checkpointing does; mostly the module itself would
        part = self.parts[-1]
        part.attention_bytes -= part.activation_bytes
        part.attention_matmul_flops -= float(self._flops.get_total_flops())

    def _leave_attention(self, *_: Any) -> None:
        part = self.parts[-1]
        part.attention_bytes += part.activation_bytes
        part.attention_matmul_flops += float(self._flops.get_total_flops())

    def _defer(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Count the input and the output gradient of a product, which wait for its weight gradient."""
        storage, part = args[0].untyped_storage(), self.parts[-1]
        if storage._cdata not in self._deferred:
            self._deferred[storage._cdata] = storage
            part.deferred_bytes += storage.nbytes()
        part.deferred_bytes += 0 if module is self._head else output.nbytes

    def _note_width(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if module is not self._head:
            self.parts[-1].widest_bytes = max(self.parts[-1].widest_bytes, float(output.nbytes))

    def _save(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage
            self.parts[-1].activation_bytes += storage.nbytes()
        return tensor

    def _multiply(self, rows: Tensor, weights: Tensor, **_: Any) -> Tensor:
        self._grouped_flops += 2 * rows.shape[0] * rows.shape[1] * weights.shape[-1]
        self.parts[-1].routed_bytes = self.parts[-1].routed_bytes or float(rows.nbytes)  # its first product's input
        return _Grouped.apply(rows, weights, self._recorder.keep)

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *_: Any, **options: Any
    ) -> tuple[Tensor, None]:
        batch, heads, tokens, width = query.shape
        seen = min(options.get("sliding_window") or tokens, tokens)
        pairs = tokens * seen - seen * (seen - 1) / 2 if getattr(module, "is_causal", True) else tokens * tokens
        part = self.parts[-1]
        part.attention_flops += 2 * batch * heads * pairs * (width + value.shape[-1])
        part.attended_bytes = float(key.nbytes + value.nbytes)
        return _Attention.apply(query, key, value, self._recorder.keep), None


def layers_alike(model: PreTrainedModel, layers: nn.ModuleList) -> list[int]:
    """Return for each layer the index of the first layer of the same kind.

    Layers of a kind have the same class, shapes, trained weights and attention type. They also agree on whether any
    weight before them is trained, because otherwise their backward needs no input gradient.
    """
    types = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    firsts: dict[Any, int] = {}
    found, reached = [], any(weight.requires_grad for weight in model.get_input_embeddings().parameters())
    for number, (layer, kind) in enumerate(zip(layers, types, strict=True)):
        weights = [(tuple(weight.shape), weight.requires_grad) for weight in layer.parameters()]
        found.append(firsts.setdefault((type(layer), kind, reached, *weights), number))
        reached = reached or any(trained for _, trained in weights)
    return found


def _work(model: PreTrainedModel, path: str, tracer: _Tracer, name: str, tokens: int, dtype: torch.dtype) -> ModelWork:
    """Combine the counts with the numbers of weights of each part."""
    layers = model.get_submodule(path)
    head = model.get_output_embeddings()
    tied = bool(head is not None and model.all_tied_weights_keys)
    head_weights = 0 if head is None else sum(weight.numel() for weight in head.parameters())
    text = model.config.get_text_config()
    before, *inner, after = tracer.parts
    ends = {id(weight) for at, weight in model.named_parameters() if not at.startswith(f"{path}.")}
    of_head = set() if head is None else {id(weight) for weight in head.parameters()}
    whole = _whole_factors(model, path)
    message_bytes = float(tokens * text.hidden_size * dtype.itemsize)
    return ModelWork(
        name=name,
        sequence_length=tokens,
        before=replace(
            _layer_work(before, model, ends if tied else ends - of_head, whole), shared_bytes=tracer.shared_bytes
        ),
        layers=tuple(
            _layer_work(part, model, {id(weight) for weight in layer.parameters()}, whole, layer, message_bytes)
            for part, layer in zip(inner, layers, strict=True)
        ),
        after=_layer_work(after, model, of_head, whole)
        + loss_work(
            float(tokens * text.vocab_size),
            text.hidden_size,
            trained=head is not None and any(weight.requires_grad for weight in head.parameters()),
        ),
        tied_parameters=head_weights if tied else 0,
        message_bytes=message_bytes,
        attended_bytes=max((part.attended_bytes for part in inner), default=0.0),
        received=received_work(tracer.received_bytes, tracer.shared_bytes),
        heads=gcd(*(int(getattr(text, name, 0) or 0) for name in ("num_attention_heads", "num_key_value_heads"))),
        experts=gcd(*(int(getattr(module, "num_experts", 0)) for _, module in expert_modules(model))),
        loss_chunk_bytes=0.0 if whole_logits_reason(model) else ModelConfig.loss_chunk_mb * 1e6,
    )


def _whole_factors(model: PreTrainedModel, path: str) -> set[int]:
    """Return the ``id`` of each adapter's factor that every rank of a tensor group holds whole."""
    factors = {at: id(weight) for at, weight in model.named_parameters() if weight.requires_grad and ".lora_" in at}
    try:
        cuts = divided_parameters(model, path, tensor=2) if factors else {}
    except ValueError:  # no group can share the model
        return set()
    return {weight for at, weight in factors.items() if at not in cuts}


def _layer_work(
    part: _Part,
    model: PreTrainedModel,
    wanted: set[int],
    whole: set[int],
    layer: nn.Module | None = None,
    message_bytes: float = 0.0,
) -> LayerWork:
    """Return the work of the parameters whose ``id`` is in ``wanted``, of a decoder layer or of modules around them."""
    size = part_size(model, {}, wanted)
    experts, trained_experts = (0, 0) if layer is None else (expert_parameters(layer), expert_parameters(layer, True))
    return LayerWork(
        parameters=size.parameters,
        expert_parameters=experts,
        trained_parameters=size.trained,
        trained_expert_parameters=trained_experts,
        whole_parameters=part_size(model, {}, wanted & whole).parameters,
        matmul_flops=part.matmul_flops,
        trained_flops=part.matmul_flops * (size.active_trained / size.active if size.active else 1.0),
        attention_flops=part.attention_flops,
        activation_bytes=part.activation_bytes,
        unrecomputed_bytes=0.0 if layer is not None else part.activation_bytes,
        deferred_bytes=part.activation_bytes if experts else part.deferred_bytes,
        attention_bytes=part.attention_bytes,
        gradient_bytes=0.0 if layer is None else temporary_gradients(part.widest_bytes, message_bytes),
        forward_bytes=0.0 if layer is None else part.forward_bytes,
        attention_matmul_flops=part.attention_matmul_flops,
        results_bytes=part.results_bytes,
        moved_bytes=part.moved_bytes,
        routed_bytes=part.routed_bytes,
        routed_layers=float(experts > 0),
    )


def expert_parameters(layer: nn.Module, trained: bool = False) -> int:
    """Return the number of weights of a layer's routed experts, or of the trained ones among them."""
    experts = [weight for name, weight in layer.named_parameters() if ".experts." in f".{name}"]
    return sum(weight.numel() for weight in experts if weight.requires_grad or not trained)
