"""A program that a person runs: whatever its standard streams are, it ends with a line and not with a traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

from common.errors import StartError
from common.log_output import complain, hold_standard_streams


def run(main: Callable[[], int]) -> int:
    """Its exit code; 2 for what it cannot do, 130 for Ctrl-C where it does not know better."""
    hold_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # A terminal that takes ASCII only shows what it can.
    try:
        code = main()
        sys.stdout.flush()
        return code
    except (StartError, ValueError) as error:
        return _fail(str(error))
    except OSError as error:  # The disk is full, or nobody reads any more.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - what the old one still holds can be written nowhere
        return _fail(f"cannot write: {(error.strerror or str(error)).lower()}")
    except KeyboardInterrupt:
        return 130


def _fail(why: str) -> int:
    complain(why)
    return 2
