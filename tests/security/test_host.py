"""Tests that other users of a host can see, block, or change nothing of a run."""

import os
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quickstart import TINY_QUICKSTART
from weft.conf import load
from weft.conf.host.private import private_folder, shared_memory_folder, take_secrets, write_private
from weft.conf.host.processes import free_port
from weft.conf.host.run_lock import RunLock
from weft.tools import launch

KEY = "a-key-that-nobody-else-should-read"
TOKEN = "hf_token_of_the_user"

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's folder")


# -- folders in places where everybody may write -----------------------------------------------------


def test_a_private_folder_is_made_with_those_above_it(tmp_path):
    folder = private_folder(tmp_path / "a" / "b")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)] == [0o700, 0o700]
    assert private_folder(folder) == folder


@pytest.mark.parametrize(
    "trap",
    [
        "open to others",
        "a link",
        "a file",
        "a folder above that everybody may write to",
        pytest.param("another's", marks=as_root),
        pytest.param("another's above", marks=as_root),
        pytest.param("another's link above", marks=as_root),
    ],
)
def test_what_another_user_could_have_prepared_is_refused(tmp_path, trap):
    base = tmp_path / "shm"
    base.mkdir()
    base.chmod(0o1777)
    folder = base / "weft-0" / "run"
    match trap:
        case "open to others":
            folder.mkdir(parents=True)
            folder.chmod(0o755)
        case "a link":
            folder.parent.mkdir()
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "elsewhere")
        case "a file":
            folder.parent.mkdir()
            folder.touch(0o600)
        case "a folder above that everybody may write to":
            folder.parent.mkdir()
            folder.parent.chmod(0o777)
        case "another's":
            folder.mkdir(parents=True, mode=0o700)
            os.chown(folder, 65534, 65534)
        case "another's above":
            folder.parent.mkdir(mode=0o755)
            os.chown(folder.parent, 65534, 65534)
        case "another's link above":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.parent.symlink_to(tmp_path / "elsewhere")
            os.lchown(folder.parent, 65534, 65534)
    with pytest.raises(ValueError, match="not a folder of this user alone"):
        private_folder(folder)


@pytest.mark.parametrize(
    "trap",
    ["a link", "a file", pytest.param("another's", marks=as_root), pytest.param("another's link", marks=as_root)],
)
def test_a_taken_name_in_shared_memory_gives_another_folder_to_all_processes_of_a_user(tmp_path, trap):
    tmp_path.chmod(0o1777)
    usual = tmp_path / f"weft-{os.geteuid()}"
    match trap:
        case "a link" | "another's link":
            usual.symlink_to("/etc")
        case "a file":
            usual.touch()
        case "another's":
            usual.mkdir()
    if trap.startswith("another's"):
        os.lchown(usual, 65534, 65534)
        (decoy := tmp_path / f"{usual.name}-0").mkdir()
        os.chown(decoy, 65534, 65534)
    first = shared_memory_folder(os.geteuid(), within=tmp_path)
    assert first != usual and first.stat().st_uid == os.geteuid()
    assert private_folder(first / "run").parent == first
    assert shared_memory_folder(os.geteuid(), within=tmp_path) == first


def test_the_usual_folder_in_shared_memory_is_taken_where_no_other_user_has_it(tmp_path):
    usual = tmp_path / f"weft-{os.geteuid()}"
    assert shared_memory_folder(os.geteuid(), within=tmp_path) == usual and not usual.exists()
    private_folder(usual)
    assert shared_memory_folder(os.geteuid(), within=tmp_path) == usual


# -- secrets ------------------------------------------------------------------------------------------


