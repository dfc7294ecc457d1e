"""python -m deploy.tied PARENT COMMAND...: becomes COMMAND, which the kernel kills when its parent ends (LIF-06).

Done here rather than between fork and exec of the parent, where Python code must not run once there are threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *command = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"error: prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):  # It ended before the kernel knew of us.
        sys.exit("error: the parent has ended")
    # Held back until common/rpc/process.py takes signals over: a Ctrl-C during the imports is then an ordinary stop.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
