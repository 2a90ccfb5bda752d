"""Imported once by the server that ranks are forked from: the imports that all ranks share, for CPUs."""

import gc
import os

gc.disable()  # until all is imported: each search would look through what is there so far
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

import weft.engine.preloaded  # noqa: F401

torch.set_num_threads(1)  # a process with threads cannot be forked safely
gc.freeze()
gc.enable()
