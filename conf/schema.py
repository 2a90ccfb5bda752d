"""The configuration schema: type, default and meaning of every field. Defaults are written only here.

The classes are not frozen because OmegaConf cannot compose frozen nodes; nothing mutates
them after `weft.conf.load` has converted them to objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from weft.conf.schedule_kinds import PlacementKind as PlacementKind
from weft.conf.schedule_kinds import ScheduleKind as ScheduleKind


class Precision(Enum):
    """Number format of weights and activations."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Attention(Enum):
    """Attention kernel, by Hugging Face's name."""

    eager = "eager"
    sdpa = "sdpa"
    flash_attention_2 = "flash_attention_2"


class SplitKind(Enum):
    """How layers are divided among virtual stages."""

    even = "even"
    cost = "cost"


class DataKind(Enum):
    """Kind of training data."""

    corpus = "corpus"
    text = "text"
    chat = "chat"


class Partition(Enum):
    """Dimensions along which collectives may be partitioned; each includes the previous ones (Centauri section 3.1)."""

    none = "none"
    primitive = "primitive"
    group = "group"
    workload = "workload"


class LrSchedule(Enum):
    """Learning-rate schedule after warm-up."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"


class KvConnector(Enum):
    """How prefill workers send KV caches to decode instances."""

    none = "none"
    nixl = "nixl"


class OptimizerKind(Enum):
    """Optimiser algorithm."""

    adamw = "adamw"
    lamb = "lamb"
    sgd = "sgd"


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters through peft."""

    enabled: bool = False
    """Train only the adapters."""
    rank: int = 8
    """Rank of the update matrices."""
    alpha: float = 16.0
    """Scale of the update: alpha / rank."""
    dropout: float = 0.0
    """Dropout on the adapter's input."""
    target_modules: list[str] = field(default_factory=list)
    """Names of the modules that get an adapter; empty lets peft choose for the architecture."""


@dataclass(kw_only=True)
class ModelConfig:
    """The Hugging Face model."""

    path: str = ""
    """Local folder or hub name; empty builds a new model from `arch` and `overrides`."""
    arch: str = "llama"
    """`model_type` of a new model, as in a Hugging Face config.json."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Hugging Face config fields to override, for new and loaded models."""
    tokenizer: str = ""
    """Tokenizer folder or hub name; empty uses `path`, or trains a tokenizer on the embedded corpus."""
    attn_implementation: Attention = Attention.sdpa
    """Attention kernel: eager, sdpa, or flash_attention_2 (needs flash-attn and a GPU)."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass to save activation memory."""
    self_check: bool = True
    """Before training, compare a shrunken copy of the staged model with Hugging Face's own forward."""
    trust_remote_code: bool = False
    """Run the modelling code that comes with the model's folder or hub repository."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters."""


@dataclass(kw_only=True)
class DataConfig:
    """Where batches come from."""

    kind: DataKind = DataKind.corpus
    """corpus: the embedded standard-library text; text: plain documents; chat: conversations."""
    path: str = ""
    """Hub name, folder, or .jsonl/.json/.parquet/.txt file; unused for the embedded corpus."""
    name: str = ""
    """Configuration name of a hub dataset."""
    split: str = "train"
    """Split of a hub dataset."""
    eval_split: str = ""
    """Split used for evaluation; empty holds out `eval_fraction` of the training data."""
    eval_fraction: float = 0.0
    """Fraction of documents held out for evaluation when `eval_split` is empty."""
    text_field: str = "text"
    """Field with the text of a document."""
    messages_field: str = "messages"
    """Field with the list of {role, content} messages of a conversation."""
    chat_template: str = ""
    """Jinja chat template, or a file with one; empty uses the tokenizer's."""
    streaming: bool = False
    """Read the data during training instead of loading it first; shuffle within a buffer."""
    shuffle: bool = True
    """Shuffle documents, differently in each epoch."""
    shuffle_buffer: int = 10_000
    """Documents in the shuffle buffer of a streamed source."""
    sequence_length: int = 256
    """Tokens per sequence."""
    packing: bool = True
    """Pack several documents into each sequence; position ids restart at each document."""
    cache_dir: str = "~/.cache/weft"
    """Folder for tokenised data, the embedded corpus's tokenizer, and measurements of devices and collectives."""


