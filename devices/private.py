"""Files that edge believes, or runs, because no other user can have written them: its caches, records and profiles.

One rule for all: a file or folder counts if it belongs to this user or to the administrator (root, who can do
everything anyway) and no other user may write to it. Where a system has no such owners, everything counts.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


def distrust(status: os.stat_result) -> str | None:
    """Why another user may have written this file or folder; None if none can have."""
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return "it belongs to another user"
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_group_of_one(status)):
        return f"other users may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _is_group_of_one(status: os.stat_result) -> bool:
    """The group that many systems give every user, together with a umask that lets it write."""
    import grp
    import pwd

    with suppress(KeyError):
        name, group = pwd.getpwuid(status.st_uid).pw_name, grp.getgrgid(status.st_gid)
        return group.gr_name == name and set(group.gr_mem) <= {name}
    return False


def is_private_file(status: os.stat_result | None) -> bool:
    """A regular file that no other user can have written."""
    return status is not None and stat.S_ISREG(status.st_mode) and distrust(status) is None


def make_private_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone, whatever the umask is.

    Raises OSError: PermissionError, with the reason, if it is there and other users may write to it.
    """
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    if why := distrust(folder.stat()):
        raise PermissionError(errno.EPERM, why, str(folder))


def open_private(path: Path) -> BinaryIO:
    """A file to read, if no other user can have written it. Neither follows a link nor waits for a pipe's other end.

    Raises OSError: PermissionError, with the reason, for a file that another user can have written.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    status = os.fstat(descriptor)
    if is_private_file(status):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise PermissionError(errno.EPERM, distrust(status) or "it is no regular file", str(path))


def read_private(path: Path, most: int) -> bytes:
    """The first bytes of a file that no other user can have written. Raises OSError as `open_private`."""
    with open_private(path) as file:
        return file.read(most)
