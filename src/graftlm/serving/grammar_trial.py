"""A script that compiles a grammar from standard input within limits on CPU time and memory.

Its arguments are the limits: seconds of CPU time, and bytes of memory. Above them it ends with a signal or an error.
"""

from __future__ import annotations

import resource
import sys


def main() -> None:
    """Compile the grammar on standard input, and exit without a result. Invalid grammars are no error here."""
    seconds = int(sys.argv[1])
    memory = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    from llguidance import LLMatcher, LLTokenizer

    LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0)


if __name__ == "__main__":
    main()
