"""Handling of each key of a DeepSpeed configuration: taken over, read by DeepSpeed, refused, or without effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The schema's field for each DeepSpeed key. If both are given, their values must be equal.
TAKEN_OVER = {
    "train_batch_size": "train.batch_size",
    "train_micro_batch_size_per_gpu": "train.microbatch_size",
    "gradient_accumulation_steps": "pipeline.microbatches",
    "gradient_clipping": "optimizer.clip",
    "communication_data_type": "zero.communication_data_type",
    "zero_optimization.stage": "zero.stage",
    "zero_optimization.overlap_comm": "zero.overlap_comm",
    "zero_optimization.reduce_bucket_size": "zero.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size": "zero.allgather_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold": "zero.param_persistence_threshold",
    "zero_optimization.stage3_model_persistence_threshold": "zero.model_persistence_threshold",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.muon_lr": "optimizer.muon_lr",
    "optimizer.params.betas": "optimizer.betas",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
}
# DeepSpeed's defaults that differ from the schema's, which apply if neither configuration has a value.
DEEPSPEED_DEFAULTS = {"optimizer.clip": 0.0, "optimizer.schedule": "constant", "optimizer.warmup_steps": 0}
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lamb": "lamb", "muon": "muon", "sgd": "sgd"}
WHOLE_ONLY = frozenset({"adafactor", "lbfgs"})
"""Optimiser types that need whole parameters, and so do not work with ZeRO's shards."""
MUON_PARAMETERS = frozenset(
    ["adam_lr", "adam_w_mode", "betas", "eps", "lr", "momentum", "muon_lr", "ns_method", "torch_adam", "weight_decay"]
)
PRECISIONS = {"bf16": "bf16", "fp16": "fp16"}

# Keys that DeepSpeed's part of the engine reads unchanged. A section includes everything in it.
READ_BY_DEEPSPEED = frozenset(
    {
        "bf16.check_grad_overflow",
        "bf16.enabled",
        "comet",
        "csv_monitor",
        "dataloader_drop_last",
        "disable_python_gc",
        "dump_state",
        "fp16.consecutive_hysteresis",
        "fp16.enabled",
        "fp16.hysteresis",
        "fp16.initial_scale_power",
        "fp16.loss_scale",
        "fp16.loss_scale_window",
        "fp16.min_loss_scale",
        "log_level",
        "memory_breakdown",
        "optimizer",
        "scheduler",
        "steps_per_print",
        "tensorboard",
        "wandb",
    }
)


@dataclass(frozen=True)
class Refusal:
    """Refusal of a key whose feature Weft does not support.

    Attributes:
        remedy: what to do instead.
        harmless: values that do not use the feature, and are accepted.
        switch: key that enables the feature, if the key is a section.
        tuning: keys that do not enable the feature, if the section has no switch.
    """

    remedy: str
    harmless: tuple[Any, ...] = ()
    switch: str = "enabled"
    tuning: frozenset[str] = frozenset()

    def asks_for_nothing(self, value: Any) -> bool:
        """True if a value is accepted, because it is harmless or a section in which everything is off."""
        if isinstance(value, Mapping) and self.switch in value:
            return not value[self.switch]
        if isinstance(value, Mapping):
            return all(not part or key in self.tuning or self.asks_for_nothing(part) for key, part in value.items())
        return any(value is allowed or value == allowed for allowed in self.harmless)


