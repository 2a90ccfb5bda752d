"""Seconds and bytes of pipeline ranks, written anew from the documented model of plans.

Shared with the planner: the workload of layers, the hardware table, shapes as values. Shared core: `zero_memory`,
`stepping_bytes` and `RankMemory`.
"""

from dataclasses import replace
from math import ceil

from weft.conf.schema import OptimizerConfig, Precision, ZeroConfig
from weft.pipeline.memory import RankMemory, TrainedWeights, stepping_bytes, zero_memory
from weft.pipeline.workload import LayerWork

START_S = 2e-5
"""Seconds per member to start a collective between hosts."""


def share_of_links(site, gpus):
    """Bytes per second of a GPU among so many neighbours, and seconds per member to start."""
    if gpus <= site.gpus_per_host:
        return site.gpu.scale_up_bytes_per_s, site.gpu.scale_up_latency_s
    return site.network_bps / 8 / site.gpus_per_host, START_S


def hierarchical_s(num_bytes, members, apart, site):
    """A reduction or gathering inside hosts, then between them; each ``apart``-th GPU takes part."""
    if members == 1:
        return 0.0
    inside = min(members, max(1, site.gpus_per_host // apart))
    hosts = ceil(members / inside)
    starts_s = 2 * site.gpu.scale_up_latency_s * (inside - 1) + 2 * START_S * (hosts - 1)
    inside_s = num_bytes * (1 - 1 / inside) / site.gpu.scale_up_bytes_per_s
    return starts_s + inside_s + num_bytes / inside * (1 - 1 / hosts) * 8 * site.gpus_per_host / site.network_bps


def weights_of(part, shape):
    """Weights on each GPU of a rank: those that tensor parallelism cuts, and whole experts that are shared out."""
    experts = part.expert_parameters if shape.expert > 1 else 0
    return (part.parameters - experts) / shape.tensor, experts / shape.expert


def over_replicas_s(bytes_of_weight, part, shape, site):
    """A collective of all weights over the replicas of one route."""
    dense, experts = weights_of(part, shape)
    gpus = shape.replicas // shape.routes * shape.tensor * shape.context
    seconds = hierarchical_s(bytes_of_weight * dense, gpus // shape.tensor, shape.tensor, site)
    if shape.expert > 1:
        seconds += hierarchical_s(bytes_of_weight * experts, gpus // shape.expert, shape.expert, site)
    return seconds


def step_bytes(shape):
    """Return the bytes sent of a weight in a step: fp32 gradients both ways without ZeRO, else one way, and weights."""
    return {0: 8, 1: 6, 2: 6, 3: 4}[shape.zero_stage]


def stage_seconds(part, layers, shape, site, cluster, work):
    """Forward, input gradients and weight gradients of one micro-batch of a virtual stage."""
    tensor, context, expert, size = shape.tensor, shape.context, shape.expert, shape.microbatch_size
    gpus = tensor * context
    rate = site.gpu.flops_per_s * cluster.efficiency * gpus
    products_s, attention_s = size * part.matmul_flops / rate, size * part.attention_flops / rate
    exchange_s = 0.0
    if tensor > 1:  # two all-gathers and two reduce-scatters a layer
        bytes_per_s, start_s = share_of_links(site, tensor)
        sent = work.message_bytes * size / context * (1 - 1 / tensor)
        exchange_s += 4 * layers * (start_s * (tensor - 1) + sent / bytes_per_s)
    if context > 1:  # one all-gather of keys and values a layer
        bytes_per_s, start_s = share_of_links(site, gpus)
        sent = work.attended_bytes * size / tensor * (1 - 1 / context)
        exchange_s += layers * (start_s * (context - 1) + sent / bytes_per_s)
    if expert > 1:  # tokens there and back
        bytes_per_s, start_s = share_of_links(site, expert)
        sent = part.routed_bytes * size / gpus * (1 - 1 / expert)
        exchange_s += 2 * (part.routed_layers * start_s * (expert - 1) + sent / bytes_per_s)
    forward_s = products_s + attention_s + exchange_s
    input_s = products_s + 2 * attention_s + exchange_s + (forward_s if shape.checkpointing else 0.0)
    gathered_s = over_replicas_s(2, part, shape, site) if shape.zero_stage == 3 else 0.0
    return max(forward_s, gathered_s), max(input_s, gathered_s), products_s


def ends(work, *, first, last):
    """Return what a virtual stage has besides layers. An output or its gradient stays until the backward."""
    hidden = work.message_bytes
    output = LayerWork(parameters=0, activation_bytes=hidden, unrecomputed_bytes=hidden, deferred_bytes=0)
    before, after = work.before.parameters, work.after.parameters
    whole = {"outside_parameters": after} if work.tied_parameters else {"head_parameters": after}
    return [
        replace(work.before, outside_parameters=before) if first else work.received,
        replace(work.after, **whole) if last else output,
    ]


def gathered_bytes(shape, work):
    """Return the bytes of a sequence that a layer keeps because GPUs share it.

    Hidden states, keys and values of others, and with context parallelism the output before it is put together.
    """
    states = 2 * (shape.tensor - 1) + (shape.context > 1)
    return states * work.message_bytes + (shape.context - 1) * work.attended_bytes


def saved_bytes(part, layers, shape, work):
    """Return the bytes that one micro-batch of a virtual stage saves on each GPU. Each has all positions."""
    kept = part.activation_bytes + layers * gathered_bytes(shape, work)
    if shape.checkpointing:
        kept = work.message_bytes * layers + part.unrecomputed_bytes
    kept += shape.tensor * part.shared_bytes + (shape.tensor - 1) * work.message_bytes * (part.logits > 0)
    return kept * shape.microbatch_size / (shape.tensor * shape.context)


def deferred_bytes(part, layers, shape, work):
    """Return the bytes that wait for weight gradients: as without recomputation, without what products do not need."""
    idle = (part.activation_bytes - part.deferred_bytes) * shape.microbatch_size / (shape.tensor * shape.context)
    return saved_bytes(part, layers, replace(shape, checkpointing=False), work) - idle


def rank_memory(part, layers, shape, work):
    """A rank's GPU without saved activations."""
    lines, held = shape.replicas * shape.tensor * shape.context, sum(weights_of(part, shape))
    largest = max(layer.parameters for layer in work.layers) // shape.tensor
    stepped = part.parameters / lines if shape.zero_stage else held
    largest_gradient = max(sum(weights_of(layer, shape)) for layer in work.layers)
    blocks = sorted([part.head_parameters / shape.tensor] + [largest] * min(layers, 2))  # two are whole at ZeRO-3
    whole = part.outside_parameters / shape.tensor + sum(blocks[-2:])
    zero = zero_memory(
        round(held),
        ZeroConfig(stage=shape.zero_stage),
        Precision.bf16,
        shape.replicas * shape.context,
        largest_block=largest,
        whole=whole,
        microbatches=shape.microbatches,
        share=part.parameters / lines if shape.zero_stage else None,
        trained=TrainedWeights(held, stepped, largest_gradient),
    )
    loss = part.working_bytes * (1 if shape.tensor == 1 else 6 / 8)
    logits = 4 * part.logits + (shape.tensor - 1) * work.message_bytes * (part.logits > 0)
    again = part.gradient_bytes / layers
    if shape.checkpointing:
        again += (part.activation_bytes - part.unrecomputed_bytes) / layers + gathered_bytes(shape, work)
    layer = max(part.forward_bytes / layers, again) * shape.microbatch_size / (shape.tensor * shape.context)
    most = max(loss, logits) * shape.microbatch_size / (shape.tensor * shape.context)
    head = 2 * part.trained_head_flops / (2 * work.sequence_length) / shape.tensor
    buffers = (zero.buffers - zero.gathering * (held <= whole)) if shape.zero_stage == 3 else 0.0
    stepping = stepping_bytes(OptimizerConfig(), stepped, largest, together=True)
    return RankMemory(zero, 0.0, max(most, layer + buffers, head, zero.gathering), messages(shape, work), stepping)


def messages(shape, work):
    """Return the bytes of what a rank gets: an activation, and its gradient until that is sent."""
    each = work.message_bytes * shape.microbatch_size / shape.tensor / shape.context
    return 2 * (shape.num_stages > 1) * len(shape.legs) * each
