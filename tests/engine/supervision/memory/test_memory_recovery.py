"""Ranks that die are made good from the memory of their host or its partner, and go on as if nothing had been."""

import shutil
from pathlib import Path

import pytest

from tests.engine.supervision.memory.memory_ranks import train
from tests.engine.tiny import tiny_config
from weft.engine.supervision.memory.slots import HostMemory
from weft.tools.ranks import run_ranks

STEPS, TOTAL = 7, 4
HOSTS = [0, 1, 0, 1]
"""Two stages of two replicas: each replica has a host."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def config(stages, replicas, zero):
    made = tiny_config(stages=stages, microbatches=TOTAL // replicas, layers=4)
    made.zero.stage = zero
    made.pipeline.debug = False
    return made


@pytest.fixture(scope="module", params=[0, 1], ids=["zero 0", "zero 1"])
def killed(request, tmp_path_factory):
    """The configuration, losses of an undisturbed run, and the memories that a killed one left."""
    made, root = config(2, 2, request.param), tmp_path_factory.mktemp("killed")
    whole = run_ranks(4, train, made, str(root / "undisturbed"), HOSTS, STEPS, TOTAL)
    with pytest.raises(RuntimeError, match=r"rank \d failed"):
        run_ranks(4, train, made, str(root / "killed"), HOSTS, STEPS, TOTAL, (2, 5))
    return made, [rank["losses"] for rank in whole], root / "killed"


def copy(memories, tmp_path):
    """Return copies of the memories, which the test may change."""
    shutil.copytree(memories, tmp_path / "memories")
    return tmp_path / "memories"


def assert_goes_on(made, losses, root):
    """At most the step is lost that was being copied when the rank died."""
    for rank, expected in zip(run_ranks(4, train, made, str(root), HOSTS, STEPS, TOTAL), losses, strict=True):
        step, state = rank["found"]
        assert step in (3, 4) and state == {"step": step}
        assert rank["losses"] == {at: loss for at, loss in expected.items() if at > step}


def test_a_rank_is_killed(killed, tmp_path):
    made, losses, memories = killed
    root = copy(memories, tmp_path)
    assert_goes_on(made, losses, root)
    folders = {path.name for host in root.iterdir() for path in host.iterdir()}
    assert folders == {"memory-000002-a", "memory-000002-b"}, "nothing is left of the attempt before"


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_is_lost(killed, tmp_path, host):
    made, losses, memories = killed
    root = copy(memories, tmp_path)
    shutil.rmtree(root / f"host{host}")
    assert_goes_on(made, losses, root)


def newest(host: Path) -> list[Path]:
    """The files of the newest step that a host holds."""
    held = list(HostMemory(host).whole())
    last = max(commit.step for _, commit in held)
    return [path for path, commit in held if commit.step == last]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_flipped_bits(killed, tmp_path):
    """On one host the copies of the other serve; on both the memory checkpoint before."""
    made, losses, memories = killed
    for both, step in ((False, STEPS), (True, STEPS - 1)):
        root = copy(memories.with_name("undisturbed"), tmp_path / str(both))
        for host in ("host0", "host1")[: 1 + both]:
            flip(newest(root / host)[0])
        for rank, expected in zip(run_ranks(4, train, made, str(root), HOSTS, STEPS, TOTAL), losses, strict=True):
            assert rank["found"] == (step, {"step": step})
            assert rank["losses"] == {at: loss for at, loss in expected.items() if at > step}


def test_fewer_replicas_and_other_hosts(killed, tmp_path):
    """Two ranks on hosts of their own take over from four; what a host lacks comes from the other."""
    made, losses, memories = killed
    root = copy(memories, tmp_path)
    shutil.rmtree(root / "host1")
    other = config(2, 1, made.zero.stage)
    for rank in run_ranks(2, train, other, str(root), [0, 1], STEPS, TOTAL):
        step, _ = rank["found"]
        expected = {at: loss for at, loss in losses[0].items() if at > step}
        assert rank["losses"] == pytest.approx(expected, rel=1e-5)


def test_nothing_is_left(killed, tmp_path):
    made, losses, _ = killed
    (rank, *_) = run_ranks(4, train, made, str(tmp_path), HOSTS, 2, TOTAL)
    assert rank["found"] is None
    assert rank["losses"] == {at: loss for at, loss in losses[0].items() if at <= 2}