_OUT = Refusal("leave it out")
_OFF = Refusal("leave it out, or set it to false", (False,))
_OFFLOAD = Refusal(
    "leave it out; zero_optimization.stage and more ranks share out what one cannot hold", (False, "none", None)
)
_QUANTISED = Refusal("leave it out; communication_data_type=bf16 halves what gradients move", (False,))
REFUSED: Mapping[str, Refusal] = {
    "activation_checkpointing": Refusal("set weft.pipeline.recompute=layers", tuning=frozenset({"number_checkpoints"})),
    "autotuning": Refusal("plan with `weft launch dry_run=true`"),
    "bf16.bf16_master_weights_and_grads": _OFF,
    "bf16.bf16_optimizer_states": Refusal("set weft.optimizer.state=bf16 instead", (False,)),
    "checkpoint": Refusal(
        "checkpoints are Weft's own; leave it out", tuning=frozenset({"tag_validation", "use_node_local_storage"})
    ),
    "comms_logger.enabled": Refusal("transfers are in the timeline: set weft.train.timeline=true", (False,)),
    "compile": Refusal("leave it out", switch="deepcompile"),
    "data_efficiency": Refusal("leave it out", tuning=frozenset({"seed"})),
    "data_types.grad_accum_dtype": Refusal(
        "gradients are added up in fp32; leave it out, or set fp32", ("fp32", "float32", "float", "torch.float32", None)
    ),
    "datastates_ckpt": Refusal("checkpoints are Weft's own; leave it out"),
    "expert_parallel": _OUT,
    "flops_profiler": Refusal("leave it out; the run reports its own throughput"),
    "fp16.auto_cast": _OFF,
    "fp16.fp16_master_weights_and_grads": _OFF,
    "gradient_allreduce_op": Refusal("losses are averaged over the tokens of a step; leave it out", ("mean",)),
    "hybrid_engine": _OUT,
    "managed_gradient_accumulation": Refusal("set gradient_accumulation_steps", (True,)),
    "pipeline": Refusal("set weft.pipeline", ("best",), tuning=frozenset({"pipe_partitioned", "grad_partitioned"})),
    "sequence_parallel_size": Refusal("leave it out", (1,)),
    "tensor_parallel": Refusal("leave it out", switch="autotp_size"),
    "torch_autocast": Refusal("use bf16 or fp16"),
    "use_data_before_expert_parallelism": _OFF,
    "wall_clock_breakdown": Refusal("each rank's step is measured: set weft.train.timeline=true", (False,)),
    "weight_quantization": _OUT,
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.cpu_offload_param": _OFFLOAD,
    "zero_optimization.enable_sanity_checks": Refusal("set weft.pipeline.debug=true", (False,)),
    "zero_optimization.ignore_unused_parameters": Refusal(
        "a weight without a gradient is left alone in any case, as torch does; leave it out", (True,)
    ),
    "zero_optimization.legacy_stage1": _OFF,
    "zero_optimization.load_from_fp32_weights": Refusal("checkpoints hold fp32 weights; leave it out", (True,)),
    "zero_optimization.offload_optimizer.device": _OFFLOAD,
    "zero_optimization.offload_param.device": _OFFLOAD,
    "zero_optimization.save_muon_momentum_buffer_in_memory": _OFF,
    "zero_optimization.zenflow": Refusal("leave it out", (None,)),
    "zero_optimization.zero_hpz_partition_size": Refusal(
        "leave it out; a gathering crosses the slow link once, and goes on inside each node", (1,)
    ),
    "zero_optimization.zero_quantized_gradients": _QUANTISED,
    "zero_optimization.zero_quantized_nontrainable_weights": _QUANTISED,
    "zero_optimization.zero_quantized_weights": _QUANTISED,
}

