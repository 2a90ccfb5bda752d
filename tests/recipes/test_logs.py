"""Tests that logs can be read back: every metric, on one axis, in every log."""

import errno
import json
import struct
import threading
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from math import nan
from unittest.mock import Mock

import pytest
import torch

from tests.recipes.runs import prepare, records, run_all
from weft.conf.schema import OptimizerConfig, WeftConfig
from weft.engine.deepspeed.construction import learning_rate
from weft.recipes import logs
from weft.recipes.logs import STEP, JsonLines, LogWriter
from weft.tools.ranks import run_ranks

METRICS = {
    *("loss", "epoch", "lr", "grad_norm", "step_seconds", "tokens_per_second", "mfu", "bubble_share"),
    "peak_memory_gb",
}

BLOCK, HEADER = 32768, struct.Struct("<IHB")
WHOLE, LAST = 1, 4


def wandb_records(data):
    """The records of a W&B file, which has the form of LevelDB's log: blocks of (checksum, length, type, bytes)."""
    at, parts = HEADER.size, b""  # the file's own header is as long as a record's
    while len(data) - at >= HEADER.size:
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size + length
        parts += data[at - length : at]
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""


def of_wandb(folder):
    """Values by metric and step, out of the files of all offline runs, the later over the earlier."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = defaultdict(dict)
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in items.items():
                if not name.startswith("_") and name != STEP:
                    found[name][items[STEP]] = value
    return dict(found)


def of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


@pytest.mark.slow
def test_every_log_holds_every_metric_at_its_step(tmp_path):
    """Six steps; the first attempt dies in the fifth, and the second repeats the fourth."""
    settings = [*prepare(tmp_path), "logging=all", "train.steps=6", "train.eval_every=2", "checkpoint.every=3"]
    run_ranks(1, run_all, [{"settings": settings, "killed_at": step} for step in (5, 0)])
    folder = tmp_path / "runs" / "run"
    train, evaluations = records(folder, "train"), records(folder, "eval")
    assert sorted(train) == [1, 2, 3, 4, 5, 6] and sorted(evaluations) == [2, 4, 6]
    expected = {f"train/{name}": {step: line[name] for step, line in train.items()} for name in METRICS}
    expected["eval/loss"] = {step: line["loss"] for step, line in evaluations.items()}
    assert of_wandb(folder) == expected
    attempts = [path.name.rpartition("-")[2] for path in folder.glob("wandb/offline-run-*")]
    assert len(attempts) == 2 and set(attempts) == {(folder / "wandb_run_id").read_text().strip()}
    board = of_tensorboard(folder)
    assert board.keys() == expected.keys()
    for name, values in expected.items():
        assert board[name] == pytest.approx(values, rel=1e-5), name
    stepped = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=OptimizerConfig().lr)
    scheduler = learning_rate(OptimizerConfig(warmup_steps=3), 6)(stepped)
    for step in range(1, 7):
        assert train[step]["lr"] == pytest.approx(scheduler.get_last_lr()[0]), "the rate of the step that was done"
        stepped.step()
        scheduler.step()
    assert [train[step]["epoch"] for step in train] == sorted(line["epoch"] for line in train.values())


@pytest.mark.parametrize(("ratio", "steps", "warmup"), [(0.0, 10, 4), (0.1, 10, 1), (0.25, 10, 3), (1.0, 10, 10)])
def test_a_share_of_the_steps_replaces_their_number_in_the_warm_up(ratio, steps, warmup):
    def rates(**warm_up):
        stepped = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        factor = learning_rate(OptimizerConfig(lr=1.0, **warm_up), steps)(stepped).lr_lambdas[0]
        return [factor(step) for step in range(steps)]

    assert rates(warmup_ratio=ratio, warmup_steps=4) == rates(warmup_steps=warmup)


def test_a_number_that_is_none_stays_json(tmp_path):
    JsonLines(tmp_path / "m.jsonl", 0).write("train", 1, {"loss": nan, "lr": 0.5})

    def refuse(text):
        raise AssertionError(text)

    line = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "kind": "train", "loss": None, "lr": 0.5}


@pytest.mark.parametrize("rest", ["", '{"step": 4, "kind": "tr', "no line of ours\n"])
def test_steps_that_are_repeated_leave_one_line_each(tmp_path, rest):
    path = tmp_path / "m.jsonl"
    first = JsonLines(path, 0)
    for step in (1, 2, 3, 4):
        first.write("train", step, {"loss": float(step)})
    first.write("eval", 4, {"loss": 0.5})
    with path.open("a") as file:
        file.write(rest)
    second = JsonLines(path, 2)
    second.write("train", 3, {"loss": 30.0})
    second.write("train", 4, {"loss": 40.0})
    second.go_back(3)
    second.write("train", 4, {"loss": 41.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 41.0)]
    JsonLines(path, 4)
    assert len(path.read_text().splitlines()) == 4


def test_lines_wait_for_room_and_none_is_torn(tmp_path, monkeypatch, caplog):
    path, room = tmp_path / "metrics.jsonl", [10]
    write = logs.os.write

    def write_little(file, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(room[0], len(data))
        room[0] -= taken
        return write(file, data[:taken])

    monkeypatch.setattr(logs.os, "write", write_little)
    log = JsonLines(path)
    for step in (1, 2, 3):
        log.write("train", step, {"loss": 0.5})
        room[0] = 10
    assert path.read_text() == "" and caplog.text.count("its next lines wait") == 1
    log.go_back(2)
    room[0] = 10_000
    log.write("train", 3, {"loss": 0.25})
    room[0] = 0
    log.write("train", 4, {"loss": 0.125})
    room[0] = 10_000
    log.close()
    assert [(line["step"], line["loss"]) for line in map(json.loads, path.read_text().splitlines())] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.25),
        (4, 0.125),
    ]
    monkeypatch.setattr(logs.os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        log.write("train", 4, {})


@pytest.mark.parametrize("settings", [{}, {"wandb_project": "ours", "wandb_name": "mine", "wandb_group": "some"}])
@pytest.mark.parametrize("given", [{}, {"PROJECT": "theirs", "NAME": "named", "RUN_GROUP": "grouped"}])
def test_wandb_variables_hold_unless_settings_name_something_else(settings, given, tmp_path, monkeypatch):
    import wandb

    asked = {}
    monkeypatch.setattr(wandb, "init", lambda **options: asked.update(options) or Mock(id="1"))
    for name in ("PROJECT", "NAME", "RUN_GROUP"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    config = WeftConfig()
    config.train.name = "sft"
    for name, value in settings.items():
        setattr(config.logging, name, value)
    logs.WeightsAndBiases(config, tmp_path, resumed=False)
    found = [asked[name] for name in ("project", "name", "group")]
    by_default = list(given.values()) or ["weft", "sft", None]
    assert found == (list(settings.values()) or by_default)


class HangingLog:
    """Does not write before ``answers`` is set."""

    def __init__(self, answers):
        self._answers, self.steps = answers, []

    def write(self, kind, step, metrics):
        assert self._answers.wait(60), "the rank waits for storage as if it computed"
        self.steps.append(step)

    def close(self):
        """Nothing to close."""


def test_a_write_that_hangs_is_waited_for_in_a_phase_of_its_own():
    answers = threading.Event()

    @contextmanager
    def waiting():
        answers.set()
        yield

    log = HangingLog(answers)
    writer = LogWriter([log], waiting)
    for step in (1, 2):
        writer.write("train", step, {"loss": 1.0})
        assert log.steps[-1] == step, "what is written is there when the step goes on"
    writer.close()


def test_an_error_of_a_log_ends_the_step(tmp_path):
    writer = LogWriter([JsonLines(tmp_path / "gone" / "metrics.jsonl")], nullcontext)
    with pytest.raises(FileNotFoundError):
        writer.write("train", 1, {"loss": 1.0})
    writer.close()


def test_tensorboard_waits_for_room(tmp_path, monkeypatch, caplog):
    """The thread that writes a file of events ends at its first error, and the record before may be lost with it."""
    free, files = [True], []

    def no_space():
        raise OSError(errno.ENOSPC, "No space left on device")

    class Writer:
        def __init__(self, log_dir, purge_step):
            self.broken, self.purge_step, self.steps = False, purge_step, []
            files.append(self)
            self.flush()

        def add_scalar(self, name, value, step):
            self.flush()
            self.steps.append(step)

        def flush(self):
            self.broken |= not free[0]
            if self.broken:
                no_space()

        close = flush

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Writer)
    log = logs.TensorBoard(tmp_path, 0)
    monkeypatch.setattr(log, "_require_space", lambda: None if free[0] else no_space())
    for step in range(1, 6):
        free[0] = step not in (3, 4)
        log.write("train", step, {"loss": 0.5})
    assert files[0].steps == [1, 2] and caplog.text.count("its next lines wait") == 1
    assert len(files) == 2, "no thread is started while there is no space"
    assert (files[-1].purge_step, files[-1].steps) == (2, [2, 3, 4, 5])
    free[0] = False
    log.write("train", 6, {"loss": 0.5})
    free[0] = True
    log.close()
    assert files[-1].steps == [5, 6]
