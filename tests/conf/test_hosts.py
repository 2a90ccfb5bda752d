"""The hostfile, which may come from somebody else."""

import os
import socket
from pathlib import Path

import pytest

from weft.conf import load
from weft.conf.hosts import ranks_here, read_hostfile, resume_folder
from weft.conf.schema import WeftConfig


@pytest.mark.parametrize("line", ["-oProxyCommand=x slots=1", "--help slots=1", "a slots=0", "a"])
def test_a_line_that_names_no_host_is_refused(tmp_path, line):
    (tmp_path / "hosts").write_text(f"# hosts\n{line}\n")
    with pytest.raises(ValueError, match=f"line 2 is '{line}'; write it as"):
        read_hostfile(tmp_path / "hosts")


def test_a_pipe_a_binary_and_a_missing_file_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("pipe", "binary", "missing"):
        with pytest.raises(ValueError, match=f"cluster.hostfile={tmp_path}/{name}: cannot be read"):
            read_hostfile(tmp_path / name)


@pytest.fixture
def hostfile(tmp_path):
    (tmp_path / "hosts").write_text("alpha slots=2\nbeta.cluster slots=4\n127.0.0.1 slots=2\n")
    return f"cluster.hostfile={tmp_path / 'hosts'}"


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("alpha", range(2)), ("alpha.cluster", range(2)), ("beta", range(2, 6)), ("beta.cluster", range(2, 6))],
)
def test_ranks_of_this_host_are_those_behind_its_name(hostfile, monkeypatch, name, ranks):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    config = load([hostfile, "cluster.spares=[127.0.0.1]"])
    assert ranks_here(config.cluster) == ranks


def test_ranks_of_this_host_are_those_behind_its_address_or_all_if_it_plays_all_hosts(hostfile, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gamma")
    assert ranks_here(load([hostfile]).cluster) == range(6, 8)
    assert ranks_here(load([hostfile, "cluster.manager=local"]).cluster) == range(8)
    with pytest.raises(ValueError, match=r"inference\.prefill\.ranks=\[\]: this host, gamma, is not in .*hosts; name"):
        ranks_here(load([hostfile, "cluster.spares=[127.0.0.1]"]).cluster)


def test_a_cluster_manager_gives_each_node_as_many_ranks():
    nodes = ["cluster.manager=slurm", "cluster.ranks=8", "cluster.sites=[{name: a, nodes: 2}]"]
    worker = [*nodes, "inference.prefill.model=m", "inference.prefill.stages=2"]
    load([*worker, "inference.prefill.ranks=[14,15]"])
    with pytest.raises(ValueError, match=r"\[7, 8\] are on several hosts"):
        load([*worker, "inference.prefill.ranks=[7,8]"])
    with pytest.raises(ValueError, match=r"\[16\]: there are 16 ranks"):
        load([*worker, "inference.prefill.ranks=[16]"])
    with pytest.raises(ValueError, match=r"is one of 2 that a cluster manager chooses; name the ranks"):
        ranks_here(load(worker).cluster)


def test_a_worker_runs_on_one_host_unless_it_has_several_stages(hostfile):
    stages = [hostfile, "inference.prefill.model=m", "inference.prefill.stages=2"]
    load([*stages, "inference.prefill.ranks=[1,2]"])
    worker = [hostfile, "inference.prefill.model=m", "inference.prefill.ranks_per_worker=2"]
    load([*worker, "inference.prefill.ranks=[2,3,6,7]"])
    load([*worker, "inference.prefill.ranks=[1,2]", "cluster.manager=local"])
    with pytest.raises(ValueError, match=r"inference\.prefill\.ranks=\[1, 2\]: \[1, 2\] are on several hosts"):
        load([*worker, "inference.prefill.ranks=[1,2]"])
    with pytest.raises(ValueError, match=r"inference\.prefill\.ranks=\[8\]: there are 8 ranks"):
        load([*worker, "inference.prefill.ranks=[8]"])
    load([*stages, "inference.prefill.stages=4"])
    with pytest.raises(ValueError, match=r"inference\.prefill\.stages=3: 8 ranks are not a multiple"):
        load([*stages, "inference.prefill.stages=3"])
    with pytest.raises(ValueError, match=r"inference\.prefill\.ranks_per_worker=4: 2 ranks are not a multiple"):
        load([hostfile, "inference.prefill.model=m", "inference.prefill.ranks_per_worker=4"])


@pytest.mark.parametrize(
    ("resume", "folder"), [("auto", "/home/me/runs/run/checkpoints"), ("~/step-4", "/home/me/step-4"), ("/s", "/s")]
)
def test_resume_folder_may_be_in_the_home_folder(monkeypatch, resume, folder):
    monkeypatch.setenv("HOME", "/home/me")
    config = WeftConfig()
    config.train.output_dir, config.checkpoint.resume = "~/runs", resume
    assert resume_folder(config) == Path(folder)
