"""Program that isolates itself in Linux namespaces and then executes the sandboxed program.

It runs as a script with the standard library only. Three processes: the first waits outside, the second is process 1
inside, at whose exit the kernel kills every process inside, and the third executes the program. A failed step is
reported on the status descriptor, and the program does not run.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
PDEATHSIG, NO_NEW_PRIVS, SECCOMP, DETACH = 1, 38, 22, 2
DEVICES = ("null", "zero", "full", "random", "urandom")
EPERM, ENOSYS = 1, 38
SOCKETS = {"x86_64": 41, "aarch64": 198}
FAMILIES = (1, 2, 10, 16)  # unix, IPv4, IPv6, netlink: isolated by a network namespace, unlike AF_VSOCK

# Numbers of pivot_root, clone, clone3 and of the denied calls: unshare, setns, mount, umount2, ptrace, bpf,
# io_uring_setup, keyctl, add_key, perf_event_open, userfaultfd, memfd_create, shmget, msgget, semget, pivot_root.
SYSTEMS = {
    "x86_64": (0xC000003E, 155, 56, 435, (272, 308, 165, 166, 101, 321, 425, 250, 248, 298, 323, 319, 29, 68, 64, 155)),
    "aarch64": (0xC00000B7, 41, 220, 435, (97, 268, 40, 39, 117, 280, 425, 219, 217, 241, 282, 279, 194, 186, 190, 41)),
}

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Set up the sandbox or report the failed step; ``argv`` holds the configuration and status descriptors."""
    configuration, status = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(status, False)  # noqa: FBT003
    with os.fdopen(configuration, "rb") as file:
        options: dict[str, Any] = json.load(file)
    libc.prctl(PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if options["unsafe"]:
            run(options)
        isolate()
        inside = os.fork()
        if inside == 0:
            run_inside(options)
    except OSError as error:
        os.write(status, f"{error.filename or 'process'}: {error.strerror}".encode())
        os._exit(1)
    os.close(status)
    finish(inside)


def finish(child: int) -> None:
    """Exit with the status of a child."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def check(result: int, step: str) -> None:
    """Raise the ``errno`` of a failed C library call."""
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), step)


def isolate() -> None:
    """Leave all namespaces; without privileges, in a new user namespace."""
    flags, uid, gid = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS, os.geteuid(), os.getegid()
    if uid == 0 and libc.unshare(flags) == 0:
        return
    check(libc.unshare(flags | NEWUSER), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"1000 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"1000 {gid} 1")


def run_inside(options: dict[str, Any]) -> None:
    """Run as process 1: build the file system, start the program and wait for it."""
    libc.prctl(PDEATHSIG, signal.SIGKILL)
    build(options)
    Path("/sandbox/main.py").write_text(options["source"], encoding="utf-8")
    program = os.fork()
    if program == 0:
        drop_privileges()
        deny_calls()
        run(options)
    while True:  # also reaps orphans
        ended, state = os.wait()
        if ended == program:
            code = os.waitstatus_to_exitcode(state)
            os._exit(code if code >= 0 else 128 - code)


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call ``mount(2)``."""
    arguments = [None if text is None else text.encode() for text in (source, target, kind, data)]
    check(libc.mount(arguments[0], arguments[1], arguments[2], ctypes.c_ulong(flags), arguments[3]), f"mount {target}")


def bind(source: str, root: str) -> None:
    """Bind-mount a folder or file of the machine, read-only."""
    target = root + source
    if Path(source).is_dir():
        Path(target).mkdir(parents=True, exist_ok=True)
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).touch()
    mount(source, target, None, BIND | REC)
    flags = os.statvfs(target).f_flag & (NOSUID | NODEV | NOEXEC | 1024 | 2048)  # a user namespace may not clear these
    device = NODEV if not source.startswith("/dev/") else 0
    mount(source, target, None, BIND | REMOUNT | RDONLY | NOSUID | device | flags)


