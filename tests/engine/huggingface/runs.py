"""One training script, run by the stock Trainer and by Weft's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset
from transformers import TrainerCallback

from tests.shapes import sizes

VOCAB = 64


class Sequences(Dataset):
    """Sequences of random tokens with labels that start at uneven places."""

    def __init__(self, count: int, length: int = 12) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(VOCAB, (count, length), generator=generator)
        self.first = torch.randint(1, length - 2, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids[index].clone()
        labels[: self.first[index]] = -100
        return {"input_ids": self.ids[index], "labels": labels}


class Streamed(IterableDataset):
    """The same rows without a length."""

    def __init__(self, count: int) -> None:
        self.rows = Sequences(count)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.rows[i] for i in range(len(self.rows)))


def tiny_model(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    shape = sizes(hidden=32, inner=64, layers=4, heads=4, groups=2, words=VOCAB)
    return LlamaForCausalLM(LlamaConfig(**shape, attention_bias=True, tie_word_embeddings=False, **more))


def arguments(folder: str, **more: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        **{
            "output_dir": folder,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "warmup_steps": 3,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "logging_nan_inf_filter": False,
        }
        | more
    )


def section(stages: int, schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    """A DeepSpeed configuration with Weft switched on."""
    weft = {"enabled": True, "pipeline": {"stages": stages, "schedule": schedule}, "model": {"self_check": False}}
    auto = dict.fromkeys(("train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"), "auto")
    return auto | {"zero_optimization": {"stage": 0}, "weft": weft} | more


def history(trainer: Any) -> list[dict[str, float]]:
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step")
    logs = [{key: float(entry[key]) for key in keys if key in entry} for entry in trainer.state.log_history]
    return [entry for entry in logs if "loss" in entry or "eval_loss" in entry]


class Signalled(TrainerCallback):
    """Sends rank 1 a SIGTERM when a step begins."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step + 1 == self.step and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)


def with_own_loss(kind: Any) -> Any:
    """A Trainer that overrides ``compute_loss``: the usual loss, and one on the size of the logits."""

    class Own(kind):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # type: ignore[no-untyped-def]
            counts = inputs["labels"][:, 1:] != -100
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            sizes = outputs.logits[:, :-1].logsumexp(-1) ** 2
            loss = loss + 0.01 * (sizes * counts).sum() / (
                counts.sum() if num_items_in_batch is None else num_items_in_batch
            )
            return (loss, outputs) if return_outputs else loss

    return Own


def stock(
    folder: str, count: int, more: dict[str, Any], evaluate_first: bool = False, own_loss: bool = False
) -> list[dict[str, float]]:
    """Logs of the stock Trainer."""
    import torch.distributed as dist
    from transformers import Trainer

    torch.set_num_threads(1)
    trainer = (with_own_loss(Trainer) if own_loss else Trainer)(
        tiny_model(), arguments(folder, use_cpu=True, **more), train_dataset=Sequences(count), eval_dataset=Sequences(8)
    )
    if evaluate_first:
        trainer.evaluate()
    trainer.train()
    if dist.is_initialized():
        dist.barrier()
    return history(trainer)


