"""Slurm: what is asked of it, and what a run finds in an allocation of a real one."""

import json
import subprocess
import sys
import time

import pytest

from tests.engine.supervision.driver.managers.slurm_cluster import SlurmCluster, missing
from tests.waiting import until
from weft.conf import load
from weft.conf.hosts import read_hostfile
from weft.engine.supervision.driver.managers.slurm import in_allocation, script, with_allocation

EAST, WEST = "{{name: a, nodes: 1, select: {{{0}: east}}}}", "{{name: b, nodes: 1, spares: 1, select: {{{0}: west}}}}"
SITES = f"cluster.sites=[{EAST}, {WEST}]"


def overrides(sites, folder="runs"):
    return [
        "model.arch=llama",
        "cluster.manager=slurm",
        "pipeline.stages=2",
        sites,
        f"train.output_dir={folder}",
        "train.name=r1",
    ]


def lines(sites, *more):
    return script(load([*overrides(sites), *more]), overrides(sites), "/venv/bin/python").splitlines()


def test_sites_as_features_share_a_job():
    made = lines(SITES.format("constraint"))
    assert made[0] == "#!/bin/bash"
    assert "#SBATCH --nodes=3" in made and "#SBATCH --constraint=[east*1&west*2]" in made
    assert "#SBATCH --no-kill" in made and "#SBATCH hetjob" not in made
    assert any(line.startswith("/venv/bin/python -m weft.tools.cli launch model.arch=llama") for line in made)


def test_a_signal_to_the_batch_script_reaches_weft(tmp_path):
    """bash would end at once and leave the run to Slurm, which kills it."""
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\ntrap 'sleep 0.5; exit 143' TERM\ntouch begun\nwhile :; do sleep 0.1; done\n")
    python.chmod(0o755)
    words = overrides(SITES.format("constraint"), str(tmp_path))
    (tmp_path / "job").write_text(script(load(words), words, str(python)))
    job = subprocess.Popen(["bash", "job"], cwd=tmp_path)
    while not (tmp_path / "begun").exists():
        time.sleep(0.05)
    job.terminate()
    assert job.wait(30) == 143


def test_sites_as_partitions_are_parts_of_a_job():
    made = lines(SITES.format("partition"))
    first, second = made[: made.index("#SBATCH hetjob")], made[made.index("#SBATCH hetjob") :]
    assert "#SBATCH --partition=east" in first and "#SBATCH --nodes=1" in first
    assert "#SBATCH --partition=west" in second and "#SBATCH --nodes=2" in second
    assert "#SBATCH --no-kill" in first and "#SBATCH --no-kill" in second


def test_one_site_needs_no_selection():
    made = lines(
        "cluster.sites=[{name: here, nodes: 2}]", 'cluster.slurm.options=["--time=1-0"]', "cluster.slurm.setup=[ls]"
    )
    assert "#SBATCH --nodes=2" in made and "#SBATCH --time=1-0" in made and "ls" in made
    assert not any("constraint" in line or "partition" in line for line in made)


@pytest.mark.parametrize(
    ("selects", "part"),
    [
        (("{partition: p}", "{constraint: c}"), "every site a partition, or all of them a constraint"),
        (("{constraint: c}", "{}"), "nothing tells nodes of site 'b' from others"),
        (("{rack: r}", "{constraint: c}"), "slurm selects by partition or constraint, not rack"),
    ],
)
def test_what_one_job_cannot_ask_for(selects, part):
    sites = f"cluster.sites=[{{name: a, nodes: 1, select: {selects[0]}}}, {{name: b, nodes: 1, select: {selects[1]}}}]"
    with pytest.raises(ValueError, match=part):
        lines(sites)


def test_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not in_allocation({}) and in_allocation({"SLURM_JOB_ID": "7"})
    config = load(overrides("cluster.sites=[{name: here, nodes: 2}]"))
    with pytest.raises(ValueError, match="scontrol is not installed here"):
        with_allocation(config, {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]"}, tmp_path / "hosts")


# Stands in for the Python that a script starts: it says what it was called with, and which hosts a run would have.
PROBE = """\
import json, os, sys
from pathlib import Path
from weft.conf import load
from weft.conf.hosts import read_hostfile
from weft.engine.supervision.driver.managers.slurm import with_allocation
folder = Path(sys.argv[1])
words = sys.argv[sys.argv.index("launch") + 1 :]
config = with_allocation(load(words), os.environ, folder / "hosts")
cluster = config.cluster
found = {"hosts": read_hostfile(cluster.hostfile), "spares": cluster.spares, "master": cluster.master_addr}
found["sites"] = {site.name: site.hosts for site in cluster.sites}
(folder / "found.json.part").write_text(json.dumps(found))
(folder / "found.json.part").rename(folder / "found.json")
"""


@pytest.fixture(scope="module")
def cluster():
    if reason := missing():
        pytest.skip(reason)
    with SlurmCluster({"east0": "east", "west0": "west", "west1": "west"}) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["constraint", "partition"])
def test_the_nodes_of_an_allocation(cluster, tmp_path, kind):
    words = overrides(SITES.format(kind), str(tmp_path))
    probe, python = tmp_path / "probe.py", tmp_path / "python"
    probe.write_text(PROBE)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {probe} {tmp_path} "$@"\n')
    python.chmod(0o755)
    job = tmp_path / "job.sbatch"
    job.write_text(script(load(words), words, str(python)))
    number = cluster.ask("sbatch", "--parsable", f"--output={tmp_path / 'out'}", str(job))
    ends = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    until(lambda: cluster.state(number) in ends, 200.0, pause_s=0.3, explain=(tmp_path / "out").read_text)
    assert cluster.state(number) == "COMPLETED", (tmp_path / "out").read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["sites"] == {"a": ["east0"], "b": ["west0", "west1"]}
    assert found["spares"] == ["west1"] and found["master"] == "127.0.0.1"
    assert found["hosts"] == read_hostfile(tmp_path / "hosts") == {"east0": 1, "west0": 1, "west1": 1}
