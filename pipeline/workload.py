"""The workload: weights, operations and bytes of each layer of a model for one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

from weft.conf.schema import Recompute
from weft.pipeline.action import Op
from weft.pipeline.costs import StageCost

WORK_FORM = 14
"""The version of work that is stored in files; another number makes old entries unread."""
LOSS_BYTES = 4
"""Bytes per logit that the loss saves: the fp32 logarithms of probabilities."""
LOSS_WORKING_BYTES = 8
"""Additional bytes per logit of the loss's backward: fp32 gradients of these and of the logits."""
CUT_LOSS_WORKING_BYTES = {2: 6, 4: 4}
"""The same by bytes of an activation where members share the vocabulary: an fp32 gradient, and its copy in theirs."""
CHUNK_WORKING = {2: 1.5, 4: 1.0}
"""Bytes of a loss in chunks per byte of a chunk in fp32, by bytes of an activation, with its copy in their type."""
GATHERED_WIDTHS = 2
"""Gathered hidden states that members of a tensor group save per layer: the inputs of attention and of the
feed-forward part."""
GRADIENT_COPIES, GRADIENT_STATES = 3, 4
"""Temporary gradients in a layer's backward: as many copies of its widest product's output, where two branches of a
feed-forward part are multiplied, and as many hidden states."""

INPUT_STATES = 4
"""Temporary hidden states in the input gradient of a layer."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """The division of a micro-batch of sequences among the ranks that share layers."""

    microbatch_size: int
    """Sequences of a micro-batch."""
    tensor: int
    """Ranks that share a layer's weights."""
    context: int
    """Ranks that share a sequence."""
    recompute: Recompute = Recompute.none
    """The part of layers that the backward computes again, which is not auto."""
    gathers: bool = True
    """True if each rank gathers the keys and values of a whole sequence."""

    @property
    def without_recomputation(self) -> Division:
        """The same division without recomputation."""
        return replace(self, recompute=Recompute.none)

    @property
    def recomputes_layers(self) -> bool:
        """True if a layer keeps its input, and the backward computes its other saved tensors again, or most of them."""
        return self.recompute in (Recompute.elementwise, Recompute.layers)

    def of_rank(self, num_bytes: float) -> float:
        """Return a rank's part of a micro-batch, from the bytes of a sequence."""
        return num_bytes * self.microbatch_size / (self.tensor * self.context)


_TRAINED = {
    "trained_parameters": "parameters",
    "trained_expert_parameters": "expert_parameters",
    "trained_flops": "matmul_flops",
    "deferred_bytes": "activation_bytes",
}


