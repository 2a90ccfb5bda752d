"""The executor: runs one rank's row of a schedule, which is its transfers and computations in order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from weft.comm.channel import Receiver, Sender, TensorSpec
from weft.engine.execution.compute import Compute
from weft.engine.execution.step_state import Key, ReceiveQueue, StepState, key
from weft.engine.parallel.axis import AxisGroups
from weft.engine.stages.cutting.stage import Stage
from weft.pipeline.action import RECEIVES, SENDS, Action, Op, Slot, is_pair, receive_of
from weft.pipeline.dependencies import establishes
from weft.pipeline.schedule import Schedule


def _run_stage_wide(run: Callable[[Action], None], _: StepState, action: Action, __: Schedule) -> None:
    run(action)


def _await_sends(state: StepState) -> None:
    for handle in state.sends:
        handle.wait()


class SlotPairs(Protocol):
    """Runs strand pairs interleaved. See `weft.engine.strands`."""

    @property
    def axes(self) -> AxisGroups:
        """The groups with which the stages must be created, because they switch between strands."""

    def agree(self, schedules: Collection[Schedule], num_stages: int) -> None:
        """Plan the strand pairs of these schedules. Collective call if there are any pairs."""

    def split(self, row: Iterable[Slot]) -> set[Key]:
        """Return stage and micro-batch of the forwards in a row whose ``B`` runs as ``I`` and ``W``."""

    def run(self, compute: Compute, state: StepState, pair: Slot) -> None:
        """Run the forward and the backward of the slot ``pair``."""

    def close(self) -> None:
        """Release the resources."""


@dataclass(kw_only=True, eq=False)
class Executor:
    """Executes rows of lowered schedules on one rank.

    A send starts as soon as its tensor exists, and the wait for it is at the end of the row. Receives are posted
    in advance. So transfers delay only computations that depend on them (MegaScale section 3.2).

    Attributes:
        rank: this pipeline rank, as in the schedule's rows.
        receive_ahead: number of receives from each neighbour that are posted in advance.
        stage_wide: implementations of ``UNSHARD``, ``RESHARD`` and ``REDUCE_GRAD``.
        pairs: runs strand pairs interleaved. None runs their halves one after the other.
    """

    rank: int
    stages: Mapping[int, Stage]
    compute: Compute
    send_to: Mapping[int, Sender]
    receive_from: Mapping[int, Receiver]
    receive_ahead: int
    stage_wide: Mapping[Op, Callable[[Action], None]]
    debug: bool
    pairs: SlotPairs | None = None

    def __post_init__(self) -> None:
        self._table: dict[Op, Callable[[StepState, Action, Schedule], None]] = {
            Op.F: lambda state, action, _: self.compute.forward(state, action),
            Op.B: lambda state, action, _: self.compute.backward(state, action),
            Op.I: lambda state, action, _: self.compute.backward(state, action),
            Op.W: lambda state, action, _: self.compute.weight_backward(state, action),
            Op.OFFLOAD: lambda state, action, _: self.compute.offload(state, action),
            Op.RELOAD: lambda state, action, _: self.compute.reload(state, action),
            Op.SEND_F: self._send,
            Op.SEND_B: self._send,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
            **{op: partial(_run_stage_wide, run) for op, run in self.stage_wide.items()},
        }

    def run(self, schedule: Schedule, state: StepState) -> None:
        """Execute this rank's row in order, up to the slot ``STEP``. `stepping` executes that slot.

        Args:
            schedule: lowered and valid.
            state: the step's batches and observers, to which losses and memory peaks are added.

        Raises:
            ChannelError: a neighbour did not deliver in time.
        """
        for observer in state.observers:
            observer.step_begins(schedule.num_microbatches)
        row = schedule.rows[self.rank]
        state.split = {key(action) for slot in row for action in slot if action.op is Op.W}
        state.offloaded = {key(action) for slot in row for action in slot if action.op is Op.OFFLOAD}
        if self.pairs is not None:
            state.split |= self.pairs.split(row)
        self._post_receives(schedule, state)
        for slot in row:
            if slot[0].op is Op.STEP:
                return
            self._begin_slot(schedule, state, slot)
            self._run_slot(schedule, state, slot)
            self._end_slot(state, slot)
        _await_sends(state)

    @contextmanager
    def stepping(self, schedule: Schedule, state: StepState) -> Iterator[None]:
        """Execute the slot ``STEP``, in which the caller updates the weights. At its end every send is complete."""
        slot = schedule.rows[self.rank][-1]
        assert slot[0].op is Op.STEP, f"a row that ends with {slot[0]} trains nothing"
        self._begin_slot(schedule, state, slot)
        yield
        self._end_slot(state, slot)
        _await_sends(state)

    def _begin_slot(self, schedule: Schedule, state: StepState, slot: Slot) -> None:
        for observer in state.observers:
            observer.slot_begins(slot)
        if self.debug:
            for action in slot:
                self._assert_ready(schedule, action, state.done)

    def _end_slot(self, state: StepState, slot: Slot) -> None:
        if self.debug:
            state.done.update(fact for action in slot for fact in establishes(action))
        for observer in reversed(state.observers):
            observer.slot_ends(slot)

    def _run_slot(self, schedule: Schedule, state: StepState, slot: Slot) -> None:
        """Run the action of a slot, or the forward and the backward of a strand pair.

        The inputs of both are available, because their transfers are earlier slots. Without interleaving the backward
        runs first, because it frees memory for the forward.
        """
        if self.pairs is not None and is_pair(slot):
            self.pairs.run(self.compute, state, slot)
        else:
            for action in reversed(slot):
                self._table[action.op](state, action, schedule)

    def _assert_ready(self, schedule: Schedule, action: Action, done: set[Action]) -> None:
        ranks = schedule.placement.stage_ranks
        missing = [n for n in schedule.dependencies(action) if ranks[n.stage] == self.rank and n not in done]
        assert not missing, f"{action} on rank {self.rank} ran before {', '.join(map(str, missing))}"

    def _post_receives(self, schedule: Schedule, state: StepState) -> None:
        """Create a queue for each neighbour, with the step's receives in the order of the neighbour's sends."""
        mine = {action for action in schedule.actions(self.rank) if action.op in RECEIVES}
        for peer, channel in self.receive_from.items():
            fed = [receive_of(action) for action in schedule.actions(peer) if action.op in SENDS]
            messages = [(action, self._spec(state, action)) for action in fed if action in mine]
            state.receives[peer] = ReceiveQueue(channel, messages, ahead=self.receive_ahead)

    def _spec(self, state: StepState, action: Action) -> TensorSpec:
        batch = state.batches[key(action)[1]]
        shape, dtype = self.stages[action.stage].hidden_spec(batch, leaving=action.op is not Op.RECV_F)
        return TensorSpec(tuple(shape), dtype)

    def _send(self, state: StepState, action: Action, schedule: Schedule) -> None:
        receive = receive_of(action)
        tensors = state.outputs if action.op is Op.SEND_F else state.input_gradients
        channel = self.send_to[schedule.placement.stage_ranks[receive.stage]]
        while state.sends and state.sends[0].ended():  # frees its tensor
            state.sends.popleft().wait()
        state.sends.append(channel.send(str(receive), tensors.pop(key(action))))

    def _receive(self, state: StepState, action: Action, schedule: Schedule) -> None:
        sender = action.stage - 1 if action.op is Op.RECV_F else action.stage + 1
        tensors = state.inputs if action.op is Op.RECV_F else state.gradients
        tensors[key(action)] = state.receives[schedule.placement.stage_ranks[sender]].wait(action)
