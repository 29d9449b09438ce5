"""Python with torch already imported: `WARM_PYTHON` stands for `[sys.executable]`.

    subprocess.run([*WARM_PYTHON, "-c", "import torch; ..."])

A program takes two seconds to import torch, and as many for what torch imports with its first
optimizer. Here a server imports both once, in a process that does nothing else, and forks for each
program. The program has the arguments, environment, folder, first three descriptors and exit status
of a process of its own. The command waits for it, hands signals on to it, and takes it along when
it is killed.

A program that must not find torch imported, measures itself or is traced needs `sys.executable`.
Without a server, and for an environment in which Python would start in another way, the command
becomes an ordinary Python. tests/conftest.py starts the server and ends it; it imports torch when
the first program comes.
"""

import array
import json
import os
import signal
import socket
import sys

SOCKET = "TENSORFERRY_WARM_PYTHON"
WARM_PYTHON = [sys.executable, "-I", "-S", __file__]
# For the PATH of programs that start Python: the python3 in this folder is WARM_PYTHON.
WARM_FOLDER = os.path.dirname(os.environ.get(SOCKET, sys.executable))
# What Python and its libraries read when they start.
READ_AT_START = ("PYTHONPATH", "PYTHONHOME", "LD_PRELOAD", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
IMPORTED = ("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint")
FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


# ---- the command ---------------------------------------------------------------------------------


def is_program(words):
    """Whether they say what to run, in a way that the server knows."""
    while words[:1] == ["-X"]:
        words = words[2:]
    return bool(words) and (words[0] in ("-c", "-m") or not words[0].startswith("-"))


def ask(server, words):
    """Has the server run a program. Returns how it ended, as os.waitpid() does, or None if the
    server does not take it."""
    ignored = [int(number) for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    request = dict(words=words, env=dict(os.environ), folder=os.getcwd(), ignored=ignored)
    data = json.dumps(request).encode()
    fds = array.array("i", [0, 1, 2])
    server.sendmsg([len(data).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    server.sendall(data)
    answers = server.makefile()
    process = json.loads(answers.readline() or "null")
    if process is None:
        return None
    for number in FORWARDED:
        if number not in ignored:
            signal.signal(number, lambda number, _: os.kill(process, number))
    return json.loads(answers.readline())


def main(words):
    status = None
    if SOCKET in os.environ and is_program(words):
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.connect(os.environ[SOCKET])
                status = ask(server, words)
        except (ConnectionError, FileNotFoundError):
            pass
    if status is None:
        os.execv(sys.executable, [sys.executable, *words])
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # it ends as the program did
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# ---- the server ----------------------------------------------------------------------------------


def receive(client):
    """What a client asks for, and its descriptors."""
    size, messages, _, _ = client.recvmsg(8, socket.CMSG_SPACE(12))
    fds = array.array("i")
    for _, _, data in messages:
        fds.frombytes(data)
    data = b""
    while len(data) < int.from_bytes(size, "little"):
        data += client.recv(1 << 20)
    return json.loads(data), list(fds)


def watch(client, process):
    """Tells the client how the program has ended, or ends it when the client is gone."""
    ended = os.pidfd_open(process)
    ready, _, _ = select.select([ended, client], [], [])
    if ended not in ready:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    try:
        client.sendall(b"%d\n" % status)
    except OSError:
        pass
    os._exit(0)


def answer(client):
    """Forks the process of a program, and returns in it with what it is to do."""
    request, fds = receive(client)
    if any(request["env"].get(name) != os.environ.get(name) for name in READ_AT_START):
        client.sendall(b"null\n")
        os._exit(0)
    process = os.fork()
    if process > 0:
        client.sendall(b"%d\n" % process)
        watch(client, process)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    client.close()
    return request


def bury():
    """Waits for those that have ended, so that their time counts as time of the tests."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


def serve(path):
    """Returns in a process for each program, with what it is to do. Ends with standard input."""
    imported = False
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("listening", flush=True)
        while True:
            ready, _, _ = select.select([0, listener], [], [])
            bury()
            if 0 in ready:
                os._exit(0)
            client, _ = listener.accept()
            if not imported:
                for name in IMPORTED:
                    importlib.import_module(name)
                gc.collect()
                gc.freeze()
                imported = True
            if os.fork() == 0:
                listener.close()
                return answer(client)
            client.close()


def become(words, env, folder, ignored):
    """Makes this process the one that the client asked for, and runs the program."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    tempfile.tempdir = None  # another variable may name it
    for number in FORWARDED:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else usual)
    while words[0] == "-X":
        if words[1] == "faulthandler":
            faulthandler.enable()
        words = words[2:]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = folder
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if words[0] == "-c":
        sys.argv, sys.path[0], source, name = ["-c", *words[2:]], "", words[1], "<string>"
    else:
        sys.argv, sys.path[0], name = words, os.path.dirname(os.path.abspath(words[0])), words[0]
        module.__file__ = name
        with open(name) as file:
            source = file.read()
    exec(compile(source, name, "exec"), module.__dict__)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--serve"]:
        main(sys.argv[1:])
    import faulthandler
    import gc
    import importlib
    import runpy
    import select
    import tempfile
    import types

    become(**serve(sys.argv[2]))
