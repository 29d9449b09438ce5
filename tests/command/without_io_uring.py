"""`python without_io_uring.py [CALL] PROGRAM ARGUMENT...`: runs it where the kernel refuses
io_uring with EPERM, as in a container: the call io_uring_setup, or the one that is named."""

import ctypes
import os
import struct
import sys

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
REFUSE, ALLOW = 0x00050000 | 1, 0x7FFF0000
CALLS = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}


def step(code, value, skip_if_not=0):
    return struct.pack("HBBI", code, 0, skip_if_not, value)


if __name__ == "__main__":
    words = sys.argv[1:]
    call = CALLS[words.pop(0)] if words[0] in CALLS else CALLS["io_uring_setup"]
    steps = ctypes.create_string_buffer(
        step(LOAD_WORD, 0)
        + step(JUMP_IF_EQUAL, call, skip_if_not=1)
        + step(RETURN, REFUSE)
        + step(RETURN, ALLOW)
    )
    program = struct.pack("HxxxxxxP", 4, ctypes.addressof(steps))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0
    ):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    os.execv(words[0], words)
