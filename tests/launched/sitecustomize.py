"""On PYTHONPATH of a launch: its ranks, not its launcher, run FSDP2 and DeepSpeed on the CPU as backends.py says."""

import atexit
import os
import sys
import time
from pathlib import Path

BACKENDS = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")

if "LOCAL_RANK" in os.environ and any(os.environ.get(name) == "true" for name in BACKENDS):
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import backends

    sys.path.pop(0)
    backends.patch()
    atexit.register(time.sleep, 0.5)  # a gloo thread that is still at work would abort the interpreter's shutdown
