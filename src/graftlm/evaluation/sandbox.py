"""Generated Python, run apart from this process: whether it passes its tests.

What it does. Each program runs in a process of its own, in a fresh folder that is removed afterwards, by an isolated
Python without installed packages, without environment variables and without stdin. Its wall-clock and CPU time, its
memory, the size of its files and the number of its processes are limited; when it is done, or its time is up, it is
killed with all that it started. What it prints is read, and all but the start of it thrown away. Where the machine
allows it, it is shut in further, and `protections()` tells what holds here, by trying it:

- network: namespaces (`unshare`) leave it no network, and let no process outlive it or see others;
- files: Landlock (Linux 5.13 and later) lets it write to its own folder alone;
- processes: they are few; as such a limit does not bind root, root's programs run as the user nobody (`setpriv`).

What it does not do. The program can read every file that you can read. Where a protection does not hold, it can use the
network, write where you can write, signal your processes, or leave a process behind that made itself a session of its
own. A flaw in the kernel opens everything: run code that you distrust in a container or a virtual machine of its own.
The memory limit is for each process, and nothing limits how many files it writes while it runs.

A pass is real for programs that try to solve their task, and for those that exit early or print whatever they like: it
takes a secret, given out after the last test. A program made to fool this very module can still fetch it, as tests and
program share one process, or can change what the tests compare.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from graftlm.errors import EvaluationError

JOB = "job.json"
_NOBODY = 65534
_FILE_BYTES, _OPEN_FILES, _PROCESSES = 16 * 2**20, 64, 32
_KEPT_OUTPUT, _LONGEST_WORD = 4096, 4096  # bytes: of what a program prints, and of what is said of it
_LOOK_EVERY = 0.02  # seconds
_PATIENCE = 4  # a busy machine may take so many times as long as the work, and that is no fault of the program
# The first process of a namespace is deaf to signals, its own included: a shell takes that place.
_SHELL = ("/bin/sh", "-c", '"$@"; exit $?', "sh")


@dataclass(frozen=True)
class Verdict:
    """How a program did: whether it passed, why not in a few words, and the start of what it printed."""

    passed: bool
    reason: str
    output: str


@dataclass(frozen=True)
class Protections:
    """What a program is kept from on this machine, beyond what holds on every one.

    Attributes:
        network: it reaches no network.
        files: it writes to its own folder alone.
        processes: it starts no more than a few processes.
    """

    network: bool
    files: bool
    processes: bool


@dataclass(frozen=True)
class _Walls:
    """The command that runs another one shut in, and the user that it becomes; None stays the same."""

    command: tuple[str, ...] = ()
    user: int | None = None


def run_tests(program: str, tests: str, *, timeout_s: float = 5.0, memory_mb: int = 512) -> Verdict:
    """Run a program, then its tests in the same module.

    Args:
        program: Python source.
        tests: Python source that raises when the program is wrong.
        timeout_s: seconds of one core that both may take together; on the clock four times as many.
        memory_mb: MiB of address space for each process.

    Raises:
        EvaluationError: this machine can't run programs so.
    """
    if os.name != "posix":
        raise EvaluationError("Generated code is run on Linux and macOS alone: run this measurement there.")
    limits = {
        "RLIMIT_CPU": math.ceil(timeout_s),
        "RLIMIT_AS": memory_mb * 2**20,
        "RLIMIT_FSIZE": _FILE_BYTES,
        "RLIMIT_NOFILE": _OPEN_FILES,
        "RLIMIT_NPROC": _PROCESSES,
        "RLIMIT_CORE": 0,
    }
    walls = _walls()
    with tempfile.TemporaryDirectory(prefix="graftlm-", ignore_cleanup_errors=True) as folder:
        Path(folder, JOB).write_text(json.dumps({"program": program, "tests": tests, "limits": limits}), "utf-8")
        if walls.user is not None:
            os.chown(folder, walls.user, walls.user)
        return _run(walls, folder, timeout_s)


@functools.cache
def protections() -> Protections:
    """What a program is kept from on this machine; one tries it out, once.

    Raises:
        EvaluationError: this machine can't run programs at all.
    """
    verdict = run_tests(_source("probe"), "import json\nprint(json.dumps(found))", timeout_s=20)
    if not verdict.passed:
        raise EvaluationError(
            f"A program that does nothing wrong does not run in the sandbox ({verdict.reason}): "
            "check that this Python starts with `python -I -S`."
        )
    return Protections(**json.loads(verdict.output))


def _run(walls: _Walls, folder: str, timeout_s: float) -> Verdict:
    """Start the program of a folder, watch it, and judge what came."""
    secret = secrets.token_hex(16)
    with _pipe() as (asked, asks), _pipe() as (heard, says):
        os.write(asks.fileno(), secret.encode())
        python = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _source("inside")]
        process = subprocess.Popen(
            [*walls.command, *python, str(asked.fileno()), str(says.fileno())],
            cwd=folder,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(asked.fileno(), says.fileno()),
            start_new_session=True,
        )
        for end in (asked, asks, says):
            end.close()
        try:
            said, output, in_time = _watch(process, heard.fileno(), timeout_s * _PATIENCE)
        finally:
            _kill(process)
    passed = said == f"{secret}\n".encode()
    return Verdict(passed, _reason(process, said, timeout_s, passed, in_time), output.decode("utf-8", "replace"))


def _reason(process: subprocess.Popen[bytes], said: bytes, timeout_s: float, passed: bool, in_time: bool) -> str:
    if passed:
        return "passed"
    if said:
        return said.decode("utf-8", "replace").strip()
    # A shell gives a signal's number plus 128, subprocess its negative.
    status = process.returncode
    number = -status if status < 0 else status - 128
    if not in_time or number == signal.SIGXCPU:
        return f"took more than {timeout_s:g} seconds"
    how = signal.Signals(number).name if number in set(signal.Signals) else f"status {status}"
    return f"ended before its tests did ({how})"


def _watch(process: subprocess.Popen[bytes], heard: int, patience_s: float) -> tuple[bytes, bytes, bool]:
    """What was said of the program, the start of what it printed, and whether it was done in time."""
    said, output, until = b"", b"", time.monotonic() + patience_s
    assert process.stdout is not None
    printed = process.stdout.fileno()
    with selectors.DefaultSelector() as selector:
        selector.register(heard, selectors.EVENT_READ)
        selector.register(printed, selectors.EVENT_READ)
        while (left := until - time.monotonic()) > 0:
            ended = _ended(process)
            events = selector.select(0 if ended else min(left, _LOOK_EVERY))
            for key, _ in events:
                data = os.read(key.fd, 2**16)
                if not data:
                    selector.unregister(key.fd)
                elif key.fd == heard:
                    said += data
                else:
                    output += data[: _KEPT_OUTPUT - len(output)]
            if said.endswith(b"\n") or len(said) > _LONGEST_WORD or (ended and not events):
                return said[:_LONGEST_WORD], output, True
    return b"", output, False


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it is no more, asked so that its id stays its own until it is killed with its group."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process, its group, and all that descends from it."""
    family = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in family:
        with contextlib.suppress(psutil.Error):
            one.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[_End, _End]]:
    ends = tuple(map(_End, os.pipe()))
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            end.close()