_IN_CHUNKS = "gradients always lie in the flat buffer of their bucket"
_BY_COST = "each collective is chosen by cost (`zero.partition`)"
_BY_BLOCK = "a block is gathered while the previous one computes, and released after its use"
_NO_OFFLOAD = "there is no offloading"
_MEAN = "losses are divided by the tokens of the whole step, and gradients are sums"
# Keys that DeepSpeed knows, and why their values make no difference here.
WITHOUT_EFFECT: Mapping[str, str] = {
    "aio": _NO_OFFLOAD,
    "bf16.immediate_grad_update": "gradients are always added at once",
    "comms_logger": "switched off, it logs nothing",
    "data_types": "holds `grad_accum_dtype` alone",
    "disable_allgather": "DeepSpeed does not use it either",
    "timers": "DeepSpeed's pipeline does not use it either",
    "gradient_predivide_factor": _MEAN,
    "optimizer.legacy_fusion": "no optimiser wrapper of DeepSpeed is used",
    "prescale_gradients": _MEAN,
    "seq_parallel_communication_data_type": "there is no sequence parallelism",
    "vocabulary_size": "DeepSpeed only warns of sizes that are slow on GPUs",
    "zero_force_ds_cpu_optimizer": _NO_OFFLOAD,
    "zero_allow_untested_optimizer": "every element-wise optimiser is allowed",
    "zero_optimization.allgather_partitions": _BY_COST,
    "zero_optimization.compute_grad_norm": "nothing waits for a norm that is not needed",
    "zero_optimization.contiguous_gradients": _IN_CHUNKS,
    "zero_optimization.cpu_offload_use_pin_memory": _NO_OFFLOAD,
    "zero_optimization.elastic_checkpoint": "every checkpoint fits any number of replicas",
    "zero_optimization.gather_16bit_weights_on_model_save": "the export is always whole",
    "zero_optimization.leaf_module": "a decoder layer is always gathered whole",
    "zero_optimization.log_trace_cache_warnings": "the schedule replaces the trace",
    "zero_optimization.memory_efficient_linear": "autograd saves weights by reference at every stage",
    "zero_optimization.offload_optimizer": _NO_OFFLOAD,
    "zero_optimization.offload_param": _NO_OFFLOAD,
    "zero_optimization.override_module_apply": "buckets are made from initialised weights",
    "zero_optimization.parameter_alignment": "shards are aligned",
    "zero_optimization.pipeline_loading_checkpoint": "each rank reads the layers of its own stages",
    "zero_optimization.reduce_scatter": _BY_COST,
    "zero_optimization.round_robin_gradients": _NO_OFFLOAD,
    "zero_optimization.stage3_allgather_sequential": _BY_BLOCK,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "the export is always whole",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "the export is always whole",
    "zero_optimization.stage3_max_live_parameters": _BY_BLOCK,
    "zero_optimization.stage3_max_reuse_distance": _BY_BLOCK,
    "zero_optimization.stage3_module_granularity_threshold": _BY_BLOCK,
    "zero_optimization.stage3_prefetch_bucket_size": _BY_BLOCK,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _BY_COST,
    "zero_optimization.sub_group_size": _NO_OFFLOAD,
    "zero_optimization.use_multi_rank_bucket_allreduce": "a bucket is one collective over all replicas",
}


def handling(name: str) -> str:
    """Return the handling of a key, by the table's entry for the key or for a section above it.

    Returns:
        ``taken over``, ``read by DeepSpeed``, ``refused`` (unless harmless) or ``without effect``, or empty if
        the key is in no table.
    """
    tables = {
        "taken over": TAKEN_OVER,
        "refused": REFUSED,
        "without effect": WITHOUT_EFFECT,
        "read by DeepSpeed": READ_BY_DEEPSPEED,
    }
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        above = ".".join(parts[:length])
        for word, table in tables.items():
            if above in table:
                return word
    return ""


def key_table() -> list[str]:
    """Return Markdown lists of all keys by their handling, which `docs/zero.md` contains."""
    return [
        "**Taken over**: " + ", ".join(f"`{key}` ({field})" for key, field in TAKEN_OVER.items()),
        "",
        "**Read by DeepSpeed**: " + ", ".join(f"`{key}`" for key in sorted(READ_BY_DEEPSPEED)),
        "",
        "**Refused** (the error states the remedy): " + ", ".join(f"`{key}`" for key in REFUSED),
        "",
        "**Without effect**, with the reason:",
        "",
        *_by_text(WITHOUT_EFFECT),
    ]


def _by_text(texts: Mapping[str, str]) -> list[str]:
    together: dict[str, list[str]] = {}
    for key, text in texts.items():
        together.setdefault(text, []).append(f"`{key}`")
    return [f"- {', '.join(keys)}: {text}" for text, keys in together.items()]
