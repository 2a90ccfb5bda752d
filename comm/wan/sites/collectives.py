"""The collectives of torch.distributed over several sites, each by one exchange between the sites' leaders.

They are correct for any size, and intended for small tensors: a leader receives its members' values, and
sends them the result. Sums are computed in order of ranks inside a site, then in order of sites, so all ranks get equal
results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce as fold
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.wan.sites.exchange import SiteExchange

_REDUCTIONS: Sequence[tuple[dist.ReduceOp.RedOpType, Callable[[Tensor, Tensor], Tensor]]] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.AVG, torch.add),
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.BAND, torch.bitwise_and),
    (dist.ReduceOp.BOR, torch.bitwise_or),
    (dist.ReduceOp.BXOR, torch.bitwise_xor),
)


def all_reduce(exchange: SiteExchange, tensor: Tensor, op: dist.ReduceOp) -> None:
    """Reduce all members' tensors, in place."""
    reduce(exchange, tensor, op, None)


def reduce(exchange: SiteExchange, tensor: Tensor, op: dist.ReduceOp, root: int | None) -> None:
    """Reduce all members' tensors, in place at member ``root``, or at all members if it is None."""
    combine = _reduction(op)
    wanted = [site for site, members in exchange.blocks.items() if root is None or root in members]

    def lead(contributions: list[Tensor]) -> Tensor:
        mine = fold(combine, [data.view(tensor.dtype) for data in contributions])
        gets = exchange.site in wanted
        theirs = exchange.swap(
            {site: _bytes(mine) for site in exchange.others if site in wanted},
            {site: tensor.nbytes for site in exchange.others if gets},
        )
        if not gets:
            return torch.empty(0, dtype=torch.uint8)
        return _bytes(_finish(_in_order(exchange, mine, theirs, combine), op, exchange.size))

    result = exchange.run(
        _bytes(tensor),
        [tensor.nbytes] * len(exchange.mine),
        lead,
        tensor.nbytes if exchange.site in wanted else 0,
    )
    if root in (None, exchange.position):
        _fill([tensor], result)


def reduce_scatter(exchange: SiteExchange, output: Tensor, inputs: Sequence[Tensor], op: dist.ReduceOp) -> None:
    """Write this member's part of the reduction to ``output``.

    Args:
        inputs: one part for each member, all of the same size.
    """
    combine, size = _reduction(op), output.nbytes

    def lead(contributions: list[Tensor]) -> Tensor:
        parts = fold(combine, [data.view(output.dtype) for data in contributions]).view(exchange.size, -1)
        theirs = exchange.swap(
            {site: _bytes(parts[exchange.blocks[site]]) for site in exchange.others},
            dict.fromkeys(exchange.others, size * len(exchange.mine)),
        )
        mine = parts[exchange.mine].view(-1)
        return _bytes(_finish(_in_order(exchange, mine, theirs, combine), op, exchange.size))

    result = exchange.run(_joined(inputs), [size * exchange.size] * len(exchange.mine), lead, size * len(exchange.mine))
    _fill([output], result.view(len(exchange.mine), size)[exchange.mine.index(exchange.position)])


def broadcast(exchange: SiteExchange, tensor: Tensor, root: int) -> None:
    """Copy the tensor of member ``root`` to all members, in place."""
    source, size = _site_of(exchange, root), tensor.nbytes

    def lead(contributions: list[Tensor]) -> Tensor:
        if exchange.site != source:
            return exchange.swap({}, {source: size})[source]
        data = contributions[exchange.mine.index(root)]
        exchange.swap(dict.fromkeys(exchange.others, data), {})
        return data

    mine = _bytes(tensor) if exchange.position == root else torch.empty(0, dtype=torch.uint8)
    result = exchange.run(mine, [size * (member == root) for member in exchange.mine], lead, size)
    if exchange.position != root:
        _fill([tensor], result)


