"""Run generated Python in a separate process and report whether it passes its tests.

Each program runs in its own process, in a fresh temporary folder, with an isolated Python: no installed packages, no
environment variables, no stdin. Wall-clock time, CPU time, memory, file sizes and the number of processes are limited.
Afterwards the process and its descendants are killed and the folder is removed. Only the start of its output is kept.

Further protections depend on the machine; `protections()` probes them:

- network: namespaces (`unshare`) remove the network, hide other processes and end all processes with the program;
- files: Landlock (Linux 5.13 and later) allows writes to the program's own folder only;
- processes: their number is limited. The limit does not bind root, so root runs programs as nobody (`setpriv`).

Limits of the sandbox. A program can read every file that you can read. Without a protection above it can use the
network, write where you can write, signal your processes, or leave a daemon behind. A kernel flaw defeats everything:
run code that you distrust in a container or a virtual machine. The memory limit holds per process, and the number of
files is unlimited.

A pass requires a secret that is handed over after the last test, so early exits and printed claims do not pass. A
program written against this module can still cheat: it shares a process with its tests.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from graftlm.errors import EvaluationError

_NOBODY = 65534
_LIMITS = {"RLIMIT_FSIZE": 16 * 2**20, "RLIMIT_NOFILE": 64, "RLIMIT_NPROC": 32, "RLIMIT_CORE": 0}
_MAX_OUTPUT_BYTES, _MAX_MESSAGE_BYTES = 4096, 4096
_POLL_S = 0.02
_WALL_FACTOR = 4  # wall-clock limit over CPU limit: a program must not fail because the machine is busy
# The first process of a PID namespace ignores signals, its own included, so a shell runs there instead.
_SHELL = ("/bin/sh", "-c", '"$@"; exit $?', "sh")


@dataclass(frozen=True)
class ExecutionResult:
    """Whether a program passed, the reason in a few words, and the start of its output."""

    passed: bool
    reason: str
    output: str


@dataclass(frozen=True)
class Protections:
    """Whether this machine can take the network away, let a program write in its folder only, and limit processes."""

    network: bool
    files: bool
    processes: bool


@dataclass(frozen=True)
class _Isolation:
    """The command that isolates another command, and the user id that it switches to; None keeps the user."""

    command: tuple[str, ...] = ()
    user: int | None = None


def run_tests(program: str, tests: str, *, timeout_s: float = 5.0, memory_mb: int = 512) -> ExecutionResult:
    """Run a program, then its tests in the same module.

    Args:
        tests: Python source that raises when the program is wrong.
        timeout_s: CPU seconds for both together; the wall-clock limit is four times as long.
        memory_mb: MiB of address space for each process.

    Raises EvaluationError if the operating system is neither Linux nor macOS.
    """
    if os.name != "posix":
        raise EvaluationError("Generated code is run on Linux and macOS alone: run this measurement there.")
    limits = {"RLIMIT_CPU": math.ceil(timeout_s), "RLIMIT_AS": memory_mb * 2**20, **_LIMITS}
    isolation = _isolation()
    with tempfile.TemporaryDirectory(prefix="graftlm-", ignore_cleanup_errors=True) as folder:
        Path(folder, "job.json").write_text(json.dumps({"program": program, "tests": tests, "limits": limits}), "utf-8")
        if isolation.user is not None:
            os.chown(folder, isolation.user, isolation.user)
        return _execute(isolation, folder, timeout_s)


@functools.cache
def protections() -> Protections:
    """The protections of this machine, probed once by a program that tries to break them.

    Raises EvaluationError if no program runs in the sandbox on this machine.
    """
    result = run_tests(_source("probe"), "import json\nprint(json.dumps(protections))", timeout_s=20)
    if not result.passed:
        raise EvaluationError(
            f"A program that does nothing wrong does not run in the sandbox ({result.reason}): "
            "check that this Python starts with `python -I -S`."
        )
    return Protections(**json.loads(result.output))


def _execute(isolation: _Isolation, folder: str, timeout_s: float) -> ExecutionResult:
    """Run the job of a folder; the socket carries the secret to the child and its message back."""
    secret = secrets.token_hex(16)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(secret.encode())
        python = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _source("inside"), str(theirs.fileno())]
        with subprocess.Popen(
            [*isolation.command, *python],
            cwd=folder,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        ) as process:
            theirs.close()
            try:
                output, in_time = _read_output(process, timeout_s * _WALL_FACTOR)
            finally:
                _kill(process)
        message = b""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            message = ours.recv(_MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
    passed = in_time and message == f"{secret}\n".encode()
    reason = "passed" if passed else _failure(process.returncode, message, timeout_s, in_time)
    return ExecutionResult(passed, reason, output.decode("utf-8", "replace"))


def _failure(status: int, message: bytes, timeout_s: float, in_time: bool) -> str:
    if message and in_time:
        return message.decode("utf-8", "replace").strip()
    # A shell reports a signal as its number plus 128, subprocess as its negative.
    number = -status if status < 0 else status - 128
    if not in_time or number == signal.SIGXCPU:
        return f"took more than {timeout_s:g} seconds"
    how = signal.Signals(number).name if number in set(signal.Signals) else f"status {status}"
    return f"ended before its tests did ({how})"


def _read_output(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[bytes, bool]:
    """Wait for a process; the start of its output, and whether it ended in time. The process is not reaped."""
    assert process.stdout is not None
    output, stdout, deadline = b"", process.stdout.fileno(), time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        # Without reaping, the id stays reserved until the whole process group is killed.
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        readable = select.select([stdout], [], [], 0 if ended else _POLL_S)[0]
        data = os.read(stdout, 2**16) if readable else b""
        output += data[: _MAX_OUTPUT_BYTES - len(output)]
        if ended and not data:
            return output, True
        if readable and not data:  # the program closed its stdout
            time.sleep(_POLL_S)
    return output, False


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, its group and its descendants."""
    descendants = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for descendant in descendants:
        with contextlib.suppress(psutil.Error):
            descendant.kill()


@functools.cache
def _source(name: str) -> str:
    """A script of the folder `sandboxed`; its text is passed, since the program's user may not be able to read it."""
    return Path(__file__).with_name("sandboxed").joinpath(f"{name}.py").read_text("utf-8")


@functools.cache
def _isolation() -> _Isolation:
    """The strongest isolation that works on this machine."""
    unshare, setpriv = shutil.which("unshare"), shutil.which("setpriv")
    root = os.geteuid() == 0
    as_user = () if root else ("--user", "--map-current-user")
    namespaces = (unshare, "--net", "--ipc", "--pid", "--fork", "--kill-child", *as_user) if unshare else ()
    namespaces = namespaces if _starts_python(namespaces) else ()
    shell = _SHELL if namespaces else ()
    if root and setpriv:
        nobody = (setpriv, f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--no-new-privs")
        # This Python may lie in a folder of root's: nobody may read what root may read, and write nothing of it.
        reads = "-all,+dac_read_search"
        reader = (*nobody, f"--bounding-set={reads}", f"--inh-caps={reads}", f"--ambient-caps={reads}")
        for user in (reader, (*nobody, "--bounding-set=-all", "--inh-caps=-all"), nobody):
            if _starts_python((*namespaces, *user)):
                return _Isolation((*namespaces, *user, *shell), _NOBODY)
    return _Isolation((*namespaces, *shell))


def _starts_python(command: Sequence[str]) -> bool:
    """Whether Python starts under an isolating command."""
    python = [sys.executable, "-I", "-S", "-c", "import json"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process = subprocess.run([*command, *python], stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
        return process.returncode == 0
    return False
