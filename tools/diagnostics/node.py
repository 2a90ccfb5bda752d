"""`weft doctor node`: check this host in under 20 seconds, so that it can be done after every fault."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.conf.features import entry
from weft.conf.host.diagnosis import CheckResult, Outcome, failures
from weft.conf.host.measurements import Measurements
from weft.conf.schema import DataConfig
from weft.tools.diagnostics.corruption import check_bits
from weft.tools.diagnostics.exchange import check_local_collectives
from weft.tools.diagnostics.gpu import check_gpus, check_xid
from weft.tools.diagnostics.judging import Judge, check_disk, check_free_space
from weft.tools.diagnostics.loopback import check_loopback
from weft.tools.diagnostics.speed import check_gemm, check_memory


@dataclass(frozen=True)
class Node:
    """The host to check, and how.

    Attributes:
        folder: folder whose disk is checked.
        driver: host with whose clock this one's is compared, or empty to leave this out.
        judge: compares speeds with references.
        faults: simulated faults of `weft.tools.doctor.NODE_FAULTS`, to verify that checks detect them.
    """

    folder: Path
    ranks: int
    judge: Judge
    driver: str = ""
    faults: Collection[str] = ()

    def devices(self) -> list[torch.device]:
        """This host's GPUs, or its CPU."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [torch.device("cuda", index) for index in range(count)] or [torch.device("cpu")]


def _slow(node: Node, fault: str) -> float:
    return 1e6 if fault in node.faults else 1.0


def _rank_with(node: Node, fault: str) -> int:
    return node.ranks - 1 if fault in node.faults else -1


def _check_clock(driver: str, shift_s: float) -> CheckResult:
    if not driver:
        return CheckResult("clock", Outcome.does_not_apply, "no driver to compare with (--driver)")
    result: CheckResult = entry("supervision").check_clock(driver, shift_s)
    return result


# A new check is a function that returns a list of `CheckResult`, and a line here.
CHECKS: Mapping[str, Callable[[Node], Sequence[CheckResult]]] = {
    "collectives": lambda node: [
        check_local_collectives(
            node.ranks, node.judge, damaged=_rank_with(node, "wrong-rank"), hung=_rank_with(node, "hung-rank")
        )
    ],
    "memory": lambda node: [check_memory(each, node.judge, _slow(node, "slow-memory")) for each in node.devices()],
    "gemm": lambda node: [check_gemm(each, node.judge, _slow(node, "slow-gemm")) for each in node.devices()],
    "bits": lambda node: [check_bits(each, "gemm-bit" in node.faults) for each in node.devices()],
    "disk": lambda node: [check_disk(node.folder, node.judge, 0.6 if "slow-disk" in node.faults else 0.0)],
    "space": lambda node: [check_free_space(node.folder, *([1 << 62] if "full-disk" in node.faults else []))],
    "clock": lambda node: [_check_clock(node.driver, 60.0 if "clock" in node.faults else 0.0)],
    "loopback": lambda node: [check_loopback(node.judge, "damaged-loopback" in node.faults)],
    "gpu": lambda node: [check_gpus()],
    "xid": lambda node: [check_xid()],
}


def diagnose(node: Node, checks: Collection[str] = tuple(CHECKS)) -> list[CheckResult]:
    """Run ``checks`` one after the other; a check that raises an error counts as a failure of the host."""
    results: list[CheckResult] = []
    for name, check in CHECKS.items():
        if name not in checks:
            continue
        try:
            results += check(node)
        except (RuntimeError, OSError) as error:  # a device that is lost, out of memory, or refuses
            reason = str(error).strip().splitlines() or [type(error).__name__]
            results.append(CheckResult(name, Outcome.failed, reason[0][:200]))
    return results


def run(args: argparse.Namespace) -> int:
    """Run the checks that the options name and return 1 if any failed."""
    cache = args.cache or Path(DataConfig.cache_dir).expanduser() / "diagnostics.json"
    node = Node(
        folder=args.folder,
        ranks=args.ranks or torch.cuda.device_count() or 2,
        judge=Judge(Measurements(cache)),
        driver=args.driver,
        faults=args.inject,
    )
    begun = perf_counter()
    results = diagnose(node, args.only or tuple(CHECKS))
    if args.json:
        print(msgspec.json.encode(results).decode())
    else:
        Console().print(table(results))
        bad = failures(results)
        print(f"{len(bad)} of {len(results)} checks failed, in {perf_counter() - begun:.1f} s")
    return 1 if failures(results) else 0


def table(results: Sequence[CheckResult]) -> Table:
    """Return a table with one row for each check."""
    made = Table("check", "outcome", "result")
    colours = {Outcome.passed: "green", Outcome.failed: "red", Outcome.does_not_apply: "dim"}
    for result in results:
        outcome = Text(result.outcome.value, style=colours[result.outcome])
        made.add_row(Text(result.check), outcome, Text(result.text))  # as they are: brackets are no markup
    return made
