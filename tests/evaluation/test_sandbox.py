"""Hostile programs: each is stopped, none passes, and `protections()` is true."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from graftlm.errors import EvaluationError
from graftlm.evaluation import Example, pass_at_1, sandbox
from graftlm.evaluation.sandbox import Protections, protections, run_tests

if os.name != "posix":
    pytest.skip("programs are run on Linux and macOS alone", allow_module_level=True)

RIGHT, TESTS = "def double(x):\n    return 2 * x\n", "assert double(2) == 4\nassert double('a') == 'aa'\n"


@pytest.fixture(params=["strongest", "none"])
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The isolation of this machine, and that of a machine that offers none."""
    if request.param == "none":
        monkeypatch.setattr(sandbox, "_isolation", sandbox._Isolation)
    return request.param


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test no process and no folder of the sandbox is left.

    Tests run one at a time across all pytest workers, because the limit of processes counts all processes of a user.
    """
    lock = (Path(tempfile.gettempdir()) / "sandbox-tests.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
    folder.chmod(0o755)  # the programs' user must be able to enter
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    until = time.monotonic() + 20  # killed processes disappear with a delay
    while left := [
        process for process in psutil.process_iter(["cwd"]) if (process.info["cwd"] or "").startswith(str(folder))
    ]:
        assert time.monotonic() < until, left
        time.sleep(0.1)
    assert not list(folder.glob("graftlm-????????"))
    shutil.rmtree(folder)
    lock.close()


def test_a_right_program_passes(isolation: str) -> None:
    assert run_tests(RIGHT, TESTS) == sandbox.ExecutionResult(True, "passed", "")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("def double(x):\n    return x + 1\n", "tests: AssertionError:"),
        ("def halve(x): ...", "tests: NameError: name 'double' is not defined"),
        ("def double(x:", "program: SyntaxError: '(' was never closed (program.py, line 1)"),
        (RIGHT + '"""', "program: SyntaxError: unterminated triple-quoted string literal"),
        (RIGHT + "1 / 0", "program: ZeroDivisionError: division by zero"),
        (RIGHT + "\0", "program: SyntaxError: source code string cannot contain null bytes"),
        (RIGHT + "# \ud800", "program: UnicodeEncodeError:"),
        (RIGHT + "input()", "program: EOFError: EOF when reading a line"),
        (RIGHT + "import numpy", "program: ModuleNotFoundError: No module named 'numpy'"),
        (RIGHT + "import graftlm", "program: ModuleNotFoundError: No module named 'graftlm'"),
    ],
)
def test_a_wrong_program_fails_and_says_why(program: str, reason: str) -> None:
    result = run_tests(program, TESTS)
    assert not result.passed
    assert result.reason.startswith(reason)


@pytest.mark.parametrize(
    "leave",
    [
        "import sys\nsys.exit(0)",
        "raise SystemExit",
        "import os\nos._exit(0)",
        "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "import os\nos.kill(0, 9)",
        "import os\nos.abort()",
        "import ctypes\nctypes.string_at(0)",
        "import os\nos.closerange(3, 64)",
        "import os\nos.execv('/bin/true', ['true'])",
        "import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()\nimport time\ntime.sleep(9)",
    ],
)
def test_leaving_before_the_tests_is_no_pass(leave: str, isolation: str) -> None:
    result = run_tests(RIGHT + leave, TESTS)
    assert not result.passed
    assert "SystemExit" in result.reason or result.reason.startswith("ended before its tests did (")


@pytest.mark.parametrize(
    "claim",
    [
        "print('passed')",
        "import sys\nprint('passed', file=sys.stderr)\nsys.exit(0)",
        "import os\nfor pipe in range(3, 64):\n    try:\n        os.write(pipe, b'passed\\n')\n    except OSError:\n"
        "        pass",
        "import os\nfor pipe in range(3, 64):\n    try:\n        os.write(pipe, b'0' * 32 + b'\\n')\n"
        "    except OSError:\n        pass\nos._exit(0)",
    ],
)
def test_claiming_to_have_passed_is_no_pass(claim: str, isolation: str) -> None:
    assert not run_tests("def double(x):\n    return 0\n" + claim, TESTS).passed


