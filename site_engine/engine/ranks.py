"""The processes of a tensor-parallel group: start followers, join the group, run what the leader announces.

To all others a group is one engine, its leader's process. If the leader ends, its followers end, and if a
follower ends, the leader ends, so that the group is restarted as a whole.
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
"""Command that starts a follower; the file descriptors of its socket and the group's store are appended."""
LOOPBACK = "lo"


class Rank(NamedTuple):
    """The rank of a process in its group of `size`. `store`: descriptor of the file that joins the ranks."""

    number: int
    size: int
    store: int
    followers: tuple[Connection, ...] = ()
    on_failure: Callable[[BaseException], None] = lambda failure: None


def lead(config: SiteConfig, on_lost: Callable[[str], None]) -> Rank | None:
    """Start the processes of the other devices of `config.device`; None if it names one.

    `on_lost` is called on another thread with the reason why a rank has ended, and must end this process.
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
    """Wait for a follower's end and report it, with the reason if the follower sent one."""
    try:
        reason = str(follower.recv())
    except (EOFError, OSError):
        reason = f"its process ended with status {process.wait()}"
    on_lost(f"rank {number} is lost: {reason}")


def join(rank: Rank, device: torch.device) -> TensorGroup:
    """Wait for the other ranks. Sums use NCCL between GPUs, which CUDA graphs can capture, and Gloo else."""
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
    """Run what the leader announces, steps of both runners and fills of pages, until it disconnects."""
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
