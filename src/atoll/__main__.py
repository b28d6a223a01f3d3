"""`python -m atoll` is the command line."""

from __future__ import annotations

from atoll.cli.main import main

if __name__ == "__main__":
    main()
