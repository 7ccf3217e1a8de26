"""Run `mico`, also as `python -m mico`: the local federation starts its processes so, whatever PATH says."""

import sys

INTERRUPTED = 130


def main() -> int:
    """Run a command and return its exit status, also where Ctrl-C comes before the commands are imported."""
    try:
        from mico.cli import main as run

        return run()
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
