"""The command's tables, exit codes and printed forms."""

import configparser
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import benchmarks.__main__ as benchmarks
from benchmarks.__main__ import benches
from tests.interpreter import python
from weft.conf import load
from weft.conf.checks import missing
from weft.conf.compose import compose
from weft.conf.fields import choices, docstrings
from weft.conf.trees import to_tree
from weft.tools import cli
from weft.tools.launch_arguments import ANNOUNCEMENT

ROOT = Path(__file__).parents[2]
# Files that the package needs in addition to its Python.
DATA = (".yaml", ".jinja", ".c", ".h", ".cpp", ".hpp", ".cu", ".json")


def run(capsys, *argv):
    code = cli.main(argv)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_every_command_is_listed(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert all(name in out for name in cli.COMMANDS)


def test_schedules_in_the_docs_are_what_is_printed(capsys):
    shown = re.findall(r"(?ms)^\$ weft (schedule [^\n]*)\n(.*?)^```", (ROOT / "docs/extending.md").read_text())
    assert shown
    for command, expected in shown:
        code, out, _ = run(capsys, *command.split())
        assert (code, out.rstrip()) == (0, expected.rstrip())


def test_every_command_has_its_module():
    missing = [name for name, (module, _) in cli.COMMANDS.items() if find_spec(module) is None]
    assert not missing


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_tells_its_usage(capsys, name):
    try:
        code = cli.main([name, "--help"])
    except SystemExit as ended:
        code = ended.code
    assert code == 0
    assert capsys.readouterr().out.startswith(f"usage: weft {name}")


def test_every_benchmark_is_listed_and_has_its_module():
    modules = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")}
    assert set(benches()) == modules - {"atlas", "results", "gpu_report", "page"}


def test_an_unknown_benchmark_ends_with_2_and_one_line(capsys):
    assert benchmarks.main(["zzz"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no such benchmark" in line


def test_benchmarks_are_not_importable_from_the_package():
    with pytest.raises(ImportError, match="benchmarks are not part of the package"):
        import_module("weft.benchmarks")


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["lanch"], "did you mean launch?"),
        (["zzz"], "one of launch"),
        (["config", "train.step=1"], "weft config: train.step=1: there is no field"),
        (["config", "zero.stage=4"], "weft config: zero.stage=4"),
        (["config", "pipeline.stages=2", "--deepspeed"], "1 processes are not a multiple"),
        (["launch", "recipe=quikstart"], "weft launch: recipe=quikstart: not one of"),
        (["launch", "--multirun"], "a sweep would run once per rank"),
        (["launch", "pipeline.stages=2"], "weft launch: pipeline.stages=2: 1 processes are not a multiple"),
    ],
)
def test_bad_input_ends_with_2_and_one_line(capsys, argv, part):
    code, _, err = run(capsys, *argv)
    assert code == 2
    (line,) = [line for line in err.splitlines() if line != ANNOUNCEMENT]
    assert part in line


def test_config_prints_every_docstring_and_stays_yaml(capsys):
    code, out, _ = run(capsys, "config", "recipe=quickstart", "cluster=two_sites")
    assert code == 0
    assert yaml.safe_load(out) == to_tree(load(["recipe=quickstart", "cluster=two_sites"]))
    words = " ".join(out.replace("#", " ").split())
    for text in docstrings()["PipelineConfig"].values():
        assert " ".join(text.split()) in words


def test_plain_forms_agree(capsys):
    _, as_yaml, _ = run(capsys, "config", "--yaml", "recipe=quickstart")
    _, as_json, _ = run(capsys, "config", "--json", "recipe=quickstart")
    assert yaml.safe_load(as_yaml) == json.loads(as_json)


def test_the_deepspeed_form(capsys):
    _, out, _ = run(capsys, "config", "recipe=quickstart", "--deepspeed")
    assert json.loads(out)["gradient_accumulation_steps"] == 8


@pytest.mark.parametrize("recipe", choices("recipe"))
@pytest.mark.parametrize("form", [[], ["--yaml"], ["--json"], ["--deepspeed"]])
def test_a_recipe_is_printed_with_what_it_still_needs(capsys, recipe, form):
    ranks = [f"cluster.ranks={compose([f'recipe={recipe}']).pipeline.stages}"]
    code, out, err = run(capsys, "config", *form, f"recipe={recipe}", *ranks)
    assert code == 0 and out
    needs = [line for line in err.splitlines() if line.startswith("weft config: before a run: ")]
    expected = list(missing(compose([f"recipe={recipe}"])))
    assert (
        [line.partition("before a run: ")[2] for line in err.splitlines()]
        == expected
        == [line.partition("before a run: ")[2] for line in needs]
    )
    assert len(expected) == {"sft": 3, "lora": 3, "qlora": 3, "distill": 4, "dpo": 3, "pretrain": 2}.get(recipe, 0)


