"""The report of a GPU machine says of every item what came of it, also where something is missing or fails."""

import ast
import re
import subprocess
import sys
import tarfile
from itertools import takewhile
from pathlib import Path

from weft.tools import gpu_report
from weft.tools.gpu_report import Item, main

ROOT = Path(__file__).parents[2]


def test_every_item_is_accounted_for(tmp_path, monkeypatch, capsys):
    made = (
        Item("good", "that it goes well", ("-m", "this"), 0),
        Item("bad", "that it fails", ("-m", "weft.tools.cli", "nothing"), 0),
        Item("slow", "that it ends", ("-m", "http.server", "0"), 0),
        Item("gone", "a program that is not here", ("no-such-program",), 0),
        Item("many", "more than there is", ("-m", "this"), 1000),
    )
    monkeypatch.setattr(gpu_report, "items", lambda: made)
    out = tmp_path / "found"
    assert main(["--out", str(out), "--seconds", "15"]) == 1
    text = (out / "report.md").read_text()
    assert "| good | that it goes well | passed after" in text and "Namespaces are" in text
    assert "| bad | that it fails | FAILED with 2" in text and "there is no command 'nothing'" in text
    assert "| slow | that it ends | FAILED: had not ended after 15 s" in text
    assert "left out: there is no no-such-program here" in text
    assert "left out: needs 1000 GPUs" in text
    with tarfile.open(f"{out}.tar.gz") as tar:
        assert {"found/report.md", "found/good.txt"} <= set(tar.getnames())
    assert capsys.readouterr().out.count("\n") == len(made) + 1


def test_every_command_is_one(tmp_path):
    """Modules exist, and runs are ones that `weft launch` takes."""
    import importlib.util

    from weft.conf import load

    for item in gpu_report.items():
        if item.command[0] == "-m":
            assert importlib.util.find_spec(item.command[1]), item
        if "launch" in item.command:
            load(list(item.command[3:]))


def _needs_gpus(file):
    """What a file's marks say: what each shows, and how many GPUs it takes."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".") == ["pytest", "mark", "gpu"]:
            said = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
            yield said["shows"], said.get("count", 1)


def test_gpu_tests_begin_with_what_each_shows_and_needs(monkeypatch):
    """As `make test-gpu` and the report start them: whoever has no GPU reads what one would show."""
    monkeypatch.chdir(ROOT)
    command = next(item.command for item in gpu_report.items() if item.name == "tests")
    more = ("--collect-only", "-p", "no:cacheprovider")
    found = subprocess.run([sys.executable, *command, *more], capture_output=True, text=True, timeout=120, check=True)
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
