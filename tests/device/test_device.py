"""The emulated device observes what a GPU would suffer from, and the engine trains on it without any of that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import fp16, mutants, observations, training, uses, waits
from tests.device.build import obstacle
from tests.device.lines import FOLDER, require
from tests.device.ranks import run_on_devices
from weft.tools.ranks import run_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
]

STEPS = 3
ON_AN_EMULATED_GPU = [str(path) for path in Path("tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
CASES = {
    1: {"one rank": {"stages": 1}, "split backward": {"stages": 1, "schedule": "auto"}},
    2: {
        "pipeline": {"stages": 2},
        "split backward, fold": {"schedule": "w", "placement": "fold"},
        **{f"replicas, ZeRO-{zero}": {"stages": 1, "zero": zero} for zero in range(4)},
        "replicas, ZeRO-2, sent in bf16": {"stages": 1, "zero": 2, "sent": "bf16", "reduce_every": 1},
        "replicas compared, ZeRO-1": {"stages": 1, "zero": 1, "compare_every": 1},
        "tensor 2": {"stages": 1, "tensor": 2},
        "context 2, ring": {"stages": 1, "context": 2, "exchange": "ring"},
        "pipeline, offload": {"stages": 2, "offload_cap": 6_000_000},
        "pipeline, bf16": {"stages": 2, "precision": "bf16"},
        "pipeline, fp16": {"stages": 2, "precision": "fp16"},
        "split backward, fp8": {"schedule": "w", "placement": "fold", "precision": "bf16", "float8": "tensorwise"},
    },
}
"""Keywords of `tiny_config` by the number of ranks."""
TOLERANCE = {"bf16": 1e-3, "fp16": 1e-3, "fp8": 1e-3, "ring": 1e-6}
"""Relative difference of losses to a CPU's, which rounds elsewhere and adds heads up otherwise; others are equal."""
WAITS = {"fp16": "zero/finite.py"}
"""Where the host waits for the norm after the last launch of a step, because an overflow changes the next one."""


@pytest.fixture(scope="module")
def seen():
    (result,) = run_on_devices(1, observations.observations)
    return result


def test_accesses_that_no_event_orders_are_races(seen):
    value, kinds = seen["read without an event"]
    assert value == 0.0, "the reader ran before the writer, so it read what fresh memory is filled with"
    (race,) = kinds["races"]
    assert race.startswith("read by aten::sum at device/observations.py") and "write by aten::fill_" in race
    value, kinds = seen["read behind an event"]
    assert value == 1.0 and not kinds["races"]
    assert not seen["other columns"][1]["races"] and seen["same columns"][1]["races"]


def test_memory_that_is_freed_too_early_is_overwritten(seen):
    value, kinds = seen["freed without record_stream"]
    assert value == 0.0 and "reuse after free" in kinds["races"][0]
    value, kinds = seen["freed with record_stream"]
    assert value == 1.0 and not kinds["races"]


def test_host_waits_are_reported_with_their_lines(seen):
    for name, what in {
        "item": "aten::_local_scalar_dense",
        "nonzero": "aten::nonzero",
        "to pageable memory": "copy to pageable memory",
        "an event not reached": "event.synchronize",
    }.items():
        (wait,) = seen[name][1]["waits"]
        assert wait.startswith(f"{what} at device/observations.py:"), name
    assert not seen["to pinned memory"][1]["waits"]
    value, kinds = seen["from pageable memory"]
    assert value == 4.0
    assert sorted(wait.partition(" at ")[0] for wait in kinds["waits"]) == [
        "aten::_local_scalar_dense",
        "copy from pageable memory",
    ]


def test_a_thread_without_a_device_creates_a_context_on_another(seen):
    (context,) = seen["a thread without a device"][1]["contexts"]
    assert context.startswith("device 0 by torch.cuda.set_stream at device/observations.py:")
    assert not seen["a thread with a device"][1]["contexts"]


def test_memory_and_random_numbers_are_those_of_a_caching_allocator_and_a_generator(seen):
    assert seen["memory"][0] == (2048, 4096, 1)
    first, second, again = seen["random numbers"][0]
    assert first == again != second
    assert seen["backward"][0], "gradients equal the CPU's"
    assert not any(kinds["errors"] for _, kinds in seen.values())


def test_the_removal_of_each_wait_between_host_and_device_is_noticed(tmp_path):
    """Only of those with lags that a busy host does not exceed; `python -m tests.device.mutants` removes all."""
    found: dict[str, str] = {}
    mutants.noticed("parts", mutants.CASES["parts"], tmp_path, found)
    assert not mutants.unnoticed(found)
    assert set(found) >= {wait for wait, what in waits.listed().items() if what.endswith("(parts)")}


