"""Just-in-time compilation of C and C++ sources into cached programs and libraries."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from weft.conf.host.files import replacing
from weft.conf.host.owners import is_trusted, own_folder


class Kind(Enum):
    """The kind of binary to build; the value is the compiler's flags."""

    program = ("-pthread",)  # not (), which enums of Python 3.11.0 to 3.11.3 misinterpret
    library = ("-pthread", "-shared", "-fPIC")


def cache_folder() -> Path:
    """Return the folder of compiled code: ``$XDG_CACHE_HOME/weft/native``, by default under ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "weft" / "native"


def build(sources: Sequence[Path], *, kind: Kind, flags: Sequence[str] = ()) -> Path:
    """Compile ``sources[0]``, unless the cache has the result.

    Safe to call from several processes at once: each compiles into a temporary file, and the
    last rename wins.

    Args:
        sources: the file to compile, followed by the headers that it includes.

    Returns:
        Path of the program or library, named by a hash of sources and flags. A cached file that another user could have
        written is compiled again.

    Raises:
        ValueError: there is no compiler, compilation fails, or another user can write to the cache.
    """
    main = sources[0]
    compiler, standard = ("c++", "-std=c++17") if main.suffix == ".cpp" else ("cc", "-std=gnu11")
    command = [compiler, standard, "-O2", "-g1", "-Wall", "-Wextra", *kind.value, str(main)]
    key = hashlib.sha256("\0".join([os.uname().machine, *command[:-1], *flags]).encode())
    for source in sources:
        key.update(source.read_bytes())
    target = own_folder(cache_folder(), "XDG_CACHE_HOME") / f"{main.stem}-{key.hexdigest()[:16]}"
    if target.exists() and is_trusted(target):
        return target
    if shutil.which(compiler) is None:
        raise ValueError(f"{main.name} is compiled at first use and there is no {compiler}; install gcc and g++")
    with replacing(target) as draft:
        done = subprocess.run([*command, *flags, "-o", str(draft)], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{compiler} cannot compile {main}:\n{done.stderr}")
        draft.chmod(0o700)
    return target
