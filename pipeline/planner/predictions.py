"""Predictions: schedule candidates, and derive time, memory and cost."""

from __future__ import annotations

from dataclasses import replace

from weft.pipeline.planner.candidates import Candidate, cap_of, held_by
from weft.pipeline.planner.estimates import Estimates
from weft.pipeline.planner.latency import pipeline_latency
from weft.pipeline.planner.layout import Layout, Prediction
from weft.pipeline.planner.routes import Route
from weft.pipeline.planner.traffic import Traffic

NEAR = 1.001
"""Schedules that are longer than their bound by less are not improved."""


class Predictions:
    """The predictions of layouts of one model on one cluster."""

    def __init__(self, estimates: Estimates, traffic: Traffic) -> None:
        self._cluster, self._work, self._traffic = estimates.cluster, estimates.work, traffic
        self._predicted: dict[Layout, Prediction | None] = {}

    def of(self, candidate: Candidate) -> Prediction | None:
        """Return the prediction for a candidate once it is scheduled, or None if its schedule exceeds memory."""
        if candidate.layout not in self._predicted:
            self._predicted[candidate.layout] = self._predict(candidate)
        return self._predicted[candidate.layout]

    def _predict(self, candidate: Candidate) -> Prediction | None:
        layout = candidate.layout
        cap = cap_of(candidate)
        enough_s = NEAR * (candidate.bound_s - candidate.collective_s - candidate.optimizer_s)
        cells = [
            pipeline_latency(cell, layout.microbatches, costs, cap, layout.schedule, enough_s, candidate.rooms)
            for costs, cell in dict.fromkeys(
                (costs, cell) for costs, way in zip(candidate.costs, layout.ways, strict=True) for cell in way.cells
            )
        ]
        pipeline_s = max(cell.step_s for cell in cells)
        peaks = [
            max(max(cell.peak_bytes[rank :: layout.num_stages]) for cell in cells) for rank in range(layout.num_stages)
        ]
        if not all(cell.fits(candidate.rooms) for cell in cells):
            return None
        memory = [replace(state, activations=peak) for state, peak in zip(candidate.states, peaks, strict=True)]
        on = [self._cluster.sites[site] for site in layout.site_of()]
        shares = [memory[rank % layout.num_stages].total / site.gpu.memory_bytes for rank, site in enumerate(on)]
        fullest = max(range(len(shares)), key=shares.__getitem__)
        ends_s = candidate.collective_s + candidate.optimizer_s
        step_s = max(pipeline_s + ends_s, candidate.bound_s)  # a closed form may come out too short
        tokens = layout.sequences * self._work.sequence_length
        peak_flops = sum(site.gpu.flops_per_s for site in on) * layout.lines_of_route
        busy_ways_s = [sum(stage.compute_s for stage in costs.stages) for costs in candidate.costs]
        route = Route(layout.sites, layout.stages)
        return Prediction(
            layout=layout,
            step_s=step_s,
            bound_s=candidate.bound_s,
            pipeline_s=pipeline_s,
            collective_s=candidate.collective_s,
            optimizer_s=candidate.optimizer_s,
            busy_s=layout.microbatches * sum(busy_ways_s) / len(busy_ways_s) / layout.num_stages,
            tokens=tokens,
            mfu=self._work.flops_per_token * tokens / step_s / peak_flops,
            memory=memory[fullest % layout.num_stages],
            memory_share=shares[fullest],
            cap_bytes=cap,
            wan_bytes=self._traffic.wan_bytes(layout, route),
            price_per_hour=sum(site.price for site in on) * layout.lines_of_route,
            egress_per_step=self._traffic.egress(layout, route) + self._traffic.reduced_egress(layout),
            binds=self._binds(candidate, step_s),
        )

    def _binds(self, candidate: Candidate, step_s: float) -> str:
        """Return the part of a step that limits a layout most."""
        layout, count = candidate.layout, candidate.layout.microbatches
        shares: dict[str, float] = {"compute": 0.0}
        filling_s = crossing_s = 0.0
        for way, costs in zip(layout.ways, candidate.costs, strict=True):
            stages = costs.stages
            busy = [sum(stages[stage].compute_s for stage in held) for held in held_by(way)]
            shares["compute"] = max(shares["compute"], max(busy) * count)
            for (here, there), link in costs.wan_links:
                names = [self._cluster.sites[way.sites[end]].name for end in (here, there)]
                held_s = link.occupancy_s(stages[0].output_bytes) * layout.crossings * count
                shares[f"uplink {names[0]} to {names[1]}"] = held_s
            way_s = sum(
                link.latency_s + link.transit_s(stages[0].output_bytes) / layout.cell for _, link in costs.wan_links
            )
            crossing_s = max(crossing_s, way_s * layout.crossings)
            filling_s = max(filling_s, (sum(busy) - max(busy)) / len(layout.legs))
        shares["the way through sites"] = crossing_s
        shares["filling and draining the pipeline"] = filling_s
        over = "collectives over replicas" + (" at several sites" if layout.routes > 1 else "")
        shares[over] = candidate.collective_s
        most = max(shares, key=lambda name: shares[name])
        return f"{most} ({shares[most] / step_s:.0%} of the step)"
