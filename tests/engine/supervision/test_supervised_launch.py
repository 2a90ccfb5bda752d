"""A supervised run survives its ranks, and computes what it would have without faults."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.recipes.runs import prepare, run
from tests.waiting import until
from weft.conf import load
from weft.engine.supervision.agent.forkserver import PRELOAD
from weft.engine.supervision.driver import driver
from weft.engine.supervision.driver.files import JOURNAL, Spec, config_file, prepare_folder, read_journal
from weft.tools import launch
from weft.tools.launch import is_supervised, write_config
from weft.tools.ranks import run_ranks

LIMIT_S = 240.0
STEPS = 12


@pytest.fixture
def settings(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("left slots=2\nright slots=2\n")
    return [
        *prepare(tmp_path),
        f"cluster.hostfile={hostfile}",
        "cluster.manager=local",
        "pipeline.stages=2",
        f"train.steps={STEPS}",
        "checkpoint.every=4",
    ]


def start(settings, name, faults="", target="faulty_ranks", **more):
    """The driver of a run; returns it with its run's folder."""
    config = load([*settings, f"train.name={name}"])
    folder = config_folder(config)
    write_config(config, config_file(folder))
    environment = {"FAULTS": faults, "RUN": str(folder), **more}
    module = f"tests.engine.supervision.{target}"
    Spec(f"{module}:run", [*PRELOAD, module], environment).write(folder)
    return subprocess.Popen([sys.executable, "-m", driver.__name__, "launch", str(folder)]), folder


def trained(settings):
    """The folder of a run without faults, on unsupervised ranks."""
    config = load([*settings, "train.name=calm"])
    assert run_ranks(4, run, [*settings, "train.name=calm"], timeout_s=LIMIT_S)[0]["steps"] == STEPS
    return config_folder(config)


def config_folder(config):
    return Path(config.train.output_dir) / config.train.name


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "each step is there once"
    return [line["loss"] for line in lines]


def events(folder, name):
    return [event for event in read_journal(folder / JOURNAL) if event["event"] == name]


@pytest.mark.slow
def test_a_run_with_faults_computes_what_one_without_does(settings):
    process, calm = start(settings, "calm")
    assert process.wait(LIMIT_S) == 0
    process, folder = start(settings, "faulty", faults="1:2:6:SIGKILL 2:1:10:SIGSTOP")
    until(lambda: (folder / JOURNAL).exists() and events(folder, "good_step"), LIMIT_S)
    os.kill(process.pid, signal.SIGKILL)  # ranks do not notice; an agent starts another driver
    process.wait(LIMIT_S)
    until(lambda: events(folder, "end"), LIMIT_S)
    assert events(folder, "end")[0]["code"] == 0
    assert len(events(folder, "driver")) == 2
    assert [fault["culprit"] for fault in events(folder, "fault")] == [
        {"rank": 2, "host": "right"},
        {"rank": 1, "host": "left"},
    ]
    assert [fault["kind"] for fault in events(folder, "fault")] == ["signal", "stopped"]
    assert [event["attempt"] for event in events(folder, "good_step")] == [1, 2, 3]
    assert losses(folder) == losses(calm)
    until(lambda: not left_of(folder), LIMIT_S)


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_a_rank_that_dies_inside_of_a_strand_pair_costs_no_loss(settings):
    pairs = ["pipeline.schedule=w", "pipeline.placement=fold", "pipeline.microbatches=4", "pipeline.pairs=always"]
    settings = [*settings, *pairs, "parallel.tensor=2", "model.overrides.num_hidden_layers=4"]
    calm = trained(settings)
    process, folder = start(settings, "faulty", faults="1:1:6:pair")
    assert process.wait(LIMIT_S) == 0
    assert [(fault["culprit"]["rank"], fault["kind"]) for fault in events(folder, "fault")] == [(1, "signal")]
    assert [event["attempt"] for event in events(folder, "good_step")] == [1, 2]
    assert losses(folder) == losses(calm)
    until(lambda: not left_of(folder), LIMIT_S)


