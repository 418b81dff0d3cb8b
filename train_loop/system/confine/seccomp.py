"""An allow-list of system calls for a process that runs users' code: seccomp, which the process cannot lift.

Landlock limits files. It has no rule for modes, owners and times of files, for limits and priorities of other
processes, for sockets in files, or for shared memory. Python has no maintained library for seccomp that needs no
system library.
"""

import ctypes
import errno
import os
import platform
import struct

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Architecture of a call, which must be the kernel's own: other ones have other numbers."""
_X32 = 0x40000000
"""First number of the calls of another interface on x86_64."""
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_KILL, _ERROR, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in the data of a call; each argument has eight bytes, the low half first."""
_ALL = 0xFFFFFFFF

# Numbers on x86_64 and aarch64; -1 if the architecture lacks the call. Files are limited by Landlock.
_FREE = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, -1), "fstat": (5, 80),
    "lstat": (6, -1), "poll": (7, -1), "lseek": (8, 62), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67),
    "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "access": (21, -1), "pipe": (22, -1),
    "select": (23, -1), "sched_yield": (24, 124), "mremap": (25, 216), "msync": (26, 227), "mincore": (27, 232),
    "madvise": (28, 233), "dup": (32, 23), "dup2": (33, -1), "pause": (34, -1), "nanosleep": (35, 101),
    "getitimer": (36, 102), "alarm": (37, -1), "setitimer": (38, 103), "getpid": (39, 172), "sendfile": (40, 71),
    "exit": (60, 93), "wait4": (61, 260), "uname": (63, 160), "flock": (73, 32), "fsync": (74, 82),
    "fdatasync": (75, 83), "ftruncate": (77, 46), "getdents": (78, -1), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "rename": (82, -1), "mkdir": (83, -1), "rmdir": (84, -1), "link": (86, -1), "unlink": (87, -1),
    "symlink": (88, -1), "readlink": (89, -1), "umask": (95, 166), "gettimeofday": (96, 169), "getrlimit": (97, 163),
    "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176),
    "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173), "getpgrp": (111, -1), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150), "getpgid": (121, 155), "getsid": (124, 156), "capget": (125, 90),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    "statfs": (137, 43), "fstatfs": (138, 44), "getpriority": (140, 141), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "arch_prctl": (158, -1), "gettid": (186, 178), "time": (201, -1), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "epoll_create": (213, -1), "getdents64": (217, 61), "set_tid_address": (218, 96),
    "restart_syscall": (219, 128), "fadvise64": (221, 223), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, -1), "epoll_ctl": (233, 21),
    "waitid": (247, 95), "mkdirat": (258, 34), "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38),
    "linkat": (265, 37), "symlinkat": (266, 36), "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72),
    "ppoll": (271, 73), "set_robust_list": (273, 99), "get_robust_list": (274, 100), "epoll_pwait": (281, 22),
    "eventfd": (284, -1), "fallocate": (285, 47), "timerfd_create": (283, 85), "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87), "eventfd2": (290, 19), "epoll_create1": (291, 20), "dup3": (292, 24),
    "pipe2": (293, 59), "preadv": (295, 69), "pwritev": (296, 70), "getcpu": (309, 168), "sched_getattr": (315, 275),
    "renameat2": (316, 276), "getrandom": (318, 278), "membarrier": (324, 283), "copy_file_range": (326, 285),
    "preadv2": (327, 286), "pwritev2": (328, 287), "statx": (332, 291), "rseq": (334, 293), "close_range": (436, 436),
    "faccessat2": (439, 439), "epoll_pwait2": (441, 441), "sendto": (44, 206),
    "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212), "shutdown": (48, 210),
    "getsockname": (51, 204), "getpeername": (52, 205), "setsockopt": (54, 208), "getsockopt": (55, 209),
    "recvmmsg": (299, 243), "sendmmsg": (307, 269), "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446), "futex_waitv": (449, 449),
}  # fmt: skip
_OF_NETWORK = {"connect": (42, 203), "accept": (43, 202), "bind": (49, 200), "listen": (50, 201), "accept4": (288, 242)}
"""Calls on sockets that are not yet connected. A process without `network` has only pairs of its own."""
_REFUSED = {
    "shmget": (29, 194), "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "truncate": (76, 45),
    "chmod": (90, -1), "fchmod": (91, 52), "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1),
    "ptrace": (101, 117), "utime": (132, -1), "mknod": (133, -1), "setpriority": (141, 140),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "setrlimit": (160, 164), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "tkill": (200, 130), "sched_setaffinity": (203, 122), "utimes": (235, -1),
    "mknodat": (259, 33), "fchownat": (260, 54), "futimesat": (261, -1), "fchmodat": (268, 53),
    "utimensat": (280, 88), "sched_setattr": (314, 274), "memfd_create": (319, 279), "execveat": (322, 281),
    "fchmodat2": (452, 452),
}  # fmt: skip
"""Calls that Python's users know: they get a PermissionError. All others are unknown to the kernel, for libraries."""

Program = list[tuple[int, int, int, int]]
"""Instructions of a BPF program: code, jumps if true and if false, operand."""


