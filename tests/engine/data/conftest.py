"""A small tokenizer, and small data made on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerBase

from weft.engine.data.tokenizer import train_bpe

datasets.disable_progress_bars()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_bpe([f"question {n}: what is {n} and {n}?\nanswer: it is {2 * n}.\n" for n in range(200)], 300)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Sequence[Any]], str]:
    """Write rows as JSON lines; returns the path."""

    def to(name: str, rows: Sequence[Any]) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return to