@dataclass(kw_only=True)
class PipelineConfig:
    """How the model is placed on ranks, and the schedule that they run."""

    stages: int = 1
    """Number of pipeline ranks; the number of replicas is world size / stages."""
    schedule: ScheduleKind = ScheduleKind["1f1b"]
    """Schedule generator; `file` reads `schedule_file`."""
    schedule_file: str = ""
    """Schedule file for schedule=file: Weft's JSON or torch's compute-only CSV."""
    costs_file: str = ""
    """Cost model of the virtual stages, in the format of `weft simulate --costs`; empty estimates costs.
    A run with `train.timeline` writes its measured costs as `costs.yaml`. Links come from `cluster`."""
    placement: PlacementKind = PlacementKind.any
    """straight: one chunk per rank; interleaved: several, round-robin; fold: two, down and back up;
    site_fold, site_interleaved: the same within each site. any: what the schedule needs, or for
    schedule=auto the placement with the shortest predicted step."""
    chunks_per_rank: int = 2
    """Virtual stages per rank in an interleaved placement."""
    launch_together: int = 0
    """Micro-batches of a chunk that the interleaved schedule launches in a row: more overlap more of
    ZeRO's collectives but hold more activations. 0 takes the number that `weft plan` prints, as far
    as memory allows, if collectives have been measured, and otherwise one per rank."""
    microbatches: int = 4
    """Micro-batches per step and replica; 0 derives it from `train.batch_size`, which is also done if
    only that is given on the command line."""
    split: SplitKind = SplitKind.even
    """How to divide layers among stages: even counts, or cost, which also weighs embedding and head."""
    layers: list[int] = field(default_factory=list)
    """Number of layers of each virtual stage; empty lets `split` decide."""
    memory_cap_bytes: int = 0
    """Limit on the activation memory that a schedule may hold on any rank; 0 means no cap."""
    search_seconds: float = 2.0
    """Nominal time for schedule=auto to improve its first schedule."""
    pair_scale: float = 1.0
    """Duration of a strand pair over the sum of its halves; at 1 pairs gain nothing, and their halves
    run one after the other."""
    receive_ahead: int = 4
    """Number of receives to post in advance, per neighbour and direction."""
    debug: bool = False
    """Check before each action that its dependencies have finished."""


@dataclass(kw_only=True)
class LinkConfig:
    """A link between two sites."""

    sites: list[str] = field(default_factory=list)
    """The two sites that the link joins."""
    latency_ms: float = 0.0
    """One-way delay in milliseconds."""
    bandwidth_mbps: float = 0.0
    """Bandwidth of a node's uplink in megabits per second; 0 probes it when the run starts."""
    pair_mbps: float = 0.0
    """Bandwidth between one pair of nodes in megabits per second, if the provider limits it below the
    uplinks'; 0 means no such limit."""


@dataclass(kw_only=True)
class SiteConfig:
    """A data centre."""

    name: str = ""
    """Name of the site in messages and plots."""
    hosts: list[str] = field(default_factory=list)
    """Hosts of the site, named and ordered as in the hostfile."""
    ranks: int = 0
    """Pipeline ranks of the site if there is no hostfile (one machine, emulation); otherwise the
    hosts' slots decide."""


@dataclass(kw_only=True)
class ClusterConfig:
    """Machines and the links between them."""

    sites: list[SiteConfig] = field(default_factory=list)
    """Sites in pipeline order; empty means a single site."""
    links: list[LinkConfig] = field(default_factory=list)
    """Links between sites."""
    hostfile: str = ""
    """DeepSpeed hostfile (`host slots=N` lines); empty means this machine only."""
    ranks: int = 1
    """Processes that `weft launch` starts on this machine if there is no hostfile."""
    master_addr: str = "127.0.0.1"
    """Rendezvous address of the ranks."""
    master_port: int = 29500
    """Rendezvous port of the ranks; 0 picks a free one (one machine only)."""


