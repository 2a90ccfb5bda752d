"""Own a cache that another process reads, and do nothing."""

import pickle
import sys

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from weft.inference.worker.vllm_nixl import blocking


def agent_of(name, memory):
    """A NIXL agent whose progress thread blocks, and a description of its memory."""
    binding = sys.modules[nixl_agent.__module__].nixlBind
    original = binding.nixlAgentConfig
    binding.nixlAgentConfig = blocking(original)
    try:
        agent = nixl_agent(name, nixl_agent_config(num_threads=4))
    finally:
        binding.nixlAgentConfig = original
    return agent, agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM").trim()


def main():
    memory = np.ones(2**20, dtype=np.uint8)
    agent, described = agent_of("owner", memory)
    print("cache", pickle.dumps((agent.get_agent_metadata(), agent.get_serialized_descs(described))).hex(), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
