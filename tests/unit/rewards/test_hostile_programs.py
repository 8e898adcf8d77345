"""What programs that lie, excuse themselves or attack can do: nothing."""

from __future__ import annotations

import errno
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from programs import ADD, SUMS, scored

from moerl.rewards.base import UnscoredError
from moerl.rewards.pool import SandboxPool


@pytest.fixture(scope="module")
def pool():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("API_SECRET", "hunter2")
        pool = SandboxPool(num_workers=1, timeout_seconds=20.0, memory_bytes=1_000_000_000)
        yield pool
    pool.close()


LIARS = {
    "equal to all": "class E:\n    def __eq__(self, o): return True\ndef add(a, b): return E()",
    "int that lies": "class E(int):\n    def __eq__(self, o): return True\ndef add(a, b): return E()",
    "builtins changed": "import builtins\nbuiltins.abs = lambda x: 3\nimport operator\ndef add(a, b): return 0",
    "assertion gone": "import builtins\nclass A(Exception): pass\nbuiltins.AssertionError=A\ndef add(a, b): return 9",
    "ends well": "import os, sys\ndef add(a, b): sys.exit(0)",
    "ends at once": "import os\ndef add(a, b): os._exit(0)",
    "looks for the answer": (
        "import gc\ndef add(a, b):\n"
        "    for o in gc.get_objects():\n"
        "        if isinstance(o, str) and 'assert add' in o or isinstance(o, dict) and 'expected' in o: return 3\n"
        "    return -1"
    ),
    "looks at frames": (
        "import sys\ndef add(a, b):\n    f = sys._getframe()\n"
        "    while f:\n        if 'source' in f.f_locals or 'expected' in f.f_locals: return 3\n        f = f.f_back\n"
        "    return -1"
    ),
    "writes a verdict": (
        "import os, json\nfor v in (True, 1, {'passed': True}, {'value': True}, {'value': {'passed': True}}):\n"
        "    d = json.dumps({'value': v}).encode()\n"
        "    for fd in range(3, 40):\n"
        "        try: os.write(fd, len(d).to_bytes(4, 'big') + d)\n"
        "        except OSError: pass\n"
        "def add(a, b): return 0"
    ),
    "prints a verdict": "print('{\"passed\": true}', 'OK', '1.0')\ndef add(a, b): return 0",
}


@pytest.mark.parametrize("liar", LIARS)
@pytest.mark.parametrize("test", [{"function": "add", "arguments": [1, 2], "output": 3}, "assert add(1, 2) == 3"])
def test_no_program_can_give_itself_the_verdict(pool, liar, test):
    value, failed = scored(pool, LIARS[liar], [test], timeout_seconds=5.0)
    assert (value, sum(failed.values())) == (0.0, 1.0)


@pytest.mark.parametrize("liar", ["writes a verdict", "ends at once"])
def test_nor_for_what_it_prints(pool, liar):
    assert scored(pool, LIARS[liar], SUMS)[0] == 0.0


def test_what_it_writes_in_place_of_the_reply_is_worth_what_it_prints(pool):
    """A process that was taken over can claim any output; it still has to know the right one."""
    forged = (
        "import os, json\nd = json.dumps({'value': {'stdout': input()}}).encode()\n"
        "for fd in range(3, 40):\n"
        "    try: os.write(fd, len(d).to_bytes(4, 'big') + d)\n"
        "    except OSError: pass\n"
        "os._exit(0)"
    )
    assert scored(pool, forged, [{"input": "echo", "output": "echo"}])[0] == 1.0
    assert scored(pool, forged, SUMS)[0] == 0.0


CALL_NAMES = ("fcntl", "prlimit64", "ioprio_set", "move_pages", "kill", "utimes")
CALLS = {
    "x86_64": dict(zip(CALL_NAMES, (72, 302, 251, 279, 62, 235), strict=True)),
    "aarch64": dict(zip(CALL_NAMES, (25, 261, 30, 239, 129, -1), strict=True)),
}.get(platform.machine(), dict.fromkeys(CALL_NAMES, -1))
LIBC = "import ctypes, sys\nlibc = sys.modules['moerl.rewards.sandbox']._LIBC\n"


