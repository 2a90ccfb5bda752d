"""A tiny model, pairs and texts for the recipes `dpo` and `distill`, and the losses of TRL's DPOTrainer."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.shapes import sizes

STEPS, LENGTH, RATE = 20, 48, 1e-3
WORDS = ["what", "is", "the", "sum", "of", "two", "and", "three", "it", "was", "not", "here", "yes", "no", "blue"]


def prepare(folder: Path, recipe: str = "dpo", *, width: int = 64) -> list[str]:
    """Write a model of a hidden size, and pairs and texts of uneven length. Return the settings of a run on them."""
    from weft.engine.data.tokenizer import train_bpe

    source = random.Random(0)
    tokenizer = train_bpe([" ".join(source.choices(WORDS, k=12)) for _ in range(99)], 300)
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    shape = sizes(hidden=width, inner=64, layers=2, heads=4, groups=2, words=len(tokenizer))
    model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=LENGTH))
    with torch.no_grad():  # so that answers differ in likelihood
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder / "model")

    def text(most: int) -> str:
        return " ".join(source.choices(WORDS, k=source.randint(1, most)))

    rows = [{"prompt": text(8), "chosen": f" {text(10)}", "rejected": f" {text(10)}"} for _ in range(4 * STEPS)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{"text": row["prompt"] + row["chosen"]} for row in rows]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return [
        f"recipe={recipe}",
        f"model.path={folder / 'model'}",
        "model.self_check=false",
        f"data.path={folder / ('pairs.jsonl' if recipe == 'dpo' else 'texts.jsonl')}",
        f"data.cache_dir={folder / 'cache'}",
        f"data.sequence_length={LENGTH}",
        "data.shuffle=false",
        f"optimizer.lr={RATE}",
        "optimizer.schedule=constant",
        "optimizer.warmup_steps=0",
        "optimizer.clip=0",
        "optimizer.betas=[0.9,0.999]",
        "train.precision=fp32",
        f"train.steps={STEPS}",
        f"train.output_dir={folder / 'runs'}",
        "train.export=false",
        "logging.progress=false",
    ]


def train(settings: list[str]) -> list[str]:
    """Train on the ranks of this job, and return where the last step's scores came from."""
    from weft.conf import load
    from weft.recipes.train import train as run

    engine = run(load(settings))
    scores = engine.scores
    return [] if scores is None else [f"{scores.num_ahead} ahead", f"{scores.num_in_line} in line"]


def train_with_key(key: str, settings: list[str]) -> list[str]:
    """See `train`. Ranks have the environment of their server, which has started before a test sets its key."""
    os.environ["WEFT_API_KEY"] = key
    return train(settings)


def train_with_slow_rank(key: str, settings: list[str]) -> tuple[int, ...]:
    """Train with replicas of which one becomes slow, and return the micro-batches that they read at the end."""
    from tests.engine.planning.adapted import slow_down
    from weft.conf import load
    from weft.recipes.train import train as run

    os.environ["WEFT_API_KEY"] = key
    slow_down(1)
    return run(load(settings)).deal.counts


def losses(run: Path) -> list[float]:
    """Return the losses of a run's steps, the last of each step."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = {record["step"]: record["loss"] for record in records if record.get("kind") == "train"}
    return [found[step] for step in sorted(found)]


def shares_ahead(run: Path) -> list[float]:
    """Return the share of each record's micro-batches whose scores were computed ahead."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["scores_ahead"] for record in records if record["kind"] == "train"]


def losses_of_trl(folder: Path) -> list[float]:
    """Return the losses of TRL's DPOTrainer in one process, on micro-batches of one pair, 4 a step."""
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_length=LENGTH,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        train_sampling_strategy="sequential",
    )
    models = [AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32) for _ in range(2)]
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = DPOTrainer(*models, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.train()
    return [float(record["loss"]) for record in trainer.state.log_history if "loss" in record]
