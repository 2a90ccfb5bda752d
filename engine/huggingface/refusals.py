"""Checks for features of the Trainer that a pipeline does not support, before any work is done."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import Trainer
from transformers.debug_utils import DebugOption

NO_LOGITS = "logits exist on the last stage only; save_model(), then use transformers.Trainer on the saved folder"
LEAVE_OUT = "leave it out"

TRL = "trl"
"""Package whose trainers run the model themselves, and read settings that other trainers ignore."""

_UNCALLED = {
    "training_step": "a schedule runs the micro-batches; override compute_loss",
    "create_optimizer": "a rank optimises its stages only, after the model is cut; override "
    "get_optimizer_cls_and_kwargs or get_decay_parameter_names",
    "_prepare_inputs": "the engine itself puts micro-batches on devices; change them in data_collator",
    "prediction_step": "a schedule runs the micro-batches of evaluations; override compute_loss or evaluate",
    "_get_num_items_in_batch": "the engine counts the labels of all replicas; override compute_loss",
    "_save": "no rank has the whole model; override save_model",
}
"""Methods of the Trainer that are not called, with the reason and the remedy."""


def _overrides(name: str, trainer: Trainer) -> bool:
    """True if the trainer's class has a method ``name`` that is neither transformers' nor Weft's."""
    return getattr(type(trainer), name).__module__.partition(".")[0] not in ("transformers", "weft")


_REFUSED: tuple[tuple[str, Callable[[Trainer], Any], str], ...] = (
    *((name, partial(_overrides, name), remedy) for name, remedy in _UNCALLED.items()),
    (
        "args of TRL",
        lambda t: _of_trl(type(t.args)),
        "only TRL's trainers read its own settings; give transformers.TrainingArguments, and prepare the data with "
        "TRL's functions and collators (docs/fine_tuning.md)",
    ),
    ("compute_metrics", lambda t: t.compute_metrics, NO_LOGITS),
    ("preprocess_logits_for_metrics", lambda t: t.preprocess_logits_for_metrics, NO_LOGITS),
    ("predict_with_generate", lambda t: getattr(t.args, "predict_with_generate", False), NO_LOGITS),
    (
        "optimizers",
        lambda t: t.optimizer or t.lr_scheduler,
        "a rank optimises its stages only, after the model is cut; give optim, or optimizer_cls_and_kwargs, and "
        "lr_scheduler_type, or override create_scheduler",
    ),
    (
        "max_grad_norm",
        lambda t: (t.args.max_grad_norm or 0) < 0,
        "no gradient has a norm below 0; give 0 to clip none",
    ),
    (
        "num_train_epochs",
        lambda t: t.args.max_steps <= 0 and t.args.num_train_epochs <= 0,
        "there would be no step to train; give more, or max_steps",
    ),
    (
        "optim",
        lambda t: _own_parameters(t),
        "it takes the whole model, of which a rank has a part; choose one of parameter groups, such as adamw_torch",
    ),
    (
        "lr_scheduler_type",
        lambda t: t.args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"),
        "it steps by a metric, and the engine's schedules step by the number of steps; choose another",
    ),
    (
        "scheduler (in deepspeed)",
        lambda t: "scheduler" in t.args.hf_deepspeed_config.config,
        "the Trainer makes the schedule and logs its rate; use lr_scheduler_type",
    ),
    (
        "zero_optimization.stage=3 (in deepspeed)",
        lambda t: t.args.hf_deepspeed_config.is_zero3(),
        "transformers would partition the model as it makes it; set weft.zero.stage=3 instead",
    ),
    (
        "fsdp",
        lambda t: t.args.fsdp,
        "it would shard the whole model over all ranks; leave it out, and set weft.zero.stage in deepspeed",
    ),
    (
        "parallelism_config",
        lambda t: t.args.parallelism_config,
        "accelerate would lay out the ranks; set weft.pipeline and weft.parallel in deepspeed",
    ),
    (
        "torch_compile",
        lambda t: t.args.torch_compile,
        "it compiles the whole model's forward, and a stage leaves the forward behind its last layer; " + LEAVE_OUT,
    ),
    (
        "auto_find_batch_size",
        lambda t: t.args.auto_find_batch_size,
        "it retries on the rank that is out of memory, while the others wait; set per_device_train_batch_size",
    ),
    (
        "neftune_noise_alpha",
        lambda t: t.args.neftune_noise_alpha is not None,
        "its hook is on the whole model's embedding, which is cut into stages after the hook is set; " + LEAVE_OUT,
    ),
    (
        "debug=underflow_overflow",
        lambda t: DebugOption.UNDERFLOW_OVERFLOW in t.args.debug,
        "its hooks expect the whole model to run, and a rank runs its own stages; " + LEAVE_OUT,
    ),
    (
        "enable_jit_checkpoint",
        lambda t: getattr(t.args, "enable_jit_checkpoint", False),
        "each rank would save by itself; leave it out, because checkpoint.on_signal saves on all ranks after one step",
    ),
    (
        "use_liger_kernel",
        lambda t: t.args.use_liger_kernel,
        "it replaces the whole model's forward, which runs in stages here; " + LEAVE_OUT,
    ),
    ("fp16_full_eval", lambda t: t.args.fp16_full_eval, "evaluation uses the training's precision; " + LEAVE_OUT),
    ("bf16_full_eval", lambda t: t.args.bf16_full_eval, "evaluation uses the training's precision; " + LEAVE_OUT),
    (
        "save_only_model",
        lambda t: t.args.save_only_model and t.args.load_best_model_at_end,
        "load_best_model_at_end loads the best weights from the engine's state, which would not be saved; " + LEAVE_OUT,
    ),
    (
        "torch_empty_cache_steps",
        lambda t: t.args.torch_empty_cache_steps,
        "a schedule runs the whole step, after which the next one needs the same memory; " + LEAVE_OUT,
    ),
    ("batch_eval_metrics", lambda t: t.args.batch_eval_metrics, NO_LOGITS),
    (
        "average_tokens_across_devices=False",
        lambda t: not t.args.average_tokens_across_devices,
        "losses are averaged over the tokens of all replicas; " + LEAVE_OUT,
    ),
    (
        "train_sampling_strategy",
        lambda t: t.args.train_sampling_strategy not in ("random", "sequential"),
        "it sorts the rows of each replica apart, and replicas share one order; choose random or sequential",
    ),
    (
        "split_batches",
        lambda t: t.args.accelerator_config.split_batches,
        "per_device_train_batch_size is per replica; " + LEAVE_OUT,
    ),
    (
        "dispatch_batches",
        lambda t: t.args.accelerator_config.dispatch_batches,
        "every rank reads its own batches; " + LEAVE_OUT,
    ),
)
"""Unsupported features: (name, function that returns a true value if the trainer uses it, remedy)."""


