"""Ranks that fork from one program, which has imported torch: that takes longer than what they do.

serve(functions)    # in the program: at its end
run(2, "name", 3)   # in a test: calls name(3) on two ranks
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import traceback


@contextlib.contextmanager
def ranks_of(job):
    """Starts a program. Yields run(number of ranks, name of a function, its arguments...), which
    returns what each rank returned."""
    from warm_python import WARM_PYTHON  # the program itself does not find it

    process = subprocess.Popen(
        [*WARM_PYTHON, job],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
    )

    def run(ranks, function, *arguments):
        print(json.dumps([ranks, function, *arguments]), file=process.stdin, flush=True)
        answer = json.loads(process.stdout.readline())
        failed = [text for rank, text in enumerate(answer) if isinstance(text, str)]
        assert not failed, "\n".join(failed)
        return [value for (value,) in answer]

    yield run
    process.stdin.close()
    assert process.wait(timeout=60) == 0


def word_of(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def run_rank(rank, ranks, port, function, arguments):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    result = function(*arguments)
    dist.barrier()
    return result


def fork_rank(*job):
    """Returns (process, where its answer can be read)."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = [run_rank(*job)]
        except BaseException:
            answer = f"rank {job[0]}: {traceback.format_exc()}"
        with open(writing, "w") as file:
            json.dump(answer, file)
        os._exit(0)  # torch 2.13 with gloo sometimes aborts at exit
    os.close(writing)
    return child, reading


def serve(functions):
    """Runs what comes in on standard input."""
    for line in sys.stdin:
        ranks, name, *arguments = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        forked = [fork_rank(rank, ranks, port, functions[name], arguments) for rank in range(ranks)]
        answers = []
        for child, reading in forked:
            with open(reading) as file:
                text = file.read()
            os.waitpid(child, 0)
            answers.append(json.loads(text) if text else "a rank ended without a word")
        print(json.dumps(answers), flush=True)
