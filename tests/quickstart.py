"""The quickstart's run, so small that it takes seconds, and the losses that it logged."""

import json
from pathlib import Path

TINY_QUICKSTART = [
    "recipe=quickstart",
    "train.export=false",
    "train.sample=",
    "train.timeline=false",
    "train.max_seconds=0",
    "model.self_check=false",
    "model.overrides.hidden_size=32",
    "model.overrides.intermediate_size=64",
    "model.overrides.num_hidden_layers=4",
    "data.sequence_length=32",
]


def train(settings: list[str], folder: Path) -> None:
    """Train on this rank, as the process does that the launcher starts."""
    from weft.recipes.train import main

    assert main([*settings, f"train.output_dir={folder}"]) == 0


def losses_of(folder: Path) -> dict[int, float]:
    """Loss by step of the run under ``folder``; a step that was repeated counts as it was last."""
    path = folder / "quickstart" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
