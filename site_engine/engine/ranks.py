"""The processes of a tensor group: start the followers of this one, join them, do what the leader announces.

A group is one engine for everybody else: its leader's process. The leader's end ends its followers, and a
follower's end the leader, so that what is started again is the whole group.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from site_engine.config import SiteConfig

if TYPE_CHECKING:
    import torch

    from site_engine.cuda.runner import DeviceRunner
    from site_engine.model.runner import PackedRunner
    from site_engine.model.tensor_group import TensorGroup

FOLLOWER = (sys.executable, "-m", "site_engine.follower_process")
"""Starts a follower's process; the numbers of its socket and of the group's store follow."""
LOOPBACK = "lo"


class Rank(NamedTuple):
    """The place of a process in its group of `size`. The ranks find each other by `store`, an open file."""

    number: int
    size: int
    store: int
    followers: tuple[Connection, ...] = ()
    on_failure: Callable[[BaseException], None] = lambda failure: None


def lead(config: SiteConfig, on_lost: Callable[[str], None]) -> Rank | None:
    """Start the processes of the other devices of `config.device`; None if it names one.

    `on_lost` is told, on another thread, why a rank has ended, and has to end this process.
    """
    devices = config.device.split("+")
    if len(devices) == 1:
        return None
    with tempfile.TemporaryFile() as file:
        store = os.dup(file.fileno())  # open as long as the group
    followers = []
    for number in range(1, len(devices)):
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                (*FOLLOWER, str(theirs.fileno()), str(store)),
                pass_fds=(theirs.fileno(), store),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        follower = Connection(ours.detach())
        follower.send((number, config))
        followers.append(follower)
        watch = threading.Thread(target=_watch, args=(number, process, follower, on_lost), daemon=True)
        watch.start()
    failed = "rank 0 failed within a step"
    return Rank(0, len(devices), store, tuple(followers), lambda failure: on_lost(f"{failed}: {failure!r}"))


def _watch(
    number: int, process: subprocess.Popen[bytes], follower: Connection, on_lost: Callable[[str], None]
) -> None:
    """Wait for a follower's end, of which it may give the reason."""
    try:
        reason = str(follower.recv())
    except (EOFError, OSError):
        reason = f"its process ended with status {process.wait()}"
    on_lost(f"rank {number} is lost: {reason}")


def join(rank: Rank, device: torch.device) -> TensorGroup:
    """Wait for the other ranks. Sums are NCCL's between GPUs, which CUDA graphs can have, and Gloo's else."""
    from torch import distributed

    from site_engine.model.descriptors import DescriptorExchange
    from site_engine.model.tensor_group import TensorGroup

    on_gpu = device.type == "cuda"
    os.environ.setdefault("NCCL_SOCKET_IFNAME" if on_gpu else "GLOO_SOCKET_IFNAME", LOOPBACK)
    store = distributed.FileStore(f"/dev/fd/{rank.store}", rank.size)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank.number,
        world_size=rank.size,
        device_id=device if on_gpu else None,
    )
    exchange = DescriptorExchange(store, rank.number, rank.size)
    return TensorGroup(distributed.group.WORLD, device, rank.followers, rank.on_failure, exchange)


def follow(announced: Callable[[], Any], reference: PackedRunner, runner: DeviceRunner | None = None) -> None:
    """Do what the leader announces until it is gone: steps of both runners, and what lies between."""
    from site_engine.model.kv_cache import Fill
    from site_engine.model.runner import PackedStep

    while True:
        try:
            message = announced()
        except (EOFError, OSError):
            return
        match message:
            case PackedStep():
                reference.play(message)
            case Fill():
                reference.kv_cache.fill(message.pages, message.number)
            case _:
                assert runner is not None
                runner.obey(message)
