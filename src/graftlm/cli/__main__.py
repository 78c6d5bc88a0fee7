"""`python -m graftlm.cli`, for launchers that take a module, is `graft`."""

from graftlm.cli import main

if __name__ == "__main__":
    main()
