"""A program that tests/shared/warm_python.py forks is one like any other, and has torch."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from warm_python import WARM_FOLDER, WARM_PYTHON

pytest.importorskip("torch")


def run(*words, python=WARM_PYTHON, **options):
    return subprocess.run([*python, *words], capture_output=True, text=True, **options)


SELF = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ["WORD"], sys.stdin.read(), __name__]))
print("torch" in sys.modules, file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("kind", ["command", "script", "module", "PATH"])
def test_arguments_folder_environment_descriptors_and_status_are_its_own(tmp_path, kind):
    script = tmp_path / "script.py"
    script.write_text(SELF)
    words = {"script": [script], "module": ["-m", "script"]}.get(kind, ["-c", SELF])
    env = os.environ | {"WORD": "a b", "PATH": f"{WARM_FOLDER}:{os.environ['PATH']}"}
    python = ["python3"] if kind == "PATH" else WARM_PYTHON
    done = run(*words, "x", "-y z", python=python, cwd=tmp_path, env=env, input="all of it")
    assert (done.returncode, done.stderr) == (7, "True\n")
    (name, *arguments), *others = json.loads(done.stdout)
    assert name == ("-c" if words[0] == "-c" else str(script)) and arguments == ["x", "-y z"]
    assert others == [str(tmp_path), "a b", "all of it", "__main__"]


def test_programs_start_alike_and_leave_nothing_to_the_next():
    code = "import sys; print('left' in globals()); left = sys.modules['left'] = 1"
    assert [run("-c", code).stdout for _ in range(2)] == ["False\n"] * 2


def test_another_python_path_makes_it_an_ordinary_python():
    env = os.environ | {"PYTHONPATH": "/somewhere"}
    code = "import sys; print('torch' in sys.modules, '/somewhere' in sys.path)"
    assert run("-c", code, env=env).stdout == "False True\n"


def test_it_ends_by_the_signal_that_ended_the_program():
    code = "import os; os.kill(os.getpid(), 9)"
    assert run("-c", code).returncode == -signal.SIGKILL


def test_ctrl_c_reaches_the_program():
    waits = "import time; print('begun', flush=True); time.sleep(100)"
    job = subprocess.Popen(
        [*WARM_PYTHON, "-c", waits],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert job.stdout.readline() == "begun\n"
    job.send_signal(signal.SIGINT)
    assert job.communicate(timeout=60)[1].splitlines()[-1] == "KeyboardInterrupt"
    assert job.returncode == -signal.SIGINT


def test_a_kill_takes_the_program_along():
    waits = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    job = subprocess.Popen([*WARM_PYTHON, "-c", waits], stdout=subprocess.PIPE, text=True)
    program = int(job.stdout.readline())
    assert program != job.pid
    job.kill()
    job.communicate(timeout=60)  # the program holds the pipe
    limit = time.monotonic() + 60
    while os.path.exists(f"/proc/{program}"):
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_without_a_server_it_is_an_ordinary_python():
    env = {name: value for name, value in os.environ.items() if name != "TENSORFERRY_WARM_PYTHON"}
    code = "import os, sys; print(os.getpid(), 'torch' in sys.modules)"
    job = subprocess.Popen([*WARM_PYTHON, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert job.communicate(timeout=60)[0] == f"{job.pid} False\n"


def test_it_is_the_python_of_the_tests():
    done = run("-c", "import sys; print(sys.executable, sys.prefix)")
    assert done.stdout == f"{sys.executable} {sys.prefix}\n"
