"""Measurements of `weft profile` for plans: the share of its peak that a kind of GPU reaches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.conf.host.documents import read_yaml
from weft.pipeline.costs import CostModel
from weft.pipeline.hardware import GPU_KINDS, gpu_kind
from weft.pipeline.limits import count, known_fields, number, short_repr
from weft.pipeline.planner.cluster import Cluster
from weft.pipeline.profile import MOST_BYTES, load_pieces
from weft.pipeline.workload import ModelWork

FIELDS = (
    "gpu",
    "device",
    "model",
    "sequence_length",
    "microbatch_size",
    "precision",
    "gradient_checkpointing",
    "collectives",
)
COLLECTIVE_FIELDS = ("ranks", "latency_us", "gb_per_s")


@dataclass(frozen=True, kw_only=True)
class MeasuredCollectives:
    """The average cost of all-gathers and reduce-scatters among GPUs of one host.

    Attributes:
        ranks: number of participating ranks.
        latency_s: latency of each step of a ring.
        bytes_per_s: bytes per second that a GPU sends.
    """

    ranks: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured costs of a model's layers, with the device and model of the measurement.

    Attributes:
        gpu: kind of the device, or empty if the hardware table does not have it.
        device: name from the driver.
    """

    gpu: str
    device: str
    sequence_length: int
    microbatch_size: int
    checkpointing: bool
    layers: CostModel
    collectives: MeasuredCollectives | None = None

    def applied(self, work: ModelWork, cluster: Cluster) -> Cluster:
        """Return ``cluster`` with the measured costs.

        All GPUs get the measured efficiency. If collectives were measured, sites with this kind of GPU get their
        bandwidth and latency inside a host, too.

        Raises:
            ValueError: see `efficiency`.
        """
        sites = cluster.sites
        if (inside := self.collectives) is not None:
            sites = tuple(
                replace(
                    site,
                    gpu=replace(
                        site.gpu,
                        scale_up_bytes_per_s=inside.bytes_per_s,
                        scale_up_latency_s=inside.latency_s,
                    ),
                )
                if site.gpu.name == self.gpu
                else site
                for site in sites
            )
        return replace(cluster, sites=sites, efficiency=self.efficiency(work, cluster))

    def efficiency(self, work: ModelWork, cluster: Cluster) -> float:
        """Return the share of the GPU's peak that the layers reached.

        Raises:
            ValueError: the layers are not this model's, the cluster has no GPU of the measured kind, or the share is
                not between 0 and 1.
        """
        if len(self.layers.stages) != len(work.layers) or self.sequence_length != work.sequence_length:
            raise ValueError(
                f"it is of {len(self.layers.stages)} layers and {self.sequence_length} tokens, and the plan of "
                f"{len(work.layers)} and {work.sequence_length}; measure this model, or give --sequence-length"
            )
        kinds = sorted({site.gpu.name for site in cluster.sites})
        if self.gpu not in kinds:
            raise ValueError(
                f"it was measured on {self.gpu or self.device}, and the cluster has {', '.join(kinds)}; measure on one "
                "of these"
            )
        seconds = sum(cost.compute_s for cost in self.layers.stages)
        flops = work.whole.forward_flops * (4 if self.checkpointing else 3) * self.microbatch_size
        found = flops / seconds / GPU_KINDS[self.gpu].flops_per_s
        if not 0 < found <= 1:
            raise ValueError(
                f"its layers reach {found:.3g} of the peak of a {self.gpu}, which is no share of it; measure anew"
            )
        return found


def load_measured(path: Path) -> Measured:
    """Read a file that `weft profile` has written.

    Raises:
        ValueError: the file cannot be read, or does not name the GPU and model that were measured.
    """
    layers = load_pieces(path)
    data = read_yaml(path, most_bytes=MOST_BYTES)
    try:
        if "measured" not in data:
            raise ValueError("measured: missing; `weft profile` writes files that record what they were measured on")
        table: dict[str, Any] = known_fields(data["measured"], "measured", FIELDS)
        gpu = str(table.get("gpu", ""))
        return Measured(
            gpu=gpu_kind(gpu, "measured.gpu").name if gpu else "",
            device=str(table.get("device", "")),
            sequence_length=count(table.get("sequence_length"), "measured.sequence_length"),
            microbatch_size=count(table.get("microbatch_size"), "measured.microbatch_size"),
            checkpointing=_truth(table.get("gradient_checkpointing", False)),
            layers=layers,
            collectives=_collectives(table["collectives"]) if "collectives" in table else None,
        )
    except ValueError as error:
        raise ValueError(f"costs file {path}: {error}") from error


def _collectives(data: Any) -> MeasuredCollectives:
    table, name = known_fields(data, "measured.collectives", COLLECTIVE_FIELDS), "measured.collectives"
    return MeasuredCollectives(
        ranks=count(table.get("ranks"), f"{name}.ranks", least=2),
        latency_s=number(table.get("latency_us"), f"{name}.latency_us") / 1e6,
        bytes_per_s=number(table.get("gb_per_s"), f"{name}.gb_per_s", above=0.0) * 1e9,
    )


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"measured.gradient_checkpointing={short_repr(value)}: expected true or false")
    return value
