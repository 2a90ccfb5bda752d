"""The parity table, and that it would show a difference."""

import dataclasses
import json

import pytest
import torch

from benchmarks import parity


@pytest.mark.parametrize("arch", ["gemma3_text", "mixtral"])
def test_all_variants_are_equal(arch, capsys):
    assert parity.main([arch, "--stages", "3", "--backends", "in-process", "--tolerance", "0"]) == 0
    out = capsys.readouterr().out
    assert out.count(arch) == len(parity.VARIANTS) and "largest difference 0, tolerance 0" in out


@pytest.mark.slow
def test_schedules_on_ranks(capsys):
    options = [
        "qwen3",
        "gpt2",
        "gemma4_text",
        "--variants",
        "tied",
        "lora",
        "--stages",
        "2",
        "4",
        "--backends",
        "gpipe",
        "1f1b",
    ]
    assert parity.main([*options, "--tolerance", "1e-6"]) == 0
    assert capsys.readouterr().out.count("1f1b") == 12


def test_json(tmp_path):
    file = str(tmp_path / "rows.json")
    options = ["llama", "--variants", "lora", "--stages", "2", "--backends", "in-process"]
    assert parity.main([*options, "--json", file]) == 0
    (row,) = json.loads((tmp_path / "rows.json").read_text())["figures"]
    assert (row["arch"], row["variant"], row["stages"], row["gradients"]) == ("llama", "lora", 2, 0.0)


@pytest.mark.parametrize("part", ["logits", "loss", "gradients"])
def test_a_difference_shows(part, capsys, monkeypatch):
    def wrong(cases):
        (outcome,) = in_process(cases)
        value = getattr(outcome, part)
        off = {n: g + 1e-3 for n, g in value.items()} if part == "gradients" else value + 1e-3
        yield dataclasses.replace(outcome, **{part: off})

    in_process = parity.in_process
    monkeypatch.setitem(parity.BACKENDS, "in-process", wrong)
    options = ["llama", "--variants", "tied", "--stages", "2", "--backends", "in-process"]
    assert parity.main(options) == 1
    assert parity.main([*options, "--tolerance", "0.01"]) == 0


def test_not_a_number_shows():
    row = parity.Row(float("nan"), 0.0, 0.0, "", arch="llama", variant="tied", stages=2, backend="in-process")
    assert row.worst == float("inf")


def test_adapters_are_awake():
    (case,) = parity.cases(["llama"], ["lora"], [2])
    (plain,) = parity.cases(["llama"], ["untied"], [2])
    assert not torch.equal(parity.hugging_face(case).logits, parity.hugging_face(plain).logits)


@pytest.mark.parametrize(("options", "message"), [(["lama"], "no such architecture"), (["--variants", "x"], "variant")])
def test_unknown_names(options, message):
    with pytest.raises(ValueError, match=message):
        parity.main(options)
