"""Configurations as people carry them from project to project: boilerplate passes, and changes nothing."""

import pytest

from weft.conf.checks import check
from weft.engine.deepspeed.keys import split_deepspeed_config

ADAMW = {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
WARMUP = {"type": "WarmupDecayLR", "params": {"total_num_steps": 900, "warmup_min_lr": 0, "warmup_num_steps": 90}}
BATCH = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
LOSS_SCALE = {
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
NO_RECOMPUTATION = {
    "partition_activations": False,
    "cpu_checkpointing": False,
    "contiguous_memory_optimization": False,
    "number_checkpoints": None,
    "synchronize_checkpoint_boundary": False,
    "profile": False,
}
NO_PROFILE = {
    "enabled": False,
    "profile_step": 5,
    "module_depth": -1,
    "top_modules": 3,
    "detailed": True,
    "output_file": None,
}
BUCKETS = {
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
}
STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": 1e7,
    "stage3_prefetch_bucket_size": 9e6,
    "stage3_param_persistence_threshold": 4e4,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}

FILES = {
    "zero 2 of a fine-tuning tutorial": {
        "fp16": {"enabled": False} | LOSS_SCALE,
        "bf16": {"enabled": True},
        "optimizer": ADAMW,
        "scheduler": WARMUP,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True} | BUCKETS,
        "gradient_clipping": 1.0,
        "steps_per_print": 2000,
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "wall_clock_breakdown": False,
    },
    "zero 3 with its offloading switched off": {
        "bf16": {"enabled": True},
        "zero_optimization": STAGE_3
        | {
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "offload_param": {"device": "none", "pin_memory": True},
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
    },
    "zero 0 of a training framework": {
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": False} | LOSS_SCALE,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 0, "round_robin_gradients": True} | BUCKETS,
    },
    "everything listed, everything off": {
        "activation_checkpointing": NO_RECOMPUTATION,
        "autotuning": {"enabled": False, "fast": True},
        "comms_logger": {"enabled": False, "verbose": False, "prof_all": True, "debug": False},
        "csv_monitor": {"enabled": False, "output_path": "out", "job_name": "run"},
        "data_efficiency": {"enabled": False, "seed": 1234, "data_sampling": {"enabled": False}},
        "flops_profiler": NO_PROFILE,
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1},
        "tensorboard": {"enabled": False},
        "torch_autocast": {"enabled": False},
        "wandb": {"enabled": False},
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
        "prescale_gradients": False,
    },
    "compilation and tensor parallelism off": {
        "compile": {"deepcompile": False, "free_activation": False, "free_activation_threshold": 10485760},
        "tensor_parallel": {"autotp_size": 0, "tp_overlap_comm": False},
        "sequence_parallel_size": 1,
        "pipeline": {},
        "checkpoint": {
            "tag_validation": "Ignore",
            "load_universal": False,
            "parallel_write": {"pipeline_stage": False},
        },
    },
    "sections without an entry": {
        "activation_checkpointing": {},
        "autotuning": {},
        "checkpoint": {},
        "compile": {},
        "data_efficiency": {},
        "flops_profiler": {},
        "hybrid_engine": {},
        "tensor_parallel": {},
    },
    "pipeline with DeepSpeed's own defaults": {
        "pipeline": {
            "partition": "best",
            "seed_layers": False,
            "activation_checkpoint_interval": 0,
            "pipe_partitioned": True,
            "grad_partitioned": True,
        }
    },
    "of an older DeepSpeed": {
        "fp16": {"enabled": False},
        "amp": {"enabled": False, "opt_level": "O1"},
        "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "progressive_layer_drop": {"enabled": False},
        "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen"},
        "eigenvalue": {"enabled": False},
        "compression_training": {},
        "nebula": {"enabled": False},
        "sparse_gradients": False,
    },
    "a number of checkpoints, and nothing to be checkpointed": {
        "activation_checkpointing": NO_RECOMPUTATION | {"number_checkpoints": 4},
    },
    "gradients as they are anyway": {
        "gradient_allreduce_op": "mean",
        "managed_gradient_accumulation": True,
        "use_data_before_expert_parallelism": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    },
    "zero++ not used": {
        "zero_optimization": STAGE_3
        | {"zero_hpz_partition_size": 1, "zero_quantized_weights": False, "zero_quantized_gradients": False},
    },
    "old spelling of bf16": {"bfloat16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "logs of a hosted run": {
        "tensorboard": {"enabled": True, "output_path": "out", "job_name": "run"},
        "wandb": {"enabled": False, "project": "mine"},
        "steps_per_print": 10,
    },
}


@pytest.mark.parametrize("name", FILES)
def test_boilerplate_passes(name):
    user = BATCH | FILES[name] | {"weft": {"enabled": True}}
    if "train_batch_size" in user:
        user.pop("gradient_accumulation_steps")
    config, kept = split_deepspeed_config(user)
    check(config)
    assert not {"activation_checkpointing", "amp", "autotuning", "compile", "flops_profiler", "pipeline"} & set(kept)


@pytest.mark.parametrize(
    "name", ["everything listed, everything off", "sections without an entry", "of an older DeepSpeed"]
)
def test_what_is_off_changes_nothing(name):
    weft = {"weft": {"enabled": True}}
    assert split_deepspeed_config(BATCH | FILES[name] | weft)[0] == split_deepspeed_config(BATCH | weft)[0]


def test_buckets_may_be_written_as_powers_of_ten():
    config, _ = split_deepspeed_config(BATCH | {"zero_optimization": STAGE_3, "weft": {"enabled": True}})
    assert (config.zero.reduce_bucket_size, config.zero.param_persistence_threshold) == (10_000_000, 40_000)
