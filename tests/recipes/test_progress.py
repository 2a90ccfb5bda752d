"""Records count what was trained: the steps since the last record, their time alone, and tokens without padding."""

from types import SimpleNamespace

import pytest
import torch

from weft.conf.schema import WeftConfig
from weft.recipes import preparation
from weft.recipes import progress as module
from weft.recipes.progress import Progress

STEP_S, TOKENS = 0.5, 100


class Log:
    def __init__(self):
        self.lines = []

    def write(self, kind, step, metrics):
        self.lines.append((kind, step, metrics))

    def go_back(self, step):
        self.lines = [line for line in self.lines if line[1] <= step]

    def close(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(module, "perf_counter", lambda: now.s)
    return now


def opened(monkeypatch, *, every, start=0, replicas=1, is_countable=True):
    log = Log()
    config = WeftConfig()
    config.logging.every, config.logging.progress = every, False
    engine = SimpleNamespace(
        global_rank=0,
        num_replicas=replicas,
        world_size=2 * replicas,
        device=torch.device("cpu"),
        module=None,
        get_lr=lambda: [0.1],
        usage=lambda: SimpleNamespace(bubble_share=0.0, peak_bytes=0),
        optimizer=SimpleNamespace(cur_scale=1.0),
        fp16_enabled=lambda: False,
        get_global_grad_norm=lambda: 1.0,
        scores=None,
    )
    monkeypatch.setattr(module, "open_logs", lambda *_: [log])
    monkeypatch.setattr(module, "together", lambda action: action())
    monkeypatch.setattr(module, "model_flops_per_token", lambda *_: 2.0)
    monkeypatch.setattr(module, "peak_flops", lambda *_: 1000.0)
    monkeypatch.setattr(module, "_layout", lambda _: "")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.mul_(2 * replicas))
    loader = SimpleNamespace(tokens=0, epoch=0.0, is_countable=is_countable, description="")
    return Progress(config, engine, None, loader, start), loader, log


def train(progress, loader, clock, steps, *, padded=0):
    for step in steps:
        progress.begin_step()
        loader.tokens += TOKENS - padded
        clock.s += STEP_S
        progress.step(step, torch.tensor(1.0 * step))


def test_first_record_after_a_resume_counts_the_steps_since_then(monkeypatch, clock):
    progress, loader, log = opened(monkeypatch, every=10, start=15)
    with progress:
        train(progress, loader, clock, range(16, 31))
    assert [step for _, step, _ in log.lines] == [20, 30]
    for _, _, metrics in log.lines:
        assert metrics["step_seconds"] == STEP_S
        assert metrics["tokens_per_second"] == TOKENS / STEP_S


def test_a_record_waits_for_the_device(monkeypatch, clock):
    """A GPU still computes when a step's last kernel has been launched."""

    class Pending:
        def cpu(self):
            clock.s += 3 * STEP_S
            return torch.tensor(1.0)

    progress, loader, log = opened(monkeypatch, every=2)
    with progress:
        for step in (1, 2):
            progress.begin_step()
            loader.tokens += TOKENS
            progress.step(step, Pending())
    assert [metrics["step_seconds"] for _, _, metrics in log.lines] == [1.5 * STEP_S]


def test_evaluations_and_checkpoints_are_no_part_of_a_step(monkeypatch, clock):
    progress, loader, log = opened(monkeypatch, every=2)
    with progress:
        for step in range(1, 7):
            train(progress, loader, clock, [step])
            clock.s += 100 if step % 3 == 0 else 0
    assert [metrics["step_seconds"] for _, _, metrics in log.lines] == [STEP_S] * 3


def test_last_step_has_a_record(monkeypatch, clock):
    progress, loader, log = opened(monkeypatch, every=10)
    with progress:
        train(progress, loader, clock, range(1, 6))
        progress.end()
    ((kind, step, metrics),) = log.lines
    assert (kind, step, metrics["loss"], metrics["step_seconds"]) == ("train", 5, 5.0, STEP_S)


def test_last_step_is_recorded_once(monkeypatch, clock):
    progress, loader, log = opened(monkeypatch, every=5)
    with progress:
        train(progress, loader, clock, range(1, 6))
        progress.end()
    assert [step for _, step, _ in log.lines] == [5]


def test_padding_does_not_count_as_tokens(monkeypatch, clock):
    progress, loader, log = opened(monkeypatch, every=1, replicas=2)
    with progress:
        train(progress, loader, clock, [1], padded=60)
    ((_, _, metrics),) = log.lines
    assert metrics["tokens_per_second"] == 2 * (TOKENS - 60) / STEP_S
    assert metrics["mfu"] == 2 * 40 * 2.0 / STEP_S / (1000.0 * 4)


def test_steps_that_are_taken_back_do_not_count(monkeypatch, clock):
    progress, loader, log = opened(monkeypatch, every=4)
    with progress:
        train(progress, loader, clock, range(1, 4))
        progress.go_back(0)
        clock.s += 50
        train(progress, loader, clock, range(1, 5))
    assert [metrics["tokens_per_second"] for _, _, metrics in log.lines] == [TOKENS / STEP_S]


@pytest.mark.parametrize(("steps", "printed"), [(5, ""), (25, "train.steps=25: 5 epochs of 40 sequences\n")])
def test_number_of_epochs_is_printed_if_the_data_is_read_more_than_once(monkeypatch, capsys, steps, printed):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(preparation, "together", lambda action: action())
    config = WeftConfig()
    config.train.steps, config.train.microbatch_size, config.pipeline.microbatches = steps, 2, 4
    loader = SimpleNamespace(is_countable=True, sequences=lambda epochs: 40 * epochs)
    assert preparation._with_steps(config, loader).train.steps == steps
    assert capsys.readouterr().out == printed


def test_second_pass_over_a_stream_is_announced_once(monkeypatch, clock, capsys):
    progress, loader, _ = opened(monkeypatch, every=1, is_countable=False)
    with progress:
        for step in range(1, 7):
            loader.epoch = step // 3
            train(progress, loader, clock, [step])
    printed = capsys.readouterr().out.splitlines()[1:]
    assert printed == ["step 3: all data has been read, and is read again from the beginning"]