@dataclass(kw_only=True)
class CommConfig:
    """Transfers between ranks."""

    timeout_s: float = 600.0
    """Seconds after which an unfinished transfer stops the run with an error."""
    deadline_s: float = 30.0
    """Seconds of silence after which a link between sites counts as failed."""
    connections: int = 0
    """TCP connections per pair of ranks of different sites; 0 probes each link when the run starts
    and takes the fewest that fill it."""
    tls: bool = True
    """Encrypt traffic between sites with TLS 1.3, keyed by WEFT_KEY. Turn it off only for private
    links: hidden states and gradients are then sent in the clear."""
    interface: str = ""
    """Network interface on which to listen for ranks of other sites; empty takes the one that reaches
    `cluster.master_addr`."""
    chunk_kb: int = 128
    """Kibibytes that a connection between sites sends at a time. A tensor should fill all `connections`
    many times over: lower it if tensors are small and connections are many."""
    cell: int = 1
    """Replicas per DP-cell, which pool their uplinks for transfers between sites; 1 disables pooling."""


@dataclass(kw_only=True)
class ZeroConfig:
    """Sharding of optimiser state, gradients and weights over replicas."""

    stage: int = 0
    """What to shard: 0: nothing; 1: optimiser state; 2: also gradients; 3: also weights."""
    overlap_comm: bool = True
    """Overlap gradient reductions and weight all-gathers with compute; off waits for each of them."""
    reduce_bucket_size: int = 50_000_000
    """Largest number of elements per gradient reduction."""
    allgather_bucket_size: int = 50_000_000
    """Largest number of elements per weight all-gather."""
    param_persistence_threshold: int = 0
    """Stage 3 keeps parameters with fewer elements than this unsharded, in order of use, up to
    `model_persistence_threshold` elements."""
    model_persistence_threshold: int = 9_223_372_036_854_775_807
    """Largest number of elements per rank that `param_persistence_threshold` may keep unsharded."""
    communication_data_type: Precision = Precision.fp32
    """Number format in which gradients are sent; they are accumulated in fp32 before and after."""
    reduce_every: int = 0
    """Micro-batches of a stage to accumulate before stages 2 and 3 reduce-scatter the gradients. 0
    accumulates the whole step and communicates least; 1 takes the least memory."""
    partition: Partition = Partition.workload
    """Dimensions along which to partition reductions and all-gathers if that is faster: none,
    primitive, group (and primitive), workload (all three). Costs are measured once and kept in
    data.cache_dir."""


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimiser and its learning rate."""

    kind: OptimizerKind = OptimizerKind.adamw
    """Algorithm: adamw, sgd, or lamb, which scales updates by each parameter's norm for large batches."""
    lr: float = 3e-4
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of the first and second moment; sgd uses the first as its momentum."""
    eps: float = 1e-8
    """Term added to the square root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip: float = 1.0
    """Global gradient norm above which gradients are clipped; 0 disables clipping."""
    schedule: LrSchedule = LrSchedule.cosine
    """Learning-rate schedule after warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    min_lr_ratio: float = 0.1
    """Final learning rate as a fraction of the peak, for cosine and linear."""


@dataclass(kw_only=True)
class TrainConfig:
    """The training run."""

    name: str = "run"
    """Name of the run; its folder is `output_dir/name`."""
    output_dir: str = "runs"
    """Parent folder of run folders."""
    steps: int = 100
    """Number of optimiser steps."""
    epochs: float = 0.0
    """Passes over the data, instead of `steps`; the last step is filled up from the next pass. 0 uses
    `steps`, which streamed data requires."""
    max_seconds: float = 0.0
    """Stop after this many seconds of training; 0 means no limit."""
    microbatch_size: int = 1
    """Sequences per micro-batch; 0 derives it from `batch_size`."""
    batch_size: int = 0
    """Sequences per step over all replicas; 0 means microbatch_size x microbatches x replicas."""
    precision: Precision = Precision.fp32
    """Number format of weights and activations; bf16 and fp16 keep fp32 master weights."""
    seed: int = 1234
    """Random seed of new weights, shuffling and dropout."""
    eval_every: int = 0
    """Steps between evaluations; 0 disables them."""
    eval_batches: int = 8
    """Batches per evaluation."""
    early_stopping_patience: int = 0
    """Stop after this many evaluations in a row without a lower loss; 0 disables early stopping."""
    early_stopping_threshold: float = 0.0
    """Least improvement of the evaluation loss that resets the patience."""
    export: bool = True
    """Export a Hugging Face folder at the end."""
    hub_model_id: str = ""
    """Hugging Face hub repository to push the export to, as NAME or ORGANISATION/NAME; empty pushes
    nothing."""
    hub_private_repo: bool = False
    """Create that repository as private if it does not exist yet."""
    sample: str = ""
    """Prompt to sample a text from the export with plain transformers; empty samples nothing."""
    sample_tokens: int = 64
    """Number of tokens to sample."""
    timeline: bool = False
    """At the end, plot a measured step beside the predicted one, and write the measured costs."""


@dataclass(kw_only=True)
class LoggingConfig:
    """Metrics logging of recipes; your own scripts use DeepSpeed's monitors."""

    every: int = 1
    """Steps between log records."""
    progress: bool = True
    """Show a progress bar on rank 0."""
    jsonl: bool = True
    """Write metrics.jsonl in the run folder."""
    tensorboard: bool = False
    """Write TensorBoard events in the run folder."""
    wandb: bool = False
    """Log to Weights & Biases; WANDB_MODE=offline keeps it local."""
    wandb_project: str = "weft"
    """Weights & Biases project."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: int = 0
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = 2
    """Number of newest complete checkpoints to keep; 0 keeps all."""
    load_best_model_at_end: bool = False
    """Also keep the checkpoint with the lowest evaluation loss, as `checkpoints/best`, and export that
    one at the end."""
    resume: str = "auto"
    """Where to resume from: auto (the newest complete checkpoint of the run folder, if any), never, or
    a checkpoint folder."""
    final: bool = True
    """Save a checkpoint at the end."""
    background: bool = False
    """Copy to host memory and write in the background while training continues. Your own script then
    has to call `engine.finish_checkpoints()` before it ends."""


@dataclass(kw_only=True)
class PrefillWorkerConfig:
    """A running prefill worker, as the controller reaches it."""

    url: str = ""
    """URL of the worker's HTTP server, such as http://127.0.0.1:8001."""
    boards: list[str] = field(default_factory=list)
    """Bubble boards of the ranks whose devices the worker uses; it computes only while all of them idle."""
    cost: str = ""
    """File with the worker's cost model; empty predicts with a cautious prior."""


