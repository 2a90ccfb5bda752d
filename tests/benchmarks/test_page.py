"""`docs/benchmarks.md`: its tables are those of the result files, and its prose is short."""

import json
import re

import pytest

from benchmarks.__main__ import benches
from benchmarks.page import BLOCK, PAGE, RESULTS, with_tables

FILES = sorted(RESULTS.glob("*.json"))


def test_tables_of_the_page_are_those_of_the_result_files():
    page = PAGE.read_text()
    assert with_tables(page) == page, "run `python -m benchmarks.page`"
    named = [name for name, _ in BLOCK.findall(page)]
    assert sorted(named) == sorted(file.stem for file in FILES)


@pytest.mark.parametrize(("name", "columns"), BLOCK.findall(PAGE.read_text()))
def test_every_column_of_the_page_is_in_its_file(name, columns):
    tables = json.loads((RESULTS / f"{name}.json").read_text())["tables"]
    assert set(filter(None, columns.split(" | "))) <= {column for table in tables for column in table["columns"]}


def test_prose_of_the_page_has_at_most_1500_words():
    assert len(BLOCK.sub("", PAGE.read_text()).split()) <= 1500


def test_a_changed_figure_changes_the_page():
    page = PAGE.read_text()
    assert with_tables(page.replace("| 0.884 |", "| 0.5 |")) == page != page.replace("| 0.884 |", "| 0.5 |")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_result_names_command_commit_day_and_machine(file):
    result = json.loads(file.read_text())
    assert result["command"] and result["commit"] and re.match(r"\d{4}-\d\d-\d\d", result["date"])
    assert result["cores"] >= 1 and result["gpu"] and result["machine"] and result["torch"]
    assert result.get("retired") or result["bench"] is None or result["bench"] in benches()
    for table in result["tables"]:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
