"""Measure exports in vLLM.

python -m integrations.vllm table --out integrations/vllm/results.json    # goes on with what is missing
python -m integrations.vllm families                                      # the list that the package contains
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from graftlm.evaluation import Results
from integrations.vllm.environment import UNAVAILABLE, UnavailableError, find_python
from integrations.vllm.table import FAMILIES_FILE, families_text, measure


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m integrations.vllm", description="Measure exports in vLLM.")
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table", help="kinds of grafts by families of models")
    table.add_argument("--out", type=Path, required=True, metavar="FILE", help="results.json; report.md is next to it")
    table.add_argument("--family", action="append", metavar="NAME", help="a family; by default all")
    commands.add_parser("families", help="write the list of families that vLLM can't run, from the committed table")
    options = parser.parse_args()
    if options.command == "families":
        results = Results.read(Path(__file__).parent)
        FAMILIES_FILE.write_text(families_text(results), encoding="utf-8")
        return
    try:
        python = find_python()
    except UnavailableError as error:
        print(error, file=sys.stderr)
        raise SystemExit(UNAVAILABLE) from error
    measure(python, options.out, options.family)


if __name__ == "__main__":
    main()
