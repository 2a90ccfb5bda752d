"""The layout of a job that `TrainingArguments` configure: its stages, replicas and the engine's configuration."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from weft.conf.schema import WeftConfig
from weft.engine.deepspeed.keys import split_deepspeed_config


@dataclass(frozen=True)
class TrainerLayout:
    """Layout of the job, from ``args.deepspeed`` and the other arguments."""

    args: TrainingArguments

    def deepspeed(self) -> dict[str, Any]:
        """Return the DeepSpeed configuration, with the values that the Trainer has filled in.

        Raises:
            ValueError: it has no enabled section ``weft``.
        """
        given = getattr(self.args, "hf_deepspeed_config", None)
        if given is None or not isinstance(given.config.get("weft"), dict) or not given.config["weft"].get("enabled"):
            raise ValueError(
                'TrainingArguments.deepspeed: no section "weft": {"enabled": true, "pipeline": {"stages": ...}}; '
                "add it, or use transformers.Trainer"
            )
        return given.config

    @property
    def num_stages(self) -> int:
        """Number of pipeline ranks."""
        return int(self._section("pipeline").get("stages", WeftConfig().pipeline.stages))

    @property
    def lines_per_replica(self) -> int:
        """Number of ranks of a stage that share the work of one micro-batch."""
        given = self._section("parallel")
        return int(given.get("context", 1)) * int(given.get("tensor", 1))

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the model."""
        return max(1, self.args.world_size // (self.num_stages * self.lines_per_replica))

    @property
    def replica(self) -> int:
        """Index of the replica that this rank is part of."""
        return self.args.process_index // self.lines_per_replica % self.num_replicas

    def engine_config(self, num_steps: int) -> dict[str, Any]:
        """Return the DeepSpeed configuration of an engine that trains ``num_steps`` steps.

        Raises:
            ValueError: it contradicts the arguments, or has an invalid field.
        """
        args, tree = self.args, deepcopy(self.deepspeed())
        self._check_batch(tree.pop("train_batch_size", None))
        zero = tree.get("zero_optimization", {})
        for name in [name for name, value in zero.items() if value == "auto"]:
            del zero[name]
        tree |= {
            "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "gradient_clipping": args.max_grad_norm,
        }
        for kind in ("bf16", "fp16"):
            if getattr(args, kind):
                tree[kind] = tree.get(kind, {}) | {"enabled": True}
        tree["weft"]["train"] = {"seed": self.args.seed} | tree["weft"].get("train", {}) | {"steps": num_steps}
        split_deepspeed_config(tree)
        return tree

    def _check_batch(self, given: Any) -> None:
        args = self.args
        per_replica = args.per_device_train_batch_size * args.gradient_accumulation_steps
        # The Trainer treats every rank as a replica.
        theirs, ours = per_replica * args.world_size, per_replica * self.num_replicas
        wrong = [line for line in args.hf_deepspeed_config.mismatches if not line.startswith("- ds train_batch_size")]
        if given not in (None, theirs, ours):
            wrong.append(f"- ds train_batch_size={given} vs {ours} of the arguments and {self.num_replicas} replicas")
        if wrong:
            raise ValueError("TrainingArguments.deepspeed contradicts the arguments:\n" + "\n".join(wrong))

    def _section(self, name: str) -> dict[str, Any]:
        return self.deepspeed().get("weft", {}).get(name, {})
