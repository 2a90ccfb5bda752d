"""Every field of a run: its type, default and meaning. Nothing else writes a default.

The classes are not frozen because OmegaConf cannot compose frozen nodes; nothing mutates
them after `weft.conf.load` has turned them into objects.
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
    """How layers are shared out over virtual stages."""

    even = "even"
    cost = "cost"


class DataKind(Enum):
    """What the training data is."""

    corpus = "corpus"
    text = "text"
    chat = "chat"


class Partition(Enum):
    """Axes by which collectives are rewritten, each with those before it (Centauri section 3.1)."""

    none = "none"
    primitive = "primitive"
    group = "group"
    workload = "workload"


class LrSchedule(Enum):
    """Shape of the learning rate after warm-up."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"


class KvConnector(Enum):
    """How KV caches leave a prefill worker."""

    none = "none"
    nixl = "nixl"


class OptimizerKind(Enum):
    """The optimiser's algorithm."""

    adamw = "adamw"
    lamb = "lamb"
    sgd = "sgd"


@dataclass(kw_only=True)
class LoraConfig:
    """Low-rank adapters through peft."""

    enabled: bool = False
    """Train adapters only."""
    rank: int = 8
    """Rank of the update matrices."""
    alpha: float = 16.0
    """Scale of the update: alpha / rank."""
    dropout: float = 0.0
    """Dropout on the adapter's input."""
    target_modules: list[str] = field(default_factory=list)
    """Module names that get an adapter; empty lets peft choose for the architecture."""


@dataclass(kw_only=True)
class ModelConfig:
    """The Hugging Face model."""

    path: str = ""
    """Local folder or hub name. Empty: build a new model from `arch` and `overrides`."""
    arch: str = "llama"
    """`model_type` of a new model, as in a Hugging Face config.json."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the Hugging Face config to set, for new and for loaded models."""
    tokenizer: str = ""
    """Tokenizer folder or hub name; empty takes `path`, or trains one for the embedded corpus."""
    attn_implementation: Attention = Attention.sdpa
    """Attention kernel: eager, sdpa, or flash_attention_2 (needs flash-attn and a GPU)."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward to save activation memory."""
    self_check: bool = True
    """Compare a shrunken copy of the model with Hugging Face's own forward before training."""
    trust_remote_code: bool = False
    """Run modelling code that the model's folder or hub page brings along."""
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
    """Split used for evaluation; empty holds back `eval_fraction` of the training data."""
    eval_fraction: float = 0.0
    """Share of documents held back for evaluation when `eval_split` is empty."""
    text_field: str = "text"
    """Field with the text of a document."""
    messages_field: str = "messages"
    """Field with the list of {role, content} messages of a conversation."""
    chat_template: str = ""
    """Jinja chat template, or a file with one, for a tokenizer that has none."""
    streaming: bool = False
    """Read while training instead of loading first; order is shuffled within a buffer."""
    shuffle: bool = True
    """Shuffle documents, anew in each epoch."""
    shuffle_buffer: int = 10_000
    """Documents in the shuffle buffer of a streamed source."""
    sequence_length: int = 256
    """Tokens per sequence."""
    packing: bool = True
    """Fill sequences with several documents; position ids restart at each."""
    cache_dir: str = "~/.cache/weft"
    """Folder for tokenised data, the embedded corpus's tokenizer, and what was measured of devices and collectives."""


@dataclass(kw_only=True)
class PipelineConfig:
    """How the model is laid over ranks, and in which order they work."""

    stages: int = 1
    """Pipeline ranks; replicas = world size / stages."""
    schedule: ScheduleKind = ScheduleKind["1f1b"]
    """Generator of the schedule; `file` reads `schedule_file`."""
    schedule_file: str = ""
    """Schedule in Weft's JSON or torch's compute-only CSV, for schedule=file."""
    costs_file: str = ""
    """Costs of the virtual stages to plan and predict with, in the form of `weft simulate --costs`;
    a run with `train.timeline` leaves its own as `costs.yaml`. Empty estimates them. Links stay
    those of `cluster`."""
    placement: PlacementKind = PlacementKind.any
    """straight: one chunk per rank; interleaved: several, round after round; fold: two, there and
    back; site_fold, site_interleaved: those in each site. any: what the schedule needs; `auto`
    takes the one whose step is the shortest by estimated or given costs."""
    chunks_per_rank: int = 2
    """Virtual stages per rank where chunks are interleaved."""
    launch_together: int = 0
    """Micro-batches of a chunk that the interleaved schedule launches in a row: more hide more of
    ZeRO's collectives and hold more activations. 0 is what `weft plan` says, as far as
    `memory_cap_bytes` or the device's memory allows, where collectives have been measured, or
    else one for each rank."""
    microbatches: int = 4
    """Micro-batches per step and replica; 0 follows from `train.batch_size`, as it does where that is
    given on the command line and this is not."""
    split: SplitKind = SplitKind.even
    """Layers per stage: even counts, or balanced by cost with embedding and head weighed in."""
    layers: list[int] = field(default_factory=list)
    """Layers of each virtual stage, given by hand; empty lets `split` decide."""
    memory_cap_bytes: int = 0
    """Peak of saved activations per rank that a schedule may reach; 0 is no cap."""
    search_seconds: float = 2.0
    """Time that schedule=auto may spend on improving its first answer."""
    pair_scale: float = 1.0
    """Duration of a strand pair over the sum of its halves; at 1 nothing is gained by running
    them as one, and schedules with pairs run the halves one after the other."""
    receive_ahead: int = 4
    """Receives posted ahead of need, per neighbour and direction."""
    debug: bool = False
    """Assert before each action that its dependencies have ended."""


