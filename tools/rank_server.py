"""The imports that all ranks on CPUs share; the server from which ranks are forked imports this module once."""

import gc
import os

gc.disable()  # until all is imported: each search would look through what is there so far
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

import weft.engine.preloaded  # noqa: F401

torch.set_num_threads(1)  # a process with threads cannot be forked safely
gc.freeze()
gc.enable()