ENDLESS = [
    "import signal\nfor number in range(1, 65):\n    try:\n        signal.signal(number, signal.SIG_IGN)\n"
    "    except (OSError, ValueError):\n        pass\nwhile True: pass",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\ntime.sleep(60)",
]
MORE_ENDLESS = [
    "while True: pass",
    "import time\ntime.sleep(60)",
    "while True:\n    try:\n        while True: pass\n    except BaseException:\n        pass",
    "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()\nwhile True: pass",
]


@pytest.mark.parametrize(
    "program", [*ENDLESS, *(pytest.param(program, marks=pytest.mark.slow) for program in MORE_ENDLESS)]
)
def test_endless_programs_are_stopped(program: str, isolation: str) -> None:
    start = time.monotonic()
    result = run_tests(program, TESTS, timeout_s=1)
    assert not result.passed
    assert result.reason in ("took more than 1 seconds", "ended before its tests did (SIGKILL)")
    assert time.monotonic() - start < 60


def test_a_thread_left_running_is_no_failure(isolation: str) -> None:
    assert run_tests(
        f"import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n{RIGHT}", TESTS
    ).passed


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS limits no address space")
@pytest.mark.parametrize("program", ["x = bytearray(10**10)", "x = []\nwhile True: x.append(bytes(10**7))"])
def test_memory_is_limited(program: str, isolation: str) -> None:
    result = run_tests(program, TESTS, memory_mb=256, timeout_s=20)
    assert result.reason == "program: MemoryError:"
    assert run_tests(f"{RIGHT}x = bytearray(10**8)", TESTS, memory_mb=256).passed


def test_a_fork_bomb_ends() -> None:
    if not protections().processes:
        pytest.skip("nothing here limits the number of processes, and a fork bomb would stop the machine")
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    assert not run_tests(bomb, TESTS, timeout_s=1).passed


def test_processes_do_not_outlive_the_program(isolation: str) -> None:
    child = "import os, time\nif os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\n"
    assert run_tests(child + RIGHT, TESTS).passed
    if (
        isolation == "strongest" and "--pid" in sandbox._isolation().command
    ):  # which holds those too that leave their session
        daemon = child.replace("time.sleep", "os.setsid()\n    if os.fork(): os._exit(0)\n    time.sleep")
        assert run_tests(daemon + RIGHT, TESTS).passed


def test_output_is_bounded(isolation: str) -> None:
    endless = run_tests("while True: print('x' * 10**6)", TESTS, timeout_s=3)
    assert not endless.passed
    assert endless.output == "x" * 4096
    much = run_tests(f"{RIGHT}\nfor _ in range(50): print('y' * 10**6)", TESTS, timeout_s=20)
    assert (much.passed, much.output) == (True, "y" * 4096)


def test_the_size_of_files_is_limited(isolation: str) -> None:
    result = run_tests("open('big', 'wb').write(bytes(10**8))", TESTS)
    assert result.reason == "program: OSError: [Errno 27] File too large"


@pytest.fixture
def stdin_line() -> Iterator[None]:
    """Stdin holds a line."""
    saved, (reader, writer) = os.dup(0), os.pipe()
    os.write(writer, b"typed\n")
    os.close(writer)
    os.dup2(reader, 0)
    os.close(reader)
    yield
    os.dup2(saved, 0)
    os.close(saved)


@pytest.mark.usefixtures("stdin_line")
def test_a_program_sees_neither_environment_nor_stdin_nor_job(monkeypatch: pytest.MonkeyPatch, isolation: str) -> None:
    monkeypatch.setenv("GRAFTLM_SECRET", "secret")
    seen = "import os, sys\nassert not os.environ, os.environ\n"
    if sys.platform == "linux":
        seen += "assert 'secret' not in open('/proc/self/environ').read()\n"
    assert run_tests(
        f"{seen}assert sys.stdin.read() == ''\nassert os.listdir() == [], os.listdir()\n{RIGHT}", TESTS
    ).passed


