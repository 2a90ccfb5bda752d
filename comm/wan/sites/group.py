"""A process group whose members are at several sites."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.channel import TensorSpec
from weft.comm.progress import Progress
from weft.comm.python_group import PythonGroup, reduction
from weft.comm.wan.channel import WanChannel
from weft.comm.wan.sites import collectives
from weft.comm.wan.sites.exchange import SiteExchange
from weft.comm.wan.sites.links import SiteLinks
from weft.comm.wan.sites.work import Arrival, CollectiveWork, HostCopy, TransferWork

_AFTER_COLLECTIVES = 1
"""Priority of messages between two members: a step waits for sums, and not for a copy of its state."""


class SiteGroup(PythonGroup):
    """The interface of gloo's and NCCL's groups, as `torch.distributed` and others call it.

    Collectives run on a thread of the group, in launch order, by `SiteExchange`: members of a site communicate over
    gloo, and the sites' leaders over authenticated links. Messages between two members of a site go over gloo, other
    messages over a link between the two members. Tensors on a GPU pass through pinned memory, so waiting for a
    collective then blocks the host.
    """

    BACKEND = "weft"

    def __init__(
        self,
        store: dist.Store,
        links: SiteLinks,
        *,
        ranks: Sequence[int],
        position: int,
        sites: Sequence[int],
        timeout: timedelta,
        inside: Callable[[dist.Store, int, int], Any],
        owns_links: bool = False,
    ) -> None:
        """Create the group. A collective call over its members.

        Args:
            store: a store that only this group uses.
            ranks: global ranks of the members.
            position: this rank's index among the members.
            inside: creates a gloo group from a store, this rank's position and the number of members.
            owns_links: True if `shutdown` of this group closes the links.
        """
        super().__init__(ranks, position)
        self.links, self._owns_links, self._timeout = links, owns_links, timeout
        here = [member for member, site in enumerate(sites) if site == sites[position]]
        self._here, self._inside = here, None
        if len(here) > 1:
            store_here = dist.PrefixStore(f"site {sites[position]}", store)
            self._inside = inside(store_here, here.index(position), len(here))
        self._lane = links.lane(store, first=position == 0)
        leaders = {site: ranks[sites.index(site)] for site in set(sites)}
        channels = {}
        if position == here[0]:
            channels = {site: self._channel(leader) for site, leader in leaders.items() if site != sites[position]}
        self._exchange = SiteExchange(position=position, sites=sites, inside=self._inside, channels=channels)
        self._progress = Progress(f"weft sites {','.join(map(str, ranks[:4]))}")
        self._closer = weakref.finalize(self, self._progress.close)

    def shutdown(self) -> None:
        """Run the launched operations, accept no more, and close the links if this group owns them."""
        self._closer()
        self._inside = None
        if self._owns_links and self._progress.error:
            self.links.close(linger_s=0.0)
        elif self._owns_links:
            self.links.close()

    def abort(self) -> None:
        """End at once; operations in flight fail."""
        self._closer()
        self._inside = None
        if self._owns_links:
            self.links.close(linger_s=0.0)

    # -- point to point --------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Start sending to a member."""
        if self._inside is not None and peer in self._here:
            return self._inside.send([tensor.cpu() for tensor in tensors], self._here.index(peer), tag)
        (tensor,) = tensors
        name = f"message {tag}"
        channel = replace(self._channel(self.ranks[peer]), priorities={name: _AFTER_COLLECTIVES})
        return TransferWork(channel.send(name, tensor.contiguous().cpu()), None)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> dist.Work:
        """Start receiving from a member."""
        (tensor,) = tensors
        if self._inside is None or peer not in self._here:
            spec = TensorSpec(tuple(tensor.shape), tensor.dtype)
            return TransferWork(self._channel(self.ranks[peer]).recv(f"message {tag}", spec), tensor)
        host = torch.empty_like(tensor, device="cpu") if tensor.is_cuda else tensor
        work = self._inside.recv([host], self._here.index(peer), tag)
        return TransferWork(Arrival(work, host), tensor) if tensor.is_cuda else work

    # -- collectives -----------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        op = reduction(opts)
        return self._each(partial(collectives.all_reduce, op=op), tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """See `ProcessGroup`."""
        return self._each(partial(collectives.reduce, op=opts.reduceOp, root=opts.rootRank), tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """See `ProcessGroup`."""
        return self._each(partial(collectives.broadcast, root=opts.rootRank), tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        return self._all("all_gather", collectives.all_gather, outputs[0], inputs)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        return self._all("all_gather", collectives.all_gather, [output], [source])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """See `ProcessGroup`."""
        run = partial(collectives.gather, root=opts.rootRank)
        return self._all("gather", run, outputs[0] if outputs else [], inputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        op = reduction(opts)
        return self._from_parts("reduce_scatter", partial(collectives.reduce_scatter, op=op), outputs, inputs[0])

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        return self.reduce_scatter([output], [[source]], opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """See `ProcessGroup`."""
        run = partial(collectives.scatter, root=opts.rootRank)
        return self._from_parts("scatter", run, outputs, inputs[0] if inputs else [])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        return self._to_all(outputs, inputs, alike=False)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        """See `ProcessGroup`. Either all members pass split sizes or none does."""
        alike = not output_splits and not input_splits
        outputs, inputs = self._split(output, output_splits), self._split(source, input_splits)
        return self._to_all(outputs, inputs, alike=alike)

    def barrier(self, opts: Any = None) -> dist.Work:
        """See `ProcessGroup`."""
        return self._launch("barrier", collectives.barrier, [], [], [])

    # -- launching -------------------------------------------------------------------------------

    def _each(self, run: Callable[..., None], tensors: list[Tensor]) -> dist.Work:
        def all_of_them(exchange: SiteExchange, *hosts: Tensor) -> None:
            for host in hosts:
                run(exchange, host)

        return self._launch(run.func.__name__, all_of_them, tensors, tensors, tensors)  # type: ignore[attr-defined]

    def _all(self, name: str, run: Callable[..., None], outputs: list[Tensor], inputs: list[Tensor]) -> dist.Work:
        def gathered(exchange: SiteExchange, source: Tensor, *targets: Tensor) -> None:
            run(exchange, targets, source)

        return self._launch(name, gathered, [inputs[0], *outputs], outputs, outputs)

    def _from_parts(self, name: str, run: Callable[..., None], outputs: list[Tensor], parts: list[Tensor]) -> dist.Work:
        def taken(exchange: SiteExchange, target: Tensor, *sources: Tensor) -> None:
            run(exchange, target, sources)

        return self._launch(name, taken, [outputs[0], *parts], outputs, outputs)

    def _split(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        if sizes:
            return list(tensor.split(list(sizes)))
        return list(tensor.chunk(self.size())) if tensor.numel() else [tensor] * self.size()

    def _to_all(self, outputs: list[Tensor], inputs: list[Tensor], *, alike: bool) -> dist.Work:
        def exchanged(exchange: SiteExchange, *hosts: Tensor) -> None:
            collectives.all_to_all(exchange, hosts[: len(outputs)], hosts[len(outputs) :], alike=alike)

        return self._launch("all_to_all", exchanged, [*outputs, *inputs], outputs, outputs)

    def _launch(
        self,
        name: str,
        run: Callable[..., None],
        tensors: Sequence[Tensor],
        written: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> dist.Work:
        """Call ``run`` on the group's thread, with the exchange and copies of ``tensors`` in host memory."""
        copies, exchange = [HostCopy(tensor) for tensor in tensors], self._exchange

        def on_thread() -> None:
            for copy in copies:
                copy.wait()
            run(exchange, *(copy.host for copy in copies))

        back = [copy for copy, tensor in zip(copies, tensors, strict=True) if any(tensor is one for one in written)]
        label = f"{name} of ranks {', '.join(map(str, self.ranks))}"
        done = self._progress.submit(on_thread)
        return CollectiveWork(done, label=label, written=back, outputs=outputs, timeout=self._timeout)

    def _channel(self, peer: int) -> WanChannel:
        return self.links.channel(peer, self._lane, self._timeout)