def _own_parameters(trainer: Trainer) -> bool:
    """True if the optimiser is created from the whole model instead of parameter groups."""
    kind, arguments = trainer.optimizer_cls_and_kwargs or Trainer.get_optimizer_cls_and_kwargs(
        trainer.args, trainer.model
    )
    return not isinstance(kind, type) or bool({"params", "model", "optimizer_dict"} & set(arguments))


def refuse_kind(kind: type[Trainer]) -> None:
    """Check that a trainer class does not also inherit from one of TRL's trainers, which run the model themselves.

    Raises:
        ValueError: it does. The message names the other class and the remedy.
    """
    others = [each.__name__ for each in kind.__mro__ if issubclass(each, Trainer) and _is_trl(each)]
    if others:
        raise ValueError(
            f"{kind.__name__}: TRL's {others[0]} puts a head of its own on the model and runs it, or a second model, "
            "in compute_loss; a pipeline runs one model, once for each micro-batch. Derive from WeftTrainer alone, "
            "give it TRL's collator, and compute the loss from the logits in compute_loss (docs/fine_tuning.md)"
        )


def _of_trl(kind: type) -> bool:
    return any(map(_is_trl, kind.__mro__))


def _is_trl(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == TRL


def refuse(trainer: Trainer) -> None:
    """Check that the trainer uses no unsupported feature.

    Raises:
        ValueError: it uses some. The message names each of them and the remedy.
    """
    asked = [f"{name}: {remedy}" for name, asks, remedy in _REFUSED if asks(trainer)]
    if asked:
        raise ValueError("WeftTrainer cannot do what is asked for:\n  " + "\n  ".join(asked))
