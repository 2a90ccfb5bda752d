"""The core trains without any one of its features, and says by name what is not there."""

import configparser
import importlib
import json
import os
import pkgutil
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from tests.interpreter import python
from tests.quickstart import TINY_QUICKSTART, losses_of
from weft.conf.features import FEATURES

ROOT = Path(__file__).parents[1]
PACKAGES = ("conf", "pipeline", "comm", "inference", "engine", "recipes", "tools")
SETTINGS = {
    "wan": "cluster.sites=[{name: a, ranks: 1}, {name: b, ranks: 1}]",
    "prefill": "inference.enabled=true",
    "strands": "pipeline.pairs=always",
    "supervision": "supervise.enabled=true",
    "watch": "logging.prometheus_port=9100",
}
"""A setting that needs each feature; the planner and emulation have commands only."""
CHECKS = {"net": ("--bind", "127.0.0.1")}
"""Options of each feature's check of `weft doctor`."""
THIRD_PARTY = ("torch", "deepspeed", "transformers", "peft", "datasets", "hydra", "hypothesis", "pytest")
"""Modules that are imported once for all features."""
NOT_INSTALLED = (".worker.vllm", ".serving.harness")
"""Modules that import vLLM or lm_eval, which tests do without."""
NO_EDITABLE = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
"""
"""An editable install imports a folder that the copy lacks from the whole tree."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def folders(name):
    """Folders of a feature, as the import contract lists them."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    modules = setup[f"importlinter:contract:{name}"]["protected_modules"].split()
    return [Path(*module.split(".")[1:]) for module in modules]


def copy(root, *, without=()):
    """Copy the package to a folder, where a process with it in PYTHONPATH imports it, and nothing from here."""
    (root / "sitecustomize.py").write_text(NO_EDITABLE)
    package = root / "weft"
    package.mkdir()
    shutil.copy(ROOT / "__init__.py", package)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, package / name)
    for folder in without:
        path = package / folder
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    return root


def train(root):
    """Losses of three steps of the quickstart."""
    runs = root / "runs"
    settings = [*TINY_QUICKSTART, "train.steps=3", f"train.output_dir={runs}", "logging.every=1"]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{ROOT}"}
    done = python("-m", "weft.tools.cli", "launch", *settings, env=environment, cwd=root, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return losses_of(runs)


@pytest.fixture(scope="module")
def fork():
    """Run `examine` in a fork of a process that has imported `THIRD_PARTY`, and return its exit code."""
    from weft.engine.supervision.agent.forkserver import ForkServer  # these tests are collected without it
    from weft.engine.supervision.messages import Fork

    server = ForkServer(THIRD_PARTY)
    # `__name__` would depend on how pytest found this file.
    target = "tests.test_features:examine"
    yield lambda *words: server.run(Fork(name="copy", target=target, arguments=[*map(str, words)]))
    server.close()


def examine(arguments: Sequence[str]) -> int:
    """Import all modules of a copy, call ``weft`` with each line of a file, and collect tests, in a fork.

    The file then contains the exit code and the standard error of each command.
    """
    root, file, *options = arguments
    for name in [name for name in sys.modules if name.partition(".")[0] in ("weft", "tests")]:
        del sys.modules[name]
    exec(NO_EDITABLE)
    sys.path[:0] = [root, str(ROOT)]
    os.chdir(root)
    import weft
    from weft.tools import cli

    assert Path(weft.__file__).parent.parent == Path(root)
    for found in pkgutil.walk_packages(weft.__path__, "weft."):
        if not any(part in found.name for part in NOT_INSTALLED) and not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    ends = []
    for words in json.loads(Path(file).read_text()):
        with redirect_stderr(StringIO()) as printed:
            ends.append((cli.main(words), printed.getvalue()))
    Path(file).write_text(json.dumps(ends))
    return pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", str(ROOT / "tests"), *options])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    losses = train(copy(tmp_path_factory.mktemp("whole")))
    assert len(losses) == 3
    return losses


@pytest.mark.parametrize("name", FEATURES)
def test_the_core_works_without(name, tmp_path, whole, fork, capfd):
    assert len(folders(name)) <= 2
    root = copy(tmp_path, without=folders(name))
    assert train(root) == whole

    refused = {f"weft {command}: needs the feature {name!r}": [command] for command in FEATURES[name].commands}
    for check in FEATURES[name].checks:
        refused[f"weft doctor {check}: needs the feature {name!r}"] = ["doctor", check, *CHECKS[check]]
    assert refused or name in SETTINGS
    settings = [["config", "recipe=quickstart", SETTINGS[name]]] if name in SETTINGS else []
    file = tmp_path / "commands.json"
    file.write_text(json.dumps([*refused.values(), *settings]))
    # Benchmarks measure every feature, and are not installed.
    own = [f"--ignore={ROOT / 'tests' / folder}" for folder in (*folders(name), "benchmarks")]
    assert fork(root, file, *own) == 0, "".join(capfd.readouterr())[-6000:]
    ends = json.loads(file.read_text())
    assert [code for code, _ in ends] == [2] * len(ends)
    for message, (_, printed) in zip(refused, ends, strict=False):
        assert message in printed
    for _, _, setting in settings:
        printed = ends[-1][1]
        assert setting.partition("=")[0] in printed and repr(name) in printed, printed
