"""The optimiser, losses other than that of labels, and the training run, its log and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from weft.conf.schema.ranges import COUNT, NATURAL, POSITIVE, Range


class Precision(Enum):
    """Number format of weights and activations."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class ExportDtype(Enum):
    """Number format of exported weights."""

    base = "base"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class LrSchedule(Enum):
    """Learning-rate schedule after warm-up."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"


class OptimizerKind(Enum):
    """Optimiser algorithm."""

    adamw = "adamw"
    lamb = "lamb"
    muon = "muon"
    sgd = "sgd"


class OptimizerState(Enum):
    """Number format of AdamW's moments."""

    bf16 = "bf16"
    fp32 = "fp32"
    int8 = "int8"


@dataclass(kw_only=True)
class OptimizerConfig:
    """The optimiser and its learning rate."""

    kind: OptimizerKind = OptimizerKind.adamw
    """Algorithm: adamw, sgd, lamb, which scales updates by each parameter's norm for large batches, or muon, which
    orthogonalizes the updates of hidden matrices and uses adamw for embeddings, head and vectors."""
    state: OptimizerState = OptimizerState.fp32
    """Number format of adamw's moments. Updates are computed in fp32. int8 needs bitsandbytes: each 256 elements share
    a scale, and parameters of fewer than 4096 elements have fp32 moments."""
    lr: Annotated[float, POSITIVE] = 3e-4
    """Peak learning rate."""
    muon_lr: Annotated[float, NATURAL] = 0.0
    """Peak learning rate of the matrices that muon orthogonalizes; 0 uses `lr`."""
    muon_momentum: Annotated[float, Range(0, 1)] = 0.95
    """Momentum of muon."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of the first and second moment; sgd uses the first as its momentum."""
    eps: Annotated[float, POSITIVE] = 1e-8
    """Term added to the square root of the second moment."""
    weight_decay: Annotated[float, NATURAL] = 0.0
    """Decoupled weight decay."""
    clip: Annotated[float, NATURAL] = 1.0
    """Global gradient norm above which gradients are clipped; 0 disables clipping."""
    schedule: LrSchedule = LrSchedule.cosine
    """Learning-rate schedule after warm-up."""
    warmup_steps: Annotated[int, NATURAL] = 0
    """Steps of linear warm-up."""
    warmup_ratio: Annotated[float, Range(0, 1)] = 0.0
    """Share of the steps that warm up, rounded up; above 0 it replaces `warmup_steps`."""
    min_lr_ratio: Annotated[float, Range(0, 1)] = 0.1
    """Final learning rate as a fraction of the peak, for cosine and linear."""


@dataclass(kw_only=True)
class PreferenceConfig:
    """Direct preference optimisation (Rafailov et al. 2023), with the model before training as its reference."""

    beta: Annotated[float, POSITIVE] = 0.1
    """Factor of the log-ratios; larger keeps the model closer to its reference."""
    label_smoothing: Annotated[float, Range(0, 0.5, high_open=True)] = 0.0
    """Probability with which a pair's answers are taken to be swapped."""


@dataclass(kw_only=True)
class DistillConfig:
    """Distillation from a teacher with the same tokens."""

    enabled: bool = False
    """Train against a teacher's probabilities."""
    teacher: str = ""
    """Folder or hub name of the teacher, whose tokens must be the student's. Each rank with the last stage holds the
    whole teacher, in `train.precision`, or with `inference.scores.enabled` the host."""
    weight: Annotated[float, Range(0, 1)] = 0.5
    """Share of the divergence from the teacher in the loss; the rest is the cross-entropy of the labels."""
    temperature: Annotated[float, POSITIVE] = 1.0
    """Divide the logarithms of both distributions by it. The divergence is multiplied by its square, so that gradients
    keep their scale (Hinton et al. 2015)."""
    top_k: Annotated[int, NATURAL] = 64
    """Compare the teacher's most likely tokens only, of those that the student has; 0 compares the whole vocabulary."""
    tail: bool = True
    """Compare all other tokens of the teacher, too, as one token with the sum of their probabilities. false compares
    the distributions within the most likely tokens."""


