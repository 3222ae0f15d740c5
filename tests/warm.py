"""Python commands without their start-up: each runs in a process forked from a server that has imported torch and transformers.

`start()` runs `python ARGUMENTS` this way for a test. A launcher runs a rank this way with `python -S tests/warm.py ARGUMENTS` in place of
`python ARGUMENTS`; that client imports nothing heavy, hands its files and environment to the server and exits with the rank's exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys

#: The variable with the path of the server's socket.
ADDRESS = "TANNSCHEN_TEST_SERVER"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: Above the numbers that a launcher gives to files it passes on.
FIRST_FD = 500


class Process:
    """A command in a process of the server.

    Attributes:
        pid: its process id.
    """

    def __init__(self, arguments: list[str], environment: dict[str, str], files: dict[int, int]) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ[ADDRESS])
        request = {"arguments": arguments, "environment": environment, "directory": os.getcwd(), "files": list(files)}
        socket.send_fds(self._connection, [b"F"], list(files.values()))
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._connection.makefile()
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self.returncode if self.returncode is not None or not self._readable(0) else self.wait()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code once it has ended. After `timeout` seconds it is killed and TimeoutError raised."""
        if self.returncode is None:
            if timeout is not None and not self._readable(timeout):
                self.kill()
                raise TimeoutError(f"process {self.pid} took more than {timeout} s")
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.send_signal(signal.SIGKILL)
            self.wait()

    def _readable(self, seconds: float) -> bool:
        waiting = select.poll()  # select() refuses file numbers from 1,024 on
        waiting.register(self._connection, select.POLLIN)
        return bool(waiting.poll(seconds * 1000))


def start(*arguments: object, environment: dict[str, str], output: int | None = None, pass_fds: tuple[int, ...] = ()) -> Process:
    """Start `python ARGUMENTS`: a script, or -m and a module, or -c and code; then what sys.argv has.

    Args:
        environment: all of its variables.
        output: file descriptor for both of its streams; they are discarded without one.
        pass_fds: file descriptors that it gets under the same numbers.
    """
    with open(os.devnull, "r+") as nothing:
        output = nothing.fileno() if output is None else output
        files = {0: nothing.fileno(), 1: output, 2: output, **{fd: fd for fd in pass_fds}}
        return Process([str(argument) for argument in arguments], environment, files)


# --- the server ----------------------------------------------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Fork a process for every request until standard input ends. Returns in the process that is to run a command."""
    import gc

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(128)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if 0 in select.select([listener, 0], [], [])[0]:
        return  # the tests have ended, and none of them has run a command
    load()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while 0 not in (ready := select.select([listener.fileno(), 0], [], [])[0]):
        assert ready
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            watch(connection)
        connection.close()


def load() -> None:
    """Import what commands and ranks of the tests need, but nothing that starts a thread."""
    import copy
    import functools
    import pickle
    import pkgutil
    import weakref
    from importlib import import_module
    from types import SimpleNamespace

    sys.path[0] = ROOT
    names = [
        "torch",
        "torch.distributed.pipelining",
        "hypothesis",
        "pytest",
        "hydra._internal.hydra",
        "omegaconf",
        "tokenizers",
        "webdataset",
    ]
    names += ["transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"]
    names += [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama")]
    import pipeline

    names += [module.name for module in pkgutil.walk_packages(pipeline.__path__, "pipeline.") if not module.name.endswith("__main__")]
    for name in names:
        import_module(name)
    import_module("pipeline.config.compose").register()
    import_module("hydra.core.plugins").Plugins.instance()  # it looks for plugins in all packages
    # A composition copies the schemas that it reads: here by pickle, and without a copy of all others before. It takes a third less time.
    store = import_module("hydra.core.config_store")
    store.ConfigStore.__deepcopy__ = lambda schemas, _: schemas
    store.copy = SimpleNamespace(copy=copy.copy, deepcopy=lambda node: pickle.loads(pickle.dumps(node)))
    files = import_module("omegaconf._utils")
    files.get_yaml_loader = functools.cache(files.get_yaml_loader)
    for finalizer in weakref.finalize._registry.values():  # PyTorch's libraries of operators would be taken apart at each process's end
        finalizer.atexit = False


def watch(connection: socket.socket) -> None:
    """Run a request in a child, and tell the client its process id and exit code. The child ends with the client."""
    _, files, _, _ = socket.recv_fds(connection, 1, 32)
    with connection.makefile() as lines:
        request = json.loads(lines.readline())
    child = os.fork()
    if child == 0:
        run(request, files)
    for fd in files:
        os.close(fd)
    connection.sendall(b"%d\n" % child)
    ended = os.pidfd_open(child)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(b"%d\n" % code)
    os._exit(0)


def run(request: dict, files: list[int]) -> None:
    """Be the command."""
    import atexit
    import ctypes
    import fcntl
    import threading
    import traceback

    safe = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD) for fd in files]
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {*safe, 0, 1, 2}:
        with contextlib.suppress(OSError):
            os.close(fd)
    for fd, number in zip(safe, request["files"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        execute(*request["arguments"])
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if code and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if mpi := sys.modules.get("mpi4py.MPI"):
        if not mpi.Is_finalized():
            mpi.Finalize()
        ctypes.PyDLL(None).exit(code & 0xFF)  # MPICH takes its leave of mpirun in a handler of libc
    os._exit(code & 0xFF)


def execute(first: str, *arguments: str) -> None:
    """As `python FIRST ARGUMENTS`."""
    import runpy

    if first == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        first, *arguments = arguments
    if first == "-m":
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *arguments]
        sys.path.insert(0, os.path.dirname(first))
        runpy.run_path(first, run_name="__main__")


def client() -> int:
    """Be a rank of a launcher: the command runs in the server, with this process's files, environment and end."""
    environment = dict(os.environ)
    passed = [int(environment[name]) for name in ("PMI_FD",) if name in environment]
    process = Process(sys.argv[1:], environment, {fd: fd for fd in (0, 1, 2, *passed)})
    signal.signal(signal.SIGUSR1, lambda number, _: process.send_signal(number))  # that of Slurm before the end of a job
    return process.wait()


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        sys.exit(client() % 256)
