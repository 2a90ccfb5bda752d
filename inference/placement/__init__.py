"""Placement of prompts on the worker that finishes first: prefill costs, bubble patterns, placement, replay."""
