"""Emulated devices for up to eight ranks, and the imports of a rank: the module that a forkserver of ranks imports."""

from importlib import import_module

from tests.device import cuda, instrument

instrument.install()
cuda.install(9)  # before torch is imported; one device is no rank's
import_module("weft.tools.rank_server")
import_module("tests.device.group").register()