@dataclass(kw_only=True)
class ControllerConfig:
    """The HTTP service in front of the prefill workers."""

    host: str = "127.0.0.1"
    """Address to listen on; any address that other machines can reach needs an API key."""
    port: int = 8300
    """Port to listen on."""
    api_key_env: str = "WEFT_API_KEY"
    """Environment variable with the API key that callers send as `Authorization: Bearer KEY`; it is
    also sent to the workers."""
    workers: list[PrefillWorkerConfig] = field(default_factory=list)
    """Running workers to use; empty uses those that `weft serve` starts."""
    tokenizer: str = ""
    """tokenizer.json of the served model, or its folder, to count prompt tokens; empty estimates the
    count from the text's length."""
    deadline_s: float = 10.0
    """Refuse a request whose first token is predicted to take longer, in seconds; the request header
    X-Weft-Deadline-S overrides it."""
    max_prompt_tokens: int = 131_072
    """Longest prompt that is accepted."""
    max_body_bytes: int = 4_194_304
    """Largest request body that is accepted."""
    max_json_depth: int = 32
    """Deepest JSON nesting of a request body that is accepted."""
    max_queue: int = 64
    """Largest number of unanswered requests on one worker."""
    max_connections: int = 1024
    """Largest number of open client connections."""
    receive_timeout_s: float = 10.0
    """Seconds that a client has to send its request."""
    answer_slack_s: float = 5.0
    """Seconds past the expected end of a prompt after which the controller starts to check the worker's
    health; the worker keeps its prompts as long as it answers."""
    silence_s: float = 30.0
    """Seconds without any answer after which a worker counts as hung. A dead worker refuses
    connections, which is noticed at once."""
    answer_timeout_s: float = 600.0
    """Seconds after which a prompt is abandoned even if its worker is alive."""
    probe_s: float = 0.5
    """Seconds between probes of each worker's health and bubbles."""


