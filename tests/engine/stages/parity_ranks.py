"""Parity through the engine's executor: stages on different ranks, joined by channels, under a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from tests.engine.stages.parity_cases import ParityCase
from tests.engine.stages.parity_cases import cases as make_cases
from weft.comm.torch_channel import TorchChannel, between_hosts, connect
from weft.engine.distributed import init_distributed
from weft.engine.execution.compute import Compute
from weft.engine.execution.executor import Executor
from weft.engine.execution.step_state import LabelCount, StepState
from weft.engine.planning.schedules import plan_evaluation
from weft.engine.stages.checking.comparison import Outcome
from weft.pipeline.generators import generate
from weft.pipeline.lowering import add_transfers
from weft.pipeline.placement import Placement
from weft.tools.ranks import run_ranks

TIMEOUT_S = 1800.0


def through_engine(kind: str, cases: Sequence[ParityCase]) -> Iterator[Outcome]:
    """Yield the outcome of every case under a schedule of ``kind``, on ranks of one job."""
    num_ranks = max(case.num_stages for case in cases)
    names = [(case.arch, case.variant, case.num_stages) for case in cases]  # tensors would need a file each
    by_rank = run_ranks(num_ranks, _run_cases, names, kind, timeout_s=TIMEOUT_S)
    for parts in zip(*by_rank, strict=True):
        gradients: dict[str, torch.Tensor] = {}
        for _, _, of_rank in parts:
            for name, array in of_rank.items():  # what two ranks hold (tied weights) is summed
                gradients[name] = torch.from_numpy(array) + gradients.get(name, 0.0)
        logits, loss = next((logits, loss) for logits, loss, _ in parts if loss is not None)
        yield Outcome(torch.from_numpy(logits), torch.tensor(loss), gradients)


def _run_cases(names: list[tuple[str, str, int]], kind: str) -> list[tuple]:
    cases = [next(make_cases([arch], [variant], [num_stages])) for arch, variant, num_stages in names]
    init_distributed(TIMEOUT_S)
    channels: dict[int, dict[tuple[int, int], TorchChannel]] = {}
    for count in sorted({case.num_stages for case in cases}):
        hops = {hop for a, b in pairwise(range(count)) for hop in ((a, b), (b, a))}
        channels[count] = connect(hops, device=torch.device("cpu"), timeout_s=TIMEOUT_S, rts_group=between_hosts())
    return [_run_case(case, kind, channels[case.num_stages]) for case in cases]


def _run_case(case: ParityCase, kind: str, channels: dict[tuple[int, int], TorchChannel]) -> tuple:
    rank, rows = dist.get_rank(), case.microbatches
    if rank >= case.num_stages:
        return None, None, {}
    placement = Placement.straight(case.num_stages)
    (stage,) = case.stages([rank])
    executor = Executor(
        rank=rank,
        stages={rank: stage},
        compute=Compute(stages={rank: stage}, placement=placement, seed_gradient=torch.ones_like),
        send_to={b: channel for (a, b), channel in channels.items() if a == rank},
        receive_from={a: channel for (a, b), channel in channels.items() if b == rank},
        receive_ahead=len(rows),
        stage_wide={},
        debug=True,
    )
    state = StepState(batches=rows, num_items=LabelCount(torch.as_tensor(case.num_items), None), training=True)
    executor.run(add_transfers(generate(kind, placement, len(rows))), state)
    # As arrays: a tensor sent to another process must outlive its sender.
    gradients = {name: p.grad.float().numpy() for name, p in stage.named_global_parameters() if p.grad is not None}
    evaluated = StepState(batches=rows, num_items=None, training=False, of_logits=lambda logits, _: logits)
    executor.run(plan_evaluation(placement, len(rows)), evaluated)
    if not stage.is_last:
        return None, None, gradients
    logits = torch.cat([evaluated.of_each[m] for m in range(len(rows))]).float().numpy()
    return logits, sum(state.losses[m].item() for m in range(len(rows))), gradients
