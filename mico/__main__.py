"""Run `mico` as `python -m mico`: the local federation starts its processes so, whatever PATH says."""

import sys

from mico.cli import main

sys.exit(main())
