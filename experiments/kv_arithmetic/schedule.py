"""Parents, and the jobs that need them, several processes at a time with one core each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.cells import workers
from experiments.kv_arithmetic.joint import Job, run_job
from experiments.kv_arithmetic.parents import DONE, Parent, make_parent


def run_jobs(jobs: Sequence[Job], out: Path, *, processes: int, title: str) -> dict[str, dict[str, Any]]:
    """Make what is not there yet, each job after its parents; measurements by job id."""
    if processes == 1:  # a process of its own takes longer to start than a small model to train
        for parent in {parent.key(): parent for job in jobs for parent in job.parents}.values():
            make_parent(parent, out / "parents")
        return {job.id: run_job(job, out) for job in jobs}
    waiting = {job.id: job for job in jobs}
    parents = {parent.key(): parent for job in jobs for parent in job.parents}
    made = {key for key, parent in parents.items() if (parent.folder(out / "parents") / DONE).exists()}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    found: dict[str, dict[str, Any]] = {}
    with Progress(*columns) as progress, workers(processes) as pool:
        bar = progress.add_task(title, total=len(waiting) + len(parents) - len(made))
        running: dict[Future[str], str] = {
            pool.submit(_make, parent.model_dump_json(), str(out / "parents")): key
            for key, parent in parents.items()
            if key not in made
        }
        while running or waiting:
            running |= _ready(waiting, made, pool, out)
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                key = running.pop(future)
                said = json.loads(future.result())
                if key in parents:
                    made.add(key)
                else:
                    found[key] = said
                progress.advance(bar)
    return {job.id: found[job.id] for job in jobs}


def _ready(waiting: dict[str, Job], made: set[str], pool: ProcessPoolExecutor, out: Path) -> dict[Future[str], str]:
    """Hand over the jobs whose parents are made."""
    ready = [job for job in waiting.values() if all(parent.key() in made for parent in job.parents)]
    for job in ready:
        del waiting[job.id]
    return {pool.submit(_run, job.model_dump_json(), str(out)): job.id for job in ready}


def _make(text: str, parents: str) -> str:
    torch.set_num_threads(1)
    return json.dumps(str(make_parent(Parent.model_validate_json(text), Path(parents))))


def _run(text: str, out: str) -> str:
    torch.set_num_threads(1)
    return json.dumps(run_job(Job.model_validate_json(text), Path(out)))