def temporary_gradients(widest_bytes: float, hidden_bytes: float) -> float:
    """Return the bytes of a layer's temporary gradients, by its widest product's output and a hidden state."""
    return GRADIENT_COPIES * widest_bytes + GRADIENT_STATES * hidden_bytes


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The work of a layer for one sequence, or of the modules before or after all layers."""

    parameters: int
    """Weights."""
    expert_parameters: int = 0
    """Those of them that belong to routed experts, which expert parallelism shares out."""
    trained_parameters: Any = None
    """Trained ones among `parameters`. None: all."""
    trained_expert_parameters: Any = None
    """Trained ones among `expert_parameters`. None: all."""
    whole_parameters: int = 0
    """Trained weights that each rank of a tensor group holds whole: one factor of each adapter."""
    matmul_flops: float = 0.0
    """Operations of a forward's products with weights; of experts, those that tokens are sent to."""
    trained_flops: Any = None
    """Those of them with trained weights, which as many operations for weight gradients follow. None: all."""
    attention_flops: float = 0.0
    """Operations of a forward's products between tokens, over the pairs that the mask leaves: of causal
    attention half of what `FlopCounterMode` counts."""
    activation_bytes: float = 0.0
    """Bytes that autograd saves in a forward, without weights."""
    unrecomputed_bytes: float = 0.0
    """Those of them that gradient checkpointing saves, too: all that do not belong to a decoder layer."""
    attention_bytes: float = 0.0
    """Those of `activation_bytes` that a module of attention saves, without its inputs."""
    results_bytes: float = 0.0
    """Bytes that a layer keeps besides its input if element-wise operations are recomputed: results of all others."""
    moved_bytes: float = 0.0
    """Bytes that the element-wise operations of a layer's forward read and write."""
    deferred_bytes: Any = None
    """Bytes that wait for weight gradients: inputs and output gradients of products. None: `activation_bytes`."""
    attention_matmul_flops: float = 0.0
    """Those of `matmul_flops` that a module of attention has."""
    working_bytes: float = 0.0
    """Additional bytes of its backward, if large: those of the loss."""
    gradient_bytes: float = 0.0
    """Temporary gradients of a layer's backward: see `GRADIENT_COPIES`."""
    forward_bytes: float = 0.0
    """Temporary bytes of a layer's forward, besides those that autograd saves."""
    shared_bytes: float = 0.0
    """Bytes that all layers of a stage get besides hidden states, such as rotations of positions. Each rank of a tensor
    group has all of them."""
    outside_parameters: float = 0.0
    """Weights that ZeRO-3 keeps whole while layers run."""
    head_parameters: float = 0.0
    """Weights of a head of its own, which ZeRO-3 gathers after the last layer."""
    logits: float = 0.0
    """Logits whose loss can be computed in chunks; the bytes above are those of a loss from whole logits."""
    head_flops: float = 0.0
    """Operations of these logits. In chunks, the forward computes the input gradient, too."""
    trained_head_flops: float = 0.0
    """The same if the head is trained. In chunks, its weight gradient computes the logits again."""
    routed_bytes: float = 0.0
    """Hidden states that go to routed experts, once for each expert of a token."""
    routed_layers: float = 0.0
    """1 for a layer with routed experts."""

    def __post_init__(self) -> None:
        """Set defaults: all weights are trained."""
        for name, whole in _TRAINED.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self, whole))

    @property
    def forward_flops(self) -> float:
        """Operations of a forward; a backward takes twice as many."""
        return self.matmul_flops + self.attention_flops

    def seconds(
        self,
        flops_per_s: float,
        *,
        recompute: Recompute = Recompute.none,
        bytes_per_s: float = inf,
        exchanged_s: Any = 0.0,
        in_chunks: bool = False,
    ) -> tuple[Any, Any, Any]:
        """Return the seconds of the forward, of input gradients and of weight gradients.

        Fields may be arrays, for many parts at once.

        Args:
            recompute: the part of the forward that runs again before the backward.
            bytes_per_s: bytes of memory that are read and written in a second, for element-wise operations.
            exchanged_s: seconds of collectives inside of layers, in one direction.
            in_chunks: True if the loss is computed in chunks.
        """
        matmul_s, attention_s = self.matmul_flops / flops_per_s, self.attention_flops / flops_per_s
        forward_s = matmul_s + attention_s + exchanged_s
        input_s = matmul_s + 2 * attention_s + exchanged_s
        if recompute is Recompute.layers:
            input_s = input_s + forward_s
        elif recompute is Recompute.attention:
            input_s = input_s + self.attention_matmul_flops / flops_per_s + attention_s
        elif recompute is Recompute.elementwise:
            input_s = input_s + self.moved_bytes / bytes_per_s
        weight_s = self.trained_flops / flops_per_s
        if not in_chunks:
            return forward_s, input_s, weight_s
        head_s = self.head_flops / flops_per_s
        return forward_s + head_s, input_s - head_s, weight_s + self.trained_head_flops / flops_per_s

    def __add__(self, other: LayerWork) -> LayerWork:
        mine, others = vars(self), vars(other)
        return LayerWork(**{name: value + others[name] for name, value in mine.items()})


NOTHING = LayerWork(parameters=0)


def loss_work(logits: float, width: int, *, trained: bool) -> LayerWork:
    """Return the work of a loss over ``logits`` logits of hidden states of ``width`` elements.

    ``trained`` is whether the head is trained. Its own work is not included.
    """
    saved, flops = logits * LOSS_BYTES, 2.0 * logits * width
    return LayerWork(
        parameters=0,
        activation_bytes=saved,
        deferred_bytes=saved,
        unrecomputed_bytes=saved,
        working_bytes=logits * LOSS_WORKING_BYTES,
        logits=logits,
        head_flops=flops,
        trained_head_flops=flops if trained else 0.0,
    )


