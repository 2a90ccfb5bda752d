"""What-if questions: the cluster with a field changed, and the value of each link and site."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from weft.pipeline.hardware import gpu_kind
from weft.pipeline.limits import number
from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.planner.search import Plan

MORE = 1.1
"""The factor by which a link or a site is enlarged, to compute its marginal value."""
_LINK = {
    "latency_ms": ("latency_s", 1e-3),
    "bandwidth_mbps": ("bandwidth_bps", 1e6),
    "pair_mbps": ("pair_bps", 1e6),
    "egress_price": ("egress_price", 1.0),
}
_SITE = ("gpus", "hosts", "price", "network_gbps", "gpu")


def changed(cluster: Cluster, question: str) -> Cluster:
    """Return the cluster with the change that a question names.

    Examples: ``link A B bandwidth_mbps=2000``, ``site A gpus=0``, ``gpu H100 price=2``.

    Raises:
        ValueError: a name is unknown, or a value is wrong.
    """
    words = question.split()
    name, given, value = words[-1].partition("=") if words else ("", "", "")
    wrong = f"--what-if {question!r}: expected `link A B FIELD=VALUE`, `site A FIELD=VALUE` or `gpu KIND price=VALUE`"
    match words:
        case ["link", here, there, _] if given:
            ends = [cluster.number(end, "--what-if link") for end in (here, there)]
            if cluster.link(*ends) is None:
                raise ValueError(
                    f"--what-if {question!r}: {here} and {there} have no link; add one to the cluster file"
                )
            field, unit = _LINK[_known(name, tuple(_LINK), question)]
            amount = number(
                value, f"--what-if link {here} {there} {name}", above=0.0 if field.endswith("bps") else None
            )
            changes: dict[str, Any] = {field: amount * unit}
            return cluster.with_link(ends[0], ends[1], **changes)
        case ["site", here, _] if given:
            site = cluster.number(here, "--what-if site")
            return _changed_site(cluster, site, _known(name, _SITE, question), value)
        case ["gpu", kind, _] if given and name == "price":
            wanted, price = gpu_kind(kind, "--what-if gpu"), number(value, f"--what-if gpu {kind} price")
            sites = tuple(
                replace(site, price=price) if site.gpu.name == wanted.name else site for site in cluster.sites
            )
            return replace(cluster, sites=sites)
    raise ValueError(wrong)


def marginal_values(found: Plan) -> Iterator[tuple[str, float]]:
    """Yield a description and the gain of each improvement, as a share of the best score.

    Each link of the best plan gets a tenth more bandwidth, and each site that has hosts a tenth more hosts. The
    cluster is planned again each time.
    """
    cluster, best = found.cluster, found.request.score(found.best)
    for here, there in found.best.layout.links:
        link = cluster.link(here, there)
        assert link is not None
        more = cluster.with_link(here, there, bandwidth_bps=link.bandwidth_bps * MORE, pair_bps=link.pair_bps * MORE)
        names = [cluster.sites[end].name for end in (here, there)]
        yield f"link {' '.join(names)} bandwidth x {MORE}", 1 - _score(found, more) / best
    for number_, site in enumerate(cluster.sites):
        if site.hosts:
            more = cluster.with_site(number_, hosts=-int(-site.hosts * MORE // 1))
            yield f"site {site.name} hosts x {MORE}", 1 - _score(found, more) / best


def _score(found: Plan, cluster: Cluster) -> float:
    again = found.again(cluster)
    return min(again.request.score(again.best), found.request.score(found.best))  # the base plan is still there


def _changed_site(cluster: Cluster, site: int, name: str, value: str) -> Cluster:
    if name == "gpu":
        return cluster.with_site(site, gpu=gpu_kind(value, "--what-if gpu"))
    asked = f"--what-if site {cluster.sites[site].name} {name}"
    amount = number(value, asked, above=0.0 if name == "network_gbps" else None)
    if name == "gpus":
        return cluster.with_site(site, hosts=int(amount) // cluster.sites[site].gpus_per_host)
    if name == "hosts":
        return cluster.with_site(site, hosts=int(amount))
    return cluster.with_site(site, **({"network_bps": amount * 1e9} if name == "network_gbps" else {name: amount}))


def _known(name: str, names: tuple[str, ...], question: str) -> str:
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}"
    raise ValueError(f"--what-if {question!r}: there is no field {name!r}; {hint}")
