"""The WAN channel: many authenticated TCP connections per link, in a native thread."""

from weft.comm.wan.endpoint import WanEndpoint as WanEndpoint
from weft.comm.wan.network import WanNetwork
from weft.comm.wan.sites.job import default_group

open_network = WanNetwork.join
"""Open the links of the job's DP-cells."""

__all__ = ["default_group", "open_network"]
