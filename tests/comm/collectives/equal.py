"""Ranks that hold random rewrites against torch's own collectives, all with the same random cases."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.comm.collectives.balanced import regular
from weft.comm.collectives import Collective, Group, Mesh, Primitive, Rewrite
from weft.comm.collectives.communicator import Communicator
from weft.comm.collectives.space import space
from weft.engine.distributed import init_distributed

GROUPS = {
    regular(2, 4): [(8,), (2, 4), (4, 2), (2, 2, 2)],
    Group((0, 1, 2, 4, 5, 7), (0, 0, 0, 1, 1, 1)): [(6,), (2, 3), (3, 2)],
    Group((1, 6), (0, 1)): [(2,)],
}
"""Overlapping groups, each with the meshes that it is laid out as, balanced or not."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
PRIMITIVES = (Primitive.all_reduce, Primitive.reduce_scatter, Primitive.all_gather)
EXACT_WITHIN = 8
"""Integers up to this size: 8 of them sum exactly in every dtype, in any order."""


@dataclass(frozen=True)
class Case:
    """A rewrite, what it works on, and what tells the data of two cases apart."""

    rewrite: Rewrite
    dtype: torch.dtype
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any primitive, group, mesh, substitution, order of axes, granularity, size and dtype."""
    group = draw(st.sampled_from(list(GROUPS)))
    primitive = draw(st.sampled_from(PRIMITIVES))
    dtype = draw(st.sampled_from(DTYPES))
    length = draw(st.integers(1, 70))
    elements = length if primitive is Primitive.all_reduce else length * group.size
    collective = Collective.flat(primitive, group, num_elements=elements, itemsize=dtype.itemsize)
    mesh = Mesh(group, draw(st.sampled_from(GROUPS[group])))
    weights = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    granularity = tuple(weight / sum(weights) for weight in weights)
    rewrites = list(space(collective, meshes=[mesh], granularities=[granularity]))
    return Case(draw(st.sampled_from(rewrites)), dtype, draw(st.integers(0, 10**6)))


def hold_against_torch(num_cases: int) -> list[str]:
    """Run that many batches of cases; returns the smallest that came out wrong, if any.

    Every rank draws the same cases, and all learn whether one of them saw a difference, so
    that hypothesis shrinks on all ranks in step.
    """
    device = init_distributed(60.0)
    opened = {}
    for group, shapes in GROUPS.items():
        opened[group] = Communicator.open(
            [group], device=device, timeout_s=60.0, meshes={group: [Mesh(group, shape) for shape in shapes]}
        )
    groups = {group: dist.new_group(list(group.ranks)) for group in GROUPS}

    @settings(
        max_examples=num_cases, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.lists(cases(), min_size=1, max_size=4))
    def check(batch: list[Case]) -> None:
        wrong = torch.tensor(int(_wrong(batch, opened, groups)))
        dist.all_reduce(wrong)
        assert not wrong.item(), "; ".join(f"{case.rewrite.collective}: {case.rewrite}, {case.dtype}" for case in batch)

    try:
        check()
    except AssertionError as error:
        return [str(error)]
    return []


def _wrong(batch: list[Case], opened: dict, groups: dict) -> bool:
    """True if any of the cases, all under way at once, differs from torch's own result in a bit."""
    under_way = []
    for case in batch:
        collective = case.rewrite.collective
        if dist.get_rank() in collective.group.ranks:
            source, target = _tensors(case)
            expected = _expected(collective, source.clone(), target.clone(), groups[collective.group])
            before = source.clone()
            handle = opened[collective.group].start(case.rewrite, source, target)
            under_way.append((handle, expected, source if source is not target else None, before))
    return any(
        not torch.equal(handle.wait(), expected) or (source is not None and not torch.equal(source, before))
        for handle, expected, source, before in under_way
    )


def _tensors(case: Case) -> tuple[Tensor, Tensor]:
    collective = case.rewrite.collective
    whole = collective.dims[0]
    random_of_rank = random.Random(case.seed * 100 + dist.get_rank())

    def numbers(count: int) -> Tensor:
        return torch.tensor(
            [random_of_rank.randint(-EXACT_WITHIN, EXACT_WITHIN) for _ in range(count)], dtype=case.dtype
        )

    match collective.primitive:
        case Primitive.all_reduce:
            tensor = numbers(whole)
            return tensor, tensor
        case Primitive.reduce_scatter:
            return numbers(whole), torch.empty(whole // collective.group.size, dtype=case.dtype)
        case _:
            return numbers(whole // collective.group.size), torch.empty(whole, dtype=case.dtype)


def _expected(collective: Collective, source: Tensor, target: Tensor, group: dist.ProcessGroup) -> Tensor:
    match collective.primitive:
        case Primitive.all_reduce:
            dist.all_reduce(source, group=group)
            return source
        case Primitive.reduce_scatter:
            dist.reduce_scatter_tensor(target, source, group=group)
        case _:
            dist.all_gather_into_tensor(target, source, group=group)
    return target
