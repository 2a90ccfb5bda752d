"""Which workers and which stages a host serves, if a worker's ranks are on several hosts."""

import socket

import pytest

from weft.conf import load
from weft.inference.worker.command import command, environment, settings_of, stage_command
from weft.inference.worker.workers import stage_hosts_of, workers_of
from weft.recipes.serving.checks import check_ports, check_stage_hosts

KEY = "k" * 32


@pytest.fixture
def on(tmp_path, monkeypatch):
    """The configuration on a host of the run, with more settings."""
    (tmp_path / "hosts").write_text("alpha slots=3\nbeta slots=3\ngamma slots=2\n")
    monkeypatch.setenv("WEFT_KEY", KEY)

    def configuration(host, *settings):
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        return load(
            [
                f"cluster.hostfile={tmp_path / 'hosts'}",
                "inference.prefill.model=tiny/llama",
                "inference.prefill.stages=4",
                f"inference.boards={tmp_path / host}",
                *settings,
            ]
        )

    return configuration


def test_a_worker_runs_on_the_host_of_its_first_rank_and_its_other_stages_on_theirs(on):
    (worker,) = workers_of(on("alpha"))
    assert worker.ranks == (0, 1, 2, 3)
    assert worker.remote == ("", "", "", "beta:5800")
    assert worker.ranks_here == [0, 1, 2]
    assert not stage_hosts_of(on("alpha"))

    config = on("beta")
    (worker,), (stage,) = workers_of(config), stage_hosts_of(config)
    assert (worker.ranks, worker.remote) == ((4, 5, 6, 7), ("", "", "gamma:5800", "gamma:5801"))
    assert (stage.rank, stage.stage, stage.port, stage.server) == (3, 3, 5800, "alpha")

    config = on("gamma")
    assert not workers_of(config)
    assert [(stage.rank, stage.stage, stage.port) for stage in stage_hosts_of(config)] == [(6, 2, 5800), (7, 3, 5801)]


def test_a_worker_with_stages_elsewhere_has_copies_of_their_boards_and_their_addresses(on):
    config = on("beta")
    (worker,) = workers_of(config)
    assert [board.name for board in worker.boards] == [f"rank{rank}.board" for rank in (4, 5, 6, 7)]
    assert {board.parent.name for board in worker.boards} == {"beta"}
    assert settings_of(config, worker).remote == worker.remote
    words = command(config, worker, python="python", num_gpus=0)
    assert words[words.index("--worker-cls") + 1] == "weft.inference.worker.vllm_remote_stage.stage_worker"


def test_a_stage_computes_in_the_bubbles_of_its_own_host(on, tmp_path):
    config = on("gamma", "inference.prefill.first_stage_port=7000")
    stage = stage_hosts_of(config)[1]
    assert stage.worker.boards[stage.stage] == tmp_path / "gamma" / "rank7.board"
    words = stage_command(stage, python="python")
    assert words[2:] == ["weft.inference.worker.vllm_stage_host", "--stage", "3", "--port", "7001", "--server", "beta"]
    env = environment(config, stage.worker, {}, key="k", package=tmp_path, devices=["GPU-x", "GPU-y"])
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-y"


def test_a_worker_gets_the_gpus_of_its_ranks_on_its_host(on, tmp_path):
    config = on("beta")
    (worker,) = workers_of(config)
    env = environment(config, worker, {}, key="k", package=tmp_path, devices=["x", "y", "z"])
    assert env["CUDA_VISIBLE_DEVICES"] == "y,z"


def test_ranks_on_one_host_each_need_no_other_host(on):
    """As before there were stages on other hosts: named ranks are those of this host, whatever its name is."""
    config = on("unknown", "inference.prefill.ranks=[3,4]", "inference.prefill.stages=2")
    (worker,) = workers_of(config)
    assert (worker.ranks, worker.remote) == ((3, 4), ("", ""))
    assert not stage_hosts_of(config)


def test_without_the_key_stages_on_several_hosts_are_refused(on, monkeypatch):
    config = on("alpha")
    check_stage_hosts(config)
    monkeypatch.delenv("WEFT_KEY")
    for host in ("alpha", "gamma"):
        with pytest.raises(ValueError, match="WEFT_KEY is not set"):
            check_stage_hosts(on(host))
    check_stage_hosts(on("alpha", "inference.prefill.stages=1"))


@pytest.mark.parametrize(
    ("host", "settings", "part"),
    [
        ("alpha", ["inference.prefill.connector=nixl"], r"connector=nixl: stages .* prove no key; set it to wan"),
        ("alpha", ["inference.prefill.connector=wan"], r"host=127\.0\.0\.1: stages on other hosts .* set its IP"),
        ("gamma", ["inference.prefill.ranks=[0,1,2,3]"], r"ranks=\[0, 1, 2, 3\]: none of them trains on this host"),
    ],
)
def test_settings_that_stages_on_several_hosts_cannot_have_are_named(on, host, settings, part):
    with pytest.raises(ValueError, match=part):
        check_stage_hosts(on(host, *settings))


def test_a_host_that_the_hostfile_lacks_is_named(on):
    with pytest.raises(ValueError, match=r"this host, delta, is not in .*hosts; name the ranks that train here"):
        workers_of(on("delta"))


def test_a_rank_on_no_host_and_ranks_that_are_no_multiple_are_refused(on):
    with pytest.raises(ValueError, match=r"ranks=\[5, 6, 7, 8\]: there are 8 ranks"):
        on("alpha", "inference.prefill.ranks=[5,6,7,8]")
    with pytest.raises(ValueError, match=r"stages=3: 8 ranks are not a multiple"):
        on("alpha", "inference.prefill.stages=3")


def test_a_port_of_a_stage_that_is_taken_is_named(on):
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        config = on("gamma", f"inference.prefill.first_stage_port={port}")
        with pytest.raises(ValueError, match=rf"first_stage_port={port}: the stage of rank 6 would listen on {port}"):
            check_ports(config)
