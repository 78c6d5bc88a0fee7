"""Entry point of the sandbox's process: set the limits, then run a program and its tests.

Argument: the file descriptor of a socket. It holds the secret that proves a pass, and takes the result's message.
"""

import contextlib
import ctypes
import json
import os
import resource
import sys
import traceback
import types
from pathlib import Path

# Landlock's access rights: files (write, make and remove of every kind, then refer and truncate), TCP, and scopes.
_WRITE, _CHANGE, _REFER, _TRUNCATE = 1 << 1, 0b1_1111_1111 << 4, 1 << 13, 1 << 14
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _NO_NEW_PRIVILEGES = 444, 445, 446, 38


def main() -> None:
    """Run the job of the current folder, report its result, and exit at once."""
    channel = int(sys.argv[1])
    job = json.loads(Path("job.json").read_text("utf-8"))
    Path("job.json").unlink()
    sys.argv[1:] = []
    os.environ.clear()  # the shell and Python set some
    limit(job["limits"])
    lock_files(Path.cwd())
    error = run(job["program"], job["tests"])
    sys.stdout.flush()
    message = os.read(channel, 64) if error is None else error.encode("utf-8", "replace")[:2000]
    os.write(channel, message + b"\n")
    os._exit(0)


def run(program: str, tests: str) -> str | None:
    """Run both; None when they succeed, else the error as one line."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    name = "program"
    try:
        exec(compile(program, "program.py", "exec"), module.__dict__)  # noqa: S102
        name = "tests"
        exec(compile(tests, "tests.py", "exec"), module.__dict__)  # noqa: S102
    except BaseException as error:  # sys.exit does not pass
        traceback.print_exc()
        return " ".join(f"{name}: {type(error).__name__}: {error}".split())
    return None


def limit(limits: dict[str, int]) -> None:
    """Lower soft and hard limits, so that the program cannot raise them again."""
    for name, value in limits.items():
        # SIGXCPU at the soft limit names the reason; SIGKILL a second later can't be ignored.
        hard = value + 1 if name == "RLIMIT_CPU" else value
        with contextlib.suppress(AttributeError, OSError, ValueError):  # such as memory on macOS
            kind = getattr(resource, name)
            known = resource.getrlimit(kind)[1]
            hard = hard if known == resource.RLIM_INFINITY else min(hard, known)
            resource.setrlimit(kind, (min(value, hard), hard))


def lock_files(folder: Path) -> None:
    """With Landlock: allow writes to `folder` and /dev/null only, and forbid TCP and signals to other processes."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return
    files = _WRITE | _CHANGE | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    values = [files] + [3] * (version >= 4) + [3] * (version >= 6)
    ruleset = libc.syscall(
        _CREATE_RULESET, (ctypes.c_uint64 * len(values))(*values), ctypes.c_size_t(8 * len(values)), 0
    )
    of_file = files & (_WRITE | _TRUNCATE)
    for path, allowed in ((folder, files), (Path(os.devnull), of_file)):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = allowed.to_bytes(8, sys.byteorder) + opened.to_bytes(4, sys.byteorder)
        libc.syscall(_ADD_RULE, ruleset, 1, ctypes.c_char_p(rule), 0)
        os.close(opened)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


if __name__ == "__main__":
    main()
