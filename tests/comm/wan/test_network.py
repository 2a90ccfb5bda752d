"""Tests of a run's report about its links between sites before the first byte is sent."""

import logging

import pytest
import torch
import torch.distributed as dist

from weft.comm.links import Cell
from weft.comm.wan.network import WanNetwork
from weft.conf.schema import CommConfig


@pytest.fixture
def world_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("keywords", "warns"), [({}, False), ({"tls": False}, True)])
def test_links_are_encrypted_unless_asked_otherwise_and_then_what_travels_readable_is_named(
    world_of_one, caplog, keywords, warns
):
    comm = CommConfig(connections=4, **keywords)
    with caplog.at_level(logging.WARNING):
        WanNetwork.join([Cell((5,), (6,))], comm=comm, device=torch.device("cpu")).close()
    words = "comm.tls=false: hidden states, gradients and tags are sent between sites unencrypted"
    assert (words in caplog.text) == warns
