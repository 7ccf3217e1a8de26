"""Run `mico`, also as `python -m mico`, which starts the local federation's processes independent of PATH."""

import sys

INTERRUPTED = 130


def main() -> int:
    """Run a command and return its exit status, including for Ctrl-C during the import of the commands."""
    try:
        from mico.cli import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
