"""Every command that the docs show is one: its options are known, its settings make a run."""

import argparse
import ast
import inspect
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import run
from weft.conf.checks import check
from weft.conf.compose import compose
from weft.tools import cli

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:weft|python -m benchmarks) ")
SPAN = re.compile(rf"`({COMMAND.pattern}[^`\n]+)`")
BENCH = re.compile(r"benchmarks [a-z]")
# Words that stand for what the reader puts there.
PLACEHOLDERS = {
    "KIND": "1f1b",
    "P": "4",
    "M": "8",
    "N": "2",
    "NAME": "model",
    "model=NAME": "model.path=NAME",
    "recipe=RECIPE": "recipe=quickstart",
}
# Commands whose settings are a run's.
OF_RUNS = {"launch", "train", "serve", "controller", "plan", "config"}


def commands():
    """The commands of the README and the docs, split as a shell does; those with gaps are no commands."""
    for file in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "AGENTS.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ):
        text = file.read_text()
        lines = [line for block in FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
        shown = [line.removeprefix("$ ").strip() for line in lines]
        # Between words of a text some name a command only; a setting or a benchmark is meant to be typed.
        spans = [span for span in SPAN.findall(FENCE.sub("", text)) if "=" in span or BENCH.search(span)]
        for command in dict.fromkeys([line for line in shown if COMMAND.match(line)] + spans):
            # What a shell would put in the place of a variable, and its sign for the background, are not ours.
            words = [word for word in shlex.split(command, comments=True) if word != "&" and not word.startswith("$")]
            if not words[1].endswith(":") and not re.search(r"\.\.\.|\[-|\||…", command):
                yield pytest.param(words[1 + (words[0] == "python") :], id=f"{file.name}: {' '.join(words)[:90]}")


class Parsed(Exception):
    """The arguments were understood: what the command made of them."""


@pytest.fixture
def parsing_only(monkeypatch):
    """Stop every command behind its parser."""
    depth = []

    def outermost(method):
        def wrapped(self, *args, **kwargs):
            depth.append(None)
            try:
                parsed = method(self, *args, **kwargs)
            finally:
                depth.pop()
            if depth:
                return parsed
            raise Parsed(*(parsed if isinstance(parsed, tuple) else (parsed, [])))

        return wrapped

    for name in ("parse_args", "parse_known_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, outermost(getattr(argparse.ArgumentParser, name)))


def overrides_of(command, rest):
    """The settings in a command's arguments; running it ends at its parser."""
    try:
        if command == "benchmarks":
            run(*rest)
        else:
            cli.import_module(cli.COMMANDS[command][0]).main(rest)
    except Parsed as parsed:
        known, overrides = parsed.args
        return list(overrides) or list(getattr(known, "overrides", []))
    raise AssertionError(f"{command} asked no parser")


@pytest.mark.parametrize("words", commands())
def test_commands_of_the_docs(words, parsing_only):
    command, *rest = [PLACEHOLDERS.get(word, word) for word in words]
    overrides = overrides_of(command, rest)
    if command in OF_RUNS or rest[:1] == ["launch"]:
        assert all("=" in word for word in overrides), overrides
        check(compose(overrides), complete=command != "config")


def test_commands_are_found():
    found = {words.values[0][0] for words in commands()}
    assert found >= {"launch", "serve", "schedule", "simulate", "benchmarks", "plan", "netbed"}


DIFFS = re.findall(r"(?ms)^```diff\n(.*?)^```", (ROOT / "docs/extending.md").read_text())


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: ", ".join(re.findall(r"(?m)^\+\+\+ b/(.*)", diff)))
def test_an_example_of_an_extension_applies_to_the_code_as_it_is(diff):
    done = subprocess.run(["git", "apply", "--check", "-"], input=diff, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def new_files():
    """The sources of the files that the examples add."""
    for diff in DIFFS:
        for path, lines in re.findall(r"(?m)^--- /dev/null\n\+\+\+ b/(.*)\n@@.*\n((?:\+.*\n)+)", diff):
            yield pytest.param(re.sub(r"(?m)^\+", "", lines), id=path)


@pytest.mark.parametrize("source", new_files())
def test_a_file_of_an_example_passes_arguments_that_the_code_takes(source):
    names = {"__name__": __name__}
    exec(compile(source, "example", "exec"), names)
    checked = 0
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        called = names.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if getattr(called, "__module__", "").startswith(("weft.", "benchmarks.", __name__)):
            arguments = {keyword.arg: None for keyword in call.keywords}
            inspect.signature(called).bind(*call.args, **arguments)
            checked += 1
    assert checked


def test_each_kind_of_extension_has_an_example():
    assert len(DIFFS) == 5
