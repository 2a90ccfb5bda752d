"""WeftTrainer: transformers' training loop over a Weft engine, for existing Trainer scripts."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from signal import SIGTERM
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
from transformers.trainer_callback import TrainerCallback, TrainerControl
from transformers.trainer_utils import EvalLoopOutput

from weft.engine.checkpoint.exporting import check_export, export
from weft.engine.checkpoint.origin import flat
from weft.engine.distributed import from_rank_zero
from weft.engine.engine import WeftEngine
from weft.engine.huggingface.checkpoint_folders import ENGINE_STATE, move_into, whole_checkpoint
from weft.engine.huggingface.inputs import inputs_of
from weft.engine.huggingface.layout import TrainerLayout
from weft.engine.huggingface.microbatches import EveryNthBatch, any_batch, check_inputs, filled
from weft.engine.huggingface.objective import trainer_objective
from weft.engine.huggingface.refusals import NO_LOGITS, refuse, refuse_kind
from weft.engine.initialize import init_distributed, initialize
from weft.engine.models.skeleton import hf_model
from weft.engine.precision import EXPORTED
from weft.engine.stop_signals import Stopped, StopSignals


class _SaveWhenStopped(TrainerCallback):
    """Callback that makes the Trainer save and end after the step in which all ranks agree to stop."""

    def __init__(self, trainer: WeftTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        """Request a checkpoint and the end of training if the engine must stop."""
        engine = self._trainer.engine
        if engine is not None and engine.must_stop:
            control.should_save = control.should_training_stop = True


OF_THE_START = ("deepspeed", "output_dir", "logging_dir", "run_name", "local_rank", "resume_from_checkpoint")
"""Arguments that may differ between starts of a run, or that the engine handles itself."""


class WeftTrainer(Trainer):
    """`transformers.Trainer` whose model is a pipeline.

    It is configured by ``TrainingArguments(deepspeed={..., "weft": {"enabled": True, "pipeline": {"stages": 4,
    ...}}})``. ``per_device_train_batch_size`` is the size of a micro-batch, and ``gradient_accumulation_steps`` is the
    number of micro-batches per step. A step takes that many from each replica (world size / stages). Data,
    learning-rate schedule, callbacks, logs, evaluation and checkpoints are the Trainer's and behave as in transformers.
    Differences:

    - ``eval_loss`` is the mean over all tokens, not over batches of unequal size.
    - A checkpoint's optimiser state fits any number of stages and replicas.
    - A custom loss (``compute_loss_func``, label smoothing, an overridden ``compute_loss``) runs on the last stage
      as on a single process, see `weft.engine.huggingface.objective`.
    - ``on_pre_optimizer_step`` is called after the step, when gradients are no longer available.
    """

    control: TrainerControl
    optimizer: Optimizer | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of `transformers.Trainer`.

        Raises:
            ValueError: the section ``weft`` is missing or invalid, or an argument is not supported in a pipeline.
        """
        refuse_kind(type(self))
        super().__init__(*args, **kwargs)
        if self.args.world_size != dist.get_world_size():
            raise ValueError(
                f"TrainingArguments sees {self.args.world_size} ranks, the job has {dist.get_world_size()}; on CPUs "
                "set use_cpu=True"
            )
        refuse(self)
        self.engine: WeftEngine | None = None
        self._pending: list[dict[str, Tensor]] = []
        self._rate, self._num_parameters, self._num_rows = 0.0, 0, 0
        self._signals: StopSignals | None = None
        self.add_callback(_SaveWhenStopped(self))
        self._layout.engine_config(1)

    # -- layout --------------------------------------------------------------------------------

    @property
    def _layout(self) -> TrainerLayout:
        return TrainerLayout(self.args)

    @property
    def num_stages(self) -> int:
        """Number of pipeline ranks."""
        return self._layout.num_stages

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the model."""
        return self._layout.num_replicas

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator. Only data loaders are prepared, and divided over replicas instead of ranks."""
        init_distributed(self._layout.deepspeed(), timeout_s=self.args.ddp_timeout)
        super().create_accelerator_and_postprocess()
        if self.args.deepspeed:  # num_steps of accelerator_config, or a script, may have changed the arguments
            self.args.hf_deepspeed_config = HfTrainerDeepSpeedConfig(self.args.deepspeed)
            self.args.hf_deepspeed_config.trainer_config_process(self.args)
        self.accelerator.prepare = self._share_loader

    def _share_loader(self, loader: DataLoader, even: bool | None = None) -> DataLoader:
        """Return this replica's share of a data loader. All ranks of the replica read the same share.

        Args:
            even: repeat rows until all replicas have equally many. None takes it from the arguments.
        """
        accelerator = self.accelerator
        return prepare_data_loader(
            loader,
            num_processes=self.num_replicas,
            process_index=self._layout.replica,
            put_on_device=False,
            rng_types=accelerator.rng_types.copy(),
            dispatch_batches=False,
            even_batches=accelerator.even_batches if even is None else even,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
        )

    # -- the engine ----------------------------------------------------------------------------

    def _make_engine(self, num_steps: int) -> WeftEngine:
        """Cut the model into stages, and make the engine. Afterwards a rank has only its own stages."""
        if self.args.gradient_checkpointing and not self.model.is_gradient_checkpointing:
            # The model is evaluated before training. Later, `train` would enable checkpointing on the first stage only.
            kwargs = dict(self.args.gradient_checkpointing_kwargs or {})
            own = {name: kwargs.pop(name) for name in ("every_n_layers", "offload") if name in kwargs}
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs or None, **own)
        if hasattr(self.model, "num_parameters"):
            self._num_parameters = self.model.num_parameters(exclude_embeddings=True)
        self._num_rows = hf_model(self.model).config.get_text_config().vocab_size
        decayed = set(self.get_decay_parameter_names(self.model))
        decay = {parameter for name, parameter in self.model.named_parameters() if name in decayed}

        def optimizer(groups: list[dict[str, Any]]) -> Optimizer:
            kind, arguments = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            held = [parameter for group in groups for parameter in group["params"]]
            parts = [
                {"params": [p for p in held if p in decay], "weight_decay": self.args.weight_decay},
                {"params": [p for p in held if p not in decay], "weight_decay": 0.0},
            ]
            return kind([part for part in parts if part["params"]] or parts[:1], **arguments)

        def scheduler(stepped: Optimizer) -> LRScheduler:
            self.lr_scheduler = None
            return self.create_scheduler(num_training_steps=num_steps, optimizer=stepped)

        config = self._layout.engine_config(num_steps)
        engine, *_ = initialize(
            model=self.model,
            optimizer=None if "optimizer" in config else optimizer,
            lr_scheduler=scheduler,
            config=config,
            loss=trainer_objective(self),
        )
        assert engine.replica == self._layout.replica
        arguments = {name: value for name, value in self.args.to_dict().items() if name not in OF_THE_START}
        inputs = from_rank_zero(partial(inputs_of, self.train_dataset, self.processing_class))
        engine.origin = replace(engine.origin, settings={**engine.origin.settings, **flat(arguments)}, inputs=inputs)
        return engine

    def _ready(self, num_steps: int) -> WeftEngine:
        if self.engine is None:
            self.engine = self.model_wrapped = self.deepspeed = self._make_engine(num_steps)
            self.optimizer = DeepSpeedOptimizerWrapper(self.engine.optimizer)
            self.lr_scheduler = DeepSpeedSchedulerWrapper(self.engine.lr_scheduler, self.optimizer)
        return self.engine

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        engine = self._ready(max_steps)
        if self.args.save_strategy != "no":
            dtype = EXPORTED.get(engine.weft.train.export_dtype)
            check_export(engine, Path(self.args.output_dir) / "export", tokenizer=self._saved_tokenizer, dtype=dtype)
        if resume_from_checkpoint is not None:
            self._restore(resume_from_checkpoint)
        if engine.weft.checkpoint.on_signal:
            self._signals = engine.stop_signals = StopSignals(engine.weft.checkpoint.signal_deadline_s).open()
            self._signals.defer()
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return engine, train_dataloader

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does. ``resume_from_checkpoint=True`` resumes the last complete checkpoint.

        Raises:
            ValueError: this trainer has trained before, or there is no checkpoint to resume from.
            Stopped: a signal has ended training (``checkpoint.on_signal``). Raised on every rank after the checkpoint.
        """
        if self.engine is not None and self.engine.global_steps:
            raise ValueError("train(): this trainer has trained already; make a new WeftTrainer")
        if resume_from_checkpoint:
            choose = partial(whole_checkpoint, resume_from_checkpoint, self.args.output_dir)
            resume_from_checkpoint = from_rank_zero(choose)
        try:
            output = super().train(resume_from_checkpoint, *args, **kwargs)
            self._end_if_stopped()
            if self.engine is not None:
                self.engine.correct_measurements()
        finally:
            if self._signals is not None:
                self._signals.close()
        return output

    def _end_if_stopped(self) -> None:
        """Raise `Stopped` if a signal has ended training, because code after `train` in a script expects all steps."""
        engine, signals = self.engine, self._signals
        if engine is None or signals is None or not engine.must_stop:
            return
        if self.args.should_log:
            step, where = self.state.global_step, self.args.output_dir
            text = f"stopped after step {step} of {self.state.max_steps}: train(resume_from_checkpoint=True) resumes"
            print(f"{text} there, from {where}/checkpoint-{step}", flush=True)
        dist.barrier()  # launchers end all ranks when the first has ended
        raise Stopped(128 + (signals.number or SIGTERM))

    # -- the step ------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Store a micro-batch. With the last one of a step, train on all of them.

        Returns:
            For the last micro-batch the step's loss, averaged over the tokens of all replicas. Otherwise 0.
        """
        engine = self.engine
        assert engine is not None
        check_inputs(inputs, self._num_rows)
        self._pending.append(inputs)
        if not self.accelerator.gradient_state.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._pending = self._pending, []
        self._rate = float(engine.get_lr()[0])
        loss = engine.train_batch(filled(batches, batches[0], engine.micro_batches))
        return loss.detach().to(self.args.device)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        """Return None, because the engine counts tokens itself."""

    def _clip_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        """Return the gradient norm of the last step, before clipping, or 0 if there is none."""
        assert self.engine is not None
        return self.engine.get_global_grad_norm() or 0.0

    _get_grad_norm = _clip_grad_norm

    def _get_learning_rate(self) -> float:
        return self._rate

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of sequences per step over all replicas."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.num_replicas

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Return this rank's share of the model's FLOPs for a batch. The Trainer sums the shares over ranks.

        All ranks of a replica read the same batch, so its FLOPs are divided by the number of these ranks.
        """
        name = getattr(self.model, "main_input_name", "input_ids")
        if name not in inputs or not self._num_parameters:
            return 0.0
        ranks = self.num_stages * self._layout.lines_per_replica
        return 6.0 * inputs[name].numel() * self._num_parameters / ranks

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        ranks = self.num_stages * self._layout.lines_per_replica
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // ranks

    # -- evaluation ----------------------------------------------------------------------------

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Return the Trainer's loader for evaluation, but without repeated rows.

        So replicas may have unequal shares.
        """
        prepare, self.accelerator.prepare = self.accelerator.prepare, self._share_evaluation
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.accelerator.prepare = prepare

    def _share_evaluation(self, loader: DataLoader) -> DataLoader:
        if not isinstance(loader.dataset, IterableDataset):
            return self._share_loader(loader, even=False)
        if self.num_replicas > 1:
            return DataLoader(
                EveryNthBatch(loader.dataset, loader.batch_size or 1, self._layout.replica, self.num_replicas),
                batch_size=loader.batch_size,
                collate_fn=loader.collate_fn,
            )
        return loader

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Compute the mean loss over all tokens. As many batches run at a time as in a training step."""
        engine = self._ready(self._planned_steps())
        self.callback_handler.eval_dataloader = dataloader
        total = torch.zeros(2, dtype=torch.float64)
        iterator, spare, num_rows = iter(dataloader), None, 0
        while True:
            batches = list(islice(iterator, engine.micro_batches))
            for batch in batches:
                check_inputs(batch, self._num_rows)
            labels = [batch["labels"] for batch in batches]
            own = sum(map(len, labels)), sum(map(engine.step_loss.items, batches))
            read = torch.tensor(own, device=self.args.device)
            if engine.num_replicas > 1:
                dist.all_reduce(read, group=engine.grid.get_data_parallel_group())
            rows, items = read.tolist()
            if not rows:
                break
            num_rows += rows
            spare = batches[0] if batches else spare or any_batch(dataloader)
            if items:
                loss = engine.eval_batch(filled(batches, spare, engine.micro_batches))
                assert isinstance(loss, Tensor)
                total += torch.tensor([float(loss) * items, items], dtype=torch.float64)
            for _ in batches:
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        metrics = {f"{metric_key_prefix}_loss": float(total[0] / total[1])} if total[1] else {}
        return EvalLoopOutput(None, None, metrics, num_rows)

    def _planned_steps(self) -> int:
        """Return the steps of the schedule, which an evaluation before training needs, or 1 without training data."""
        if self.engine is not None or self.train_dataset is None:
            return 1
        return self.set_initial_training_values(self.args, self.get_train_dataloader())[-1]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a `ValueError`, because logits exist only on the last stage."""
        raise ValueError(f"predict: {NO_LOGITS}")

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a `ValueError`, because a pipeline runs one trial."""
        raise ValueError("hyperparameter_search: start one run per trial")

    # -- checkpoints ---------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as a Hugging Face folder, from the stages of all ranks. All ranks must call it."""
        folder = Path(output_dir or self.args.output_dir)
        if self.engine is None:
            if self.args.should_save:
                self._save(str(folder))
        else:
            part = folder / "export"
            if self.args.should_save:
                folder.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            dtype = EXPORTED.get(self.engine.weft.train.export_dtype)
            export(self.engine, part, tokenizer=self._saved_tokenizer, dtype=dtype)
            if self.args.should_save:
                move_into(part, folder)
                torch.save(self.args, folder / "training_args.bin")
            dist.barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    @property
    def _saved_tokenizer(self) -> Any:
        """The processing class that a saved folder gets, or without one the collator's tokenizer, as in `_save`."""
        return self.processing_class or getattr(self.data_collator, "tokenizer", None)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        self.engine.save_checkpoint(os.path.join(output_dir, ENGINE_STATE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Do nothing, because the engine is restored after it has been created."""

    def _load_best_model(self) -> None:
        self._restore(self.state.best_model_checkpoint)

    def _restore(self, checkpoint: str) -> None:
        assert self.engine is not None
        path, _ = self.engine.load_checkpoint(os.path.join(checkpoint, ENGINE_STATE))
        if path is None:
            raise ValueError(f"resume_from_checkpoint={checkpoint}: it holds no whole checkpoint of WeftTrainer")