def test_a_program_may_use_its_folder(isolation: str) -> None:
    use = "import os, pathlib\nos.makedirs('a/b')\npathlib.Path('a/b/c').write_text('é')\nos.rename('a/b/c', 'd')\n"
    use += "assert pathlib.Path('d').read_text() == 'é'\nos.remove('d')\nopen('/dev/null', 'w').write('x')\n"
    assert run_tests(use + RIGHT, TESTS) == sandbox.ExecutionResult(True, "passed", "")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may write to."""
    with tempfile.TemporaryDirectory(prefix="everybody-") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def test_writing_outside_the_folder_fails_where_that_is_promised(open_folder: Path) -> None:
    (open_folder / "kept").write_text("kept")
    (open_folder / "kept").chmod(0o666)
    changes = {
        "open({0!r} + '/new', 'w')": lambda: (open_folder / "new").exists(),
        "open({0!r} + '/kept', 'w')": lambda: not (open_folder / "kept").read_text(),
        "import os; os.remove({0!r} + '/kept')": lambda: not (open_folder / "kept").exists(),
    }
    for change, happened in changes.items():
        result = run_tests(change.format(str(open_folder)) + "\n" + RIGHT, TESTS)
        assert happened() == result.passed
        assert not (protections().files and result.passed), change


def test_the_network_is_out_of_reach_where_that_is_promised() -> None:
    connections: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.5)

        def listen() -> None:
            with pytest.raises(TimeoutError):
                connections.append(server.accept())

        listener = threading.Thread(target=listen)
        listener.start()
        call = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=2)\n"
        result = run_tests(call + RIGHT, TESTS)
        listener.join()
    assert result.passed == bool(connections)
    assert not (protections().network and connections)


def test_protections_are_found_by_trying(isolation: str) -> None:
    protections.cache_clear()
    actual = protections()
    protections.cache_clear()
    if isolation == "none" and os.geteuid() == 0:
        assert actual.processes is False, "nothing binds root"
    if isolation == "strongest":
        assert actual.network or "--pid" not in sandbox._isolation().command
        assert actual.processes or sandbox._isolation().user is None
    if sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, 0, 1) >= 1:  # Landlock's version
        assert actual.files
    assert actual == Protections(actual.network, actual.files, actual.processes)


def test_root_s_programs_run_as_nobody() -> None:
    if os.geteuid() != 0 or sandbox._isolation().user is None:
        pytest.skip("these tests do not run as root, or setpriv is not there")
    assert run_tests(
        "import os\nassert os.getuid() == os.getgid() == 65534 and os.getgroups() == []\n" + RIGHT, TESTS
    ).passed
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(
            [*sandbox._isolation().command, "sh", "-c", "echo > /etc/passwd"], check=True, capture_output=True
        )


def test_pass_at_1_runs_prompt_and_answer() -> None:
    examples = [Example("def double(x):\n", "", TESTS)] * 4
    answers = ["    return x * 2", "    return x * x", "    while True: pass", "return x * 2"]
    passed = pass_at_1(answers, examples, timeout_s=2)
    assert passed.dtype == np.float64
    assert passed.tolist() == [1, 0, 0, 0]


def test_what_can_not_be_run() -> None:
    with pytest.raises(EvaluationError, match="^Example 2 has no tests, which every answer would pass: give it some"):
        pass_at_1(["", ""], [Example("", "", "assert 1"), Example("", "", " \n")])
    with pytest.raises(EvaluationError, match="^There are 1 answers to 0 examples"):
        pass_at_1(["a"], [])


def test_a_machine_that_can_not_run_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    protections.cache_clear()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(sandbox, "_isolation", sandbox._Isolation)
    with pytest.raises(
        EvaluationError, match=r"does not run in the sandbox \(ended before its tests did \(status 1\)\): check"
    ):
        protections()
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(EvaluationError, match="Linux and macOS alone"):
        run_tests(RIGHT, TESTS)
