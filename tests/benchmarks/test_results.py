"""Every benchmark writes its figures, and says at once where it could not."""

import argparse
import json
from dataclasses import dataclass
from importlib import import_module

import pytest
from rich.table import Table

from benchmarks import results
from benchmarks.__main__ import benches
from benchmarks.results import parse, write_json


@dataclass
class Row:
    name: str
    step_s: float


def parser():
    made = argparse.ArgumentParser()
    made.add_argument("--ranks", type=int, default=4)
    return made


def test_figures_lie_beside_what_they_were_measured_on(tmp_path):
    args = parse(parser(), ["--ranks", "2", "--json", str(tmp_path / "out.json")])
    table = Table("ranks", "step")
    table.add_row("2", "1.5")
    write_json(args, "auto", {"rows": [Row("a", 0.5)], "table": table}, met=False)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["figures"] == {"rows": [{"name": "a", "step_s": 0.5}], "table": [{"ranks": "2", "step": "1.5"}]}
    assert (found["bench"], found["met"], found["arguments"]) == ("auto", False, {"ranks": 2})
    assert found["cores"] >= 1 and found["torch"]
    assert found["command"].endswith(f"--ranks 2 --json {tmp_path / 'out.json'}") and found["date"] and found["gpu"]


def test_printed_tables_are_written_as_they_were_printed(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "_SHOWN", [])
    args = parse(parser(), ["--json", str(tmp_path / "out.json")])
    table = Table("ranks", "step", title="\nsteps")
    table.add_row("2", "1.5")
    results.show(table, "a line")
    write_json(args, "auto", [])
    (found,) = json.loads((tmp_path / "out.json").read_text())["tables"]
    assert found == {"title": "steps", "columns": ["ranks", "step"], "rows": [["2", "1.5"]]}


def test_without_the_option_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_json(parse(parser(), []), "auto", [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bench", benches())
def test_every_benchmark_refuses_a_file_that_it_could_not_write(bench, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    required = {"engines": ["host"], "inject": ["host"], "answers": ["--python", "python"]}
    required["bubbles"] = [*required["answers"], "--trace", "trace.csv"]
    with pytest.raises(ValueError, match="--json /nowhere/x: cannot be written"):
        import_module(f"benchmarks.{bench}").main([*required.get(bench, []), "--json", "/nowhere/x"])