def test_a_lost_worker_is_no_verdict():
    """Killed from outside while a program runs that would have been right."""
    own = SandboxPool(num_workers=1, timeout_seconds=60.0, memory_bytes=1_000_000_000)
    try:
        assert scored(own, ADD, SUMS) == (1.0, {})
        worker = own.submit("os:getppid", {}).result(timeout=60).value
        with ThreadPoolExecutor(1) as thread:
            late = thread.submit(scored, own, f"import time\ntime.sleep(50)\n{ADD}", SUMS)
            while not Path(f"/proc/{worker}/task/{worker}/children").read_text():
                time.sleep(0.05)
            os.kill(worker, 9)
            with pytest.raises(UnscoredError, match="crash: the sandbox itself: the verifier process was lost"):
                late.result(timeout=60)
        assert scored(own, ADD, SUMS) == (1.0, {})
    finally:
        own.close()


def test_what_fails_before_the_program_begins_is_no_verdict(pool, monkeypatch):
    """No pipe of this machine holds the input, which an unprivileged process may not change."""
    largest = int(Path("/proc/sys/fs/pipe-max-size").read_text())
    monkeypatch.setattr("moerl.rewards.code_tests.MAX_INPUT_BYTES", 4 * largest)
    with pytest.raises(UnscoredError, match=r"exception: the sandbox itself: (PermissionError|OSError)"):
        scored(pool, ADD, [{"input": "1" * (2 * largest), "output": ""}])


def test_walls_that_cannot_be_built_are_no_verdict():
    """Without a standard input there is nothing to close, and no task begins."""
    script = (
        "import json, os, sys\nfrom moerl.rewards.worker import TaskRunner\nos.close(0)\n"
        "run = TaskRunner(memory_bytes=1 << 30, filter_calls=None, inherited=())\n"
        "request = {'program': 'print(3)', 'stdin': '', 'max_output_bytes': 9}\n"
        "print(json.dumps(run({'function': sys.argv[1], 'kwargs': request, 'timeout_seconds': 60.0})))"
    )
    function = "moerl.rewards.judges.program:run_script"
    done = subprocess.run([sys.executable, "-c", script, function], capture_output=True, text=True, check=True)
    reply = json.loads(done.stdout)
    assert (reply["error"], reply["in_program"]) == ("exception", False)
    assert "Bad file descriptor" in reply["text"]


def reply(value, data=""):
    """A program that writes a reply of its own wherever it can."""
    return (
        f"import os, json\nd = {data or f'json.dumps({value}).encode()'}\n"
        "for fd in range(3, 40):\n"
        "    try: os.write(fd, len(d).to_bytes(4, 'big') + d)\n"
        "    except OSError: pass\n"
        "os._exit(0)"
    )


EXCUSES = {
    "ends its process": "import os\nos._exit(1)",
    "kills its process": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 0))\nwhile True: pass",
    "says that the sandbox failed": reply("{'error': 'exception', 'text': 'x', 'in_program': False}"),
    "says that its verifier is broken": reply("{'error': 'broken', 'text': 'x'}"),
    "says no kind of failure": reply("{'error': ['exception'], 'text': {}}"),
    "says a value and a failure": reply("{'value': {'failed': 'x'}, 'error': 'broken', 'seconds': 'x'}"),
    "says what is too deep to read": reply(1, "b'{\"value\": ' + b'[' * 5000 + b']' * 5000 + b'}'"),
    "says what is too deep to pass on": reply(1, "b'{\"value\": ' + b'[' * 300 + b']' * 300 + b'}'"),
    "closes everything": "import os\nos.closerange(0, 64)",
    "breaks what comes after it": "import os\nos.read = None\nos.close = None",
}


