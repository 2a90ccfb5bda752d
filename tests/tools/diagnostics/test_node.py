"""`weft doctor node`: each check passes on a healthy host, and is seen to fail on the fault that it is for."""

import itertools
import re

import msgspec
import numpy as np
import pytest
import torch

from weft.conf.host.diagnosis import CheckResult, Outcome, failures, read_results
from weft.conf.host.measurements import Measurements
from weft.tools.cli import main
from weft.tools.diagnostics import corruption, exchange, gpu
from weft.tools.diagnostics.corruption import CHECKSUMS, SIZE, check_bits, checksum, factor
from weft.tools.diagnostics.judging import Judge, check_disk, check_free_space
from weft.tools.diagnostics.node import Node, diagnose
from weft.tools.doctor import NODE_FAULTS

CPU = torch.device("cpu")


@pytest.fixture
def judge(tmp_path):
    return Judge(Measurements(tmp_path / "figures.json"))


@pytest.mark.parametrize("spread", CHECKSUMS)
def test_checksums_are_those_of_products_in_whole_numbers(spread):
    left, right = factor(1, spread).numpy().astype(np.int32), factor(2, spread).numpy().astype(np.int32)
    product = left @ right
    assert set(np.unique(left)) == set(range(1 - spread, spread, 2))
    # Whatever order terms are added in, no partial sum leaves what the format holds.
    assert (np.abs(left) @ np.abs(right)).max() <= 2**24
    assert np.abs(product).max() <= (2**8 if spread == 2 else 2**24)
    assert checksum(torch.from_numpy(product.astype(np.float32))) == CHECKSUMS[spread]


def test_one_flipped_bit_is_seen():
    assert check_bits(CPU).outcome is Outcome.passed
    result = check_bits(CPU, flip=True)
    assert result.outcome is Outcome.failed
    assert re.search(r"wrong bits in 2 of 6 products \(float32, round 2: tile \d,0\)", result.text)


@pytest.mark.parametrize(("tile_s", "tiles"), [(0.5, 1), (5.0, 1), (0.05, 2), (0.001, 4)])
def test_a_processor_multiplies_as_many_tiles_as_there_is_time_for(monkeypatch, tile_s, tiles):
    """One without instructions for a format takes a hundred times as long, and may be slowed down besides.

    Tiles are small: where there is none of the instructions, 98 products of the full size take a minute.
    """
    monkeypatch.setattr(corruption, "SIZE", 64)
    for spread in CHECKSUMS:
        product = factor(1, spread).numpy() @ factor(2, spread).numpy()
        monkeypatch.setitem(CHECKSUMS, spread, checksum(torch.from_numpy(product.astype(np.float32))))
    clock = itertools.count(step=tile_s)
    monkeypatch.setattr("weft.tools.diagnostics.corruption.perf_counter", lambda: next(clock))
    result = check_bits(CPU)
    assert result.outcome is Outcome.passed
    assert f"{tiles**2} of float32 and {tiles**2} of bfloat16" in result.text
    assert f"float32, round 2: tile {tiles - 1},0" in check_bits(CPU, flip=True).text


@pytest.mark.parametrize(("row", "column", "bit"), [(0, 0, 0), (SIZE - 1, SIZE - 1, 31), (17, 300, 22)])
def test_any_bit_changes_the_checksum(row, column, bit):
    tile = (factor(1, 16).float() @ factor(2, 16).float()).contiguous()
    assert checksum(tile) == CHECKSUMS[16]
    tile.view(torch.int32)[row, column] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    assert checksum(tile) != CHECKSUMS[16]


def test_figures_are_held_against_the_best_so_far(judge):
    figures = iter([10.0, 6.0, 1.0, 1.0, 1.0, 20.0, 9.0, 9.0, 11.0])
    measure = figures.__next__
    first = judge.by_own_best("x", "this", measure, share=0.5, unit="GB/s")
    assert first.outcome is Outcome.passed and first.least is None and "first figure" in first.text
    assert judge.by_own_best("x", "this", measure, share=0.5, unit="GB/s").least == 5.0
    slow = judge.by_own_best("x", "this", measure, share=0.5, unit="GB/s")
    assert slow.outcome is Outcome.failed and "10% of the best here so far" in slow.text
    assert judge.by_own_best("x", "this", measure, share=0.5, unit="GB/s").figure == 20.0
    assert judge.by_own_best("x", "this", measure, share=0.5, unit="GB/s").outcome is Outcome.passed  # the third try
    assert judge.by_own_best("x", "other", lambda: 1.0, share=0.5, unit="GB/s").least is None


def test_figures_are_held_against_the_data_sheet(judge):
    def of(figure):
        return judge.by_data_sheet("GEMM", lambda: figure, peak=989.0, share=0.5, unit="TFLOP/s")

    assert of(700.0).outcome is Outcome.passed and "71% of the data sheet's 989" in of(700.0).text
    assert of(300.0).outcome is Outcome.failed


def test_a_cache_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    judge = Judge(Measurements(tmp_path / "file" / "figures.json"))
    result = judge.by_own_best("x", "this", lambda: 1.0, share=0.5, unit="GB/s")
    assert result.outcome is Outcome.passed and "not kept" in result.text