def on_device(use_cpu: bool) -> None:
    """Unless on CPUs, let accelerate choose what it chooses on GPUs: DeepSpeed, on all ranks."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from weft.engine.distributed import init_distributed

    init_distributed(60)
    if not use_cpu:
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)


def weft(
    folder: str,
    count: int,
    more: dict[str, Any],
    deepspeed: dict[str, Any],
    resume: bool = False,
    save: str = "",
    model: dict[str, Any] | None = None,
    evaluate_first: bool | list[int] = False,
    own_loss: bool = False,
    signalled_at: int = 0,
) -> list[dict[str, float]]:
    """Logs of Weft's Trainer; those before a signal end with the exit code.

    Args:
        evaluate_first: before training; or on these numbers of rows, as a list and as a stream.
        signalled_at: step in which rank 1 gets a SIGTERM.
    """
    import torch.distributed as dist
    from transformers import DefaultDataCollator

    from weft import WeftTrainer
    from weft.engine.data.tokenizer import train_bpe

    collator: Any = DefaultDataCollator()
    collator.tokenizer = train_bpe(["a b"], 260)
    on_device(more.get("use_cpu", False))
    expected = eval_loss_by_hand()
    trainer = (with_own_loss(WeftTrainer) if own_loss else WeftTrainer)(
        tiny_model(**model or {}),
        arguments(folder, deepspeed=deepspeed, **more),
        train_dataset=Sequences(count),
        eval_dataset=Sequences(8),
        data_collator=collator,
    )
    if evaluate_first is True:
        found = trainer.evaluate()["eval_loss"]
        assert found > expected if own_loss else abs(found - expected) < 1e-4
    with torch.random.fork_rng():  # reading in between shuffles what comes after
        for rows in evaluate_first if isinstance(evaluate_first, list) else ():
            for data in (Sequences(rows), Streamed(rows)):
                found, by_hand = trainer.evaluate(data)["eval_loss"], eval_loss_by_hand(count=rows)
                assert abs(found - by_hand) < 1e-5, (data, rows, found, by_hand)
    trainer.state.log_history.clear()
    if signalled_at:
        trainer.add_callback(Signalled(signalled_at))
    try:
        trainer.train(resume_from_checkpoint=resume)
    except SystemExit as end:
        return [*history(trainer), {"exit": float(str(end.code))}]
    if save:
        trainer.save_model(save)
        assert dist.get_rank() or (Path(save) / "config.json").exists()
    dist.barrier()
    return history(trainer)


def operations(folder: str, stages: int, more: dict[str, Any]) -> list[float]:
    """``total_flos`` of the stock Trainer, or of Weft's over some layouts, each of two steps."""
    from transformers import Trainer

    from weft import WeftTrainer

    on_device(True)
    found = []
    for schedule in ("1f1b", "w") if stages else ("",):
        deepspeed = section(stages, schedule) if stages else None
        if schedule == "w":
            deepspeed["weft"]["pipeline"]["placement"] = "fold"  # type: ignore[index]
        used = arguments(folder, use_cpu=True, deepspeed=deepspeed, max_steps=2, **more)
        trainer = (WeftTrainer if stages else Trainer)(tiny_model(), used, train_dataset=Sequences(40))
        trainer.train()
        found.append(trainer.state.total_flos)
    return found


def other_base(folder: str, more: dict[str, Any], deepspeed: dict[str, Any]) -> list[bool]:
    """True for each model that goes on from a checkpoint: of its base, of another, and of its own export."""
    from transformers import AutoModelForCausalLM

    from weft import WeftTrainer

    on_device(True)
    for seed, name in enumerate(("one", "other")):
        model = tiny_model()
        torch.manual_seed(seed)
        type(model)(model.config).save_pretrained(Path(folder, name))
    checkpoint = Path(folder, "run", "checkpoint-1")
    goes_on = []
    for number, name in enumerate((Path(folder, "one"), Path(folder, "one"), Path(folder, "other"), checkpoint)):
        steps = {"max_steps": number + 1, "save_strategy": "steps" if number == 0 else "no"}
        used = arguments(str(Path(folder, "run")), deepspeed=deepspeed, **more | steps)
        trainer = WeftTrainer(AutoModelForCausalLM.from_pretrained(name), used, train_dataset=Sequences(40))
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if number else None)
            goes_on.append(True)
        except ValueError as error:
            assert "other weights" in str(error)
            goes_on.append(False)
    return goes_on[1:]


def over_sites(folder: str, count: int, more: dict[str, Any], deepspeed: dict[str, Any]) -> list[dict[str, float]]:
    """Logs of Weft's Trainer in a job over several sites, where no group was there before."""
    import torch.distributed as dist

    import weft as package
    from weft.comm.job import current_job
    from weft.comm.wan.sites.group import SiteGroup

    package.init_distributed(deepspeed)
    assert current_job().address
    logs = weft(folder, count, more, deepspeed)
    assert current_job().address
    groups = [group for group in dist.distributed_c10d._world.pg_map if group.size() == dist.get_world_size()]
    assert all(isinstance(group, SiteGroup) for group in groups)
    return logs


def readme_example(code: str, folder: str) -> float:
    """The steps that a piece of a script has trained."""
    from functools import partial

    from transformers import TrainingArguments

    import weft

    arguments = partial(TrainingArguments, use_cpu=True, report_to="none", save_strategy="no")
    scope = {"weft": weft, "TrainingArguments": arguments, "folder": folder}
    scope |= {"model": tiny_model(), "dataset": Sequences(16)}
    exec(code, scope)
    return scope["trainer"].state.global_step


