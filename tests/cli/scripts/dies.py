"""Dies as a script that takes all memory of the machine."""

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
