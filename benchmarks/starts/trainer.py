"""The peer of `weft launch recipe=lora`: a rank of torchrun with transformers' Trainer and peft."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments


class _Steps(TrainerCallback):
    """A callback with which rank 0 writes a line to a file for every step."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        if args.process_index == 0:
            with self._file.open("a") as file:
                file.write(f"{state.global_step}\n")


def main(model_path: str, data: str, length: int, steps: int, folder: Path) -> None:
    """Train adapters for ``steps`` steps of two micro-batches of a sequence, save a checkpoint and the adapters."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_path), lora)

    def encode(row: dict[str, str]) -> dict[str, list[int]]:
        ids = tokenizer(row["prompt"] + row["completion"], max_length=length, truncation=True)["input_ids"]
        pad = length - len(ids)
        return {
            "input_ids": ids + [0] * pad,
            "attention_mask": [1] * len(ids) + [0] * pad,
            "labels": ids + [-100] * pad,
        }

    rows = load_dataset("json", data_files=data, split="train")
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=steps,
        logging_steps=1,
        save_steps=steps,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=rows.map(encode, remove_columns=rows.column_names),
        callbacks=[_Steps(folder / "steps")],
    )
    trainer.train()
    trainer.save_model(str(folder / "export"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
