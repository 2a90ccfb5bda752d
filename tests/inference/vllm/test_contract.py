"""vLLM's private interfaces are still what the prefill worker takes them for."""

import inspect
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.v1.engine.async_llm import AsyncLLM  # noqa: E402
from vllm.v1.engine.core import EngineCore, EngineCoreProc  # noqa: E402

from weft.inference.worker.settings import VLLM_VERSION  # noqa: E402
from weft.inference.worker.vllm_interfaces import CLASSES, PRIVATE  # noqa: E402
from weft.inference.worker.vllm_nixl import (  # noqa: E402
    PROGRESS_US,
    PushScheduler,
    PushWorker,
    QuietNixlConnector,
    blocking,
)
from weft.inference.worker.vllm_scheduler import BubbleScheduler  # noqa: E402
from weft.inference.worker.vllm_stored import StoredLoader  # noqa: E402

pytestmark = pytest.mark.vllm


def test_it_is_the_version_that_was_read():
    assert vllm.__version__ == VLLM_VERSION


@pytest.mark.parametrize("name", PRIVATE)
def test_a_method_is_there_and_uses_what_we_lean_on(name):
    kind, method = name.split(".")
    used, _ = PRIVATE[name]
    # From the class's own text, for decorators hide methods from `inspect`.
    _, _, rest = inspect.getsource(CLASSES[kind]).partition(f"    def {method}(")
    assert used in rest.partition("\n    def ")[0]


@pytest.mark.parametrize(
    ("ours", "names"),
    [
        (
            BubbleScheduler,
            ["schedule", "has_requests", "add_request", "update_from_output", "finish_requests", "shutdown"],
        ),
        (StoredLoader, ["download_model", "get_all_weights"]),
        (PushScheduler, ["update_state_after_alloc"]),
        (PushWorker, ["start_load_kv", "get_transfer_results", "_do_send_reg_notif", "_do_start_push_kv"]),
    ],
)
def test_what_is_overridden_exists_with_the_same_parameters(ours, names):
    for name in names:
        theirs, own = (inspect.signature(getattr(kind, name)) for kind in (ours.__mro__[1], ours))
        assert list(theirs.parameters) == list(own.parameters), name


def test_the_loop_asks_the_scheduler_before_it_blocks_and_before_it_steps():
    asked = inspect.getsource(EngineCoreProc._process_input_queue)
    assert asked.index("has_work()") < asked.index("input_queue.get")
    stepped = inspect.getsource(EngineCore.step)
    assert stepped.index("has_requests()") < stepped.index(".schedule(")


def test_health_calls_the_engine_of_a_decode_server():
    assert "await self.engine_core.is_scheduler_paused_async()" in inspect.getsource(AsyncLLM.is_paused)


def test_a_wake_up_is_a_message_that_does_nothing():
    handled = inspect.getsource(EngineCoreProc._handle_client_request)
    first = handled[handled.index("WAKEUP") :].splitlines()[1]
    assert first.strip() == "return"


def test_the_nixl_agent_is_configured_by_the_name_that_we_replace():
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    agent = base_worker.NixlWrapper
    created = inspect.getsource(agent.__init__)
    assert created.index("nixlBind.nixlAgentConfig()") < created.index("agent_config.pthrDelay = 0")
    assert "enable_prog_thread" not in inspect.getsource(base_worker)
    config = blocking(sys.modules[agent.__module__].nixlBind.nixlAgentConfig)()
    config.pthrDelay = 0
    assert config.pthrDelay == PROGRESS_US
    assert "NixlPullConnector" in [kind.__name__ for kind in QuietNixlConnector.__mro__]


def test_a_cache_is_read_while_its_owner_does_nothing():
    from tests.inference.vllm.nixl_owner import agent_of

    script = Path(__file__).with_name("nixl_owner.py")
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        printed = next(line for line in owner.stdout if line.startswith("cache "))  # others are NIXL's log
        metadata, remote = pickle.loads(bytes.fromhex(printed.split()[1]))
        memory = np.zeros(2**20, dtype=np.uint8)
        agent, described = agent_of("reader", memory)
        name, remote = agent.add_remote_agent(metadata), agent.deserialize_descs(remote)
        for _ in range(3):
            memory[:] = 0
            read = agent.initialize_xfer("READ", described, remote, name, b"read")
            state, begun_s = agent.transfer(read), time.monotonic()
            while state != "DONE" and time.monotonic() - begun_s < 60.0:
                time.sleep(0.01)
                state = agent.check_xfer_state(read)
            assert state == "DONE" and memory.all()
            agent.release_xfer_handle(read)
        owner.stdin.close()


def test_a_stage_is_asked_for_a_cache_by_names_that_we_replace():
    worker, scheduler = PushWorker.__mro__[1], PushScheduler.__mro__[1]
    sent = inspect.getsource(scheduler.update_state_after_alloc)
    assert "_push_pending_registrations[request.request_id] = {" in sent and '"request_id": request.request_id' in sent
    assert "remote_request_id=request.request_id" in inspect.getsource(scheduler.request_finished)
    assert 'reg_data.get("request_id")' in inspect.getsource(worker._handle_push_reg_notif)
    assert 'decode_request_id = registration_data["request_id"]' in inspect.getsource(worker._do_start_push_kv)
    assert "_failed_recv_reqs.get_nowait()" in inspect.getsource(worker.__mro__[1].get_transfer_results)


def test_stages_exchange_nothing_but_the_engines_name_and_the_number_of_hosts_when_they_start():
    from vllm.distributed import parallel_state
    from vllm.distributed.kv_transfer import kv_transfer_state

    synced = inspect.getsource(kv_transfer_state._sync_engine_id_across_tp)
    assert synced.count("broadcast_object(") == 2 and "get_pp_group().broadcast_object(synced_id, src=0)" in synced
    created = inspect.getsource(parallel_state.init_distributed_environment)
    assert "_NODE_COUNT = _node_count(_WORLD.cpu_group)" in created
    assert "if not torch.distributed.is_initialized():" in created
    assert "get_device_communicator_cls()" in inspect.getsource(parallel_state.GroupCoordinator.__init__)
