"""Placement of prompts on the worker that ends first: prefill costs, bubble patterns, placement, replay."""
