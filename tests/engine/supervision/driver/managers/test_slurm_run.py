"""A run under a real Slurm loses a node in the middle, and goes on where it was on the spare one."""

import json
import subprocess
import sys
import time

import pytest

from tests.engine.supervision.driver.managers.slurm_cluster import SlurmCluster, missing
from tests.recipes.runs import prepare
from weft.engine.supervision.driver.files import JOURNAL, read_journal

LIMIT_S = 300.0
STEPS = 600


def wait_for(condition, cluster, folder, job):
    limit = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > limit or cluster.state(job) in ("FAILED", "CANCELLED", "NODE_FAIL"):
            said = {path.name: path.read_text()[-3000:] for path in folder.glob("slurm-*.out")}
            raise AssertionError(f"waited in vain; {cluster.ask('sinfo', '-N')}\n{said}\n{events(folder)}")
        time.sleep(0.2)


def events(folder, name=""):
    if not (folder / JOURNAL).exists():
        return []
    return [event for event in read_journal(folder / JOURNAL) if name in ("", event["event"])]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_node_is_lost_and_a_spare_takes_its_place(tmp_path):
    settings = [
        *prepare(tmp_path),
        "cluster.manager=slurm",
        "cluster.ranks=1",
        "cluster.sites=[{name: here, nodes: 2, spares: 1}]",
        "pipeline.stages=2",
        f"train.steps={STEPS}",
        "checkpoint.every=100",
        "train.name=under-slurm",
        "model.arch=llama",
    ]
    folder = tmp_path / "runs" / "under-slurm"
    nodes = {"node0": "here", "node1": "here", "node2": "here"}
    with SlurmCluster(nodes) as cluster:
        command = [sys.executable, "-m", "weft.tools.cli", "launch", *settings]
        launched = subprocess.run(
            command, env=cluster.env, capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path
        )
        assert launched.returncode == 0, launched.stderr
        job = launched.stdout.split()[1].rstrip(":")
        wait_for(lambda: events(folder, "good_step"), cluster, folder, job)
        assert events(folder, "attempt")[0]["ranks"] == {"0": "node0", "1": "node1"}

        cluster.lose("node1")
        wait_for(lambda: events(folder, "end"), cluster, folder, job)
        # What Slurm does itself after its SlurmdTimeout; the job waits for that node's word until then.
        cluster.ask("scontrol", "update", "nodename=node1", "state=down", "reason=lost")
        wait_for(lambda: cluster.state(job) not in ("RUNNING", "COMPLETING"), cluster, folder, job)
        assert cluster.state(job) == "COMPLETED"
    assert events(folder, "end")[-1]["code"] == 0
    assert [event["host"] for event in events(folder, "evict")] == ["node1"]
    assert events(folder, "attempt")[-1]["ranks"] == {"0": "node0", "1": "node2"}
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
