"""Delay models: those that come along, a user's own, and what is wrong with one."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist

from tests.comm.emulated.test_world import Clock
from weft.comm.collectives.collective import Primitive
from weft.comm.collectives.costs import AlphaBeta, CollectiveCosts
from weft.comm.collectives.group import LinkClass
from weft.comm.emulated.operation_log import EmulationError
from weft.comm.emulated.step import Call
from weft.comm.emulated.world import EmulatedWorld
from weft.pipeline.costs import CostModel, LinkCost
from weft.recipes.emulation.delays import AlphaBetaDelays, CheckedDelays, DelayModel, Job, Message, delay_model

ROOT = Path(__file__).parents[3]
LINKS = MappingProxyType({LinkClass.intra: AlphaBeta(1.0, 0.5), LinkClass.inter: AlphaBeta(10.0, 5.0)})
WAN = CostModel(
    stages=(),
    wan=LinkCost(latency_s=1000.0),
    wan_links=(((0, 1), LinkCost(latency_s=100.0)), ((1, 0), LinkCost(bandwidth_bps=64.0, pair_bps=0.5))),
)
JOB = Job(num_ranks=64, collectives=None, links=LINKS, costs=WAN)
MESSAGE = Message("0SEND_F0", 0, 1, crosses=False, num_bytes=1.0)


def call(operation="all_reduce", size=4, num_hosts=1, sites=(0,), num_bytes=8):
    return Call(operation, tuple(range(size)), num_hosts, sites, num_bytes)


def test_collectives_by_alpha_and_beta_of_their_link():
    model = DelayModel(JOB)
    assert model.collective_s(call()) == 6 * 1.0 + 6 / 4 * 8 * 0.5
    assert model.collective_s(call(num_hosts=4)) == 6 * 10.0 + 6 / 4 * 8 * 5.0
    assert model.collective_s(call(num_hosts=2)) == model.collective_s(call(num_hosts=4))  # the slow links hold back
    assert model.collective_s(call("all_to_all")) == 3 * 1.0 + 3 / 4 * 8 * 0.5
    assert model.collective_s(call("broadcast")) == 2 * 1.0 + 8 * 0.5
    assert model.collective_s(call(num_hosts=4, sites=(1, 2))) == 2 * 10.0 + 8 * 5.0 + 1000.0
    assert model.collective_s(call(size=1)) == 0.0


def test_a_collective_over_sites_takes_as_long_as_the_slowest_of_their_links():
    model = DelayModel(JOB)
    inside_s = 2 * 10.0 + 8 * 5.0
    assert model.collective_s(call(num_hosts=4, sites=(0, 1))) == inside_s + 8 * 8 / 0.5  # the limit of a pair of hosts
    assert model.collective_s(call(num_hosts=4, sites=(0, 1), num_bytes=0)) == 2 * 10.0 + 100.0
    assert model.collective_s(call(num_hosts=4, sites=(0, 1, 2))) == inside_s + 1000.0


def test_measured_costs_come_first():
    costs = CollectiveCosts({(LinkClass.intra, Primitive.all_reduce): AlphaBeta(0.25, 0.0)})
    model = DelayModel(replace(JOB, collectives=costs))
    assert model.collective_s(call()) == 6 * 0.25
    assert model.collective_s(call("all_gather")) == 2 * 1.0 + 8 * 0.5  # not measured


def halves(tensor):
    return list(tensor.chunk(2))


COLLECTIVES = {
    "all_reduce": lambda tensor: dist.all_reduce(tensor),
    "reduce": lambda tensor: dist.reduce(tensor, dst=0),
    "broadcast": lambda tensor: dist.broadcast(tensor, src=0),
    "all_gather": lambda tensor: dist.all_gather_into_tensor(tensor, tensor[:4].clone()),
    "gather": lambda tensor: dist.gather(tensor[:4], halves(tensor), dst=1),
    "reduce_scatter": lambda tensor: dist.reduce_scatter_tensor(tensor[:4].clone(), tensor),
    "scatter": lambda tensor: dist.scatter(tensor[:4].clone(), halves(tensor), src=1),
    "all_to_all": lambda tensor: dist.all_to_all_single(torch.empty(8), tensor),
    "barrier": lambda tensor: dist.barrier(),
}


class Ready:
    """The behaviour of emulated ranks that are always ready."""

    def ready_s(self, operation, ranks, root):
        return 0.0

    def ended(self, operation, ranks, at_s):
        pass


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_an_emulated_collective_takes_as_long_as_its_delay_model_says(operation, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restores what `join` replaces
    job = replace(JOB, costs=CostModel(stages=(), wan=LinkCost(latency_s=1000.0)))
    world, model, calls = EmulatedWorld(rank=1, size=2, hosts=int, sites=int), DelayModel(job), []
    world.clock, world.step = Clock(), Ready()
    world.collective_s = lambda call: calls.append(call) or model.collective_s(call)
    world.join()
    try:
        begun_s = world.clock.now()
        COLLECTIVES[operation](torch.ones(8))
        (call,) = calls
        assert (call.operation, call.ranks, call.num_hosts, call.sites) == (operation, (0, 1), 2, (0, 1))
        assert call.num_bytes == (0 if operation == "barrier" else 32)
        assert world.clock.now() == begun_s + 1 * 10.0 + call.num_bytes * 5.0 + 1000.0
    finally:
        dist.destroy_process_group()


def test_alpha_beta_has_ranks_that_are_always_ready():
    assert AlphaBetaDelays(JOB).compute_s(0, "0F0", 3.0) == 0.0
    assert DelayModel(JOB).compute_s(0, "0F0", 3.0) == 3.0


def test_a_trace_says_what_was_recorded(tmp_path):
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"compute": {"1": {"1F0": 7.0}}}))
    name, make = delay_model(f"trace:{file}")
    model = CheckedDelays(name, make, JOB)
    assert model.compute_s(1, "1F0", 3.0) == 7.0
    assert model.compute_s(0, "0F0", 3.0) == 3.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("packet", "--delays packet: not known; choose from .*alpha-beta.*simulate.*trace"),
        ("no_such_module:Model", "cannot be loaded: ModuleNotFoundError"),
        ("{folder}/none.py:Model", "cannot be loaded: FileNotFoundError"),
        ("{folder}/model.py:None_", "cannot be loaded: AttributeError"),
        ("{folder}/model.py:Raises", "it raised ZeroDivisionError: division by zero"),
        ("{folder}/model.py:Negative", r"collective_s\(Call\(.*\) is -1.0; return seconds of at least 0"),
        ("{folder}/model.py:NotANumber", "is nan; return seconds"),
        ("{folder}/model.py:Text", "is 'soon'; return seconds"),
        ("{folder}/model.py:Later", "collective_s raised KeyError: 'here'"),
        ("trace:{folder}/none.json", "trace:[^ ]*none.json: cannot be read [(].*No such file.*[)]; give .*; `weft emu"),
        ("trace:{folder}/list.json", "trace:[^ ]*list.json: Expected `object`, got `array`.*; `weft emulate --record"),
    ],
)
def test_what_is_wrong_is_one_clear_error(tmp_path, given, message):
    (tmp_path / "model.py").write_text(
        "from weft.recipes.emulation.delays import DelayModel\n"
        "class Raises:\n    def __init__(self, job): 1 / 0\n"
        "class Negative(DelayModel):\n    def collective_s(self, call): return -1.0\n"
        "class NotANumber(DelayModel):\n    def collective_s(self, call): return float('nan')\n"
        "class Text(DelayModel):\n    def collective_s(self, call): return 'soon'\n"
        "class Later(DelayModel):\n    def collective_s(self, call): return {}['here']\n"
    )
    (tmp_path / "list.json").write_text('{"compute": [7]}')
    with pytest.raises(EmulationError, match=message):
        name, make = delay_model(given.format(folder=tmp_path))
        CheckedDelays(name, make, JOB).collective_s(call())


def test_the_model_in_the_docs_runs_as_it_is_written(tmp_path):
    text, _ = models_in_the_docs()
    assert len(text.splitlines()) <= 20
    file = tmp_path / "fabric.py"
    file.write_text(text)
    name, make = delay_model(f"{file}:Fabric")
    model, plain = CheckedDelays(name, make, JOB), DelayModel(JOB)
    assert model.collective_s(call()) == plain.collective_s(call())
    assert model.collective_s(call(num_hosts=2)) == 3 * plain.collective_s(call(num_hosts=2))
    late = [model.late_s(MESSAGE) for _ in range(1000)]
    assert set(late) == {0.0, 0.002}
    assert model.compute_s(0, "0F0", 1.5) == 1.5


def test_the_packet_model_in_the_docs_queues_behind_other_traffic_between_sites(tmp_path):
    _, text = models_in_the_docs()
    file = tmp_path / "packets.py"
    file.write_text(text)
    name, make = delay_model(f"{file}:Packets")
    model, plain = CheckedDelays(name, make, JOB), DelayModel(JOB)
    assert model.late_s(MESSAGE) == 0.0  # inside a site
    num_bytes = 9000 * 10_000
    late_s = model.late_s(Message("0SEND_F0", 0, 1, crosses=True, num_bytes=num_bytes))
    assert late_s == pytest.approx(0.2 * 8 * num_bytes / 5e9, rel=0.05)
    near, far = call(num_hosts=4, num_bytes=num_bytes), call(num_hosts=4, sites=(0, 1), num_bytes=num_bytes)
    assert model.collective_s(near) == plain.collective_s(near)
    assert model.collective_s(far) - plain.collective_s(far) == pytest.approx(late_s, rel=0.1)


def models_in_the_docs():
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/emulation.md").read_text(), re.DOTALL)


def test_messages_are_late_when_the_model_says(tmp_path):
    file = tmp_path / "late.py"
    file.write_text(
        "from weft.recipes.emulation.delays import DelayModel\n"
        "class Late(DelayModel):\n    def late_s(self, message): return 0.5 if message.crosses else 0.25\n"
    )
    name, make = delay_model(f"{file}:Late")
    assert CheckedDelays(name, make, JOB).late_s(MESSAGE) == 0.25
