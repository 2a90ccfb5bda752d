"""The overlap effectiveness factor, measured on operators whose overlap is known, in a time that is made up."""

from dataclasses import dataclass

import pytest
import torch
from pytest import approx

from weft.comm.channel import Completed
from weft.engine.parallel.in_process import run_in_threads
from weft.engine.strands import overlap_probe
from weft.engine.strands.overlap_cache import OverlapCache, overlap_cache, overlap_key
from weft.engine.strands.overlap_probe import measure_overlap, usual_kernels
from weft.pipeline.strands.overlap import OverlapTable
from weft.pipeline.strands.segments import Kind, LinkScope

CPU = torch.device("cpu")
INSIDE, BETWEEN = LinkScope.inside_host, LinkScope.between_hosts


@dataclass
class Clock:
    """A time that goes on when somebody says so."""

    now: float = 0.0


@dataclass
class Group:
    """A group whose gathers take a second, of which compute started meanwhile hides a share."""

    clock: Clock
    hides: float
    size: int = 2
    index: int = 0
    axis: str = "tensor"

    def all_gather(self, shard):
        return Gather(self, torch.cat([shard, shard]), self.clock.now)

    def maximum(self, tensor):
        return Completed(tensor)


@dataclass
class Gather:
    group: Group
    result: torch.Tensor
    since: float

    def wait(self):
        meanwhile = self.group.clock.now - self.since
        self.group.clock.now += 1.0 - self.group.hides * min(1.0, meanwhile)
        return self.result


@pytest.mark.parametrize("hides", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("kernel_s", [0.1, 0.6, 1.0, 3.0])
def test_the_factor_is_what_compute_hides(monkeypatch, hides, kernel_s):
    clock = Clock()
    monkeypatch.setattr(overlap_probe, "perf_counter", lambda: clock.now)

    def kernel():
        clock.now += kernel_s

    groups = {INSIDE: Group(clock, hides), BETWEEN: Group(clock, 0.5)}
    table = measure_overlap(groups, CPU, num_bytes=64, kernels={Kind.gemm: kernel})
    assert table.compute == {(Kind.gemm, INSIDE): approx(hides), (Kind.gemm, BETWEEN): approx(0.5)}
    assert 0 <= table.links <= 1


def test_members_measure_together():
    """Real kernels and collectives: all members end, with factors that a table takes."""

    def member(axes):
        return measure_overlap({INSIDE: axes.tensor}, CPU, num_bytes=1 << 12, repeats=1)

    for table in run_in_threads({"tensor": 2}, member):
        assert set(table.compute) == {(kind, INSIDE) for kind in usual_kernels(CPU)}
        assert all(0 <= factor <= 1 for factor in table.compute.values())


def test_tables_are_kept_by_device(tmp_path):
    cache = overlap_cache(str(tmp_path))
    table = OverlapTable({(Kind.gemm, INSIDE): 0.9, (Kind.memory, BETWEEN): 0.5}, 0.7)
    cache.write(overlap_key(CPU), table)
    cache.write("another", OverlapTable())
    assert cache.read(overlap_key(CPU)) == table
    assert cache.read("none") is None


def test_a_measurement_keeps_what_it_did_not_measure(tmp_path):
    """`weft profile` knows the links inside of a host, `python -m benchmarks collectives` those between hosts, too."""
    cache = overlap_cache(str(tmp_path))
    cache.write("gpu", OverlapTable({(Kind.gemm, INSIDE): 0.9, (Kind.gemm, BETWEEN): 0.5}, links=0.7))
    cache.write("gpu", OverlapTable({(Kind.gemm, INSIDE): 0.8}))
    assert cache.read("gpu") == OverlapTable({(Kind.gemm, INSIDE): 0.8, (Kind.gemm, BETWEEN): 0.5}, links=0.7)
    cache.write("gpu", OverlapTable({(Kind.gemm, INSIDE): 0.6, (Kind.gemm, BETWEEN): 0.4}, links=0.2))
    assert cache.read("gpu").links == 0.2


@pytest.mark.parametrize(
    "text", ["", "[]", '{"x": 1}', '{"x": {"compute": [{"kind": "?"}]}}', '{"x": {"compute": []}}']
)
def test_a_cache_that_is_none_is_as_good_as_empty(tmp_path, text):
    path = tmp_path / "overlap.json"
    path.write_text(text)
    assert OverlapCache(path).read("x") is None