@dataclass(kw_only=True)
class LinkConfig:
    """A link between two sites."""

    sites: list[str] = field(default_factory=list)
    """The two sites it joins."""
    latency_ms: float = 0.0
    """One-way delay."""
    bandwidth_mbps: float = 0.0
    """Megabits per second of a node's uplink; 0 asks for a probe when the run starts."""
    pair_mbps: float = 0.0
    """Most megabits per second that one pair of nodes gets, where a provider limits pairs to less
    than their uplinks; 0 is no such limit."""


@dataclass(kw_only=True)
class SiteConfig:
    """A data centre."""

    name: str = ""
    """Its name in messages and pictures."""
    hosts: list[str] = field(default_factory=list)
    """Hosts in it, as in the hostfile and in its order."""
    ranks: int = 0
    """Pipeline ranks in it, where there is no hostfile (one machine, emulation); otherwise the
    hosts' slots say."""


@dataclass(kw_only=True)
class ClusterConfig:
    """Machines and the links between them."""

    sites: list[SiteConfig] = field(default_factory=list)
    """Sites in pipeline order; empty is one site."""
    links: list[LinkConfig] = field(default_factory=list)
    """Links between sites."""
    hostfile: str = ""
    """DeepSpeed hostfile (`host slots=N` lines); empty is this machine."""
    ranks: int = 1
    """Processes that `weft launch` starts on this machine when there is no hostfile."""
    master_addr: str = "127.0.0.1"
    """Address on which the ranks meet."""
    master_port: int = 29500
    """Port on which the ranks meet; 0 takes a free one (one machine only)."""


@dataclass(kw_only=True)
class CommConfig:
    """Transfers between ranks."""

    timeout_s: float = 600.0
    """Seconds after which a transfer that does not end stops the run with one error."""
    deadline_s: float = 30.0
    """Seconds of silence after which a link between sites has failed."""
    connections: int = 0
    """TCP connections per pair of ranks of different sites; 0 probes each link when the run starts
    and takes the fewest that fill it."""
    tls: bool = True
    """Encrypt between sites with TLS 1.3, keyed by WEFT_KEY; off is for links that are private, for
    hidden states and their gradients are then readable on the way."""
    interface: str = ""
    """Network interface that listens for ranks of other sites; empty takes the one that reaches
    `cluster.master_addr`."""
    chunk_kb: int = 128
    """Kibibytes that a connection between sites takes at a time. A tensor should be many times
    `connections` as large: lower it where tensors are small and connections are many."""
    cell: int = 1
    """Replicas whose uplinks carry each other's transfers between sites (a DP-cell); 1 shares none."""


