"""The `python`, `roadtrain` and `torchrun` of warm_python.py: let the server fork a process that
runs the command, forward signals to it, and end with its status. Other commands replace this
process with the real interpreter. Imports little, since it exists to save start-up time."""

import _socket
import os
import signal
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(sys.argv[0])))
# Commands that import torch or numba, or that may be forked instead of started.
MODULES = {
    "roadtrain",
    "roadtrain.cli",
    "roadtrain.planner.calibrate_steps",
    "roadtrain.relay.relay",
    "torch.distributed.run",
}
NOT_FORKED = (["launch"], ["lab"])  # commands that start processes and import neither
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def is_forked(words: list[str]) -> bool:
    """Whether the server runs these arguments of `python`."""
    rest = [word for word in words if word not in ("-u", "-B")]
    if rest[:1] == ["-m"]:
        return rest[1] in MODULES and rest[2:3] not in NOT_FORKED
    is_script = bool(rest) and not rest[0].startswith("-") and "/ray/" not in rest[0]
    return is_script and rest[1:2] not in NOT_FORKED


def run_forked(words: list[str]) -> None:
    """Run the command to its end and end in the same way."""
    child = [0]
    waiting: list[int] = []

    def pass_on(number: int, _: object) -> None:
        if child[0]:
            os.kill(child[0], number)
        else:
            waiting.append(number)

    ignored = []
    for number in PASSED_ON:
        if signal.getsignal(number) == signal.SIG_IGN:
            ignored.append(str(int(number)))
        else:
            signal.signal(number, pass_on)
    umask = os.umask(0o22)
    os.umask(umask)
    environment = [f"{name}={value}" for name, value in os.environ.items()]
    groups = [[os.getcwd(), str(umask)], ignored, words, environment]
    request = b"\1".join(b"\0".join(map(os.fsencode, group)) for group in groups)
    link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    link.connect(f"{ROOT}/server")
    standard = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    link.sendmsg(
        [len(request).to_bytes(8, "big")],
        [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, standard)],
    )
    link.sendall(request)
    child[0] = _number(link)
    for number in waiting:
        os.kill(child[0], number)
    status = _number(link)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) in PASSED_ON:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _number(link: _socket.socket) -> int:
    data = b""
    while len(data) < 8:
        more = link.recv(8 - len(data))
        if not more:
            sys.exit("the server of warm Python processes has ended")
        data += more
    return int.from_bytes(data, "big")


def main() -> None:
    own, *words = sys.argv
    name = os.path.basename(own)
    python = os.readlink(f"{ROOT}/python")
    if name != "python":  # a script in the interpreter's folder
        words.insert(0, os.path.join(os.path.dirname(python), name))
    if is_forked(words):
        run_forked(words)
    # by this name, so that the processes it starts are warm too
    os.execv(python, [f"{ROOT}/bin/python", *words])


main()
