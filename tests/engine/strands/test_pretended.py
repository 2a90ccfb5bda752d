"""Strands of a rank alone, with collectives in flight: on CPUs, and on a GPU what only there can be seen."""

import gc
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.strands.pretended import Pretended, PretendedGroup
from weft.comm.collectives.executors import executor_for
from weft.engine.strands.pair import PairRunner, StrandThread
from weft.engine.strands.yielding_group import YieldingGroup, YieldPoint
from weft.pipeline.strands.plan import SegmentPlan, Step

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PLANS = ["", "B F W B F W F B F B F 2W B", "5B 4W 5F", "5F 5B 4W", "3F B F 2B W F 2B"]


class Stand:
    """The device of one test."""

    def __init__(self, device, **settings):
        self.executor, self.thread = executor_for(device, "pretended"), StrandThread(device)
        self.runner = PairRunner(self.thread, YieldPoint())
        self.steps = Pretended(device, self.executor, self.runner, **settings)

    def close(self):
        self.thread.close()
        self.executor.close()


@pytest.fixture
def stand():
    stands = []

    def make(device, **settings):
        stands.append(Stand(device, **settings))
        return stands[-1]

    yield make
    for made in stands:
        made.close()


def require_equal(steps, plans):
    alone = steps.results(None)
    for plan in plans:
        together = steps.results(plan)
        assert [torch.equal(*pair) for pair in zip(alone, together, strict=True)] == [True] * len(alone), str(plan)


@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@given(data=st.data())
@settings(max_examples=6)
def test_any_plan_gives_the_same_numbers(dropout, again, data):
    """Outputs, gradients, and the random numbers of what comes after."""
    made = Stand(CPU, dropout=dropout, again=again, width=4)
    plan = SegmentPlan(tuple(data.draw(st.lists(st.sampled_from(list(Step)), max_size=30))))
    require_equal(made.steps, [plan])
    made.close()


def test_a_collective_that_fails_ends_both_strands_with_its_error(stand):
    made = stand(CPU)
    lost = RuntimeError("rank 1 has gone")

    class Losing(PretendedGroup):
        def reduce_scatter(self, tensor):
            def fails(_):
                raise lost

            return self._start(tensor, fails)

    group = YieldingGroup(Losing(made.executor), made.runner.yield_point)
    strand = lambda: group.all_gather(torch.ones(2)).wait() + group.reduce_scatter(torch.ones(4)).wait()  # noqa: E731
    good = lambda: [group.all_gather(torch.ones(2)).wait() for _ in range(5)]  # noqa: E731
    for forward, backward in ((strand, good), (good, strand), (strand, strand)):
        with pytest.raises(RuntimeError) as raised:
            made.runner.run(SegmentPlan(()), forward, backward)
        assert raised.value is lost
    assert made.runner.run(SegmentPlan(()), lambda: 1, lambda: 2) == (1, 2)


@pytest.mark.gpu(shows="strands whose collectives run on another stream give the numbers of halves, bit by bit")
@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_streams_and_random_numbers(stand, dropout, again):
    require_equal(stand(GPU, dropout=dropout, again=again, width=1024).steps, map(SegmentPlan.of, PLANS))


@pytest.mark.gpu(shows="no strand makes the host wait for the device, so that it may run ahead of both")
def test_the_host_runs_ahead(stand):
    steps = stand(GPU, width=1024).steps
    steps.results(SegmentPlan(()))  # compiles and allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps.results(SegmentPlan.of(PLANS[1]))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu(shows="memory that one strand frees the other takes: 40 runs reserve no more than one allocates")
def test_memory_is_used_again(stand):
    steps, plan = stand(GPU, width=1024).steps, SegmentPlan.of(PLANS[1])
    allocated, reserved = [], []
    for _ in range(41):
        steps.results(plan)
        gc.collect()  # the model of one run is in a reference cycle
        torch.cuda.synchronize()  # what a collective still reads is free only afterwards
        allocated.append(torch.cuda.memory_stats()["allocated_bytes.all.allocated"])
        reserved.append(torch.cuda.memory_reserved())
    # Within one run, reuse depends on how far the host is ahead, so a later run may reserve more than the first.
    assert reserved[-1] - reserved[0] < (allocated[-1] - allocated[0]) / 40


@pytest.mark.gpu(shows="a backward that pauses holds neither autograd's device thread nor another stream's caller")
def test_a_paused_backward_does_not_block_the_forward(stand):
    runner = stand(GPU).runner
    weight = torch.ones(4, device=GPU, requires_grad=True)
    seen = []

    class Pauses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append((threading.current_thread().name, torch.cuda.current_stream()))
            runner.yield_point.pause()
            return gradient

    def forward():
        other = torch.ones(4, device=GPU, requires_grad=True)
        (other * 2).sum().backward()  # in autograd's device thread, while the strand's backward is under way
        return other.grad

    loss = Pauses.apply(weight * 2).sum()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gradient, _ = runner.run(SegmentPlan.of("B F B"), forward, loss.backward)
    torch.cuda.synchronize()
    assert gradient.tolist() == weight.grad.tolist() == [2.0] * 4
    assert [name for name, _ in seen] == ["weft strand"]


@pytest.mark.gpu(shows="a strand's thread computes on the device and the stream that its caller has then")
def test_device_and_stream(stand):
    runner = stand(GPU).runner
    stream = torch.cuda.Stream(GPU)
    with torch.cuda.stream(stream):
        _, found = runner.run(
            SegmentPlan(()), lambda: None, lambda: (torch.cuda.current_stream(), torch.cuda.current_device())
        )
    assert found == (stream, 0)
