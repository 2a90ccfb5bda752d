"""The benchmark of the loss on a small head: chunks take less memory, and compute the same loss."""

import json

import pytest

from benchmarks import loss


def test_chunks_take_less_memory_than_whole_logits(tmp_path, monkeypatch):
    for name, value in {"WORDS": 4096, "TOKENS": 64, "WIDTH": 16, "CHUNK_MB": 0.1}.items():
        monkeypatch.setattr(loss, name, value)
    file = tmp_path / "loss.json"
    assert loss.main(["--parts", "head", "--dtypes", "fp32", "--rounds", "1", "--json", str(file)]) == 0
    *_, table = json.loads(file.read_text())["tables"]  # behind those of other tests of this process
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    peaks = {row["loss"]: float(row["peak MB"]) for row in rows}
    assert peaks["Weft"] < peaks["whole logits"] / 2
    assert all(float(row["error of the loss"]) < 1e-5 for row in rows if "torch" not in row["loss"])


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="--parts tail: not known"):
        loss.main(["--parts", "tail"])
