"""Shows edge's modules, and no others, a system that is not this one: what they import lacks what that system lacks.

Packages and the standard library go on as they are, since they have their own code for each system. Children of edge
see the same system. What such a system has and this one lacks (`ctypes.windll`) cannot be shown.
"""

from __future__ import annotations

import builtins
import os
import platform
import select
import stat
import sys
import types
from pathlib import Path
from typing import Any

# From the "Availability" notes of Python's documentation.
_NO_WINDOWS = ["fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "spwd", "syslog", "termios", "tty"]
MODULES = {"win32": {*_NO_WINDOWS, "curses"}, "darwin": {"spwd"}}
_SIGNALS = (
    "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGUSR1 SIGUSR2 SIGWINCH "
    "alarm setitimer getitimer ITIMER_REAL pause pthread_kill pthread_sigmask SIG_BLOCK SIG_SETMASK SIG_UNBLOCK "
    "sigpending siginterrupt sigtimedwait sigwait sigwaitinfo"
)
_MAPS = (
    "MAP_PRIVATE MAP_SHARED MAP_ANON MAP_ANONYMOUS MAP_POPULATE PROT_READ PROT_WRITE PROT_EXEC MADV_DONTNEED "
    "MADV_SEQUENTIAL MADV_RANDOM MADV_WILLNEED"
)
_LINUX = (
    "sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate POSIX_FADV_DONTNEED memfd_create pipe2 "
    "copy_file_range eventfd fdatasync"
)
_UNIX = (
    "fork forkpty geteuid getuid getegid getgid getpgid getpgrp getsid setsid killpg pread pwrite preadv pwritev "
    "statvfs fstatvfs sysconf confstr uname getloadavg nice wait wait3 wait4 waitid WNOHANG WIFEXITED mkfifo mknod "
    "chown fchown lchown fchmod chroot fchdir register_at_fork O_NOFOLLOW O_NONBLOCK O_DIRECTORY O_CLOEXEC O_SYNC "
    "getgroups setuid setgid openpty ttyname tcgetpgrp sync lockf sendfile"
)
MISSING = {
    "win32": {"os": f"{_LINUX} {_UNIX}", "signal": _SIGNALS, "mmap": _MAPS, "socket": "AF_UNIX", "time": "tzset"},
    "darwin": {"os": _LINUX, "mmap": "MAP_POPULATE", "select": "epoll"},
}
# For which there is no compiler: the native engine calls functions of Windows and of macOS that this system lacks.
COMPUTERS = {"win32": ("Windows", "ARM64"), "darwin": ("Darwin", "x86_64")}
_SHADOWS = ("/proc", "/sys", "/dev")  # no such files


def install(system: str) -> None:
    """From now on edge's modules see `system`, a value of sys.platform."""
    shown, real = dict[str, types.ModuleType](), builtins.__import__

    def find(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        caller = str((globals or {}).get("__name__", ""))
        if level or not _is_ours(caller, globals):
            return real(name, globals, locals, fromlist, level)
        if name.partition(".")[0] in MODULES[system]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        module = real(name, globals, locals, fromlist, level)
        if name == "psutil" and system == "win32":
            return shown.setdefault(name, _windows_psutil(module))
        if name in MISSING[system] or name in ("sys", "select", "resource", "platform"):
            return shown.setdefault(name, _shadow(module, system))
        return module

    builtins.__import__ = find
    _hide_files()


def _is_ours(name: str, namespace: Any) -> bool:
    return name.partition(".")[0] == "edge" or (
        name == "__main__" and "/edge/" in str((namespace or {}).get("__file__"))
    )


def _shadow(module: types.ModuleType, system: str) -> types.ModuleType:
    lacks = set(MISSING[system].get(module.__name__, "").split())
    values: dict[str, Any] = {}
    if module is sys:
        values = {"platform": system}
    if module is os and system == "win32":
        values = {"O_BINARY": 0}
    if module is platform:
        name, machine = COMPUTERS[system]
        values = {"system": lambda: name, "machine": lambda: machine}
    if module.__name__ == "resource" and system == "darwin":
        values = {"getrusage": _usage_in_bytes}
    if module is select and system == "win32":
        values = {"select": _select_sockets}

    class Shadow(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            if name in values:
                return values[name]
            if name in lacks:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return getattr(module, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(module, name, value)

    return Shadow(module.__name__)


def _usage_in_bytes(who: int) -> Any:
    import resource

    use = resource.getrusage(who)
    return types.SimpleNamespace(**{each: getattr(use, each) for each in dir(use) if each.startswith("ru_")} | {
        "ru_maxrss": use.ru_maxrss << 10,
    })  # fmt: skip


def _windows_psutil(module: types.ModuleType) -> types.ModuleType:
    class Process(module.Process):  # type: ignore[name-defined, misc]
        def memory_info(self) -> Any:
            info = super().memory_info()
            return types.SimpleNamespace(rss=info.rss, vms=info.vms, peak_wset=info.rss)

    shown = types.ModuleType("psutil")
    shown.__dict__.update(module.__dict__, Process=Process)
    return shown


def _select_sockets(*lists: Any) -> Any:
    for each in (each for some in lists[:3] for each in some):
        if not stat.S_ISSOCK(os.fstat(each if isinstance(each, int) else each.fileno()).st_mode):
            raise OSError(10038, "An operation was attempted on something that is not a socket")
    return select.select(*lists)


def _is_shadow(path: object) -> bool:
    return str(path).startswith(tuple(f"{each}/" for each in _SHADOWS)) and str(path) != os.devnull


def _hide_files() -> None:
    """From our modules; packages may read them, as their versions for the other system would read others."""
    stat_of, glob = Path.stat, Path.glob

    def missing(path: object) -> FileNotFoundError:
        return FileNotFoundError(2, "No such file or directory", str(path))

    def find_status(self: Path, **options: Any) -> os.stat_result:
        if _is_shadow(self):
            raise missing(self)
        return stat_of(self, **options)

    def find_paths(self: Path, pattern: str, **options: Any) -> Any:
        return iter(()) if _is_shadow(self / pattern) else glob(self, pattern, **options)

    def open_file(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not _is_shadow(arguments[0]):
            return
        frame = sys._getframe(1)
        while frame.f_back and frame.f_globals.get("__name__") in ("pathlib", "io", "os", "codecs"):
            frame = frame.f_back
        if _is_ours(str(frame.f_globals.get("__name__")), frame.f_globals):
            raise missing(arguments[0])

    Path.stat, Path.glob = find_status, find_paths  # type: ignore[method-assign, assignment]
    sys.addaudithook(open_file)


def environment(system: str, folder: Path) -> dict[str, str]:
    """For a Python that shows edge `system`, and for its children. folder: an empty one."""
    here = Path(__file__).parent
    code = f"import sys; sys.path.append({str(here)!r}); import elsewhere; elsewhere.install({system!r})\n"
    (folder / "sitecustomize.py").write_text(code)
    return {**os.environ, "PYTHONPATH": str(folder)}
