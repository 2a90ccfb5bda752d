"""The quickstart's run, so small that it takes seconds, and the losses that it logged."""

import json
import os
import signal
import threading
import time
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


def train_to_death(settings: list[str], folder: Path, victim: int) -> None:
    """`train`, until its second checkpoint is being written: then rank ``victim`` is killed."""
    checkpoints = folder / "quickstart" / "checkpoints"

    def steps() -> set[str]:
        # A folder has a name of its own until it is whole.
        return {path.name.partition(".")[0] for path in checkpoints.iterdir()} if checkpoints.exists() else set()

    known, begun = steps(), set[str]()

    def kill() -> None:
        while len(begun) < 2:
            begun.update(steps() - known)
            time.sleep(0.002)
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    if int(os.environ["RANK"]) == victim:
        threading.Thread(target=kill, daemon=True).start()
    train(settings, folder)


def losses_of(folder: Path) -> dict[int, float]:
    """Loss by step of the run under ``folder``; a step that was repeated counts as it was last."""
    path = folder / "quickstart" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