def test_a_wrong_configuration_is_printed_and_refused(capsys):
    code, out, err = run(capsys, "config", "recipe=sft", "train.name=a/b")
    assert code == 2
    assert "learning rate" in out and "choose one word" in err and "set model.path" not in err


def test_an_interrupt_is_one_line(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert cli.report_bad_input("weft plan", interrupted) == 130
    assert capsys.readouterr().err == "weft plan: interrupted\n"


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m weft.tools.cli config | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("#") and not done.stderr


CODE = """
import sys
from weft.tools import cli
cli._run = lambda command, rest: print(command) or int(rest[0])
sys.exit(cli.main())
"""


@pytest.mark.parametrize(("status", "to_full"), [(0, 1), (3, 3)])
def test_an_output_that_cannot_be_written_hides_no_failure(status, to_full, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # output is written after the command
    command = [sys.executable, "-c", CODE, "config", str(status)]
    reader, pipe = os.pipe()
    os.close(reader)
    with open(pipe, "w") as closed, open("/dev/full", "w") as full:
        to = {
            output: subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True)
            for output in (closed, full)
        }
    assert (to[closed].returncode, to[closed].stderr) == (status, "")
    assert (to[full].returncode, to[full].stderr) == (to_full, "weft config: [Errno 28] No space left on device\n")


def test_standard_streams_that_are_closed_are_the_null_device():
    code = CODE.replace("print(command)", "(open('/dev/zero').fileno() <= 2) or print(command)")
    command = f'{sys.executable} -c "$0" config 0 <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", command, code], check=False).returncode == 0


def test_a_removed_current_folder_is_refused(tmp_path):
    command = f"cd {tmp_path} && rmdir {tmp_path} && {sys.executable} -m weft.tools.cli config"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "weft config: the current folder has been removed; change to another one\n"


def test_the_package_list_is_true():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    rooms = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    tops = rooms - {"tests", "benchmarks"}
    makefile = (ROOT / "Makefile").read_text()
    packages = next(line for line in makefile.splitlines() if line.startswith("PACKAGES"))
    assert set(packages.partition(":=")[2].split()) == tops | {"__init__.py"}
    folders = {path.parent for top in tops for path in (ROOT / top).rglob("__init__.py")}
    found = {"weft"} | {"weft." + ".".join(path.relative_to(ROOT).parts) for path in folders}
    assert set(setup["options"]["packages"].split()) == found
    patterns = setup["options.package_data"]["weft"].split()
    beside = [path for top in tops for path in (ROOT / top).rglob("*") if path.suffix in DATA]
    inside = {path.relative_to(ROOT) for path in beside}
    inside |= {path.relative_to(ROOT) for path in (ROOT / "examples").rglob("*") if path.is_file()}
    inside = {path for path in inside if "__pycache__" not in path.parts}
    assert all(any(path.match(pattern) for pattern in patterns) for path in inside)


@pytest.mark.parametrize("command", [*cli.COMMANDS, "doctor net", "doctor node", "doctor ring", "doctor cache"])
def test_no_help_imports_torch(command):
    code = (
        "import sys; from contextlib import suppress; from weft.tools.cli import main\n"
        "with suppress(SystemExit): main([*sys.argv[1:], '--help'])\n"
        "print('torch' in sys.modules)"
    )
    done = python("-c", code, *command.split(), timeout_s=120)
    *text, imported = done.stdout.splitlines()
    assert "usage" in text[0] and imported == "False"


def test_the_parsers_name_what_there_is():
    from weft.tools import doctor
    from weft.tools.diagnostics import node

    assert tuple(node.CHECKS) == doctor.NODE_CHECKS


def test_a_user_without_a_home_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("no such user")))
    code, _, err = run(capsys, "evict", "--list")
    assert code == 2 and err.count("\n") == 1 and "set HOME" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("watch runs/none --once", "--once: only --text uses it"),
        ("watch runs/none --step 1", "--step: only --otlp uses it"),
        ("watch runs/none --text --port 1", "--port: --text shows the run in this terminal"),
        ("watch runs/none --otlp http://[::1]:1 --against runs/other", "--against: --otlp sends a step"),
        ("doctor net --netbed none.yaml --port 1", "--port: --netbed probes its own nodes"),
        ("profile --no-links --ranks 2", "--ranks: --no-links skips what ranks measure"),
        ("stacks runs/none --dumps none --native", "--native: --dumps reads files"),
        ("launch --attach runs/none train.steps=3", "--attach runs/none: the run has its settings already"),
        ("plan --cluster none --model none --format json --explain 1", "--explain: --format json has no place for it"),
    ],
)
def test_an_option_that_would_not_be_used_is_refused(words, message, capsys):
    assert cli.main(words.split()) == 2
    assert message in capsys.readouterr().err