class _End:
    """One end of a pipe, to be closed once or twice."""

    def __init__(self, number: int) -> None:
        self._number, self._open = number, True

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        if self._open:
            self._open = False
            os.close(self._number)


@functools.cache
def _source(name: str) -> str:
    """A script of the folder `sandboxed`, handed over as text: the program's user may not be allowed to read it."""
    return Path(__file__).with_name("sandboxed").joinpath(f"{name}.py").read_text("utf-8")


@functools.cache
def _walls() -> _Walls:
    """The strongest walls that this machine offers."""
    unshare, setpriv = shutil.which("unshare"), shutil.which("setpriv")
    root = os.geteuid() == 0
    spaces: tuple[str, ...] = ()
    if unshare:
        spaces = (unshare, "--net", "--ipc", "--pid", "--fork", "--kill-child")
        spaces = spaces if root else (*spaces, "--user", "--map-current-user")
        spaces = spaces if _works(spaces) else ()
    shell = _SHELL if spaces else ()
    if root and setpriv:
        nobody = (setpriv, f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--no-new-privs")
        # This Python may lie in root's own folder: nobody may read what root may read, and write nothing of it.
        reads = "-all,+dac_read_search"
        reader = (*nobody, f"--bounding-set={reads}", f"--inh-caps={reads}", f"--ambient-caps={reads}")
        for user in (reader, (*nobody, "--bounding-set=-all", "--inh-caps=-all"), nobody):
            if _works((*spaces, *user)):
                return _Walls((*spaces, *user, *shell), _NOBODY)
    return _Walls((*spaces, *shell))


def _works(command: Sequence[str]) -> bool:
    """Whether Python starts behind these walls."""
    python = [sys.executable, "-I", "-S", "-c", "import json"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.run([*command, *python], timeout=30, check=False, **quiet).returncode == 0  # type: ignore[call-overload]
    return False
