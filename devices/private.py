"""Files that edge trusts because no other user can have written them: its caches, records and profiles.

A file or folder is trusted if it belongs to this user or to root, and no other user may write to it. On systems without
such owners, everything is trusted.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def distrust(status: os.stat_result) -> str | None:
    """The reason why another user may have written this file or folder; None if none can have."""
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return "it belongs to another user"
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_group_of_one(status)):
        return f"other users may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _is_group_of_one(status: os.stat_result) -> bool:
    """Whether the file's group is its owner's private group. Many systems create one, and let it write by their
    umask."""
    import grp
    import pwd

    with suppress(KeyError):
        name, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
        return group.gr_name == name and set(group.gr_mem) <= {name}
    return False


def is_private_file(status: os.stat_result | None) -> bool:
    """Whether this is a regular file that no other user can have written."""
    return status is not None and stat.S_ISREG(status.st_mode) and distrust(status) is None


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents for this user alone, whatever the umask.

    Raises OSError; PermissionError, with the reason, if the folder exists and other users may write to it.
    """
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    if why := distrust(folder.stat()):
        raise PermissionError(errno.EPERM, why, str(folder))


def open_private(path: Path) -> BinaryIO:
    """Open a private file for reading, without following links or blocking on a pipe.

    Raises OSError; PermissionError, with the reason, for a file that another user can have written.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    status = os.fstat(descriptor)
    if is_private_file(status):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise PermissionError(errno.EPERM, distrust(status) or "it is no regular file", str(path))


def read_private(path: Path, most: int) -> bytes:
    """Read at most `most` bytes from the start of a private file. Raises OSError as `open_private`."""
    with open_private(path) as file:
        return file.read(most)
