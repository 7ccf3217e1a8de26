"""`python -m mico` is `mico`: how the local federation starts its processes whatever PATH says."""

import sys

from mico.cli import main

sys.exit(main())