def all_gather(exchange: SiteExchange, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    """Gather every member's tensor, in order of members. All have the same size."""
    gather(exchange, outputs, tensor, None)


def gather(exchange: SiteExchange, outputs: Sequence[Tensor], tensor: Tensor, root: int | None) -> None:
    """Gather every member's tensor, in order of members, at member ``root``, or at all members if it is None.

    Args:
        outputs: receive the tensors, or empty on members that receive none.
    """
    size = tensor.nbytes
    wanted = [site for site, members in exchange.blocks.items() if root is None or root in members]

    def lead(contributions: list[Tensor]) -> Tensor:
        mine, gets = torch.cat(contributions), exchange.site in wanted
        theirs = exchange.swap(
            {site: mine for site in exchange.others if site in wanted},
            {site: size * len(exchange.blocks[site]) for site in exchange.others if gets},
        )
        if not gets:
            return torch.empty(0, dtype=torch.uint8)
        whole = torch.empty(exchange.size, size, dtype=torch.uint8)
        for site, data in ({exchange.site: mine} | theirs).items():
            whole[exchange.blocks[site]] = data.view(-1, size)
        return whole.view(-1)

    result = exchange.run(
        _bytes(tensor),
        [size] * len(exchange.mine),
        lead,
        size * exchange.size if exchange.site in wanted else 0,
    )
    if root in (None, exchange.position):
        _fill(outputs, result)


def scatter(exchange: SiteExchange, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
    """Send a part of ``root``'s tensors to each member.

    Args:
        inputs: on ``root``, one part for each member, all of the same size; empty on other members.
    """
    source, size = _site_of(exchange, root), output.nbytes

    def lead(contributions: list[Tensor]) -> Tensor:
        if exchange.site != source:
            return exchange.swap({}, {source: size * len(exchange.mine)})[source]
        parts = contributions[exchange.mine.index(root)].view(exchange.size, size)
        exchange.swap({site: parts[exchange.blocks[site]].view(-1) for site in exchange.others}, {})
        return parts[exchange.mine].view(-1)

    sizes = [size * exchange.size * (member == root) for member in exchange.mine]
    result = exchange.run(_joined(inputs), sizes, lead, size * len(exchange.mine))
    _fill([output], result.view(-1, size)[exchange.mine.index(exchange.position)])


def all_to_all(exchange: SiteExchange, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, alike: bool) -> None:
    """Send one part from every member to every other one.

    Args:
        outputs: receive the part from each member.
        inputs: the part for each member.
        alike: True if all parts have the same size, otherwise members exchange sizes first.
    """
    mine = torch.tensor([part.nbytes for part in inputs])
    sizes = [torch.empty_like(mine) for _ in range(exchange.size)]
    if alike:
        sizes = [mine] * exchange.size
    else:
        all_gather(exchange, sizes, mine)
    num_bytes = [row.tolist() for row in sizes]  # bytes from each member to each member
    everyone = range(exchange.size)

    def cut(data: Tensor, pairs: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Tensor]:
        pairs = list(pairs)
        lengths = [num_bytes[source][target] for source, target in pairs]
        return dict(zip(pairs, data.split(lengths), strict=True))

    def lead(contributions: list[Tensor]) -> Tensor:
        parts = cut(torch.cat(contributions), ((source, target) for source in exchange.mine for target in everyone))
        theirs = exchange.swap(
            {
                site: torch.cat([parts[source, target] for source in exchange.mine for target in targets])
                for site, targets in exchange.blocks.items()
                if site != exchange.site
            },
            {
                site: sum(num_bytes[source][target] for source in exchange.blocks[site] for target in exchange.mine)
                for site in exchange.others
            },
        )
        for site, data in theirs.items():
            parts |= cut(data, ((source, target) for source in exchange.blocks[site] for target in exchange.mine))
        return torch.cat([parts[source, target] for target in exchange.mine for source in everyone])

    ends = list(accumulate(sum(num_bytes[source][target] for source in everyone) for target in exchange.mine))
    result = exchange.run(_joined(inputs), [sum(num_bytes[member]) for member in exchange.mine], lead, ends[-1])
    at = exchange.mine.index(exchange.position)
    _fill(outputs, result[(0, *ends)[at] : ends[at]])


def barrier(exchange: SiteExchange) -> None:
    """Wait until all members have joined."""
    all_reduce(exchange, torch.zeros(1, dtype=torch.uint8), dist.ReduceOp(dist.ReduceOp.SUM))


def _reduction(op: dist.ReduceOp) -> Callable[[Tensor, Tensor], Tensor]:
    for known, combine in _REDUCTIONS:
        if op == known:
            return combine
    raise ValueError(f"{op}: a reduction that groups over several sites do not have")


def _finish(total: Tensor, op: dist.ReduceOp, size: int) -> Tensor:
    return total / size if op == dist.ReduceOp.AVG else total


def _in_order(
    exchange: SiteExchange, mine: Tensor, theirs: dict[int, Tensor], combine: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the reduction of the sites' reductions, in order of sites."""
    parts = {site: data.view(mine.dtype) for site, data in theirs.items()} | {exchange.site: mine}
    return fold(combine, [parts[site] for site in exchange.blocks])


def _site_of(exchange: SiteExchange, member: int) -> int:
    return next(site for site, members in exchange.blocks.items() if member in members)


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as bytes [nbytes]. A view if the tensor is contiguous."""
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        return torch.empty(0, dtype=torch.uint8)
    return torch.cat([_bytes(tensor) for tensor in tensors])


def _fill(outputs: Sequence[Tensor], result: Tensor) -> None:
    for output, data in zip(outputs, result.split([output.nbytes for output in outputs]), strict=True):
        output.copy_(data.clone().view(output.dtype).view(output.shape))