FAULTY = {
    "slow-memory": ("memory", "memory"),
    "slow-gemm": ("gemm", "GEMM"),
    "gemm-bit": ("bits", "GEMM bits"),
    "full-disk": ("space", "free space"),
    "damaged-loopback": ("loopback", "loopback"),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_fault_is_seen_by_its_check(fault, judge, tmp_path):
    check, name = FAULTY[fault]
    healthy = diagnose(Node(tmp_path, 2, judge), [check])
    assert [result.outcome for result in healthy] == [Outcome.passed] and healthy[0].check == name
    faulty = diagnose(Node(tmp_path, 2, judge, faults=[fault]), [check])
    assert [result.outcome for result in faulty] == [Outcome.failed]


def test_every_fault_has_a_test():
    assert set(NODE_FAULTS) == {*FAULTY, "slow-disk", "clock", "wrong-rank", "hung-rank"}


def test_a_slow_disk(tmp_path):
    judge = Judge(Measurements(tmp_path / "figures.json"))
    judge.cache.store({f"disk, folder {tmp_path.absolute()}": 1e9})  # what no disk reaches
    result = check_disk(tmp_path, judge)
    assert result.outcome is Outcome.failed and "of the best here so far" in result.text
    assert check_disk(tmp_path, Judge(Measurements(tmp_path / "new.json"))).outcome is Outcome.passed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figures.json", "new.json"]


def test_a_folder_that_is_not_there(tmp_path, judge):
    assert "No such file" in check_disk(tmp_path / "gone", judge).text
    assert check_free_space(tmp_path / "gone").outcome is Outcome.failed


def test_a_device_that_refuses_is_a_failure_of_the_host(monkeypatch, judge, tmp_path):
    def broken(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr("weft.tools.diagnostics.node.check_memory", broken)
    (result,) = diagnose(Node(tmp_path, 2, judge), ["memory"])
    assert result == CheckResult("memory", Outcome.failed, "CUDA error: an illegal memory access was encountered")


def fake_smi(tmp_path, monkeypatch, script):
    path = tmp_path / "bin" / "nvidia-smi"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")


HEALTHY = "0, NVIDIA H200, 41, 0, No, Not Active, Not Active, Not Active"


@pytest.mark.parametrize(
    ("rows", "outcome", "part"),
    [
        ([HEALTHY, HEALTHY], Outcome.passed, "2 GPUs without a fault"),
        (["0, NVIDIA L40S, 41, [N/A], [N/A], Not Active, Not Active, [N/A]"], Outcome.passed, "1 GPUs"),
        ([HEALTHY, "1, NVIDIA H200, 60, 3, No, " + "Not Active, " * 3], Outcome.failed, "GPU 1 has 3 uncorrectable"),
        (["0, A100, 60, 0, Yes, Not Active, Not Active, Not Active"], Outcome.failed, "pages to retire"),
        (
            ["0, A100, 91, 0, No, Active, Active, Not Active"],
            Outcome.failed,
            "by hardware; GPU 0 is slowed down by heat",
        ),
    ],
)
def test_gpu_state(tmp_path, monkeypatch, rows, outcome, part):
    fake_smi(tmp_path, monkeypatch, "\n".join(f"echo '{row}'" for row in rows))
    result = gpu.check_gpus()
    assert result.outcome is outcome and part in result.text


def test_a_gpu_driver_that_fails(tmp_path, monkeypatch):
    fake_smi(
        tmp_path, monkeypatch, "echo 'Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost'; exit 15"
    )
    result = gpu.check_gpus()
    assert result.outcome is Outcome.failed and "GPU is lost" in result.text


def test_without_a_gpu_the_checks_do_not_apply(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.check_gpus().outcome is gpu.check_xid().outcome is Outcome.does_not_apply


def test_xid_of_a_device_and_of_a_program():
    lost = "[ 12.3] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n"
    fault = "[ 11.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=99, name=python, MMU Fault\n"
    assert gpu.check_xid("").outcome is Outcome.passed
    assert "1 that programs may cause" in gpu.check_xid(fault).text
    assert "the last 79 of PCI:0000:3b:00" in gpu.check_xid(fault + lost).text
    assert gpu.check_xid(fault + lost).outcome is Outcome.failed


def test_results_survive_json_and_a_doctor_that_dies():
    result = CheckResult("disk", Outcome.failed, "slow", 1.5, "MB/s", 15.0)
    assert read_results(msgspec.json.encode([result]).decode(), 1) == [result]
    (broken,) = read_results("Traceback ...\nOSError: no", 1)
    assert broken.outcome is Outcome.failed and "ended with 1: Traceback ... OSError: no" in broken.text
    (silent,) = read_results("", None)
    assert silent.text == "the doctor did not end in time" and failures([silent]) == [silent]


def test_the_command_prints_a_table(tmp_path, capsys):
    options = ["--cache", str(tmp_path / "figures.json"), "--folder", str(tmp_path), "--only", "bits", "space"]
    assert main(["doctor", "node", *options]) == 0
    assert "0 of 2 checks failed" in capsys.readouterr().out
    assert main(["doctor", "node", *options, "--inject", "gemm-bit"]) == 1
    shown = capsys.readouterr().out
    assert "1 of 2 checks failed" in shown and "tile" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "part"),
    [({"damaged": 1}, "numbers of ranks [1] came wrong"), ({"hung": 0}, "ranks [0, 1] of 2 did not answer")],
)
def test_a_faulty_rank_is_named(fault, part, judge, monkeypatch):
    monkeypatch.setattr(exchange, "MOST_S", 120.0 if "damaged" in fault else 3.0)
    result = exchange.check_local_collectives(2, judge, **fault)
    assert result.outcome is Outcome.failed and part in result.text


def test_one_rank_has_no_peer(judge):
    assert exchange.check_local_collectives(1, judge).outcome is Outcome.does_not_apply


def test_without_a_driver_the_clock_is_not_compared(judge, tmp_path):
    (result,) = diagnose(Node(tmp_path, 1, judge), ["clock"])
    assert result.outcome is Outcome.does_not_apply
