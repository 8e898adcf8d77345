"""The walls around a verifier that reads hostile text. Standard library only; used inside the worker processes.

| layer | where | what it guarantees |
|---|---|---|
| limits | POSIX | memory, CPU seconds, 64 open files, no file data, no core dump; unless root: no process |
| namespaces | Linux, where allowed | a network without any device, and no capability of the caller |
| landlock | Linux 5.13+ | reads only below the interpreter, `sys.path`, system libraries; no writes, 6.12+ no signals |
| seccomp | Linux, x86-64, arm64 | no socket, process, program or signal; nothing created, renamed, changed, removed |
| audit | Python | the same as seccomp as far as Python code goes; native code could pass it by |

To seccomp belongs that no other process, the trainer among them, gets limits, processors, priorities or signals from
here, or shares memory or queues with it. Each layer stands alone. With seccomp the others are a second wall; without it
(another system) `audit` and `limits` remain, which stop what model answers try in practice and are no proof against an
attacker. Inside its walls a judge that evaluates the text can still lie about its own verdict: no sandbox can prevent
that.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SIGKILL = 9
_LANDLOCK_EXECUTE = 1
_SCOPE_SIGNAL = 2
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_THREAD = 0x10000000, 0x40000000, 0x00010000
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# Numbers of the kernel's interface: (x86-64, arm64); None where the call does not exist.
_DENIED_CALLS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "sendto": (44, 206),
    "sendmsg": (46, 211), "sendmmsg": (307, 269), "io_uring_setup": (425, 425),
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "unshare": (272, 97),
    "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "kcmp": (312, 272), "get_robust_list": (274, 100),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "setpgid": (109, 154),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192),
    "semctl": (66, 191), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "creat": (85, None), "mknod": (133, None), "mknodat": (259, 33), "unlink": (87, None), "unlinkat": (263, 35),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "rmdir": (84, None), "mkdir": (83, None),
    "mkdirat": (258, 34), "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "truncate": (76, 45), "ftruncate": (77, 46), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utimensat": (280, 88),
    "fchmodat2": (452, 452), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "file_setattr": (469, 469), "fallocate": (285, 47), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "open_tree": (428, 428), "open_tree_attr": (467, 467), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
}  # fmt: skip
_ABSENT_CALLS = {"clone3": (435, 435), "openat2": (437, 437)}  # libraries fall back to what can be filtered
_CLONE, _OPEN, _OPENAT = (56, 220), (2, None), (257, 56)
_FCNTL, _IOCTL, _PRLIMIT, _PRCTL = (72, 25), (16, 29), (302, 261), (157, 167)
_FILE_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1034)
"""Of fcntl, those that programs need: descriptors, flags, locks, the size of a pipe. Owner and signal of a descriptor
(8, 10, 15) reach any process of the user, and a lease (1024) stops others opening a file: they are not among them."""
_DEVICE_COMMANDS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Of ioctl, likewise: is it a terminal (old and new), its size, bytes that wait, non-blocking, close on exec or not."""
_SHARE_CORE = 62
"""Option of prctl that ties another process to this one's processor core."""
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_DENIED_EVENTS = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "os.remove",
    "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.chflags",
    "os.utime", "os.setxattr", "os.removexattr", "os.putenv", "os.startfile", "pty.", "shutil.", "ctypes.dlopen",
    "ctypes.dlsym", "signal.pthread_kill", "syslog.", "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.",
)  # fmt: skip
_OWNER_COMMANDS = {getattr(fcntl, name) for name in ("F_SETOWN", "F_SETSIG", "F_SETOWN_EX") if hasattr(fcntl, name)}

_TASK_LAYERS: list[str] = []
_ON_START: list[Callable[[], object]] = []


class _Filter(ctypes.Structure):
    _fields_ = (("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint))


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.POINTER(_Filter)))


def die_with_parent() -> None:
    """Ask the kernel (Linux) to kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def wall_in_worker() -> list[str]:
    """The layers of the worker itself, inherited by every task; returns the names of those that hold."""
    if sys.platform != "linux":
        return []
    layers = []
    if _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        layers.append("namespaces")
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if _restrict_files(readable_folders(), own_folder=True):
        layers.append("landlock")
    _TASK_LAYERS.extend(layers)
    return layers


def wall_in_task(*, memory_bytes: int, cpu_seconds: int, filter_calls: _Program | None) -> None:
    """The layers of one task, in its own process; nothing can take them off again."""
    os.dup2(1, 2)  # the worker's stdout is /dev/null; opening that anew is a write, which the walls refuse
    os.close(0)
    limits = {"RLIMIT_CPU": cpu_seconds, "RLIMIT_FSIZE": 0, "RLIMIT_NOFILE": 64, "RLIMIT_CORE": 0, "RLIMIT_NPROC": 0}
    for name, limit in limits.items():
        _limit(getattr(resource, name), limit)
    _limit(resource.RLIMIT_AS, memory_bytes)
    layers = _TASK_LAYERS
    layers.append("limits")
    if filter_calls is not None and _LIBC.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(filter_calls), 0, 0) == 0:
        layers.append("seccomp")
    sys.addaudithook(_refuse)
    layers.append("audit")


def layers_of_task() -> list[str]:
    """The layers that hold around the task that calls this, those of its worker among them."""
    return list(_TASK_LAYERS)


def when_program_starts(tell: Callable[[], object]) -> None:
    """`tell` is called by `program_starts`; the worker's way to hear of it."""
    _ON_START.append(tell)


