"""A pytest plugin (`-p tests.comm.wan.sanitized`): the WAN transport is compiled with sanitizers.

`WEFT_SANITIZE` names them as the compiler does. The sanitizer's library has to be loaded before
Python starts: see `test_sanitizers.py`, which does so.
"""

import os
import platform

from weft.comm.wan import library

os.environ.pop("LD_PRELOAD", None)  # it is loaded; the compiler shall not be slowed down by it

library._FLAGS[platform.machine()] = [
    *library._FLAGS.get(platform.machine(), []),
    *("-Og", "-fno-omit-frame-pointer", f"-fsanitize={os.environ['WEFT_SANITIZE']}"),
]