@pytest.fixture
def two_hosts(tmp_path, monkeypatch):
    """A run over ssh whose launcher, pdsh and ssh are stand-ins that note their command lines."""
    tools = tmp_path / "tools"
    tools.mkdir()
    said = tmp_path / "command lines"
    for name in ("pdsh", "ssh"):
        (tools / name).write_text(
            f'#!/bin/sh\nfor part in "$0" "$@"; do printf "%s\\n" "$part"; done >> {shlex.quote(str(said))}\n'
        )
        (tools / name).chmod(0o755)
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    (tmp_path / ".deepspeed_env").write_text(f"MINE=1\nMY_PASSWORD={TOKEN}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("WEFT_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(launch, "preflight", lambda *_, **__: None)
    return said


def test_no_command_line_of_a_launch_over_ssh_holds_a_secret(two_hosts, tmp_path):
    arguments = [
        f"cluster.hostfile={tmp_path}/hosts",
        "cluster.master_addr=10.1.2.3",
        "cluster.master_port=29950",
        f"train.output_dir={tmp_path}/runs",
    ]
    launch.main(["--no_ssh_check", "recipe=quickstart", *arguments])
    said = two_hosts.read_text()
    assert "weft.recipes.train" in said and "export MINE=1" in said
    assert KEY not in said and TOKEN not in said
    secrets_file = shlex.quote(f"{tmp_path}/runs/quickstart/deepspeed_env.secrets")  # DeepSpeed quotes values
    assert f"WEFT_SECRETS={secrets_file}" in said
    assert not (tmp_path / "runs" / "quickstart" / "deepspeed_env.secrets").exists()  # the run has ended


def test_the_file_of_secrets_reaches_the_ranks(two_hosts, tmp_path):
    file = launch.write_environment(os.environ, tmp_path / "run" / "env")
    (pointer,) = [line for line in file.read_text().splitlines() if line.startswith("WEFT_SECRETS=")]
    environment = dict([pointer.split("=", 1)]) | {"HF_TOKEN": "set on this host"}
    take_secrets(environment)
    assert environment["WEFT_KEY"] == KEY and environment["MY_PASSWORD"] == TOKEN
    assert environment["HF_TOKEN"] == "set on this host"


def test_ranks_of_several_hosts_share_a_key_made_by_the_launcher(monkeypatch):
    monkeypatch.delenv("WEFT_KEY", raising=False)
    config = load(["recipe=quickstart"])
    assert launch.job_key(config, {}) == {}
    config.cluster.master_addr = "10.1.2.3"
    assert len(launch.job_key(config, {})["WEFT_KEY"]) == 64
    with pytest.raises(ValueError, match="WEFT_KEY is not set"):
        launch.job_key(config, {}, ["--no_ssh"])


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o604])
def test_secrets_that_others_could_read_are_refused(tmp_path, mode):
    file = tmp_path / "secrets"
    write_private(file, f"WEFT_KEY={KEY}\n")
    file.chmod(mode)
    environment = {"WEFT_SECRETS": str(file)}
    with pytest.raises(ValueError, match=r"WEFT_SECRETS=.*: others can read or write it; chmod 600"):
        take_secrets(environment)
    assert "WEFT_KEY" not in environment
    file.unlink()
    with pytest.raises(ValueError, match=r"No such file.*; every host has to see the run's folder"):
        take_secrets(environment)
    take_secrets({})


def test_a_run_is_its_owners_to_read(tmp_path):
    file = launch.write_config(load(["recipe=quickstart"]), tmp_path / "runs" / "a" / "config.yaml")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_link_in_the_place_of_a_draft_is_not_written_through(tmp_path):
    (tmp_path / f".config.yaml.{os.getpid()}").symlink_to(tmp_path / "victim")
    write_private(tmp_path / "config.yaml", "text")
    assert (tmp_path / "config.yaml").read_text() == "text"
    assert not (tmp_path / "victim").exists()


# -- one run to a folder ------------------------------------------------------------------------------

HOLD = """
import os, sys, time
from pathlib import Path
from weft.conf.host.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
child = os.fork()  # as a data loader's worker, which may outlive a rank that is killed
if child == 0:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


def test_a_second_run_is_refused_with_the_first_ones_process_and_a_killed_one_blocks_none(tmp_path):
    folder = tmp_path / "run"
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    orphan = int(first.stdout.readline())
    try:
        for attempt in (RunLock, RunLock.check):
            with pytest.raises(
                ValueError, match=rf"another run writes there \(process {first.pid} on .*\); wait for it"
            ):
                attempt(folder)
        first.kill()
        first.wait()
        os.kill(orphan, 0)
        RunLock.check(folder)
        RunLock(folder).release()
    finally:
        first.kill()
        os.kill(orphan, signal.SIGKILL)


def test_a_second_launch_changes_nothing_of_the_first(tmp_path, monkeypatch):
    folder = tmp_path / "quickstart"
    launch.write_config(load(["recipe=quickstart", "train.steps=7"]), folder / "config.yaml")
    before = (folder / "config.yaml").read_text()
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    orphan = int(first.stdout.readline())
    monkeypatch.setattr(launch, "early_agent", lambda: None)
    monkeypatch.setattr("weft.engine.supervision.drive", lambda *_, **__: pytest.fail("ranks would start"))
    try:
        with pytest.raises(ValueError, match="another run writes there"):
            launch.main(["recipe=quickstart", f"train.output_dir={tmp_path}", "cluster.master_port=0"])
    finally:
        first.kill()
        os.kill(orphan, signal.SIGKILL)
    assert (folder / "config.yaml").read_text() == before


# -- DeepSpeed's launcher without ours ----------------------------------------------------------------


def _deepspeed(*overrides):
    command = [
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        "--quiet",
        "--num_gpus",
        "2",
        "--master_port",
        str(free_port()),
    ]
    command += ["--module", "weft.recipes.train", *overrides]
    env = os.environ | {"DS_ACCELERATOR": "cpu"}
    env.pop("WEFT_KEY")
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_through_deepspeeds_launcher_a_bad_setting_is_said_once():
    done = _deepspeed("recipe=quickstart", "pipeline.microbatches=-3")
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count("weft train: pipeline.microbatches=-3") == 1


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_through_deepspeeds_launcher_a_run_leaves_its_configuration(tmp_path):
    done = _deepspeed(
        *TINY_QUICKSTART,
        "pipeline.stages=2",
        "train.steps=1",
        "checkpoint.final=false",
        f"train.output_dir={tmp_path}",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = tmp_path / "quickstart"
    assert load([f"recipe={folder / 'config.yaml'}"]).train.steps == 1
    for path in (folder / "config.yaml", folder / "metrics.jsonl", folder / "lock"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert Path(folder).stat().st_uid == os.geteuid()