def program_starts() -> None:
    """To be said right before a stranger's program begins: a failure from here on is that program's own, and nothing it
    does takes this word back. What fails before is the sandbox's.
    """
    for tell in _ON_START:
        tell()


def narrow_files() -> None:
    """For a task that runs a stranger's program: from now on it reads the installed Python and the system's libraries
    alone, not what else is on `sys.path`, such as a folder with gold answers. Needs landlock; raises OSError where that
    refuses.
    """
    if "landlock" in _TASK_LAYERS and not _restrict_files(program_folders(), own_folder=False):
        raise OSError("landlock would not narrow what the program may read")


def program_folders() -> list[str]:
    """What a stranger's program may read."""
    paths = sysconfig.get_paths()
    python = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    python += [str(Path(os.__file__).parent)]
    system = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]
    return sorted({str(Path(p).resolve()) for p in [*python, *system, "/usr/share/zoneinfo"] if p and Path(p).exists()})


def call_filter() -> _Program | None:
    """The seccomp program for this machine, or None where it has none."""
    found = _ARCHITECTURES.get(platform.machine())
    if sys.platform != "linux" or found is None:
        return None
    column, architecture = found
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, absent, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
    code: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill),
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (give, 0, 0, deny),
    ]  # fmt: skip

    def refuse(number: int | None, verdict: int) -> None:
        if number is not None:
            code.extend([(equal, 0, 1, number), (give, 0, 0, verdict)])

    def check_flags(number: int | None, argument: int, bits: int, verdicts: tuple[int, int]) -> None:
        """Look at the low half of one argument; `verdicts` where any of the bits is set, and where none is."""
        if number is not None:
            where = 16 + 8 * argument
            code.extend([(equal, 0, 4, number), (load, 0, 0, where), (any_bit, 0, 1, bits)])
            code.extend([(give, 0, 0, verdicts[0]), (give, 0, 0, verdicts[1])])

    def check_word(number: int | None, argument: int, words: tuple[int, ...], verdicts: tuple[int, int]) -> None:
        """Likewise; `verdicts` where it is one of the words, and where it is none."""
        if number is not None:
            code.extend([(equal, 0, 2 * len(words) + 2, number), (load, 0, 0, 16 + 8 * argument)])
            code.extend(line for word in words for line in ((equal, 0, 1, word), (give, 0, 0, verdicts[0])))
            code.append((give, 0, 0, verdicts[1]))

    for numbers in _DENIED_CALLS.values():
        refuse(numbers[column], deny)
    for numbers in _ABSENT_CALLS.values():
        refuse(numbers[column], absent)
    check_flags(_CLONE[column], 0, _CLONE_THREAD, (allow, deny))
    check_flags(_OPEN[column], 1, _WRITE_FLAGS, (deny, allow))
    check_flags(_OPENAT[column], 2, _WRITE_FLAGS, (deny, allow))
    check_word(_FCNTL[column], 1, _FILE_COMMANDS, (allow, deny))
    check_word(_IOCTL[column], 1, _DEVICE_COMMANDS, (allow, deny))
    check_word(_PRLIMIT[column], 0, (0,), (allow, deny))  # 0 is the caller itself
    check_word(_PRCTL[column], 0, (_SHARE_CORE,), (deny, allow))
    code.append((give, 0, 0, allow))
    return _Program(len(code), (_Filter * len(code))(*(_Filter(*line) for line in code)))


def readable_folders() -> list[str]:
    """What a task may read: the interpreter, everything on `sys.path`, the system's libraries."""
    installed = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values(), *sys.path]
    package = str(Path(__file__).resolve().parents[1])
    system = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom", "/dev/zero"]
    return sorted({str(Path(p).resolve()) for p in [*installed, package, *system] if p and Path(p).exists()})


def _restrict_files(folders: list[str], *, own_folder: bool) -> bool:
    """Landlock (calls 444 to 446 on every architecture): handle every file right, grant reading below `folders`, and
    writing in the worker's own; no signal leaves. What was taken away before stays away.
    """
    abi = _LIBC.syscall(444, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return False
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    read_file, read_folder = 1 << 2, 1 << 3
    attributes = (ctypes.c_uint64 * 3)(handled, 0, _SCOPE_SIGNAL)  # files, network, scope
    ruleset = _LIBC.syscall(444, ctypes.byref(attributes), ctypes.c_size_t(24 if abi >= 6 else 8), 0)
    if ruleset < 0:
        return False
    for folder in folders:
        _grant(ruleset, folder, read_file | (read_folder if Path(folder).is_dir() else 0))
    if own_folder:
        _grant(ruleset, ".", handled & ~_LANDLOCK_EXECUTE)  # caches of libraries that it imports
    held = _LIBC.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return held


def _grant(ruleset: int, path: str, rights: int) -> None:
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = rights.to_bytes(8, sys.byteorder) + handle.to_bytes(4, sys.byteorder, signed=True)
    _LIBC.syscall(445, ruleset, 1, ctypes.c_char_p(rule), 0)
    os.close(handle)


def _limit(which: int, limit: int) -> None:
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(which, (limit, limit))


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & _WRITE_FLAGS):
            raise PermissionError(f"the sandbox does not allow writing {arguments[0]!r}")
    elif event.startswith(_DENIED_EVENTS) or _is_of_another(event, arguments):
        raise PermissionError(f"the sandbox does not allow {event}")


def _is_of_another(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether another process gets limits, or the signals of a descriptor."""
    if event == "resource.prlimit":
        return arguments[0] != 0
    return event == "fcntl.fcntl" and arguments[1] in _OWNER_COMMANDS