def eval_loss_by_hand(folder: str = "", count: int = 8) -> float:
    """Mean loss over the tokens of the evaluation data, by plain transformers."""
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder) if folder else tiny_model()
    rows = [Sequences(count)[i] for i in range(count)]
    ids, labels = (torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = model.eval()(ids).logits[:, :-1]
    return float(cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100))


def refusals(folder: str) -> dict[str, str]:
    """Return the message of Weft's Trainer for each unsupported feature."""
    import transformers

    from weft import WeftTrainer
    from weft.engine.huggingface.refusals import _UNCALLED

    def own(name: str) -> Any:
        return type("Own", (WeftTrainer,), {name: lambda self, *args: getattr(super(type(self), self), name)(*args)})

    on_device(True)
    said = {}

    def attempt(name: str, kind: Any = WeftTrainer, action: Any = None, deepspeed: Any = None, **more: Any) -> None:
        names = {"compute_metrics", "preprocess_logits_for_metrics", "optimizers"} & more.keys()
        own = {key: more.pop(key) for key in names}
        try:
            used = arguments(folder, deepspeed=deepspeed or section(1), **{"use_cpu": True} | more)
            trainer = kind(tiny_model(), used, train_dataset=Sequences(8), eval_dataset=Sequences(8), **own)
            if action is not None:
                action(trainer)
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)

    def nothing(*_: Any, **__: Any) -> None:
        return None

    of_trl = type("SFTTrainer", (transformers.Trainer,), {"__module__": "trl.trainer.sft_trainer"})
    attempt("TRL's SFTTrainer", type("Mixed", (WeftTrainer, of_trl), {}))
    foreign = arguments(folder, deepspeed=section(1), use_cpu=True)
    foreign.__class__ = type("SFTConfig", (transformers.TrainingArguments,), {"__module__": "trl.trainer.sft_config"})
    attempt("args of TRL", lambda model, _, **__: WeftTrainer(model, foreign))
    for name in _UNCALLED:
        attempt(name, own(name))
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        attempt(name, **{name: nothing})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    attempt("optimizers", optimizers=(optimizer, None))
    attempt("lr_scheduler_type, or", optimizers=(None, torch.optim.lr_scheduler.ConstantLR(optimizer)))
    attempt("max_grad_norm", max_grad_norm=-1.0)
    attempt("num_train_epochs", num_train_epochs=0)
    attempt("lr_scheduler_type", lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps")
    attempt("torch_compile", torch_compile=True)
    attempt("auto_find_batch_size", auto_find_batch_size=True)
    attempt("neftune_noise_alpha", neftune_noise_alpha=0.1)
    attempt("debug=underflow_overflow", debug="underflow_overflow")
    attempt("bf16_full_eval", bf16_full_eval=True)
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    attempt("save_only_model", save_only_model=True, **best)
    attempt("torch_empty_cache_steps", torch_empty_cache_steps=1)
    attempt("average_tokens_across_devices=False", average_tokens_across_devices=False)
    attempt("train_sampling_strategy", train_sampling_strategy="group_by_length")
    attempt("split_batches", accelerator_config={"split_batches": True})
    attempt("predict", action=lambda trainer: trainer.predict(Sequences(4)))
    attempt("hyperparameter_search", action=lambda trainer: trainer.hyperparameter_search())
    attempt("fsdp", fsdp=True)
    attempt("zero_optimization.stage=3", deepspeed=section(1, zero_optimization={"stage": 3}))
    attempt("no section", deepspeed={"zero_optimization": {"stage": 1}})
    attempt("contradicts", deepspeed=section(1, train_micro_batch_size_per_gpu=5))
    real = transformers.TrainingArguments.world_size.fget
    transformers.TrainingArguments.world_size = property(lambda self: real(self) + 1)  # type: ignore[misc]
    attempt("use_cpu=True")
    transformers.TrainingArguments.world_size = property(real)  # type: ignore[misc]
    wrong = section(1)
    wrong["weft"]["pipeline"]["no_such_field"] = 1
    attempt("no_such_field", deepspeed=wrong)
    attempt("trained already", action=lambda trainer: (trainer.train(), trainer.train()))
    attempt("no whole checkpoint", action=lambda trainer: trainer.train(resume_from_checkpoint=True))
    return said
