"""The system-call filter of bubblewrap sandboxes, as the kernel's classic BPF, without libseccomp.

A list of what is refused, for there is no engine to bring numbers for an allow-list of names. It closes the same doors
as seccomp.json: namespaces, mounts, tracing, keys, kernel interfaces, odd socket families, io_uring.
"""

from __future__ import annotations

import struct

EPERM, ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _JUMP_IF_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARG, _SECOND_ARG = (
    0,
    4,
    16,
    24,
)  # offsets in struct seccomp_data; args' low halves (little endian)
_X32 = 0x40000000
_NEW_NAMESPACES = 0x7E020000  # clone's CLONE_NEW* flags
_SOCKET_FAMILIES = (1, 2, 10)  # Unix, IPv4, IPv6
_TERMINAL_INPUT = (0x5412, 0x541C)  # ioctls that type into a terminal

# name: numbers on x86_64 and aarch64 (None: not there)
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_setup": (206, 0), "io_destroy": (207, 1), "io_getevents": (208, 4), "io_submit": (209, 2), "io_cancel": (210, 3),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "init_module": (175, 105), "delete_module": (176, 106), "finit_module": (313, 273),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "sethostname": (170, 161), "setdomainname": (171, 162),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None),
    "syslog": (103, 116), "vhangup": (153, 58),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263), "lookup_dcookie": (212, 18),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "get_mempolicy": (239, 236),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    "vmsplice": (278, 75), "remap_file_pages": (216, 234), "memfd_secret": (447, 447),
}  # fmt: skip

# machine: (AUDIT_ARCH, column above, numbers of clone, clone3, socket, ioctl)
_MACHINES = {
    "x86_64": (0xC000003E, 0, 56, 435, 41, 16),
    "aarch64": (0xC00000B7, 1, 220, 435, 198, 29),
}


def supported(machine: str) -> bool:
    """Whether there is a filter for this machine (`platform.machine()`)."""
    return machine in _MACHINES


def build_filter(machine: str) -> bytes:
    """The filter as an array of `struct sock_filter`. Raises KeyError for a machine that is not `supported`."""
    arch, column, clone, clone3, socket, ioctl = _MACHINES[machine]
    refuse = _statement(_RETURN, _ERRNO | EPERM)
    program = [
        _statement(_LOAD, _ARCH),
        _jump(_JUMP_IF_EQUAL, arch, 1, 0),
        _statement(_RETURN, _KILL),  # another ABI of this processor has other numbers
        _statement(_LOAD, _NUMBER),
        _jump(_JUMP_IF_AT_LEAST, _X32, 0, 1),
        refuse,
    ]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            program += [_jump(_JUMP_IF_EQUAL, number, 0, 1), refuse]
    # its flags are behind a pointer, so libc is told to use clone instead
    program += [_jump(_JUMP_IF_EQUAL, clone3, 0, 1), _statement(_RETURN, _ERRNO | ENOSYS)]
    allow = _statement(_RETURN, _ALLOW)
    program += [
        _jump(_JUMP_IF_EQUAL, clone, 0, 4),
        _statement(_LOAD, _FIRST_ARG),
        _jump(_JUMP_IF_SET, _NEW_NAMESPACES, 0, 1),
        refuse,
        allow,
    ]
    families = [
        _jump(_JUMP_IF_EQUAL, family, len(_SOCKET_FAMILIES) - n, 0) for n, family in enumerate(_SOCKET_FAMILIES)
    ]
    program += [
        _jump(_JUMP_IF_EQUAL, socket, 0, 3 + len(families)),
        _statement(_LOAD, _FIRST_ARG),
        *families,
        refuse,
        allow,
    ]
    requests = [
        _jump(_JUMP_IF_EQUAL, request, len(_TERMINAL_INPUT) - n, 0) for n, request in enumerate(_TERMINAL_INPUT)
    ]
    program += [
        _jump(_JUMP_IF_EQUAL, ioctl, 0, 3 + len(requests)),
        _statement(_LOAD, _SECOND_ARG),
        *requests,
        allow,
        refuse,
    ]
    program.append(allow)
    return b"".join(program)


def _statement(code: int, value: int) -> bytes:
    return struct.pack("<HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
