"""Start a module as a process by forking one that has imported it: imports cost most of what a test's engine
does. `fork` is to the tests' engines what `spawn` is to a site's.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from site_engine.engine.process_spawn import Spawned, spawn

PR_SET_CHILD_SUBREAPER = 36
LONGEST_REQUEST_BYTES = 1 << 20
WITHIN_S = 240.0
CAN_FORK = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
"""Not with CUDA, which does not work in a process whose parent has looked for GPUs before it forked."""
SERVERS: set[int] = set()
"""The ids of fork servers, which are children of this process that no test has started."""


def fork(module: str) -> Spawned:
    """Start `python -m MODULE DESCRIPTOR`; the process is a child of this one."""
    if not CAN_FORK:
        return spawn((sys.executable, "-m", module))
    ours, theirs = socket.socketpair()
    with theirs:
        return Spawned(Forked((module, str(theirs.fileno()))), ours)


class Forked(subprocess.Popen[bytes]):
    """A child that the fork server has made."""

    def _execute_child(self, args: Sequence[str], *rest: object) -> None:
        module, descriptor = args
        self.pid = fork_server(os.getpid()).fork(module, int(descriptor))
        self._child_created = True


class ForkServer:
    """The process that imports and forks. It ends once its socket has closed, as it has with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prctl = ctypes.CDLL(None).prctl
        self._requests, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._requests.settimeout(WITHIN_S)
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "tests.support.forked", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=environment(),
            )
        self.pid = self._process.pid
        atexit.register(self._end)

    def fork(self, module: str, descriptor: int) -> int:
        """Return the id of a process that runs the module. It becomes this one's child as an orphan does."""
        asked = {"module": module, "environ": environment(), "path": sys.path, "folder": str(Path.cwd())}
        with self._lock:
            self._prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._requests, [json.dumps(asked).encode()], [descriptor, 1, 2])
                answer = self._requests.recv(64)
            finally:
                self._prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise ChildProcessError(f"the fork server could not start {module}")
        return int(answer)

    def _end(self) -> None:
        self._requests.close()
        self._process.kill()
        self._process.wait()


@cache
def fork_server(pid: int) -> ForkServer:
    """Return the fork server of the process `pid`, which is this one."""
    server = ForkServer()
    SERVERS.add(server.pid)
    return server


def environment() -> dict[str, str]:
    """Return an environment in which packages are found where this process finds them."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


# ---- in the fork server


def serve(requests: socket.socket) -> None:
    """Fork for each request, on the only thread that there is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    importlib.import_module("site_engine.text.grammar")  # which every engine imports as it starts
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, LONGEST_REQUEST_BYTES, 3)
        if not message:
            return
        asked = json.loads(message)
        importlib.import_module(asked["module"])
        gc.freeze()
        fork_orphan(requests, asked, descriptors)
        for each in descriptors:
            os.close(each)


def fork_orphan(requests: socket.socket, asked: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Fork a process that answers with its id, and then runs, once it has its new parent."""
    gate, opener = os.pipe()
    between = os.fork()
    if not between:
        if os.fork():
            os._exit(0)
        os.close(opener)
        os.read(gate, 1)  # nothing, as `between` has ended
        os.close(gate)
        with requests:
            requests.send(b"%d" % os.getpid())
        run(asked, *descriptors)
    os.close(gate)
    os.waitpid(between, 0)
    os.close(opener)


def run(asked: dict[str, Any], descriptor: int, output: int, errors: int) -> NoReturn:
    """Run the module as Python would that was started for it."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for given, place in ((output, 1), (errors, 2)):
            os.dup2(given, place)
            os.close(given)
        os.environ.clear()
        os.environ.update(asked["environ"])
        os.chdir(asked["folder"])
        sys.path[:] = asked["path"]
        sys.argv[:] = [asked["module"], str(descriptor)]
        del sys.modules[asked["module"]]
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:  # noqa: BLE001 - it must not go on as the fork server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)