def build(options: dict[str, Any]) -> None:
    """Build a file system with the read-only interpreter and one writable folder, which disappears with process 1."""
    root = options["root"]
    mount("none", "/", None, REC | PRIVATE)
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "mode=755,size=1m")
    for link in ("/bin", "/lib", "/lib64", "/sbin"):
        if Path(link).is_symlink():
            Path(root + link).symlink_to(Path(link).readlink())
        elif Path(link).is_dir():
            bind(link, root)
    for path in options["binds"]:
        bind(path, root)
    for device in DEVICES:
        bind(f"/dev/{device}", root)
    for name in ("sandbox", "proc"):
        Path(root, name).mkdir()
    if not Path(root, "tmp").exists():
        Path(root, "tmp").symlink_to("sandbox")
    mount("tmpfs", f"{root}/sandbox", "tmpfs", NOSUID | NODEV, f"mode=777,size={options['disk']},nr_inodes=4096")
    libc.mount(b"proc", f"{root}/proc".encode(), b"proc", ctypes.c_ulong(NOSUID | NODEV | NOEXEC | RDONLY), None)
    os.chdir(root)
    pivot_root = SYSTEMS[platform.machine()][1]
    check(libc.syscall(pivot_root, b".", b"."), "pivot_root")
    check(libc.umount2(b".", DETACH), "umount2")
    mount("tmpfs", "/", None, REMOUNT | RDONLY | NOSUID | NODEV)
    os.chdir("/sandbox")


def drop_privileges() -> None:
    """Switch to an unused uid so that RLIMIT_NPROC counts only this sandbox."""
    if os.geteuid() == 0:
        uid = 20_000 + int.from_bytes(os.urandom(2), "big") % 40_000
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    check(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def deny_calls() -> None:
    """Deny system calls that create namespaces or unaccounted memory, or that inspect other processes."""
    architecture, _, clone, clone3, denied = SYSTEMS[platform.machine()]

    def statement(code: int, k: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, k)

    load, equal, test, stop = 0x20, 0x15, 0x45, 0x06
    fail, allow, kill = 0x50000, 0x7FFF0000, 0x80000000
    program = [statement(load, 4), statement(equal, architecture, 1, 0), statement(stop, kill), statement(load, 0)]
    program += [statement(0x35, 0x40000000, 0, 1), statement(stop, kill)]  # x32 system calls
    for number in denied:
        program += [statement(equal, number, 0, 1), statement(stop, fail | EPERM)]
    program += [statement(equal, clone3, 0, 1), statement(stop, fail | ENOSYS)]  # the C library falls back on clone
    program += [statement(equal, SOCKETS[platform.machine()], 0, 2 + len(FAMILIES)), statement(load, 16)]
    program += [statement(equal, family, len(FAMILIES) - place, 0) for place, family in enumerate(FAMILIES)]
    program += [statement(stop, fail | EPERM), statement(load, 0)]
    program += [statement(equal, clone, 0, 3), statement(load, 16), statement(test, NEWUSER, 0, 1)]
    program += [statement(stop, fail | EPERM), statement(stop, allow)]
    code = ctypes.create_string_buffer(b"".join(program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    check(libc.prctl(SECCOMP, 2, header, 0, 0), "seccomp")


def run(options: dict[str, Any]) -> None:
    """Set the limits and execute the program."""
    limits = {
        resource.RLIMIT_AS: options["memory"],
        resource.RLIMIT_CPU: int(options["seconds"]) + 1,
        resource.RLIMIT_FSIZE: options["disk"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if not options["unsafe"]:  # without a separate uid it counts every process of the user
        limits[resource.RLIMIT_NPROC] = options["processes"]
    for name, limit in limits.items():
        resource.setrlimit(name, (limit, limit))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execve(options["command"][0], options["command"], options["environment"])


if __name__ == "__main__":
    main()
