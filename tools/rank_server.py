"""The imports that all ranks on CPUs share; the server from which ranks are forked imports this module once."""

import gc
import os

gc.disable()  # until all is imported: each search would look through what is there so far
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")  # a process with threads cannot be forked

import torch

import weft.engine.data
import weft.engine.preloaded  # noqa: F401
from weft.conf import preload
from weft.conf.host.processes import freeze_imports

preload()
torch.set_num_threads(1)
freeze_imports()
gc.enable()