@dataclass(kw_only=True)
class PrefillConfig:
    """The prefill workers: stock vLLM servers beside the training ranks of a host."""

    model: str = ""
    """Model to serve: Hugging Face folder or hub name, as vLLM takes it."""
    python: str = ""
    """Python interpreter that has vLLM; empty uses the one that runs `weft serve`."""
    ranks: list[int] = field(default_factory=list)
    """Training ranks of this host whose bubbles serve prefill; empty means all of `cluster.ranks`."""
    ranks_per_worker: int = 1
    """Ranks whose devices one worker spans as its tensor-parallel group; it runs while all of them
    are in a bubble."""
    host: str = "127.0.0.1"
    """Address for the workers to listen on; any address that other machines can reach needs an API key."""
    first_port: int = 8301
    """Port of the first worker; the others follow."""
    first_side_port: int = 5600
    """Side-channel port of the first worker's NIXL connector, for decode instances; the others follow."""
    memory_share: float = 0.1
    """Fraction of a GPU's memory that a worker reserves at its start for weights, KV cache and about a
    gigabyte more; an 8 B model in bf16 has 16 GB of weights, so 0.25 of an 80 GB GPU. Training must
    leave that much free; `weft serve` checks both before it starts a worker."""
    kv_cache_bytes: int = 268_435_456
    """KV cache of a worker on a CPU; on a GPU it follows from `memory_share`."""
    max_tokens: int = 4096
    """Longest prompt, and longest prefill chunk, in tokens."""
    guard_s: float = 0.003
    """Seconds to keep free at the end of each bubble, before training is expected back."""
    quantile: float = 0.98
    """Fraction of prefill steps that should end within their prediction; the others run into the guard."""
    connector: KvConnector = KvConnector.none
    """How to send KV caches: none, or nixl (vLLM's NIXL connector, with a quiet progress thread)."""
    yield_cores: bool = True
    """On a CPU, run only on otherwise idle cores (SCHED_IDLE). False lets a worker compete for cores
    inside bubbles; otherwise it would never run on a host that other jobs keep busy."""
    allow_decode: bool = False
    """Also decode on the workers, instead of refusing requests for more than one token."""
    cost_dir: str = "~/.cache/weft/prefill"
    """Folder that keeps the cost model of each model and machine between runs."""
    arguments: list[str] = field(default_factory=list)
    """Additional arguments for the vLLM server."""


@dataclass(kw_only=True)
class InferenceConfig:
    """Prefill serving in bubbles."""

    enabled: bool = False
    """Publish each rank's bubbles on a board for co-located prefill workers; off costs the training
    step nothing."""
    boards: str = ""
    """Folder of the boards, private to this user; empty means weft-UID/`train.name` in /dev/shm."""
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    """Prefill workers."""
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    """HTTP service in front of the workers."""


@dataclass(kw_only=True)
class WeftConfig:
    """The configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    inference: InferenceConfig = field(default_factory=InferenceConfig)
    dry_run: bool = False
    """Print stages, memory, predicted step time and bubbles, and exit before any rank starts."""