@pytest.mark.parametrize("excuse", EXCUSES)
@pytest.mark.parametrize("test", [SUMS[0], {"function": "add", "arguments": [1, 2], "output": 3}])
def test_no_program_can_make_its_failure_one_of_the_sandbox(pool, excuse, test):
    value, failed = scored(pool, EXCUSES[excuse], [test], timeout_seconds=5.0)
    assert (value, sum(failed.values())) == (0.0, 1.0)


HOSTILE = {
    "fork bomb": "import os\nwhile True: os.fork()",
    "threads": "import threading, time\nfor _ in range(10**6): threading.Thread(target=time.sleep, args=(99,)).start()",
    "program": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo 3'])",
    "shell": "import os\nif os.system('echo 3 > {target}'): raise OSError",
    "subprocess": "import subprocess\nprint(subprocess.check_output(['echo', '3']))",
    "write": "open('{target}', 'w').write('x')",
    "write here": "open('x', 'w').write('x')",
    "huge file": "import os\nos.ftruncate(os.memfd_create('x'), 10**12)",
    "temporary": "import tempfile\ntempfile.NamedTemporaryFile()",
    "mode by a newer call": LIBC + "if libc.syscall(452, -100, b'{victim}', 0, 0): raise OSError",
    "time by an older call": LIBC + "if libc.syscall({utimes}, b'{victim}', (ctypes.c_long * 4)()): raise OSError",
    "remove": "import os\nos.remove('{victim}')",
    "users": "print(open('/etc/passwd').read())",
    "gold answers": "print(open('{victim}').read())",
    "parent's environment": "import os\nprint(open(f'/proc/{{os.getppid()}}/environ').read())",
    "kill the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "kill all": "import os\nos.kill(-1, 9)",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)",
    "raw socket": "import _socket\n_socket.socket().connect(('127.0.0.1', {port}))",
    "ctypes": "import ctypes\nctypes.CDLL(None).system(b'touch {target}')",
    "ctypes that is there": (
        "import sys\nlibc = sys.modules['moerl.rewards.sandbox']._LIBC\n"
        "if libc.syscall(57) or libc.syscall(2, b'{target}', 0o101): raise OSError"
    ),
    "takes the walls off": "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (10**9, 10**9))",
    "owner of a descriptor": (
        "import fcntl, os, time\nr, w = os.pipe()\n"
        "fcntl.fcntl(r, fcntl.F_SETOWN, {process})\nfcntl.fcntl(r, 10, 9)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')\ntime.sleep(1)"
    ),
    "owner by libc": LIBC
    + (
        "import os, time\nr, w = os.pipe()\n"
        "if libc.syscall({fcntl}, r, 8, {process}) or libc.syscall({fcntl}, r, 10, 9): raise OSError\n"
        "libc.syscall({fcntl}, r, 4, os.O_ASYNC)\nos.write(w, b'x')\ntime.sleep(1)"
    ),
    "group as owner by libc": LIBC
    + (
        "import os\nr, w = os.pipe()\n"
        "class Owner(ctypes.Structure): _fields_ = (('kind', ctypes.c_int), ('pid', ctypes.c_int))\n"
        "if libc.syscall({fcntl}, r, 15, ctypes.byref(Owner(2, {process}))): raise OSError"
    ),
    "owner by ioctl": "import fcntl, os, struct\nfcntl.ioctl(os.pipe()[0], 0x8901, struct.pack('i', {process}))",
    "lease": "import fcntl, os\nfcntl.fcntl(os.open(os.__file__, 0), 1024, fcntl.F_RDLCK)",
    "limits of another": "import resource\nresource.prlimit({process}, resource.RLIMIT_CPU, (0, 0))",
    "limits by libc": LIBC
    + "if libc.syscall({prlimit64}, {process}, 0, (ctypes.c_long * 2)(0, 0), None): raise OSError",
    "processors of another": "import os\nos.sched_setaffinity({process}, [0])",
    "priority of another": "import os\nos.setpriority(os.PRIO_PROCESS, {process}, 7)",
    "priority of a group": "import os\nos.setpriority(os.PRIO_PGRP, {process}, 7)",
    "scheduler of another": "import os\nos.sched_setscheduler({process}, os.SCHED_IDLE, os.sched_param(0))",
    "scheduler's parameter": "import os\nos.sched_setparam({process}, os.sched_param(0))",
    "disk priority of another": LIBC + "if libc.syscall({ioprio_set}, 1, {process}, 3 << 13): raise OSError",
    "pages of another": LIBC + "if libc.syscall({move_pages}, {process}, 0, None, None, None, 2): raise OSError",
    "signal to another": "import os\nos.kill({process}, 9)",
    "signal to a group": "import os\nos.killpg({process}, 9)",
    "signal by libc": LIBC + "if libc.syscall({kill}, {process}, 9): raise OSError",
    "recursion": "def f(): f()\nf()",
    "memory": "x = ' ' * 10**12",
    "open files": "import os\nfor _ in range(100): os.open('/dev/null', os.O_RDONLY)",
    "parser": "exec('(' * 10**5)",
}