@pytest.mark.slow
def test_a_rank_whose_storage_hangs_for_30_s_is_not_taken_for_hung(settings):
    """Opening a FIFO without a reader blocks the writer, as storage that does not answer does."""
    process, folder = start([*settings, "train.steps=60"], "hanging")
    metrics, pipe = folder / "metrics.jsonl", folder / "pipe"
    until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, LIMIT_S)
    os.mkfifo(pipe)
    os.link(metrics, folder / "before")
    pipe.replace(metrics)
    time.sleep(30.0)
    reading = os.open(metrics, os.O_RDWR)  # from now on storage answers
    assert process.wait(LIMIT_S) == 0
    assert events(folder, "fault") == [] and len(events(folder, "attempt")) == 1
    lines = (folder / "before").read_bytes() + os.read(reading, 1 << 16)
    assert [json.loads(line)["step"] for line in lines.splitlines()] == list(range(1, 61))
    os.close(reading)


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_replicas_and_grows_back(settings):
    settings = [*settings, "supervise.least_deadline_s=200"]
    calm = trained(settings)
    # The host of the second replica is evicted; the first, alone, waits for it to return, and never ends by itself.
    process, folder = start(settings, "smaller", faults="1:3:3:evict 2:0:6:readmit 2:0:11:wait")
    assert process.wait(LIMIT_S) == 0
    assert [event["reason"] for event in events(folder, "attempt")] == ["start", "shrink", "grow"]
    assert [len(event["ranks"]) for event in events(folder, "attempt")] == [4, 2, 4]
    assert [event["host"] for event in events(folder, "evict")] == ["right"]
    assert losses(folder) == pytest.approx(losses(calm), rel=1e-3)


def left_of(folder):
    """Processes that name the run's folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if str(folder) in " ".join(process.info["cmdline"] or []):
            found.append(process)
    return found


def test_who_is_supervised(tmp_path):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=4\nb slots=4\n")
    many = [f"cluster.hostfile={hostfile}"]
    assert is_supervised(load(many), [])
    assert not is_supervised(load(many), ["--no_ssh"])
    assert not is_supervised(load([*many, "supervise.enabled=false"]), [])
    assert not is_supervised(load(["cluster.ranks=4"]), [])
    assert is_supervised(load(["cluster.ranks=4", "supervise.enabled=true"]), [])
    hostfile.write_text("a slots=4\n")
    assert not is_supervised(load(many), [])
    with pytest.raises(ValueError, match="option of DeepSpeed's launcher"):
        is_supervised(load(["supervise.enabled=true"]), ["--no_ssh"])


@pytest.mark.parametrize("alone", [["supervise.enabled=false"], ["--no_ssh"]])
def test_what_only_a_supervisor_can_do(tmp_path, alone):
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=4\nb slots=4\n")
    options = [word for word in alone if word.startswith("--")]
    settings = [word for word in alone if word not in options]
    for needed in (
        [f"cluster.hostfile={hostfile}", "cluster.spares=[b]"],
        ["cluster.manager=slurm", "cluster.sites=[{name: here, nodes: 1}]"],
    ):
        assert is_supervised(load(needed), [])
        with pytest.raises(ValueError, match=r"it takes a supervisor, and .* goes without"):
            is_supervised(load([*needed, *settings]), options)


def test_a_run_that_would_resume_from_another_is_not_supervised(tmp_path):
    config = load(["recipe=quickstart", f"train.output_dir={tmp_path}", "checkpoint.resume=never"])
    (tmp_path / "quickstart" / "checkpoints" / "step-00000050").mkdir(parents=True)
    with pytest.raises(ValueError, match="which an earlier run has left"):
        launch.supervise(config, tmp_path / "quickstart", {})
    prepare_folder(config, tmp_path / "quickstart", {}, supervised=False)  # it does not start again


def test_keys_are_for_the_owner_alone_and_in_no_command_line(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "execve", lambda *call: seen.append(call))
    config = load(["recipe=quickstart", f"train.output_dir={tmp_path}"])
    launch.supervise(config, tmp_path / "quickstart", {"WEFT_KEY": "hidden", "PATH": "p"})
    ((program, arguments, env),) = seen
    assert program == sys.executable and "hidden" not in " ".join(arguments) and env["WEFT_KEY"] == "hidden"
    spec = Spec.read(tmp_path / "quickstart")
    assert spec.environment["WEFT_KEY"] == "hidden" and "PATH" not in spec.environment
    file = tmp_path / "quickstart" / "supervisor" / "job.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_there_is_nothing_to_attach_to(tmp_path, capfd):
    assert driver.main(["attach", str(tmp_path)]) == 2
    assert "no supervised run is under way there" in capfd.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_no_one_attaches_to_a_run_of_another_user(tmp_path, capfd):
    Spec("os:abort", [], {}).write(tmp_path)
    os.chown(tmp_path / "supervisor" / "job.json", 54321, 54321)
    assert driver.main(["attach", str(tmp_path)]) == 2
    assert "the run belongs to user 54321, who has to attach to it" in capfd.readouterr().err


def test_a_second_driver_is_refused_with_the_first_ones_process(tmp_path, capfd):
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from weft.conf.host.run_lock import RunLock\n"
            "lock = RunLock(Path(sys.argv[1])); print(flush=True); sys.stdin.read()",
            str(tmp_path / "supervisor"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    holder.stdout.readline()
    assert driver.main(["attach", str(tmp_path)]) == 2
    assert f"process {holder.pid}" in capfd.readouterr().err
    holder.communicate()
