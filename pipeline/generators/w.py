"""DHelix's W schedule: pairs the forward of one strand with the backward of the other on every rank."""

from __future__ import annotations

from collections import defaultdict

from weft.pipeline.action import Action, Op, Slot
from weft.pipeline.placement import Placement
from weft.pipeline.schedule import Schedule


def generate_w(placement: Placement, num_microbatches: int) -> Schedule:
    """Generate the W-shaped schedule of DHelix section 4.1, figure 8, for any number of micro-batches.

    A micro-batch enters every second tick and advances one virtual stage per tick: forward
    through all S stages, then immediately backward through them. The two chunks of a rank are
    therefore never active in the same tick, and the forward of micro-batch m + S/2 meets the
    backward of micro-batch m on every rank of the fold: groups of S/2 = P micro-batches alternate
    as strand alpha and strand beta. The first group's forwards (warm-up) and the last group's
    backwards (cool-down) run alone; every slot between is a pair.

    On a fold every rank holds 2P chunk activations between slots, the same bytes as 1F1B's P
    activations of a straight stage. Within a pair the forward may save up to one chunk more before
    the backward frees one; an engine that alternates them layer by layer saves one layer more. On
    a site fold the first site's chunks all come early in the model and are held longer: its p
    ranks hold 4P - 2p chunks each, 1.5 times as many for two equal sites.

    Raises:
        ValueError: the placement's legs are not ``du``.
    """
    if placement.legs != "du":
        raise ValueError(
            f"pipeline.schedule=w: it pairs a forward and a backward that move the same way, which needs placement="
            f"fold or site_fold (legs 'du'), the placement has legs {placement.legs!r}; choose placement=fold, or "
            f"schedule=1f1b or auto"
        )
    stages = placement.num_stages
    ticks: list[dict[int, list[Action]]] = [defaultdict(list) for _ in range(placement.num_ranks)]
    for microbatch in range(num_microbatches):
        enter = 2 * microbatch
        for stage, rank in enumerate(placement.stage_ranks):
            ticks[rank][enter + stage].append(Action(Op.F, stage, microbatch))
            ticks[rank][enter + 2 * stages - 1 - stage].append(Action(Op.B, stage, microbatch))
    rows = tuple(tuple(_slot(row[tick]) for tick in sorted(row)) for row in ticks)
    return Schedule("w", placement, num_microbatches, rows)


def _slot(actions: list[Action]) -> Slot:
    """Return a slot of one action, or of a strand pair with its forward first."""
    assert len(actions) == 1 or sorted(a.op.value for a in actions) == ["B", "F"], actions
    return tuple(sorted(actions, key=lambda action: action.op is not Op.F))