@dataclass(kw_only=True)
class TrainConfig:
    """The training run."""

    name: str = "run"
    """Name of the run; its folder is `output_dir/name`."""
    output_dir: str = "runs"
    """Parent folder of run folders."""
    shared: bool = False
    """Let other users read checkpoints, exports, metrics and plots of the run, as the umask allows; otherwise the
    folder is private (0700). Settings and the supervisor's files are private in any case."""
    steps: Annotated[int, COUNT] = 100
    """Number of optimiser steps."""
    epochs: Annotated[float, NATURAL] = 0.0
    """Passes over the data, instead of `steps`; the last step is filled up from the next pass. 0 uses
    `steps`, which streamed data requires."""
    max_seconds: Annotated[float, NATURAL] = 0.0
    """Stop after this many seconds of training; 0 means no limit."""
    microbatch_size: Annotated[int, NATURAL] = 1
    """Sequences per micro-batch; 0 derives it from `batch_size`. A preference pair is two sequences."""
    batch_size: Annotated[int, NATURAL] = 0
    """Sequences per step over all replicas; 0 means microbatch_size x microbatches x replicas."""
    precision: Precision = Precision.fp32
    """Number format of weights and activations; bf16 and fp16 keep fp32 master weights."""
    seed: Annotated[int, NATURAL] = 1234
    """Random seed of new weights, shuffling and dropout."""
    eval_every: Annotated[int, NATURAL] = 0
    """Steps between evaluations; 0 disables them."""
    eval_batches: Annotated[int, COUNT] = 8
    """Batches per evaluation."""
    early_stopping_patience: Annotated[int, NATURAL] = 0
    """Stop after this many evaluations in a row without a lower loss; 0 disables early stopping."""
    early_stopping_threshold: Annotated[float, NATURAL] = 0.0
    """Minimum improvement of the evaluation loss that resets the count of evaluations without one."""
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    """Loss of data.kind=preference."""
    export: bool = True
    """Export a Hugging Face folder at the end."""
    export_dtype: ExportDtype = ExportDtype.base
    """Number format of the export's weights: base is that of the model that was given, fp32 for a new one."""
    hub_model_id: str = ""
    """Hugging Face hub repository to push the export to, as NAME or ORGANISATION/NAME; empty pushes
    nothing."""
    hub_private_repo: bool = False
    """Create that repository as private if it does not exist yet."""
    sample: str = ""
    """Prompt to sample a text from the export with plain transformers; empty samples nothing."""
    sample_tokens: Annotated[int, COUNT] = 64
    """Number of tokens to sample."""
    timeline: bool = False
    """At the end, plot a measured step and the predicted one, and write the measured costs."""


@dataclass(kw_only=True)
class LoggingConfig:
    """Metrics logging of recipes; your own scripts use DeepSpeed's monitors."""

    every: Annotated[int, COUNT] = 1
    """Steps between log records."""
    progress: bool = True
    """Show the steps on rank 0: a bar on a terminal, otherwise a line every ten seconds."""
    jsonl: bool = True
    """Write metrics.jsonl in the run folder."""
    events: bool = True
    """Time every action, wait and stall of all ranks, for `weft watch` and `weft explain`."""
    prometheus_port: Annotated[int, Range(0, 65535)] = 0
    """Port on which the first host serves Prometheus metrics to processes of that host; 0 serves none."""
    tensorboard: bool = False
    """Write TensorBoard events in the run folder."""
    wandb: bool = False
    """Log to Weights & Biases; WANDB_MODE=offline keeps it local."""
    wandb_project: str = ""
    """Weights & Biases project; empty takes WANDB_PROJECT, or weft."""
    wandb_name: str = ""
    """Name of the run at Weights & Biases; empty takes WANDB_NAME, or `train.name`."""
    wandb_group: str = ""
    """Group of the run at Weights & Biases; empty takes WANDB_RUN_GROUP, if it is set."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: Annotated[int, NATURAL] = 0
    """Steps between checkpoints; 0 saves only at the end."""
    memory_every: Annotated[int, NATURAL] = 0
    """Steps between checkpoints in host memory, on this host and one other, from which a supervised run
    recovers; 0 keeps none."""
    memory_share: Annotated[float, Range(0, 1, low_open=True)] = 0.25
    """Share of the time that copies to the other host may take, where one takes more than a second: over
    a slow link they hold training up. Memory checkpoints are then further apart than `memory_every`."""
    keep: Annotated[int, NATURAL] = 2
    """Number of newest complete checkpoints to keep; 0 keeps all."""
    load_best_model_at_end: bool = False
    """Also keep the checkpoint with the lowest evaluation loss, as `checkpoints/best`, and export that
    one at the end."""
    resume: str = "auto"
    """Where to resume from: auto (the newest complete checkpoint of the run folder, if any), never, or
    a checkpoint folder."""
    final: bool = True
    """Save a checkpoint at the end."""
    storage_wait_s: Annotated[float, NATURAL] = 3600.0
    """Seconds that the last checkpoint and the export wait for storage that is full or read-only, and try again."""
    on_signal: bool = True
    """Take the first SIGTERM or SIGINT as a request: training ends after the running step with a checkpoint, exit
    code 143 or 130. A second signal ends it at once."""
    signal_deadline_s: Annotated[float, POSITIVE] = 300.0
    """Seconds from the first signal to the end of the step and its checkpoint; then the ranks are killed."""
    background: bool = False
    """Copy to host memory and write in the background while training continues. Your own script then
    has to call `engine.finish_checkpoints()` before it ends."""
