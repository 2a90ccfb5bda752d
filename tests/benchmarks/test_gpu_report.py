"""The report of a GPU machine says of every item what came of it, also where something is missing or fails."""

import ast
import importlib.util
import json
import re
import tarfile
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu_report
from benchmarks.gpu_report import Item, write_report
from tests.interpreter import python
from tests.tools.test_docs import overrides_of, parsing_only  # noqa: F401  # a fixture
from tests.waiting import until
from weft.conf.checks import check
from weft.conf.compose import compose
from weft.tools import cli

ROOT = Path(__file__).parents[2]


def test_every_item_is_accounted_for(tmp_path, monkeypatch, capsys):
    made = (
        Item("good", "that it goes well", ("-m", "this"), 0),
        Item("bad", "that it fails", ("-m", "weft.tools.cli", "nothing"), 0),
        Item("gone", "a program that is not here", ("no-such-program",), 0),
        Item("many", "more than there is", ("-m", "this"), 1000),
        Item("bare", "what another package does", ("-m", "this"), 0, needs="no_such_package"),
    )
    monkeypatch.setattr(gpu_report, "items", lambda out, **_: made)
    out = tmp_path / "found"
    assert write_report(["--out", str(out), "--seconds", "60"]) == 1
    text = (out / "report.md").read_text()
    assert "| good | that it goes well | passed after" in text and "Namespaces are" in text
    assert "| bad | that it fails | FAILED with 2" in text and "there is no command 'nothing'" in text
    assert "left out: there is no no-such-program here" in text
    assert "left out: needs 1000 GPUs" in text and "left out: no_such_package is not installed" in text
    with tarfile.open(f"{out}.tar.gz") as tar:
        assert {"found/report.md", "found/good.txt"} <= set(tar.getnames())
    assert capsys.readouterr().out.count("\n") == len(made) + 1


def test_a_benchmark_that_misses_a_goal_has_run_and_one_that_breaks_has_failed(tmp_path, monkeypatch):
    made = [
        Item(name, "a goal", ("sh", "-c", f"echo '{{\"met\": false}}' > {tmp_path}/{file}.json; exit {code}"), 0)
        for name, file, code in (("missed", "missed", 1), ("broken", "other", 1), ("killed", "killed", 3))
    ]
    (tmp_path / "broken.json").write_text('{"met": false}')  # of an earlier report
    for items, failed in ((made, 1), (made[:2], 1), (made[:1], 0)):
        monkeypatch.setattr(gpu_report, "items", lambda out, items=items, **_: items)
        assert write_report(["--out", str(tmp_path), "--seconds", "60"]) == failed
        text = (tmp_path / "report.md").read_text()
        assert "| missed | a goal | ran, and MISSED a goal, after" in text
        assert ("| broken | a goal | FAILED with 1 after" in text) == (len(items) > 1)
        assert ("| killed | a goal | FAILED with 3 after" in text) == (len(items) > 2)


def test_an_item_beyond_its_limit_is_terminated_and_then_killed_with_its_processes(tmp_path, monkeypatch):
    script = "sleep 600 & echo $! > child; trap 'echo got SIGTERM' TERM; while :; do sleep 0.1; done"
    terminated = Item("terminated", "that it ends", ("sh", "-c", script), 0, 3.0)
    monkeypatch.chdir(tmp_path)
    after = Item("after", "that it is started all the same", ("true",), 0)
    monkeypatch.setattr(gpu_report, "items", lambda out, **_: (terminated, after))
    monkeypatch.setattr(gpu_report, "LEAVE_S", 1.0)
    assert write_report(["--out", str(tmp_path), "--seconds", "60"]) == 1
    text = (tmp_path / "report.md").read_text()
    assert "| terminated | that it ends | FAILED: had not ended after 3 s" in text and "got SIGTERM" in text
    assert "| after | that it is started all the same | passed after" in text
    child = int((tmp_path / "child").read_text())
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE, 10)


def test_items_without_time_are_left_out_and_results_are_written_before_the_next(tmp_path, monkeypatch):
    first = Item("first", "that it has a result", ("true",), 0)
    second = Item("second", "the report so far", ("cat", str(tmp_path / "report.md")), 0)
    late = Item("late", "that it needs more time than is left", ("true",), 0, 1000.0)
    monkeypatch.setattr(gpu_report, "LEAST_S", 500.0)
    monkeypatch.setattr(gpu_report, "items", lambda out, **_: (first, second, late))
    assert write_report(["--out", str(tmp_path), "--seconds", "300"]) == 0
    assert "| first | that it has a result | passed after" in (tmp_path / "second.txt").read_text()
    assert (
        "| late | that it needs more time than is left | left out: no time is left"
        in (tmp_path / "report.md").read_text()
    )


@pytest.mark.usefixtures("parsing_only")
def test_every_command_is_one(tmp_path):
    """Modules exist, options are known, and settings make a run."""
    found = gpu_report.items(tmp_path)
    for item in found:
        if item.command[0] == "-m":
            assert importlib.util.find_spec(item.command[1]), item
        if cli.__name__ in item.command:
            command, *rest = item.command[item.command.index(cli.__name__) + 1 :]
            if overrides := overrides_of(command, rest):
                check(compose(overrides))
        elif "benchmarks" in item.command:
            overrides_of("benchmarks", item.command[item.command.index("benchmarks") + 1 :])
    assert len({item.name for item in found}) == len(found), "each has a file of its own"
    assert {"device", "llama-1b", "profile", "collectives", "engines"} <= {item.name for item in found}


def _needs_gpus(file):
    """Return a file's marks: what each shows, and how many GPUs it needs."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".") == ["pytest", "mark", "gpu"]:
            said = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
            yield said["shows"], said.get("count", 1)


def test_gpu_tests_begin_with_what_each_shows_and_needs(monkeypatch):
    """As `make test-gpu` and the report start them: whoever has no GPU reads what one would show."""
    monkeypatch.chdir(ROOT)
    command = next(item.command for item in gpu_report.items(ROOT) if item.name == "tests")
    more = ("--collect-only", "-p", "no:cacheprovider")
    found = python(*command, *more, timeout_s=120, check=True)
    _, head, said = found.stdout.partition("what GPU tests show; this machine has ")
    assert head
    lines = list(takewhile(lambda line: re.match(r"\d+ GPU", line), said.splitlines()[1:]))
    files = [word for word in command if word.startswith("tests/")]
    expected = [
        f"{count} GPU{'s' if count > 1 else ' '}  {file}: {shows}"
        for file in files
        for shows, count in _needs_gpus(file)
    ]
    assert lines == sorted(expected)  # a machine with one GPU reads its part first
    assert {line[:7].strip() for line in lines} == {"1 GPU", "2 GPUs"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_race_collectives(tmp_path, monkeypatch):
    """The command for two GPUs, soon done on two processes."""
    (item,) = (item for item in gpu_report.items(tmp_path) if item.name == "collectives")
    soon = replace(item, num_gpus=0, limit_s=250.0, command=(*item.command, "--sizes=65536", "--repeats=1"))
    monkeypatch.setattr(gpu_report, "items", lambda out, **_: [soon])
    assert write_report(["--out", str(tmp_path), "--seconds", "250"]) == 0, (tmp_path / "report.md").read_text()
    raced = json.loads((tmp_path / "collectives.json").read_text())["figures"]
    assert [row["plain_s"] > 0 for row in raced] == [True] * 3
    assert "all_gather" in (tmp_path / "report.md").read_text()
