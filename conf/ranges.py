"""The allowed range of every numeric field of the schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import inf
from typing import Any

from weft.conf.schema import WeftConfig

LARGEST = 2**63 - 1
"""The largest number of any field."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, without the ends that are open, and without what 64 bits cannot hold."""

    low: float
    high: float = inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, number: float) -> bool:
        above = self.low < number if self.low_open else self.low <= number
        below = number < self.high if self.high_open else number <= self.high
        return above and below and number <= LARGEST

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.low_open else f"at least {self.low:g}"
        high = f"below {self.high:g}" if self.high_open else f"at most {self.high:g}"
        return low if self.high == inf else f"{low} and {high}"

    def remedy(self, number: float) -> str:
        """Return the remedy for ``number``, which is outside the range."""
        return f"at most {LARGEST:.2g}" if number > LARGEST and self.high == inf else str(self)


NATURAL = Range(0)
COUNT = Range(1)
POSITIVE = Range(0, low_open=True)
SHARE = Range(0, 1, high_open=True)

RANGES = {
    "model.lora.rank": COUNT,
    "model.lora.alpha": POSITIVE,
    "model.lora.dropout": SHARE,
    "data.eval_fraction": SHARE,
    "data.shuffle_buffer": COUNT,
    "data.sequence_length": Range(2),
    "pipeline.stages": COUNT,
    "pipeline.chunks_per_rank": COUNT,
    "pipeline.launch_together": NATURAL,
    "pipeline.microbatches": NATURAL,
    "pipeline.memory_cap_bytes": NATURAL,
    "pipeline.search_seconds": NATURAL,
    "pipeline.receive_ahead": COUNT,
    "parallel.tensor": COUNT,
    "parallel.context": COUNT,
    "parallel.expert": COUNT,
    "cluster.ranks": COUNT,
    "cluster.master_port": Range(0, 65535),
    "comm.timeout_s": POSITIVE,
    "comm.deadline_s": POSITIVE,
    "comm.connections": Range(0, 1024),
    "comm.port": Range(0, 65000),
    "comm.chunk_kb": Range(4, 4096),
    "comm.cell": Range(1, 64),
    "zero.stage": Range(0, 3),
    "zero.param_persistence_threshold": NATURAL,
    "zero.model_persistence_threshold": NATURAL,
    "zero.reduce_every": NATURAL,
    "zero.reduce_bucket_size": COUNT,
    "zero.allgather_bucket_size": COUNT,
    "optimizer.lr": POSITIVE,
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": NATURAL,
    "optimizer.clip": NATURAL,
    "optimizer.warmup_steps": NATURAL,
    "optimizer.warmup_ratio": Range(0, 1),
    "optimizer.min_lr_ratio": Range(0, 1),
    "train.steps": COUNT,
    "train.max_seconds": NATURAL,
    "train.microbatch_size": NATURAL,
    "train.batch_size": NATURAL,
    "train.seed": NATURAL,
    "train.eval_every": NATURAL,
    "train.eval_batches": COUNT,
    "train.epochs": NATURAL,
    "train.early_stopping_patience": NATURAL,
    "train.early_stopping_threshold": NATURAL,
    "train.sample_tokens": COUNT,
    "logging.every": COUNT,
    "checkpoint.every": NATURAL,
    "checkpoint.keep": NATURAL,
    "checkpoint.memory_every": NATURAL,
    "checkpoint.signal_deadline_s": POSITIVE,
    "checkpoint.storage_wait_s": NATURAL,
    "checkpoint.memory_share": Range(0, 1, low_open=True),
    "supervise.port": Range(0, 65535),
    "supervise.heartbeat_s": POSITIVE,
    "supervise.silence_s": POSITIVE,
    "supervise.least_deadline_s": POSITIVE,
    "supervise.setup_deadline_s": POSITIVE,
    "supervise.max_restarts": NATURAL,
    "supervise.backoff_s": NATURAL,
    "supervise.max_skips": NATURAL,
    "supervise.spike": NATURAL,
    "supervise.compare_every": NATURAL,
    "inference.prefill.ranks_per_worker": COUNT,
    "inference.prefill.first_port": Range(1024, 65535),
    "inference.prefill.first_side_port": Range(1024, 65535),
    "inference.prefill.memory_share": Range(0, 1, low_open=True, high_open=True),
    "inference.prefill.kv_cache_bytes": COUNT,
    "inference.prefill.max_tokens": COUNT,
    "inference.prefill.guard_s": NATURAL,
    "inference.prefill.quantile": Range(0, 1, low_open=True, high_open=True),
    "inference.controller.port": Range(0, 65535),
    "inference.controller.deadline_s": POSITIVE,
    "inference.controller.max_prompt_tokens": COUNT,
    "inference.controller.max_body_bytes": COUNT,
    "inference.controller.max_json_depth": COUNT,
    "inference.controller.max_queue": COUNT,
    "inference.controller.max_connections": COUNT,
    "inference.controller.receive_timeout_s": POSITIVE,
    "inference.controller.answer_slack_s": POSITIVE,
    "inference.controller.silence_s": POSITIVE,
    "inference.controller.answer_timeout_s": POSITIVE,
    "inference.controller.probe_s": POSITIVE,
}


def value_of(config: WeftConfig, name: str) -> Any:
    """The value of the field with this dotted name."""
    return reduce(getattr, name.split("."), config)


def out_of_range(config: WeftConfig) -> Iterator[str]:
    """Yield a line for each number outside its range; null is not checked."""
    for name, allowed in RANGES.items():
        value = value_of(config, name)
        if value is not None and value not in allowed:
            yield f"{name}={_short(value)}: outside its range; choose a value {allowed.remedy(value)}"


def _short(value: float) -> str:
    try:
        return f"{value:g}"
    except OverflowError:  # an integer larger than any float
        return "inf" if value > 0 else "-inf"