@dataclass(kw_only=True)
class ZeroConfig:
    """Sharding of optimiser state, gradients and weights over replicas."""

    stage: int = 0
    """0: none; 1: optimiser state; 2: gradients, too; 3: weights, too."""
    overlap_comm: bool = True
    """Reduce gradients and gather weights beside compute; off waits for each at once."""
    reduce_bucket_size: int = 50_000_000
    """Most elements per gradient reduction."""
    allgather_bucket_size: int = 50_000_000
    """Most elements per weight all-gather."""
    param_persistence_threshold: int = 0
    """Stage 3 leaves parameters of fewer elements whole, in the order of need..."""
    model_persistence_threshold: int = 9_223_372_036_854_775_807
    """... up to so many elements of a rank: what memory is left for, to gather less."""
    communication_data_type: Precision = Precision.fp32
    """Number format in which gradients travel; they are added up in fp32 before and after."""
    reduce_every: int = 0
    """Micro-batches of a stage whose gradients are added up whole before stages 2 and 3 reduce
    them; 0 is all of a step, which moves least, 1 keeps least."""
    partition: Partition = Partition.workload
    """Axes by which reductions and gatherings are rewritten where that is faster: none,
    primitive, group (and primitive), workload (all three). Costs are measured once and kept in
    data.cache_dir."""


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimiser and its learning rate."""

    kind: OptimizerKind = OptimizerKind.adamw
    """adamw, sgd, or lamb, which scales steps by the norm of each parameter, for large batches."""
    lr: float = 3e-4
    """Peak learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of the first and second moment; sgd takes the first as its momentum."""
    eps: float = 1e-8
    """Added to the second moment's root."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    clip: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 turns it off."""
    schedule: LrSchedule = LrSchedule.cosine
    """Shape of the learning rate after warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    min_lr_ratio: float = 0.1
    """Last learning rate over the peak, for cosine and linear."""


@dataclass(kw_only=True)
class TrainConfig:
    """The run."""

    name: str = "run"
    """Name of the run; its folder is `output_dir/name`."""
    output_dir: str = "runs"
    """Folder that holds run folders."""
    steps: int = 100
    """Optimiser steps."""
    epochs: float = 0.0
    """Passes over the data, instead of `steps`; the last step is filled up from the pass after it.
    0 counts steps, as streamed data asks for."""
    max_seconds: float = 0.0
    """Stop after this many seconds of training; 0 is no limit."""
    microbatch_size: int = 1
    """Sequences per micro-batch; 0 follows from `batch_size`."""
    batch_size: int = 0
    """Sequences per step over all replicas; 0 is microbatch_size x microbatches x replicas."""
    precision: Precision = Precision.fp32
    """Number format of weights and activations; bf16 and fp16 keep fp32 master weights."""
    seed: int = 1234
    """Seed of new weights, shuffling and dropout."""
    eval_every: int = 0
    """Steps between evaluations; 0 is never."""
    eval_batches: int = 8
    """Batches per evaluation."""
    early_stopping_patience: int = 0
    """Evaluations in a row without a lower loss after which the run ends; 0 is never."""
    early_stopping_threshold: float = 0.0
    """What an evaluation's loss has to be lower by to count as lower there."""
    export: bool = True
    """Write a Hugging Face folder at the end."""
    hub_model_id: str = ""
    """Repository of the Hugging Face hub, NAME or ORGANISATION/NAME, that the export is pushed to;
    empty pushes nothing."""
    hub_private_repo: bool = False
    """Make that repository private where it does not exist yet."""
    sample: str = ""
    """Prompt for a text sampled from the export by plain transformers; empty is none."""
    sample_tokens: int = 64
    """Tokens to sample."""
    timeline: bool = False
    """Draw a measured step beside the predicted one at the end, and write down what was measured as costs."""


@dataclass(kw_only=True)
class LoggingConfig:
    """What a recipe tells, and where; a script of your own has DeepSpeed's monitors."""

    every: int = 1
    """Steps between records."""
    progress: bool = True
    """Progress bar on rank 0."""
    jsonl: bool = True
    """Write metrics.jsonl in the run folder."""
    tensorboard: bool = False
    """Write TensorBoard events in the run folder."""
    wandb: bool = False
    """Send to Weights & Biases; WANDB_MODE=offline keeps it local."""
    wandb_project: str = "weft"
    """Project name at Weights & Biases."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: int = 0
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = 2
    """Newest whole checkpoints to keep; 0 keeps all."""
    load_best_model_at_end: bool = False
    """Keep the checkpoint of the lowest evaluation loss beside them, as `checkpoints/best`, and export
    that one at the end."""
    resume: str = "auto"
    """auto: the newest whole checkpoint of the run folder, if any; never; or a folder."""
    final: bool = True
    """Save at the end."""
    background: bool = False
    """Copy to host memory and write while training goes on, instead of training waiting. A
    script of your own then calls `engine.finish_checkpoints()` before it ends."""


@dataclass(kw_only=True)
class PrefillWorkerConfig:
    """A running prefill worker, as the controller sees it."""

    url: str = ""
    """Where its HTTP server listens, as in http://127.0.0.1:8001."""
    boards: list[str] = field(default_factory=list)
    """Bubble boards of the ranks whose devices it uses; it computes only where all of them idle."""
    cost: str = ""
    """File in which it keeps its cost model; empty predicts with a cautious prior."""


