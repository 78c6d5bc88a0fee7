"""`python -m graftlm` is `graft`."""

from graftlm.cli import main

if __name__ == "__main__":
    main()
