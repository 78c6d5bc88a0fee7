"""Run the tests against every mutation: `python tests/mutations/run.py [--jobs N] [NAME ...]`.

Each mutation is made in a copy of the project, in a process of its own. `results.json` keeps what is done, so a killed
run goes on where it was. A suite that fails without a mutation is an error, as it would prove nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results.json"
COPIED = ("src", "tests", "examples", "experiments", "docs", "pyproject.toml", "README.md")
SLOW_IMPORTS = ("torch", "transformers", "peft", "pytest", "hypothesis", "scipy.stats", "sklearn.covariance")
sys.path.insert(0, str(ROOT / "tests"))

from mutations.table import MUTATIONS, SUITES, Mutation  # found beside this file


def apply(mutation: Mutation, root: Path) -> None:
    """Make one mutation below `root`; a `ValueError` if its text is not there exactly once."""
    path = root / "src" / "graftlm" / mutation.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        count = text.count(mutation.old)
        raise ValueError(f"{mutation.name}: {mutation.old!r} occurs {count} times in {mutation.file}, not once")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def first_failure(suite: str, root: Path) -> str | None:
    """The first test of a suite that fails below `root`; None if all pass. Runs in a forked process.

    A suite that can't be collected, or whose process dies, is a `RuntimeError`: no test has seen the mutation.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run_suite, args=(suite, root, sender))
    process.start()
    sender.close()
    try:
        failure, is_test = receiver.recv()
    except EOFError as error:
        raise RuntimeError(f"the process of the suite {suite} died") from error
    finally:
        process.join()
    if not is_test:
        raise RuntimeError(f"the suite {suite} can't be collected: {failure}")
    return failure


class _Failures:
    """A plugin of pytest that keeps the first failure, and whether it is that of a test."""

    first: str | None = None
    is_test = True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.first is None:
            self.first = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and self.first is None:
            self.first, self.is_test = report.nodeid, False


def _run_suite(suite: str, root: Path, sender: Any) -> None:
    import pytest

    os.chdir(root)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(root / "src"), str(root / "tests"), str(root)]
    sys.path.remove(str(ROOT / "tests"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mutations"]:
        del sys.modules[name]
    paths = [path for path in SUITES[suite].paths if (root / path).exists()]
    runs = [paths, ["tests/laws/test_laws.py", "-m", "", "-k", SUITES[suite].laws]] if SUITES[suite].laws else [paths]
    failures = _Failures()
    for arguments in runs:
        pytest.main([*arguments, "-x", "-q", "-n", "0", "-p", "no:cacheprovider"], plugins=[failures])
        if failures.first:
            break
    sender.send((failures.first, failures.is_test))
    sender.close()
    os._exit(0)


def _check(job: tuple[str, Mutation | None]) -> tuple[str, Mutation | None, str | None]:
    """One suite in a copy of its own, with or without a mutation, and its first failure."""
    suite, mutation = job
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, root / name)
        if mutation is not None:
            apply(mutation, root)
        return suite, mutation, first_failure(suite, root)


def check_all(
    jobs: Iterable[tuple[str, Mutation | None]], workers: int
) -> Iterator[tuple[str, Mutation | None, str | None]]:
    """The outcome of every job as it ends; `workers` run at a time."""
    from concurrent.futures import ThreadPoolExecutor, as_completed

    with ThreadPoolExecutor(workers) as pool:
        for future in as_completed([pool.submit(_check, job) for job in jobs]):
            yield future.result()


def read_results() -> dict[str, Any]:
    """The committed results by the mutation's name."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def main() -> None:
    """Check all mutations that have no result yet, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--no-write", action="store_true", help="leave results.json alone")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    digests = {mutation.name: mutation.digest() for mutation in MUTATIONS}
    results = {
        name: row for name, row in read_results().items() if row["change"] == digests.get(name) and row["caught"]
    }
    names = options.names or digests.keys() - results.keys()
    todo = [mutation for mutation in MUTATIONS if mutation.name in names]
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    for suite, _, failure in check_all([(suite, None) for suite in sorted({m.suite for m in todo})], options.jobs):
        print(f"{suite}: {failure or 'passes without a mutation'}", flush=True)
        if failure:
            sys.exit(f"The suite {suite} fails without a mutation: mend {failure} first.")
    for _, mutation, failure in check_all([(mutation.suite, mutation) for mutation in todo], options.jobs):
        assert mutation is not None
        results[mutation.name] = {"change": mutation.digest(), "caught": failure is not None, "by": failure}
        if not options.no_write:
            RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")
        print(f"{mutation.name}: {'caught by ' + failure if failure else 'MISSED'}", flush=True)


if __name__ == "__main__":
    main()