@dataclass(kw_only=True)
class ControllerConfig:
    """The HTTP service in front of the prefill workers."""

    host: str = "127.0.0.1"
    """Address it listens on; any but this machine's own needs an API key."""
    port: int = 8300
    """Port it listens on."""
    api_key_env: str = "WEFT_API_KEY"
    """Environment variable with the key that callers send as `Authorization: Bearer KEY`; also
    sent to the workers."""
    workers: list[PrefillWorkerConfig] = field(default_factory=list)
    """Workers that already run; empty takes those that `weft serve` starts."""
    tokenizer: str = ""
    """tokenizer.json (or a folder with one) of the served model, to count prompts; empty
    estimates from their length."""
    deadline_s: float = 10.0
    """Seconds to the first token above which a request is refused, where it names no own
    (header X-Weft-Deadline-S)."""
    max_prompt_tokens: int = 131_072
    """Longest prompt taken."""
    max_body_bytes: int = 4_194_304
    """Largest request body taken."""
    max_json_depth: int = 32
    """Deepest nesting of a request body taken."""
    max_queue: int = 64
    """Requests placed on one worker and not answered, above which it gets no more."""
    max_connections: int = 1024
    """Connections of callers held at once."""
    receive_timeout_s: float = 10.0
    """Seconds in which a caller has to send its request."""
    answer_slack_s: float = 5.0
    """Seconds past the expected end after which a worker is asked how it is, again and again; it
    keeps its prompts for as long as it answers."""
    silence_s: float = 30.0
    """Seconds in which a worker answers nothing at all, after which it counts as hung. One that is
    dead refuses connections, which is noticed at once."""
    answer_timeout_s: float = 600.0
    """Seconds after which a prompt is given up although its worker lives."""
    probe_s: float = 0.5
    """Seconds between looks at each worker's health and bubbles."""


@dataclass(kw_only=True)
class PrefillConfig:
    """The prefill workers: stock vLLM servers beside the training ranks of a host."""

    model: str = ""
    """Model that is served: Hugging Face folder or hub name, as vLLM takes it."""
    python: str = ""
    """Python that has vLLM; empty is the one that runs `weft serve`."""
    ranks: list[int] = field(default_factory=list)
    """Training ranks of this host whose bubbles are served in; empty is all of `cluster.ranks`."""
    ranks_per_worker: int = 1
    """Ranks whose devices one worker spans (as its tensor-parallel group): it runs in the
    bubbles that they share."""
    host: str = "127.0.0.1"
    """Address that the workers listen on; any but this machine's own needs an API key."""
    first_port: int = 8301
    """Port of the first worker; the others follow."""
    first_side_port: int = 5600
    """Port on which the first worker's NIXL connector meets decode instances; the others follow."""
    memory_share: float = 0.1
    """Share of a GPU's memory that a worker takes at its start, for good: weights, KV cache and
    about a gigabyte. An 8 B model in bf16 takes 16 GB in weights: 0.25 of a GPU of 80 GB. What
    training leaves free must exceed it; `weft serve` checks both before it starts any."""
    kv_cache_bytes: int = 268_435_456
    """KV cache of a worker on a CPU; a GPU's follows from `memory_share`."""
    max_tokens: int = 4096
    """Longest prompt, and longest chunk."""
    guard_s: float = 0.003
    """Seconds of each bubble that are kept free before training is expected back."""
    quantile: float = 0.98
    """Share of prefill steps that are to end when predicted; the others eat into the guard."""
    connector: KvConnector = KvConnector.none
    """How KV caches leave: none, or nixl (vLLM's NIXL connector, with a quiet progress thread)."""
    yield_cores: bool = True
    """On a CPU, run only on cores that nothing else on the host wants (SCHED_IDLE). False has a
    worker take its share of them inside bubbles: where other jobs keep the host busy, it would
    never run."""
    allow_decode: bool = False
    """Also decode here, instead of answering requests for more than one token with an error."""
    cost_dir: str = "~/.cache/weft/prefill"
    """Folder in which the cost model of each model and machine is kept between runs."""
    arguments: list[str] = field(default_factory=list)
    """Further arguments of the vLLM server."""


@dataclass(kw_only=True)
class InferenceConfig:
    """Prefill serving in bubbles."""

    enabled: bool = False
    """Publish each rank's bubbles on a board, for co-located prefill workers. Off removes every
    trace of it from the training step."""
    boards: str = ""
    """Folder of the boards, of this user alone; empty is weft-UID/`train.name` in /dev/shm."""
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    """The workers."""
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    """The service in front of the workers."""


@dataclass(kw_only=True)
class WeftConfig:
    """A whole run."""

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
    """Print stages, memory, predicted step time and bubbles, then stop before any rank starts."""
