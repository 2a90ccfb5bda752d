"""The DeepSpeed engine subclass that executes a schedule, and all it is made of."""

import os

# DeepSpeed reads it once, when it is imported, and by default tells every step of its set-up.
os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
