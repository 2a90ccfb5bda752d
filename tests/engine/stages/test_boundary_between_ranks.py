"""An executor waits for just what the stage before hands on, and its gradient: ranks in threads."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor

import torch

from tests.engine.stages.tiny import batch, stages_of, tiny
from weft.comm.channel import TensorSpec
from weft.engine.execution.compute import Compute
from weft.engine.execution.executor import Executor
from weft.engine.execution.step_state import LabelCount, StepState
from weft.engine.stages.checking.comparison import difference, staged_outcome
from weft.engine.stages.checking.comparison import gradients as gradients_of
from weft.pipeline.generators import generate
from weft.pipeline.lowering import add_transfers
from weft.pipeline.placement import Placement

LIMIT_S = 120.0


class Sent:
    """Something that has arrived, or will."""

    def __init__(self, get=None) -> None:
        self._get = get

    def wait(self):
        return self._get() if self._get else None

    def ended(self) -> bool:
        return True


class Queue:
    """One way between two threads; a tensor that is not as the receiver has predicted fails."""

    def __init__(self) -> None:
        self._waiting: queue.Queue = queue.Queue()

    def send(self, tag: str, tensor: torch.Tensor) -> Sent:
        self._waiting.put((tag, tensor.detach().clone()))
        return Sent()

    def recv(self, tag: str, spec: TensorSpec) -> Sent:
        def get() -> torch.Tensor:
            name, tensor = self._waiting.get(timeout=LIMIT_S)
            assert (name, tuple(tensor.shape), tensor.dtype) == (tag, tuple(spec.shape), spec.dtype)
            return tensor

        return Sent(get)


def test_shared_keys_and_values_reach_their_layers():
    config, count = tiny("gemma4_text"), 3
    rows = [{name: tensor[m : m + 1] for name, tensor in batch(4).items()} for m in range(4)]
    items = torch.tensor(37)
    want = staged_outcome(stages_of(config, count), rows, items)
    stages, placement = stages_of(config, count), Placement.straight(count)
    wires = {(a, b): Queue() for a in range(count) for b in (a - 1, a + 1) if 0 <= b < count}

    def run(rank: int) -> StepState:
        executor = Executor(
            rank=rank,
            stages={rank: stages[rank]},
            compute=Compute(stages={rank: stages[rank]}, placement=placement, seed_gradient=torch.ones_like),
            send_to={b: wire for (a, b), wire in wires.items() if a == rank},
            receive_from={a: wire for (a, b), wire in wires.items() if b == rank},
            receive_ahead=len(rows),
            stage_wide={},
            debug=True,
        )
        state = StepState(batches=rows, num_items=LabelCount(items, None), training=True)
        executor.run(add_transfers(generate("1f1b", placement, len(rows))), state)
        return state

    with ThreadPoolExecutor(count) as threads:
        last = list(threads.map(run, range(count)))[-1]
    loss = torch.stack([last.losses[m].detach() for m in range(len(rows))]).sum()
    got = type(want)(want.logits, loss, gradients_of(stages))
    assert difference(got, want).worst < 1e-6
