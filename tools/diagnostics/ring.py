"""`weft doctor ring`: exchanges between neighbouring ranks, then between all, to find a bad connection."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console

from weft.comm.rendezvous import open_store
from weft.conf.host.diagnosis import CheckResult, Outcome, failures
from weft.pipeline import limits
from weft.tools.diagnostics.exchange import all_reduce, with_neighbour
from weft.tools.diagnostics.node import table

_COUNT = 3  # pairs of a kind that it takes to call one of them slow
_MOST = 1024  # ranks that one host starts
_JOIN_S = 120.0  # imports take a while on a busy host


@dataclass(frozen=True)
class _Seen:
    """One rank's measurement of a pair."""

    pair: tuple[int, int]
    bytes_per_s: float
    problem: str = ""


def run(args: argparse.Namespace) -> int:
    """Run as a rank of the ring, or start all ranks; return 1 if any pair failed.

    Raises:
        ValueError: RANK is not set, there are fewer than two ranks, or an option has no usable value.
    """
    limits.number(args.share, "--share")
    limits.number(args.timeout, "--timeout", above=0.0)
    if args.ranks:
        limits.count(args.ranks, "--ranks", least=2, most=_MOST)
        return _start(args)
    if "RANK" not in os.environ:
        raise ValueError("RANK is not set; start it as a job's ranks, or with --ranks on this host")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size < 2:
        raise ValueError("a ring takes two ranks or more")
    try:
        store = open_store(rank, size, timedelta(seconds=_JOIN_S))
    except dist.DistError as error:
        print(f"rank {rank}: the ranks did not all come together: {error}", file=sys.stderr)
        return 1
    results = _Ring(rank, size, store, args).run()
    if rank == 0:
        if args.json:
            print(msgspec.json.encode(results).decode())
        else:
            Console().print(table(results))
    return 1 if failures(results) else 0


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs of neighbours around the ring, in the fewest rounds of pairs without a common rank."""
    yield [(rank, rank + 1) for rank in range(0, size - 1, 2)]
    if size > 2:
        yield [(rank, (rank + 1) % size) for rank in range(1, size - 1 + (size + 1) % 2, 2)]
    if size > 2 and size % 2:
        yield [(size - 1, 0)]


def judge_pairs(seen: Sequence[_Seen], hosts: Sequence[str], share: float) -> list[CheckResult]:
    """Return a `CheckResult` for each pair of ranks.

    Args:
        seen: the reports of both ranks of each pair.
        share: minimum rate, as a share of the median of pairs of the same kind.
    """
    rates: dict[tuple[int, int], float] = {}
    problems: dict[tuple[int, int], str] = {}
    for one in seen:
        rates[one.pair] = min(one.bytes_per_s, rates.get(one.pair, float("inf")))
        if one.problem:
            problems.setdefault(one.pair, one.problem)
    by_kind: dict[bool, list[float]] = {True: [], False: []}
    for pair, rate in rates.items():
        by_kind[hosts[pair[0]] == hosts[pair[1]]] += [rate] if pair not in problems else []
    results = []
    for (a, b), rate in sorted(rates.items()):
        name = f"pair {a}-{b}"
        where = f"on {hosts[a]}" if hosts[a] == hosts[b] else f"{hosts[a]} and {hosts[b]}"
        if (a, b) in problems:
            results.append(CheckResult(name, Outcome.failed, f"{where}: {problems[a, b]}"))
            continue
        others = by_kind[hosts[a] == hosts[b]]
        usual = median(others) if len(others) >= _COUNT else 0.0
        says = f"{where}: {rate / 1e9:.3g} GB/s" + (f", {rate / usual:.0%} of the median" if usual else "")
        outcome = Outcome.passed if rate >= share * usual else Outcome.failed
        results.append(CheckResult(name, outcome, says, rate / 1e9, "GB/s", share * usual / 1e9 if usual else None))
    return results


class _Ring:
    def __init__(self, rank: int, size: int, store: dist.Store, args: argparse.Namespace) -> None:
        self._rank, self._size, self._store, self._args = rank, size, store, args
        self._fault, _, self._faulty = args.inject.partition("=")
        on_gpu = torch.cuda.is_available()
        self._device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")

    def run(self) -> list[CheckResult]:
        """Run all exchanges; return the results of rank 0 on every rank."""
        timeout = timedelta(seconds=self._args.timeout)
        self._store.set(f"host/{self._rank}", socket.gethostname())
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self._device)
        torch.set_num_threads(1)
        group_store = dist.PrefixStore("ring", self._store)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=group_store, rank=self._rank, world_size=self._size, timeout=timeout
        )
        for number, pairs in enumerate(rounds(self._size)):
            for pair in pairs:
                if self._rank in pair:
                    one = self._exchange(pair)
                    # Published at once: a rank that waits for a silent one below would publish too late.
                    self._store.set(f"seen/{number}/{self._rank}", json.dumps([one.bytes_per_s, one.problem]))
            self._meet(f"round{number}")
        if self._rank == 0:
            results = self._judge()
            self._store.set("pairs", msgspec.json.encode(results))
        else:
            results = self._read("pairs", 4 * self._args.timeout)
        if not failures(results):
            results.append(self._all())
        self._meet("end")  # rank 0 has the store
        return results

    def _exchange(self, pair: tuple[int, int]) -> _Seen:
        other = pair[1] if pair[0] == self._rank else pair[0]
        forward = pair[0] == self._rank
        fault = self._fault if self._faulty == str(pair[0]) else ""
        try:
            if forward and fault == "hung":
                time.sleep(2 * self._args.timeout)
            done = with_neighbour(
                other,
                self._device,
                damage=forward and fault == "wrong",
                rounds=1 if fault == "slow" else 5,  # one that is slow each time has no better one
                pause_s=3.0 if forward and fault == "slow" else 0.0,
            )
        except RuntimeError as error:
            return _Seen(pair, 0.0, f"rank {other} did not answer rank {self._rank} ({_first_line(error)})")
        problem = f"rank {self._rank} received wrong numbers from rank {other}" if done.wrong_from else ""
        return _Seen(pair, done.bytes_per_s, problem)

    def _judge(self) -> list[CheckResult]:
        """Evaluate the reports of all ranks, and name ranks that sent no report."""
        seen: list[_Seen] = []
        silent: dict[int, CheckResult] = {}
        deadline = time.monotonic() + 2 * self._args.timeout
        for number, pairs in enumerate(rounds(self._size)):
            for pair, rank in ((both, one) for both in pairs for one in both):
                try:
                    rate, problem = self._read_json(f"seen/{number}/{rank}", max(0.1, deadline - time.monotonic()))
                    seen.append(_Seen(pair, rate, problem))
                except dist.DistError:
                    silent[rank] = CheckResult(f"rank {rank}", Outcome.failed, "it did not report its results")
        hosts = [self._store.get(f"host/{rank}").decode() for rank in range(self._size)]
        return [*silent.values(), *judge_pairs(seen, hosts, self._args.share)]

    def _all(self) -> CheckResult:
        try:
            done = all_reduce(self._device)
        except RuntimeError as error:
            return CheckResult("all ranks", Outcome.failed, _first_line(error))
        if done.wrong_from:
            return CheckResult("all ranks", Outcome.failed, "the sum is wrong, though every pair is right")
        rate = done.bytes_per_s / 1e9
        return CheckResult("all ranks", Outcome.passed, f"all-reduce: {rate:.3g} GB/s per rank", rate, "GB/s")

    def _meet(self, name: str) -> None:
        """Wait for the others, at most ``timeout`` seconds; missing ranks are reported by `_judge`."""
        if self._store.add(f"met/{name}", 1) == self._size:
            self._store.set(f"all/{name}", "")
        with suppress(dist.DistError):
            self._store.wait([f"all/{name}"], timedelta(seconds=self._args.timeout))

    def _read(self, key: str, seconds: float) -> list[CheckResult]:
        try:
            return msgspec.convert(self._read_json(key, seconds), list[CheckResult])
        except dist.DistError:
            return [CheckResult("rank 0", Outcome.failed, "it did not report its results")]

    def _read_json(self, key: str, seconds: float) -> list:
        self._store.wait([key], timedelta(seconds=seconds))
        return json.loads(self._store.get(key))


def _first_line(error: RuntimeError) -> str:
    """Return the error's first line, without the location in gloo's sources."""
    return str(error).strip().splitlines()[0].rpartition("] ")[2][:120]


def _start(args: argparse.Namespace) -> int:
    """Start all ranks on this host, and return the first rank's exit code."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ["--share", str(args.share), "--timeout", str(args.timeout), "--inject", args.inject]
    command = [sys.executable, "-m", "weft.tools.doctor", "ring", *options, *(["--json"] if args.json else [])]
    common = {**os.environ, "WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started: list[subprocess.Popen] = []
    try:
        for rank in range(args.ranks):
            started.append(subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
        return started[0].wait()
    finally:
        for process in started[1:]:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        for process in started:
            process.kill()
            process.wait()
