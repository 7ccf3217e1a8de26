"""Start a module as a process by forking one that has imported it: imports cost most of what a test's engine
does. `fork` is to the tests' engines what `spawn` is to a site's, and `fork_command` to commands.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from site_engine.engine.process_spawn import Spawned, spawn
from site_engine.optional_packages import UNUSED, hide

PR_SET_CHILD_SUBREAPER = 36
LONGEST_REQUEST_BYTES = 1 << 20
WITHIN_S = 240.0
CAN_FORK = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
"""Not with CUDA, which does not work in a process whose parent has looked for GPUs before it forked."""
SERVERS: set[int] = set()
"""The ids of fork servers, which are children of this process that no test has started."""


def environment() -> dict[str, str]:
    """Return an environment in which packages are found where this process finds them."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def fork(module: str, *imports: str) -> Spawned:
    """Start `python -m MODULE DESCRIPTOR` from a process with `imports`; it is a child of this one."""
    if not CAN_FORK:
        return spawn((sys.executable, "-m", module))
    ours, theirs = socket.socketpair()
    with theirs:
        return Spawned(Forked(Start(module, (module, *imports)), descriptor=theirs.fileno()), ours)


def fork_command(
    module: str, arguments: Sequence[str], imports: Sequence[str], output: int, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS`, which writes to `output`, from a process with `imports`."""
    if not CAN_FORK:
        command = (sys.executable, "-m", module, *arguments)
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ)
    start = Start(module, tuple(imports), tuple(arguments), dict(environ))
    return Forked(start, output, output)


@dataclass(frozen=True, slots=True)
class Start:
    """What a process is to run, and what the fork server imports before it is forked."""

    module: str
    imports: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=environment)


class Forked(subprocess.Popen[bytes]):
    """A child that the fork server has made. The number of its `descriptor` is its last argument."""

    def __init__(self, start: Start, output: int = 1, errors: int = 2, descriptor: int | None = None) -> None:
        self._start = start
        self._descriptors = [output, errors, *([] if descriptor is None else [descriptor])]
        super().__init__(start.module)

    def _execute_child(self, *_: object) -> None:
        self.pid = fork_server(os.getpid()).fork(self._start, self._descriptors)
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
                env={**environment(), "OMP_NUM_THREADS": "1"},  # others of its threads would be missing
            )
        self.pid = self._process.pid
        atexit.register(self._end)

    def fork(self, start: Start, descriptors: Sequence[int]) -> int:
        """Return the id of a process that runs the module. It becomes this one's child as an orphan does."""
        asked = {**asdict(start), "path": sys.path, "folder": str(Path.cwd())}
        with self._lock:
            self._prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._requests, [json.dumps(asked).encode()], descriptors)
                answer = self._requests.recv(64)
            finally:
                self._prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise ChildProcessError(f"the fork server could not start {start.module}")
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


# ---- in the fork server


def serve(requests: socket.socket) -> None:
    """Fork for each request, on the only thread that there is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hide(*UNUSED)  # as an engine's process does
    importlib.import_module("site_engine.text.grammar")  # which every engine imports as it starts
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, LONGEST_REQUEST_BYTES, 3)
        if not message:
            return
        asked = json.loads(message)
        for each in asked["imports"]:
            importlib.import_module(each)
        threads = len(list(Path("/proc/self/task").iterdir()))
        assert threads == 1, f"a fork would lack a thread that one of {asked['imports']} has started"
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
        run(asked, descriptors)
    os.close(gate)
    os.waitpid(between, 0)
    os.close(opener)


def run(asked: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Run the module as Python would that was started for it."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output, errors, *given = descriptors
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.close(output)
        os.close(errors)
        os.environ.clear()
        os.environ.update(asked["environ"])
        os.chdir(asked["folder"])
        sys.path[:] = asked["path"]
        sys.argv[:] = [asked["module"], *asked["arguments"], *map(str, given)]
        if asked["module"] in asked["imports"]:
            del sys.modules[asked["module"]]
        runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else bool(exc.code)
    except BaseException:  # noqa: BLE001 - it must not go on as the fork server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)
