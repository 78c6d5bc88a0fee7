"""A script that compiles a grammar from standard input within limits on CPU time and memory.

Its arguments are the limits: seconds of CPU time, and bytes of memory. Above the time it ends with SIGXCPU or SIGKILL.
Above the memory it ends with SIGABRT, with which Rust reports a failed allocation, or with the status `OUT_OF_MEMORY`.
"""

from __future__ import annotations

import resource
import sys

OUT_OF_MEMORY = 90
"""Exit status if Python could not allocate memory."""


def main() -> None:
    """Compile the grammar on standard input, and exit without a result. Invalid grammars are no error here."""
    seconds = int(sys.argv[1])
    memory = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    from llguidance import LLMatcher, LLTokenizer

    LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0)


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
