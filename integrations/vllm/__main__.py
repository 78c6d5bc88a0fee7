"""Measure exports in vLLM: `python -m integrations.vllm table`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from integrations.vllm.environment import UNAVAILABLE, UnavailableError, find_python
from integrations.vllm.table import measure


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m integrations.vllm", description="Measure exports in vLLM.")
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table", help="kinds of grafts by families of models")
    table.add_argument("--out", type=Path, required=True, metavar="FILE", help="results.json; report.md is next to it")
    table.add_argument("--family", action="append", metavar="NAME", help="a family; by default all")
    options = parser.parse_args()
    try:
        python = find_python()
    except UnavailableError as error:
        print(error, file=sys.stderr)
        raise SystemExit(UNAVAILABLE) from error
    measure(python, options.out, options.family)


if __name__ == "__main__":
    main()
