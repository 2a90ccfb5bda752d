"""The WAN channel with tensors on a GPU: staged through pinned memory, compute not disturbed."""

from contextlib import ExitStack

import pytest
import torch

from tests.comm.wan.test_endpoint import Pair
from weft.comm.channel import TensorSpec

pytestmark = pytest.mark.gpu(shows="tensors cross the WAN through pinned memory, whole and in order")


def test_tensors_cross_between_gpus_as_they_were_when_they_were_sent():
    device = torch.device("cuda")
    with ExitStack() as stack:
        pair = Pair(stack, device=device)
        for shape in ((1000, 1000), (0, 4), (3,)):
            # Written by kernels that are still queued when the send is called.
            tensor = torch.full(shape, 1.0, device=device)
            for _ in range(50):
                tensor = tensor * 1.01
            receive = pair.channels[1].recv("a", TensorSpec(shape, torch.float32))
            send = pair.channels[0].send("a", tensor)
            received = receive.wait()
            assert received.device.type == "cuda"
            assert torch.equal(received, tensor)
            send.wait()


def test_sends_keep_their_order_and_may_not_be_contiguous():
    device = torch.device("cuda")
    with ExitStack() as stack:
        pair = Pair(stack, device=device)
        tensors = [torch.randn(300, 400, device=device).T for _ in range(8)]
        receives = [pair.channels[1].recv("a", TensorSpec((400, 300), torch.float32)) for _ in tensors]
        sends = [pair.channels[0].send("a", tensor) for tensor in tensors]
        for receive, tensor in zip(receives, tensors, strict=True):
            assert torch.equal(receive.wait(), tensor)
        for send in sends:
            send.wait()
