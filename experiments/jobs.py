"""Many independent pieces of work of one experiment, several processes at a time, each finished one kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any, TypeVar

import torch

from experiments.cells import progress_bar, workers
from graftlm.config import Config
from graftlm.io import write_atomically

MEASURED = "measurement.json"
J = TypeVar("J", bound="Job")


class Job(Config):
    """One piece of work.

    Args:
        id: its folder's name, unique in the experiment.
        after: `digest` of what it begins with that other jobs made: with another, it is another piece of work.
    """

    id: str
    after: str = ""

    def key(self) -> str:
        """SHA-256 over all settings but the name."""
        left_out = {"id"} if self.after else {"id", "after"}
        return hashlib.sha256(self.model_dump_json(exclude=left_out).encode()).hexdigest()


def digest(*values: Any) -> str:
    """SHA-256 over plain JSON values, such as keys of jobs and what they found."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def run_jobs(
    jobs: Sequence[J], work: Callable[[J, Path], Mapping[str, Any]], out: Path, *, processes: int, title: str
) -> dict[str, dict[str, Any]]:
    """Do what was not done before in `out` with the same settings; what was measured, by job id.

    Args:
        jobs: in the order in which they are begun.
        work: gives what a job measured, as plain JSON values; a function of a module, which a new process finds.
        out: where each job has a folder, which `work` is given.
        processes: at a time, with one core each.
        title: what the progress bar says.
    """
    found = {job.id: kept for job in jobs if (kept := _read(out / job.id, job.key())) is not None}
    left = [job for job in jobs if job.id not in found]
    with progress_bar() as progress:
        bar = progress.add_task(title, total=len(jobs), completed=len(found))
        if processes == 1:  # a process of its own takes longer to start than a small model to train
            for job in left:
                found[job.id] = _do(job, work, out)
                progress.advance(bar)
        elif left:
            with workers(processes) as pool:
                futures = {pool.submit(_do_alone, job, work, str(out)): job.id for job in left}
                for future in as_completed(futures):
                    found[futures[future]] = json.loads(future.result())
                    progress.advance(bar)
    return {job.id: found[job.id] for job in jobs}


def _do(job: J, work: Callable[[J, Path], Mapping[str, Any]], out: Path) -> dict[str, Any]:
    found = dict(work(job, out / job.id))
    write_atomically(out / job.id / MEASURED, json.dumps({"key": job.key()} | found, indent=1).encode())
    return found


def _do_alone(job: J, work: Callable[[J, Path], Mapping[str, Any]], out: str) -> str:
    torch.set_num_threads(1)
    return json.dumps(_do(job, work, Path(out)))


def _read(folder: Path, key: str) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / MEASURED).read_text(encoding="utf-8"))
        return found if found.pop("key") == key else None
    except (OSError, ValueError, KeyError):
        return None
