"""A run's folder is its owner's alone, unless the run is shared."""

import os

import pytest

from tests.recipes.runs import prepare, run
from weft.conf import load
from weft.tools.preflight import check_run_folder
from weft.tools.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_a_run_is_private_unless_it_is_shared(tmp_path, shared):
    before = os.umask(0o022)
    try:
        settings = [*prepare(tmp_path), "train.steps=2", f"train.shared={str(shared).lower()}"]
        check_run_folder(load(settings))
        run_ranks(1, run, settings)
    finally:
        os.umask(before)
    folder = tmp_path / "runs" / "run"
    modes = {path.relative_to(folder).as_posix(): path.stat().st_mode & 0o777 for path in folder.rglob("*")}
    assert folder.stat().st_mode & 0o777 == (0o755 if shared else 0o700)
    assert modes["config.yaml"] == 0o600
    assert modes["metrics.jsonl"] == (0o644 if shared else 0o600)
    assert modes["checkpoints/step-00000002"] == (0o755 if shared else 0o700)
