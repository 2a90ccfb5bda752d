"""vLLM's private interfaces are still what the prefill worker takes them for."""

import inspect

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine.core import EngineCore, EngineCoreProc  # noqa: E402

from weft.inference.worker.vllm_interfaces import CLASSES, PRIVATE, VERSION  # noqa: E402
from weft.inference.worker.vllm_nixl import QuietNixlConnector  # noqa: E402
from weft.inference.worker.vllm_scheduler import BubbleScheduler  # noqa: E402

pytestmark = pytest.mark.vllm


def test_it_is_the_version_that_was_read():
    assert vllm.__version__ == VERSION


@pytest.mark.parametrize("name", PRIVATE)
def test_a_method_is_there_and_uses_what_we_lean_on(name):
    kind, method = name.split(".")
    used, _ = PRIVATE[name]
    # From the class's own text, for decorators hide methods from `inspect`.
    _, _, rest = inspect.getsource(CLASSES[kind]).partition(f"    def {method}(")
    assert used in rest.partition("\n    def ")[0]


def test_what_is_overridden_exists_with_the_same_parameters():
    for name in ("schedule", "has_requests", "add_request", "update_from_output", "finish_requests", "shutdown"):
        theirs, ours = (inspect.signature(getattr(kind, name)) for kind in (Scheduler, BubbleScheduler))
        assert list(theirs.parameters) == list(ours.parameters), name


def test_the_loop_asks_the_scheduler_before_it_blocks_and_before_it_steps():
    asked = inspect.getsource(EngineCoreProc._process_input_queue)
    assert asked.index("has_work()") < asked.index("input_queue.get")
    stepped = inspect.getsource(EngineCore.step)
    assert stepped.index("has_requests()") < stepped.index(".schedule(")


def test_a_wake_up_is_a_message_that_does_nothing():
    handled = inspect.getsource(EngineCoreProc._handle_client_request)
    first = handled[handled.index("WAKEUP") :].splitlines()[1]
    assert first.strip() == "return"


def test_the_nixl_agent_is_configured_by_the_name_that_we_replace():
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    assert "nixl_agent_config(num_threads" in inspect.getsource(base_worker)
    assert QuietNixlConnector.__mro__[1].__name__ == "NixlPullConnector"