def test_gpu_tests_pass_on_an_emulated_gpu_without_races(tmp_path):
    command = [sys.executable, "-m", "pytest", "-q", "--device=emulated", "-m", "gpu", *ON_AN_EMULATED_GPU]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "DS_"))}
    environment[FOLDER] = str(tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    require("GPU tests", tmp_path)


def test_memory_checkpoints_are_ordered_after_all_gathers(tmp_path):
    keywords = {"stages": 1, "zero": 1, "layers": 2}
    for rank, run in enumerate(
        run_on_devices(2, training.train_with_memory, keywords, 4, str(tmp_path), runs="memory")
    ):
        assert not run.races, (rank, run.races)
        assert not run.contexts, (rank, run.contexts)
        assert not run.waits, (rank, run.waits)


def test_measurements_boards_and_checkpoints_work_on_a_device(tmp_path):
    (found,) = run_on_devices(1, uses.on_one_rank, str(tmp_path), runs="one rank")
    assert not found["races"] and not found["errors"]
    launched_ms, begin_ms, busy_ms = found["bubbles"]
    assert launched_ms < begin_ms >= uses.SLEEP_MS <= busy_ms, "marks have the device's times; the host runs ahead"
    assert not found["timer"], "a timed slot does not make the host wait"
    assert found["failed device"] == ["close"], "readers find no writer"
    assert found["diagnostics"]["gemm"] == "TFLOP/s" and found["diagnostics"]["tiles"] == 16
    assert found["dropout"] == (True, 0), "draws differ, and the host does not wait for them"
    assert found["kernels"] == ["GpuFlash", "GpuEfficient"]
    assert found["profile"] == 4
    published, allocated = found["heartbeat"]
    assert published == allocated > 0
    expected, resumed = found["checkpoint"]
    assert resumed == expected


def test_ranks_measure_collectives_and_overlap_on_devices():
    for found in run_on_devices(2, uses.on_two_ranks, runs="two ranks"):
        assert not found["races"] and not found["errors"]
        assert found["exchanged"] == [(), ()] and found["overlap"] == 1 and found["samples"] > 0


def test_ranks_at_two_sites_train_on_devices_like_on_cpus():
    cases = list(mutants.AT_SITES.values())
    expected = run_ranks(2, training.train_on_cpu, [case | {"sites": (), "routes": None} for case in cases], 2)[0]
    for found in run_on_devices(2, uses.over_sites, cases, 2, runs="two sites", first_device=0):
        assert found["losses"] == expected
        assert not found["races"] and not found["errors"] and not found["contexts"]


def test_strand_pairs_of_two_ranks_give_what_their_halves_give():
    shape = ["train.precision=bf16", "pipeline.recompute=layers", "data.sequence_length=64"]
    for found in run_on_devices(2, uses.strand_pairs, shape, timeout_s=60.0, first_device=0):
        assert len(set(map(tuple, found["values"]))) == 1, found["values"]
        assert not found["races"] and not found["errors"] and not found["contexts"]


def test_the_number_of_events_does_not_grow_with_steps():
    (runs,) = run_on_devices(1, training.train, [{"stages": 1, "layers": 2, "microbatches": 2}], 13)
    assert len(set(runs[0].events[-4:])) == 1, runs[0].events


def test_predicted_memory_is_that_of_the_device():
    """Layouts with W, temporary gradients and recomputation; `python -m benchmarks device --emulated` has more."""
    from benchmarks.device import measure_emulated  # needs the feature emulation, without which these are collected

    settings = ("pipeline.stages=2", "pipeline.placement=fold", "model.overrides.num_hidden_layers=4")
    layouts = [(*settings, "pipeline.schedule=zbv"), (*settings, "pipeline.schedule=w", "pipeline.recompute=layers")]
    for found in run_on_devices(2, measure_emulated, layouts):
        for row in found:
            assert abs(row["error"]) < 0.05, row


def test_fp16_steps_on_a_device_skip_like_deepspeed_and_wait_after_their_last_operator():
    (expected,) = run_ranks(1, fp16.deepspeed_rows, timeout_s=400)
    assert len({skipped for _, _, skipped, _ in expected}) > 2 and expected[-1][1] > expected[-2][1]
    for num_ranks, arguments in {1: (1, 0, 3), 2: (2, 1)}.items():
        for rows, after in run_on_devices(num_ranks, fp16.weft_rows, *arguments):
            assert [row[1:] for row in rows] == [row[1:] for row in expected]
            assert [row[0] for row in rows] == pytest.approx([row[0] for row in expected], rel=1e-3)
            assert not after, after


@pytest.mark.parametrize("num_ranks", CASES)
def test_training_is_that_of_a_cpu_without_races(num_ranks):
    cases, runs = CASES[num_ranks], "training" if num_ranks > 1 else ""
    expected = run_ranks(num_ranks, training.train_on_cpu, list(cases.values()), STEPS, timeout_s=400)[0]
    results = run_on_devices(num_ranks, training.train, list(cases.values()), STEPS, timeout_s=400, runs=runs)
    for rank, trained in enumerate(results):
        for name, run, losses in zip(cases, trained, expected, strict=True):
            where = f"{name}, rank {rank}"
            precision = name.rpartition(", ")[2]
            assert run.losses == pytest.approx(losses, rel=TOLERANCE.get(precision, 0.0), abs=0.0), where
            assert not run.races, (where, run.races)
            assert not run.contexts, (where, run.contexts)
            assert not run.errors, (where, run.errors)
            allowed = [wait for wait in run.waits if precision in WAITS and WAITS[precision] in wait]
            assert len(allowed) <= 1 and len(run.waits) == len(allowed), (where, run.waits)
            assert run.num_launches, where
