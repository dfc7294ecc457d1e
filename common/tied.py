"""A process that must not outlive the one that started it (LIF-06)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when `parent`, its parent, ends: precisely, the thread that started it.

    Ends this process at once if that cannot be arranged or the parent has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit(f"error: prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # It ended before the kernel knew of us.
        sys.exit("error: the parent has ended")
