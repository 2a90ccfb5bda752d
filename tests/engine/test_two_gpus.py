"""The engine on two GPUs over NCCL: what `tests/device/test_engine.py` says on emulated ones, said by NCCL itself."""

import json

import pytest

from tests.engine.two_gpus import report
from tests.interpreter import python
from weft.tools.ranks import run_ranks


def _run() -> dict:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = python(*torchrun, "-m", "tests.engine.two_gpus", timeout_s=500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("{")))


def _check(found: dict) -> None:
    assert found["wrong"] == 0
    assert not {name: gap for name, gap in found["cases"].items() if not gap < (1e-2 if "bf16" in name else 1e-4)}


@pytest.mark.gpu(
    count=2, shows="pipelines and replicas over NCCL end, and their losses equal Hugging Face's; notes, first contacts"
)
@pytest.mark.timeout(520)
def test_pipelines_and_replicas_over_nccl():
    found = _run()
    assert found["device"] == "cuda"
    _check(found)


@pytest.mark.slow
@pytest.mark.timeout(520)
def test_the_same_on_cpus():
    """So that what a GPU machine will run is known to run."""
    _check(run_ranks(2, report, timeout_s=500)[0])
