"""python -m deploy.tied PARENT COMMAND...: becomes COMMAND, which the kernel kills when its parent ends (LIF-06).

Done here rather than between fork and exec of the parent, where Python code must not run once there are threads.
"""

from __future__ import annotations

import os
import signal
import sys

from common.tied import die_with_parent


def main() -> None:
    parent, *command = sys.argv[1:]
    die_with_parent(int(parent))
    # Held back until common/rpc/process.py takes signals over: a Ctrl-C during the imports is then an ordinary stop.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
