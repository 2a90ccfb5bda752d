"""Entry points: training and fine-tuning, prefill serving, emulation."""
