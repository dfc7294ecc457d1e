"""FileStamp: tells a file that was replaced, written, or made readable from the one there was."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import NamedTuple


class FileStamp(NamedTuple):
    """changed_ns: also of its owner and mode, for what could not be read may be readable then. mode: permission bits.

    A pipe has the same one for ever: what was in it has been read, and reading it again would wait for a writer."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    mode: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Raises OSError if it is not there."""
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return cls(found.st_ino, 0, 0, 0, stat.S_IMODE(found.st_mode))
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, stat.S_IMODE(found.st_mode))

    @property
    def is_open_to_all(self) -> bool:
        """Every user of this host may do something with it."""
        return bool(self.mode & 0o007)