def refuse_calls(*, network: bool) -> bool:
    """Take all system calls from this thread and its children but those that code needs; sockets without `network`.

    They start threads, but no processes. Returns False, without limits, on other systems and architectures.
    """
    if platform.system() != "Linux" or platform.machine() not in _AUDIT or struct.calcsize("P") != 8:
        return False
    kernel, program = ctypes.CDLL(None), _program(platform.machine(), network=network)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in program))
    pointer = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    no_new_privileges = kernel.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return bool(no_new_privileges == 0 and kernel.prctl(_SET_SECCOMP, _FILTER, pointer, 0, 0) == 0)


def _program(machine: str, *, network: bool) -> Program:
    column = [*_AUDIT].index(machine)
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, _AUDIT[machine]), (_RETURN, 0, 0, _KILL)]
    program += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for _, numbers in sorted((_FREE | (_OF_NETWORK if network else {})).items()):
        program += _for_call(numbers[column], [_answer(0)])
    for _, numbers in sorted(_REFUSED.items()):
        program += _for_call(numbers[column], [_answer(errno.EPERM)])
    for numbers, rule in _by_arguments(network=network):
        program += _for_call(numbers[column], rule)
    # The C library then uses older calls, such as clone in place of clone3.
    return [*program, _answer(errno.ENOSYS)]


def _for_call(number: int, rule: Program) -> Program:
    """Return instructions that end with a rule for a call, and go on for others."""
    return [] if number < 0 else [(_EQUAL, 0, len(rule), number), *rule]


def _answer(error: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ERROR | error if error else _ALLOW)


def _if(argument: int, values: tuple[int, ...], *, mask: int = _ALL, error: int = errno.EPERM) -> Program:
    """Return a rule that allows a call whose argument is one of some values, in the bits of a mask."""
    tests = [(_EQUAL, len(values) - place, 0, value & _ALL) for place, value in enumerate(values)]
    loads = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (_AND, 0, 0, mask)]
    return [*loads, *tests, _answer(error), _answer(0)]


def _unless(argument: int, value: int, *, mask: int) -> Program:
    """Return a rule that allows a call unless its argument has a value in the bits of a mask."""
    loads = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), (_AND, 0, 0, mask)]
    return [*loads, (_EQUAL, 1, 0, value), _answer(0), _answer(errno.EPERM)]


def _all(*rules: Program) -> Program:
    """Return a rule that allows a call if all rules do. Each rule ends with what it returns if it allows the call."""
    return [one for rule in rules[:-1] for one in rule[:-1]] + rules[-1]


_THREAD, _NAMESPACES = 0x00010000, 0x7E020080
_SHARED, _ANONYMOUS = 0x01, 0x20
_STREAM, _DATAGRAM, _KINDS = 1, 2, 0xF
_INTERNET = (2, 10)
_READING_TRUNCATE, _ACCESS = 0o1000, 0o1003
_OPTIONS = (3, 15, 16, 23, 38, 39, 0x53564D41)
"""Options of prctl: get dumpable, set and get the name, read capabilities, no new privileges, names of memory."""
_OF_DESCRIPTORS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032, 1034)
"""Commands of fcntl: duplicates, flags, locks, sizes and seals; no larger pipes, and no signals to others."""
_OF_DEVICES = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Commands of ioctl: terminal settings, sizes, waiting bytes, and flags of descriptors."""


def _by_arguments(*, network: bool) -> list[tuple[tuple[int, int], Program]]:
    """Return the numbers of the calls that depend on their arguments, and their rules."""
    own, low = os.getpid(), _ARGUMENTS
    none = [(_LOAD, 0, 0, low + 16), (_EQUAL, 1, 0, 0), _answer(errno.EPERM)]
    none += [(_LOAD, 0, 0, low + 20), (_EQUAL, 1, 0, 0), _answer(errno.EPERM), _answer(0)]
    sockets = _all(_if(0, _INTERNET, error=errno.EAFNOSUPPORT), _if(1, (_STREAM, _DATAGRAM), mask=_KINDS))
    return [
        # RLIMIT_DATA does not count shared memory.
        ((9, 222), _unless(3, _SHARED | _ANONYMOUS, mask=_SHARED | _ANONYMOUS)),
        # Old versions of Landlock do not limit an open for reading that empties the file.
        ((2, -1), _unless(1, _READING_TRUNCATE, mask=_ACCESS)),
        ((257, 56), _unless(2, _READING_TRUNCATE, mask=_ACCESS)),
        ((16, 29), _if(1, _OF_DEVICES, error=errno.ENOTTY)),
        ((72, 25), _if(1, _OF_DESCRIPTORS)),
        ((41, 198), sockets if network else [_answer(errno.EACCES)]),
        ((53, 199), _if(1, (_STREAM,), mask=_KINDS)),
        ((56, 220), _if(0, (_THREAD,), mask=_THREAD | _NAMESPACES)),
        ((62, 129), _if(0, (own,))),
        ((234, 131), _if(0, (own,))),
        ((157, 167), _if(0, _OPTIONS, error=errno.EINVAL)),
        # It reads this process's limits, and sets none.
        ((302, 261), _all(_if(0, (0, own)), none)),
    ]
