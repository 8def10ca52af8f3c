"""A model server whose start goes as a file says: ``moody_server.py MOOD_FILE PROFILES ARGUMENTS...``

``oom`` ends as vLLM does when the weights do not fit; ``deaf`` never opens its port; ``slow N`` waits N
seconds, as for weights, and then starts well; any other mood is the simulator profile to become.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

OOM = """\
INFO 03-01 01:00:02 [gpu_model_runner.py:1875] Starting to load model...
ERROR 03-01 01:00:09 [core.py:632] EngineCore failed to start.
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has 610.25 MiB free.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"""


def main() -> None:
    mood, _, seconds = Path(sys.argv[1]).read_text().partition(" ")
    sys.stderr.write(f"mood: {mood}\n")
    if mood == "oom":
        sys.exit(OOM)
    if mood == "deaf":
        threading.Event().wait()
    if mood == "slow":
        time.sleep(float(seconds))
        mood = "well"
    profile = ["--profile", str(Path(sys.argv[2]) / f"{mood}.yaml")]
    os.execv(sys.executable, [sys.executable, "-m", "include.capacity.simulator", *profile, *sys.argv[3:]])


main()
