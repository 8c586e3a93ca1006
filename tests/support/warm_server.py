"""Fork processes that run Python commands from a process that has imported torch: `python
warm_server.py FOLDER`. It ends with all its children at the end of its standard input, and has a
single thread."""

from __future__ import annotations

import array
import atexit
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

MODULES = ("tests.support.preloaded", "torch.distributed.run", "roadtrain.cli")
PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


class Command:
    """A forked process and the client that waits for it."""

    def __init__(self, link: socket.socket, pid: int) -> None:
        self.link, self.pid, self.pidfd = link, pid, os.pidfd_open(pid)

    def end(self) -> int:
        """Reap the process and return its wait status."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        return status


class Server:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._selector = selectors.DefaultSelector()
        self._commands: set[Command] = set()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(f"{folder}/server")
        self._listening.listen(64)

    def run(self) -> None:
        self._selector.register(0, selectors.EVENT_READ, None)
        self._selector.register(self._listening, selectors.EVENT_READ, None)
        going = True
        while going:
            # Ends first, so that a killed process is gone before the next starts.
            ready = sorted(self._selector.select(), key=lambda item: item[0].data is None)
            for key, _ in ready:
                if isinstance(key.data, Command):
                    if key.data in self._commands:
                        self._end(key.data, key.fileobj is key.data.link)
                elif key.fileobj is self._listening:
                    self._accept()
                else:
                    going = bool(os.read(0, 1))
        for command in list(self._commands):
            self._end(command, True)

    def _accept(self) -> None:
        link, _ = self._listening.accept()
        request = receive(link)
        if request is None:
            link.close()
            return
        groups, files = request
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until the child has its handlers
        pid = os.fork()
        if not pid:
            os.setpgid(0, 0)
            self._listening.close()
            self._selector.close()
            link.close()
            for command in self._commands:
                command.link.close()
                os.close(command.pidfd)
            become(groups, files, f"{self._folder}/bin/python")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        for file in files:
            os.close(file)
        with suppress(OSError):
            link.sendall(pid.to_bytes(8, "big"))
        command = Command(link, pid)
        self._commands.add(command)
        for file in (link, command.pidfd):
            self._selector.register(file, selectors.EVENT_READ, command)

    def _end(self, command: Command, is_killed: bool) -> None:
        """End a command. is_killed: The client has died, so its process is killed too."""
        if is_killed:
            os.kill(command.pid, signal.SIGKILL)
        self._commands.remove(command)
        self._selector.unregister(command.link)
        self._selector.unregister(command.pidfd)
        status = command.end()
        with suppress(OSError):
            command.link.sendall(status.to_bytes(8, "big"))
        command.link.close()


def receive(link: socket.socket) -> tuple[list[list[str]], list[int]] | None:
    """Return a request's groups of words and its three files, or None if the client has ended."""
    files = array.array("i")
    head, ancillary, _, _ = link.recvmsg(8, socket.CMSG_SPACE(3 * files.itemsize))
    for _, _, data in ancillary:
        files.frombytes(data)
    size, data = int.from_bytes(head, "big"), b""
    while len(head) == 8 and len(data) < size:
        if not (more := link.recv(size - len(data))):
            break
        data += more
    if len(head) < 8 or len(data) < size:
        for file in files:
            os.close(file)
        return None
    words = [
        [os.fsdecode(w) for w in group.split(b"\0")] if group else [] for group in data.split(b"\1")
    ]
    return words, list(files)


def become(groups: list[list[str]], files: list[int], executable: str) -> NoReturn:
    """Run the command in this forked process as a fresh interpreter would."""
    (directory, umask), ignored, words, environment = groups
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.chdir(directory)
    os.umask(int(umask))
    os.environ.clear()
    os.environ.update(entry.split("=", 1) for entry in environment)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN if str(int(number)) in ignored else signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    while words[0] in ("-u", "-B"):
        os.environ["PYTHONUNBUFFERED"] = "1"
        del words[0]
    sys.executable = executable
    through = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty(), write_through=through)
    sys.stderr.reconfigure(line_buffering=True, write_through=through)
    numpy = sys.modules["numpy"]
    numpy.random.seed()
    code = 0
    try:
        run_main(words)
    except SystemExit as end:
        code = exit_code(end)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finish(code)


def run_main(words: list[str]) -> None:
    """Run `-m MODULE ...` or `SCRIPT ...` as the program."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[:0] = [os.getcwd(), *filter(None, paths)]
        sys.modules.pop(words[1], None)  # the module becomes `__main__`, as in a fresh interpreter
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[:0] = [str(Path(words[0]).resolve().parent), *filter(None, paths)]
        main.__file__ = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


def exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def finish(code: int) -> NoReturn:
    """End as an interpreter does."""
    with suppress(BaseException):
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()  # noqa: SLF001
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main(folder: str) -> None:
    del sys.path[0]  # the folder of this file
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children then neither scan nor copy shared objects in garbage collection
    server = Server(folder)
    print("ready", flush=True)
    server.run()
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1])