@pytest.fixture
def process():
    """Another process of this user, as the trainer is one."""
    waits = [sys.executable, "-I", "-S", "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, start_new_session=True) as process:
        yield process
        process.kill()


def state(pid):
    """Everything that another process could change of `pid`."""
    priorities = [os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid), os.sched_getparam(pid)]
    limits = [resource.prlimit(pid, getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")]
    return priorities, os.sched_getaffinity(pid), limits


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_get_nothing(pool, process, tmp_path, name):
    victim, target = tmp_path / "victim", tmp_path / "target"
    victim.write_text("3")
    before, kept = (state(process.pid), state(os.getpid())), victim.stat()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.1)
        port = listener.getsockname()[1]
        program = HOSTILE[name].format(victim=victim, target=target, port=port, process=process.pid, **CALLS)
        value, failed = scored(pool, program + "\nprint(3)", SUMS, timeout_seconds=3.0)
        with pytest.raises(TimeoutError):
            listener.accept()
    assert process.poll() is None
    assert (state(process.pid), state(os.getpid())) == before
    assert (value, sum(failed.values())) == (0.0, 1.0), failed
    assert "wrong" not in failed, "it came to its end"
    assert victim.read_text() == "3"
    assert (victim.stat().st_mode, victim.stat().st_mtime_ns) == (kept.st_mode, kept.st_mtime_ns)
    assert not target.exists()
    assert scored(pool, ADD, SUMS) == (1.0, {})


def test_a_program_has_64_open_files_and_its_timeout_of_processor_time(pool):
    """The second stands behind the deadline, which is the clock's, and has a second more."""
    program = (
        "import os, resource\nfiles = []\ntry:\n    while True: files.append(os.open(os.devnull, os.O_RDONLY))\n"
        "except OSError as error: print(error.errno, max(files))\n"
        "print(*resource.getrlimit(resource.RLIMIT_CPU))"
    )
    output = f"{errno.EMFILE} 63\n4 4"
    assert scored(pool, program, [{"input": "", "output": output}], timeout_seconds=3.0) == (1.0, {})


def test_secrets_are_not_there(pool):
    assert os.environ["API_SECRET"] == "hunter2"
    program = "import os\nprint(sorted(os.environ))"
    names = str(["HOME", "LANG", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TMPDIR"])
    assert scored(pool, program, [{"input": "", "output": names}]) == (1.0, {})


def test_a_program_reads_less_than_a_verifier(pool, tmp_path, monkeypatch):
    """A folder on sys.path may hold the gold answers."""
    gold = tmp_path / "gold.txt"
    gold.write_text("3")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = SandboxPool(num_workers=1, timeout_seconds=20.0, memory_bytes=1_000_000_000)
    try:
        value, failed = scored(own, f"print(open({str(gold)!r}).read())", [{"input": "", "output": "3"}])
        assert (value, failed) == (0.0, {"exception": 1.0})
        assert scored(own, "import json, math, heapq\nprint(3)", [{"input": "", "output": "3"}]) == (1.0, {})
    finally:
        own.close()
