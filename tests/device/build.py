"""Build of the emulated device, into the cache of compiled code; must not import torch."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

NATIVE = Path(__file__).parent / "native"


def torch_folder() -> Path:
    """Return the folder of the torch package, which this function does not import."""
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def obstacle() -> str:
    """Return why torch cannot have an emulated device, or an empty string if it can."""
    has_cuda = (torch_folder() / "lib" / "libtorch_cuda.so").exists()
    return "this torch has CUDA of its own; the emulated device needs a CPU build" if has_cuda else ""


def library() -> Path:
    """Return the compiled library; several minutes the first time.

    Raises:
        ValueError: torch cannot have an emulated device.
    """
    from weft.comm.native import Kind, build

    if why := obstacle():
        raise ValueError(why)

    include = torch_folder() / "include"
    folders = (include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_paths()["include"]))
    flags = ["-std=c++20", "-w", "-O1", "-g0", *(f"-isystem{folder}" for folder in folders)]
    headers = sorted(NATIVE.glob("*.hpp"))
    first, *others = sorted(NATIVE.glob("*.cpp"))

    def unit(source: Path) -> str:
        return str(build([source, *headers], kind=Kind.library, flags=[*flags, "-c"]))

    with ThreadPoolExecutor(2) as pool:
        units = list(pool.map(unit, others))
    return build([first, *headers], kind=Kind.library, flags=[*flags, *units])


if __name__ == "__main__":
    try:
        print(obstacle() or library())
    except (ValueError, subprocess.SubprocessError) as error:
        sys.exit(str(error))
