"""A follower's process: `python -m site_engine.follower_process` DESCRIPTOR STORE, of its leader's socket and
the file by which ranks find each other.

Loads its share of the model and computes every step that the leader announces; it knows no requests. Started
by `site_engine/engine/ranks.py`; alone it is of no use.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

from site_engine.engine.child import end_with_parent, see_one_device
from site_engine.engine.loading import load_follower
from site_engine.engine.ranks import Rank, follow
from site_engine.errors import ConfigError
from site_engine.optional_packages import UNUSED, hide
from site_engine.telemetry import logs

log = logging.getLogger("site_engine.follower_process")  # this module is run as __main__


def main(descriptor: int, store: int) -> int:
    """Follow over an inherited socket until the leader is gone; return the exit status."""
    end_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # for the site's process, which ends all others in order
        signal.signal(number, signal.SIG_IGN)
    leader = Connection(descriptor)
    number, config = leader.recv()
    logs.set_up(config.log_level, config.site)
    devices = config.device.split("+")
    try:
        follower = load_follower(config, see_one_device(devices[number]), Rank(number, len(devices), store))
    except ConfigError as exc:
        leader.send(str(exc))
        return 1
    log.info("rank %d of %s runs in process %d", number, config.device, os.getpid())
    follow(leader.recv, *follower)
    return 0


if __name__ == "__main__":
    hide(*UNUSED)
    os._exit(main(int(sys.argv[1]), int(sys.argv[2])))
