"""Direct preference optimisation (Rafailov et al. 2023) over a pipeline, as TRL's DPOTrainer computes it.

The data are JSON lines with ``prompt``, ``chosen`` and ``rejected``. What the reference model says of both answers are
columns of the data, for a pipeline runs one model: the first command adds them, in one process, and the second trains.

    python examples/dpo.py reference MODEL PAIRS.jsonl PAIRS-WITH-REFERENCE.jsonl
    torchrun --nproc-per-node 4 examples/dpo.py train MODEL PAIRS-WITH-REFERENCE.jsonl OUTPUT --stages 4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, logsigmoid
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import weft
from weft.engine.data.rows import read_rows

BETA = 0.1
REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
"""Columns; DPOTrainer writes the same ones with ``precompute_ref_log_probs``."""
SIDES = ("chosen", "rejected")


def encode(tokenizer: Any, row: Mapping[str, Any], longest: int) -> dict[str, Any] | None:
    """Token ids of a pair, as TRL's DPOTrainer makes them: the prompt's, and those of both answers.

    A prompt and its answer are tokenised together, because tokens may span both; the answers begin where the three
    texts differ. Prompt and answers are texts, or lists of messages.

    Returns:
        None if the prompt leaves no tokens for an answer.
    """
    if isinstance(row["prompt"], list):
        tools = {"tools": row.get("tools"), "return_dict": True}
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, **tools)["input_ids"]
        whole = [tokenizer.apply_chat_template(row["prompt"] + row[side], **tools)["input_ids"] for side in SIDES]
    else:
        end = tokenizer.eos_token or ""
        prompt = tokenizer(row["prompt"])["input_ids"]
        whole = [tokenizer(row["prompt"] + row[side].removesuffix(end) + end)["input_ids"] for side in SIDES]
    shared = sum(1 for _ in takewhile(lambda each: len({*each}) == 1, zip(prompt, *whole, strict=False)))
    if shared >= longest:
        return None
    answers = {f"{side}_ids": ids[shared:longest] for side, ids in zip(SIDES, whole, strict=True)}
    return {"prompt_ids": prompt[:shared], **answers, **{name: row[name] for name in REFERENCE if name in row}}


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A micro-batch of P pairs, chosen answers first: ids, labels, mask [2 P, S], and what the reference says [2 P]."""
    sides = [(row["prompt_ids"], row[f"{side}_ids"]) for side in SIDES for row in rows]
    ids = [torch.tensor([*prompt, *answer]) for prompt, answer in sides]
    labels = [torch.tensor([-100] * len(prompt) + [*answer]) for prompt, answer in sides]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }
    if REFERENCE[0] in rows[0]:
        batch["reference"] = torch.tensor([float(row[name]) for name in REFERENCE for row in rows])
    return batch


def answers_logps(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability [2 P] of each answer, by logits [2 P, S, V] and labels [2 P, S]."""
    targets = labels[:, 1:]
    each = log_softmax(logits[:, :-1].float(), -1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return each.masked_fill(targets == -100, 0.0).sum(-1)


class DPOTrainer(weft.WeftTrainer):
    """Makes chosen answers likelier than rejected ones, measured from the reference."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_is_scaled_for_ga = False  # `compute_loss` is a mean over pairs

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Equation 7 of the paper; runs on the last stage, on the logits of the micro-batch."""
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        chosen, rejected = (answers_logps(outputs.logits, inputs["labels"]) - inputs["reference"]).chunk(2)
        loss = -logsigmoid(BETA * (chosen - rejected)).mean()
        return (loss, outputs) if return_outputs else loss


def add_reference(model: Any, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Encoded pairs with what ``model`` says of them."""
    with torch.no_grad():
        said = []
        for row in rows:
            batch = collate([row])
            logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            said.append(answers_logps(logits, batch["labels"]).tolist())
    return [{**row, **dict(zip(REFERENCE, each, strict=True))} for row, each in zip(rows, said, strict=True)]


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["reference", "train"])
    parser.add_argument("model", help="folder or name on the hub")
    parser.add_argument("pairs", type=Path, help="JSON lines")
    parser.add_argument("output", help="JSON lines, or the folder of the trained model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt and an answer")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    read = [row for _, row in read_rows(args.pairs)]
    encoded = [encode(tokenizer, row, args.longest) for row in read]
    kept = [(row, ids) for row, ids in zip(read, encoded, strict=True) if ids]
    rows = [ids for _, ids in kept]
    if len(kept) < len(read):
        print(f"left out: {len(read) - len(kept)} pairs whose prompt has {args.longest} tokens or more; see --longest")
    if args.command == "reference":
        found = add_reference(AutoModelForCausalLM.from_pretrained(args.model), rows)
        lines = [
            json.dumps(row | {name: new[name] for name in REFERENCE}) for (row, _), new in zip(kept, found, strict=True)
        ]
        Path(args.output).write_text("\n".join(lines) + "\n")
        return
    if not all(name in row for row in rows for name in REFERENCE):
        raise SystemExit(f"{args.pairs}: {', '.join(REFERENCE)} are missing; run `{parser.prog} reference` first")
    weft.init_distributed()
    arguments = TrainingArguments(
        output_dir=args.output,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        learning_rate=5e-7,
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
        deepspeed={"zero_optimization": {}, "weft": {"enabled": True, "pipeline": {"stages": args.stages}}},
    )
    model = AutoModelForCausalLM.from_pretrained(args.model)
    trainer = DPOTrainer(model, arguments, train_dataset=rows, data_collator=collate, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
