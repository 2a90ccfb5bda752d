"""These tests run where vLLM is installed (`make test-vllm`); elsewhere each says that it is not."""

from importlib.util import find_spec

import pytest

HAS_VLLM = find_spec("vllm") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where there is no vLLM, with a reason that the summary shows."""
    for item in items:
        if not HAS_VLLM and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny Llama's folder."""
    from benchmarks.serving.served_model import write_model

    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder
