"""Tests of the probe of collectives and its evaluation."""

import pytest
import torch

from weft.comm.collectives import Group, LinkClass, Primitive, probe
from weft.comm.collectives.collective import EXECUTED
from weft.comm.collectives.costs import AlphaBeta, moved_share, rounds


class Wires:
    """A communicator whose only axis is between two nodes."""

    group = Group((0, 1), (0, 1))

    def axes(self):
        return [(mesh, axis) for mesh in self.group.meshes() for axis in range(len(mesh.shape))]

    def process_group(self, mesh, axis):
        return None


def _measured(monkeypatch, line):
    """Samples over wires that take what ``line`` says."""

    def seconds(primitive, num_bytes, *_):
        return rounds(primitive, 2) * line.alpha_s + moved_share(primitive, 2) * num_bytes * line.beta_s

    monkeypatch.setattr(probe, "_slowest_s", seconds)
    return probe.measure(Wires(), device=torch.device("cpu"))


@pytest.mark.parametrize("line", [AlphaBeta(0.4, 1e-7), AlphaBeta(1e-3, 1e-3), AlphaBeta(1e-5, 1e-9)])
def test_every_line_is_found_however_long_a_message_takes(monkeypatch, line):
    costs = probe.fitted(_measured(monkeypatch, line))
    for primitive in EXECUTED:
        found = costs.table[LinkClass.inter, primitive]
        assert (found.alpha_s, found.beta_s) == pytest.approx((line.alpha_s, line.beta_s))


def test_more_bytes_are_tried_until_they_take_long(monkeypatch):
    def sizes(line):
        samples = _measured(monkeypatch, line)
        return tuple(sample.num_bytes for sample in samples if sample.primitive is Primitive.all_gather)

    assert sizes(AlphaBeta(1.0, 1e-9)) == probe.SIZES
    assert sizes(AlphaBeta(1e-3, 1e-6)) == probe.SIZES[:3]
    assert sizes(AlphaBeta(1e-3, 1e-3)) == probe.SIZES[:2]


@pytest.mark.parametrize(("repeats", "told"), [(1, 1.0), (2, (1.0 + 3.0) / 2), (3, 3.0)])
@pytest.mark.parametrize("primitive", EXECUTED)
def test_a_sample_is_the_median_of_the_slowest_ranks_runs_after_one_to_warm_up(monkeypatch, primitive, repeats, told):
    """By a clock that only the primitive advances; the other rank is slower by a second in its second run."""
    now, runs, barriers = [0.0], [], []

    def run(tensor, group):
        runs.append((tensor.shape, tensor.dtype, group))
        now[0] += [100.0, 1.0, 2.0, 3.0][len(runs) - 1]

    def slowest(tensor, *, op, group):
        assert (op, group) == (torch.distributed.ReduceOp.MAX, "whole")
        tensor[1:2] += 1.0

    monkeypatch.setattr(probe, "perf_counter", lambda: now[0])
    monkeypatch.setattr(probe, "PRIMITIVES", {primitive: run})
    monkeypatch.setattr(probe.dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(probe.dist, "barrier", lambda *, group: barriers.append(group))
    monkeypatch.setattr(probe.dist, "all_reduce", slowest)
    found = probe._slowest_s(primitive, 4096, "axis", "whole", torch.device("cpu"), repeats)
    gathers = primitive in (Primitive.all_gather, Primitive.broadcasts)
    shape = (256,) if gathers else (4, 256)
    assert runs == [(shape, torch.float32, "axis")] * (1 + repeats), "4,096 bytes in all, of fp32"
    assert barriers == ["whole"] * (1 + repeats), "all begin together"
    assert found == told