def received_work(hidden_bytes: float, shared_bytes: float = 0.0) -> LayerWork:
    """Return what a stage has instead of embeddings: a hidden state of ``hidden_bytes``, and what all layers get."""
    return LayerWork(parameters=0, activation_bytes=hidden_bytes, deferred_bytes=0.0, shared_bytes=shared_bytes)


class Working(NamedTuple):
    """Temporary bytes of actions, besides saved activations."""

    forward: float
    whole: float
    input: float
    """Also bytes that are kept for weight gradients, as far as they are more than the activations that they replace."""
    weight: float
    layer: float = 0.0
    """Those of a layer's actions, without the loss."""

    @property
    def most(self) -> float:
        """The bytes of any action, if what an input gradient keeps counts as saved: it needs no more besides."""
        return max(self.forward, self.whole, self.weight)

    def during(self, op: Op, buffers: float = 0.0) -> float:
        """Return the bytes of an action while weights are gathered to, or gradients reduced from, ``buffers`` bytes."""
        used = {Op.F: self.forward, Op.B: self.whole, Op.I: self.input, Op.W: self.weight}[op]
        return max(used, self.layer + buffers) if buffers else used


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """The work of a model for one sequence.

    Attributes:
        sequence_length: tokens of the sequence.
        before: work of embeddings.
        after: work of the final norm, the head and the loss.
        received: what a stage has instead of embeddings if another one is before it. Its activations are a hidden
            state, if layers do not save that, but a copy in fp32.
        tied_parameters: weights that embedding and head share; they are counted in both.
        message_bytes: bytes of the hidden states between layers.
        attended_bytes: bytes of one layer's keys and values, which context parallelism gathers.
        heads: numbers that tensor parallelism has to divide: heads of keys and values, and of queries; 0 if unknown.
        experts: experts of a layer, which expert parallelism has to divide; 0 if it is not supported.
        loss_chunk_bytes: bytes of a chunk of logits in fp32 if the loss of more logits is computed in chunks, or 0.
    """

    name: str
    sequence_length: int
    before: LayerWork
    layers: tuple[LayerWork, ...]
    after: LayerWork
    tied_parameters: int
    message_bytes: float
    attended_bytes: float
    heads: int = 0
    experts: int = 0
    loss_chunk_bytes: float = 0.0
    received: LayerWork = NOTHING

    @cached_property
    def whole(self) -> LayerWork:
        """The sum of all parts; tied weights count once."""
        parts = sum(self.layers, self.before) + self.after
        trained = min(self.tied_parameters, self.after.trained_parameters)
        return parts + LayerWork(parameters=-self.tied_parameters, trained_parameters=-trained)

    def stage_cost(
        self, part: LayerWork, num_layers: int, seconds: tuple[float, float, float], division: Division
    ) -> StageCost:
        """Return the cost of a micro-batch on a rank whose layers have the work ``part``.

        Args:
            seconds: of the forward, of input gradients and of weight gradients, see `LayerWork.seconds`.
        """
        forward_s, input_s, weight_s = seconds
        saved = self.saved_bytes(part, num_layers, division)
        return StageCost(
            forward_s=forward_s,
            input_s=input_s,
            weight_s=weight_s,
            activation_bytes=saved,
            weight_saved_bytes=self.saved_bytes(part, num_layers, division.without_recomputation)
            + division.of_rank(part.deferred_bytes - part.activation_bytes),
            output_bytes=division.of_rank(self.message_bytes),
        )

    def saved_bytes(self, part: LayerWork, num_layers: int, division: Division) -> float:
        """Return the bytes that a rank keeps of a micro-batch from the forward to the backward."""
        saved = division.tensor * part.shared_bytes
        if part.logits and self.loss_in_chunks(division):
            # Instead of logarithms: the gradient of the head's input, and the input itself if it is gathered.
            states = (2 * division.tensor - 1) * self.message_bytes
            saved += states + division.tensor * self.sequence_length * LOSS_BYTES - part.logits * LOSS_BYTES
        elif part.logits:
            saved += (division.tensor - 1) * self.message_bytes  # the head's input is gathered
        if division.recomputes_layers:
            kept = part.unrecomputed_bytes + self._kept(part, division)
            return division.of_rank(saved + num_layers * self.message_bytes + kept)
        saved -= part.attention_bytes if division.recompute is Recompute.attention else 0.0
        return division.of_rank(saved + part.activation_bytes + num_layers * self._gathered_bytes(division))

    def _kept(self, part: LayerWork, division: Division) -> float:
        """Return the bytes per sequence of results that a recomputation of layers uses again."""
        return part.results_bytes if division.recompute is Recompute.elementwise else 0.0

    def loss_in_chunks(self, division: Division) -> bool:
        """True if the loss of a micro-batch is computed in chunks, because its logits take more bytes than a chunk."""
        return 0 < self.loss_chunk_bytes < division.of_rank(self.after.logits * LOSS_BYTES)

    def working_bytes(self, part: LayerWork, num_layers: int, division: Division, weight_bytes: int) -> Working:
        """Return the temporary bytes of a rank's actions: those of the loss, or of a recomputed layer."""
        of_loss, chunk = part.working_bytes, 0.0
        head = part.trained_head_flops / (2 * self.sequence_length) / division.tensor * weight_bytes
        if division.tensor > 1:
            of_loss *= CUT_LOSS_WORKING_BYTES[weight_bytes] / LOSS_WORKING_BYTES
        if part.logits and self.loss_in_chunks(division):
            of_loss, chunk = 0.0, self.loss_chunk_bytes * CHUNK_WORKING[weight_bytes]
        of_head = chunk + head if head else 0.0
        again = 0.0
        if division.recomputes_layers:
            again = (part.activation_bytes - part.unrecomputed_bytes - self._kept(part, division)) / max(1, num_layers)
            again += self._gathered_bytes(division)
        elif division.recompute is Recompute.attention:
            again = part.attention_bytes / max(1, num_layers)
        gradients = part.gradient_bytes / max(1, num_layers)
        of_input = max(of_loss, self._input_bytes(part, num_layers, division) + again)
        again = again + gradients if division.recomputes_layers else max(again, gradients)
        whole = max(division.of_rank(max(of_loss, again)), of_head if chunk else 0.0)
        of_layer = part.forward_bytes / max(1, num_layers)
        # of the loss: logits in fp32, and in a tensor group the head's gathered input
        of_logits = part.logits * LOSS_BYTES + (division.tensor - 1) * self.message_bytes if part.logits else 0.0
        forward = max(chunk, division.of_rank(of_layer if chunk else max(of_layer, of_logits)))
        layer = division.of_rank(max(of_layer, again))
        return Working(forward, whole, division.of_rank(of_input), of_head, layer)

    def _input_bytes(self, part: LayerWork, num_layers: int, division: Division) -> float:
        """Return the bytes per sequence that an input gradient needs at most, besides saved activations.

        Layer by layer, what is kept for weight gradients replaces activations.
        """
        layers = max(1, num_layers)
        ends = self.after if part.logits else NOTHING
        kept = (part.deferred_bytes - ends.deferred_bytes) / layers + self._gathered_bytes(division)
        saved = self.saved_bytes(part, num_layers, division) / division.of_rank(layers)
        return kept + INPUT_STATES * self.message_bytes + (layers - 1) * max(0.0, kept - saved)

    def _gathered_bytes(self, division: Division) -> float:
        """Return the bytes per sequence that a layer keeps for its backward because ranks share it.

        These are gathered tensors, and attention's output before it is put together.
        """
        attended = (division.context - 1) * self.attended_bytes if division.gathers else 0.0
        parts = self.message_bytes if division.context > 1 else 0.0
        return GATHERED_WIDTHS * (division.tensor - 1) * self.message_bytes + attended + parts

    @property
    def parameters(self) -> int:
        """Weights of the model."""
        return self.whole.parameters

    @property
    def active_parameters(self) -> float:
        """Number of weights by which one token is multiplied; embeddings are looked up, and do not count."""
        return self.whole.matmul_flops / (2 * self.sequence_length)

    @property
    def flops_per_token(self) -> float:
        """Operations of training one token, without recomputation, as in the definition of MFU."""
        return 3 * self.whole.forward_flops / self.sequence_length

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that `from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelWork:
        """Return the work from the output of `to_dict`. Raise TypeError or KeyError if ``data`` has another form."""
        parts = {name: LayerWork(**data[name]) for name in ("before", "after", "received")}
        return cls(**{**data, **parts, "layers": tuple(LayerWork(**layer) for layer in data["layers"])})
