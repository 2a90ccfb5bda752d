"""The parts that a vLLM prefill worker loads, and how it is started."""
