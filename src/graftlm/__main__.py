"""`python -m graftlm` is `graft`, for launchers that take a module."""

from graftlm.cli import main

if __name__ == "__main__":
    main()
