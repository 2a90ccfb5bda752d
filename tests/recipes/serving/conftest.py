"""A configuration of `weft serve`, and an interpreter that stands for vLLM's."""

import pytest

from weft.conf.schema import WeftConfig
from weft.inference.worker.settings import VLLM_VERSION


@pytest.fixture
def config():
    config = WeftConfig()
    config.cluster.ranks = 2
    config.inference.prefill.model = "tiny/llama"
    config.inference.prefill.first_port = 28301
    config.inference.prefill.first_side_port = 25600
    return config


@pytest.fixture
def fake_python(tmp_path):
    """Write an interpreter."""

    def written(name="python", *, vllm=True, version=VLLM_VERSION, then="true"):
        """Return the path of an interpreter that has vLLM or not, and of which a server does ``then``."""
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\ncase $1 in -c) echo {version}; exit {int(not vllm)};; esac\n{then}\n")
        path.chmod(0o755)
        return str(path)

    return written
