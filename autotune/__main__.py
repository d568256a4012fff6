"""`python -m autotune`: the command line."""

import sys

from autotune.cli import main


def run() -> int:
    """Run the command line with this process's arguments; return its exit code."""
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
