"""The core trains without any one of its features, and says by name what is not there."""

import configparser
import os
import shutil
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
IMPORT_ALL = """
import importlib, pkgutil, weft
names = [found.name for found in pkgutil.walk_packages(weft.__path__, "weft.")]
for name in names:
    if ".worker.vllm" not in name and not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""
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
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in without:
        path = package / folder
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    return root


def run(root, *command):
    """Run Python with the copy, and return what it printed."""
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{ROOT}"}
    return python(*command, env=environment, cwd=root, timeout_s=300)


def train(root):
    """Losses of three steps of the quickstart."""
    runs = root / "runs"
    done = run(
        root,
        "-m",
        "weft.tools.cli",
        "launch",
        *TINY_QUICKSTART,
        "train.steps=3",
        f"train.output_dir={runs}",
        "logging.every=1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses_of(runs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    losses = train(copy(tmp_path_factory.mktemp("whole")))
    assert len(losses) == 3
    return losses


@pytest.mark.parametrize("name", FEATURES)
def test_the_core_works_without(name, tmp_path, whole):
    assert len(folders(name)) <= 2
    root = copy(tmp_path, without=folders(name))
    imported = run(root, "-c", IMPORT_ALL)
    assert imported.returncode == 0, imported.stderr[-3000:]
    assert train(root) == whole

    # Benchmarks measure every feature, and are not installed.
    own = [f"--ignore={ROOT / 'tests' / folder}" for folder in (*folders(name), "benchmarks")]
    collected = run(root, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(ROOT / "tests"), *own)
    assert collected.returncode == 0, collected.stdout[-3000:]

    for command in FEATURES[name].commands:
        refused = run(root, "-m", "weft.tools.cli", command)
        assert refused.returncode == 2 and f"weft {command}: needs the feature {name!r}" in refused.stderr
    for check in FEATURES[name].checks:
        refused = run(root, "-m", "weft.tools.cli", "doctor", check, *CHECKS[check])
        assert refused.returncode == 2 and f"weft doctor {check}: needs the feature {name!r}" in refused.stderr
    if name in SETTINGS:
        refused = run(root, "-m", "weft.tools.cli", "config", "recipe=quickstart", SETTINGS[name])
        setting = SETTINGS[name].partition("=")[0]
        assert refused.returncode == 2 and f"{setting}" in refused.stderr and f"{name!r}" in refused.stderr, (
            refused.stderr
        )
    else:
        assert FEATURES[name].commands
