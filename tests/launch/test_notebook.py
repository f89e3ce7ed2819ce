"""`spmd.launch.local` and `run`: functions on a real mesh of two processes, what comes back, and
that nothing is left behind or hangs.
"""

import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import spmd
from spmd import errors
from spmd.launch import serialization
from spmd.launch.worker_pool import MAX_BUFFERED, OutputBuffer, failure_reason
from tests.compare import assert_close
from tests.processes import environment

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
SLOW = pytest.mark.slow
SCRIPT = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may ignore it
import jax
import spmd

NUMBER = 3

class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b

def double(x):
    return NUMBER * x

def pids():
    from jax.experimental import multihost_utils
    return multihost_utils.process_allgather(jax.numpy.array(os.getpid()))
"""


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.out = nnx.Linear(6, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def train(learning_rate):
    random = np.random.default_rng(0)
    data = {
        "x": random.normal(size=(128, 6)).astype("float32"),
        "y": random.integers(0, 4, 128).astype("int32"),
    }
    return spmd.fit(
        lambda: MLP(nnx.Rngs(0)),
        data,
        batch_size=32,
        steps=12,
        loss=spmd.losses.cross_entropy,
        optimizer=optax.sgd(learning_rate, momentum=0.9),
        layout="fsdp",
        mesh=spmd.make_mesh("data=4", devices=jax.devices()[:4]),
        progress=False,
    )


def gone(numbers, seconds):
    """Whether processes are gone in time; zombies are."""

    def is_alive(number):
        try:
            return Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2][0] != "Z"
        except OSError:
            return False

    until = time.monotonic() + seconds
    while any(map(is_alive, numbers)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(is_alive, numbers))


@pytest.fixture(scope="module", autouse=True)
def by_value():
    """This module cannot be imported in the processes, just as a notebook's `__main__` cannot."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def both():
    with spmd.launch.local(processes=2, simulate=2) as processes:
        yield processes


def spread(x):
    """An array sharded over all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.make_array_from_callback(
        x.shape, jax.NamedSharding(mesh, jax.P("data")), lambda index: x[index]
    )


def test_mesh_over_two_processes(both, capsys):
    number, x = 3, np.arange(8.0, dtype=np.float32)
    x[0] = -0.0

    def function(x, *, times):
        print(f"hello from {jax.process_index()}")
        print("no line end", end="")
        print("to stderr", file=sys.stderr)
        array = spread(x)
        total = jax.jit(lambda a: (a * times).sum())(array)
        return {
            "counts": (jax.process_count(), jax.local_device_count(), jax.device_count()),
            "array": [array, array],
            "total": total,
            "number": number,
            "pid": os.getpid(),
            "key": jax.random.key(7),
            "addressable": array.is_fully_addressable,
        }

    first, second = both.run(function, x, times=2.0), both.run(function, x, times=3.0)
    assert (
        first["counts"] == (2, 2, 4)
        and both.devices == 4
        and both.count == 2
        and first["number"] == 3
    )
    assert not first["addressable"], "the array really is spread"
    assert (
        type(first["array"][0]) is np.ndarray
        and first["array"][0] is first["array"][1]
        and first["array"][0].flags.writeable
    )
    assert first["array"][0].tobytes() == x.tobytes(), "to the last bit, and the sign of a zero"
    assert type(first["total"]) is np.ndarray and (
        float(first["total"]),
        float(second["total"]),
    ) == (56.0, 84.0)
    assert first["pid"] == second["pid"] != os.getpid()
    assert (
        jax.random.key_data(first["key"]).tolist()
        == jax.random.key_data(jax.random.key(7)).tolist()
    )
    printed = capsys.readouterr().out
    for rank in range(2):
        assert (
            printed.count(f"[{rank}] hello from {rank}\n") == 2
            and f"[{rank}] no line endto stderr\n" in printed
        )
    assert "\x1e" not in printed


def test_fit_equals_fit_in_one_process(both):
    """Gloo adds up inside a process first, so the last bits differ: 1e-6 of losses, 1e-5 of
    weights, as in test_two_processes.
    """

    def function(rate):
        result = train(rate)
        assert jax.process_count() == 2
        return result.history, result.state, result.model

    here = train(0.1)
    history, state, model = both.run(function, 0.1)
    assert_close(history["loss"], here.history["loss"])
    assert list(history.rows())[-1].keys() == list(here.history.rows())[-1].keys()
    assert not here.state.params["hidden"]["kernel"].sharding.is_fully_replicated, (
        "fsdp has sharded it"
    )
    untrained = jax.tree.leaves(nnx.to_pure_dict(nnx.state(MLP(nnx.Rngs(0)), nnx.Param)))
    for ours, theirs, before in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(here.state.params), untrained, strict=True
    ):
        assert type(ours) is np.ndarray
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
        assert np.abs(ours - before).max() > 1e-3, "it has trained"
    assert isinstance(model, MLP)
    np.testing.assert_array_equal(model.hidden.kernel[...], state.params["hidden"]["kernel"])


def test_jax_settings_and_folders_are_sent(both, tmp_path, monkeypatch):
    (tmp_path / "own_module_of_a_notebook.py").write_text("NAME = 'mine'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def function():
        import own_module_of_a_notebook

        return os.getcwd(), own_module_of_a_notebook.NAME, str(jax.numpy.arange(2.0).dtype)

    assert both.run(function) == (str(tmp_path), "mine", "float32")
    with jax.enable_x64(True):
        assert both.run(function)[2] == "float64"
    assert both.run(function)[2] == "float32"


def test_large_array_round_trip(both):
    x = np.random.default_rng(0).normal(size=(1 << 22,))  # 32 MiB, many times what a pipe holds
    assert np.array_equal(both.run(lambda x: x[::-1], x), x[::-1])


def test_unserializable_part_is_named(both):
    pid = both.run(os.getpid)
    with pytest.raises(
        errors.ProcessError,
        match=r"the result, kept/1 \(a lock\) cannot be sent to the notebook: TypeError",
    ):
        both.run(lambda: {"kept": [1, threading.Lock()]})
    with pytest.raises(
        errors.ProcessError, match=r"the result \(a Mesh\) cannot be sent .*\n    fix: .*"
    ):
        both.run(lambda: jax.make_mesh((4,), ("data",)))
    with pytest.raises(errors.OptionError, match=r"argument 0, a \(a lock\) cannot"):
        both.run(lambda lock: None, {"a": threading.Lock()})
    with pytest.raises(
        errors.ProcessError, match=r"float32\[8\], of which 4 of 8 .* process 1 has not returned it"
    ):
        both.run(lambda: spread(np.zeros(8, np.float32)) if jax.process_index() == 0 else None)
    assert both.run(lambda: None if jax.process_index() else 5) == 5
    assert both.run(os.getpid) == pid


def test_run_in_a_block_uses_its_processes(both):
    assert spmd.launch.run(os.getpid) == both.run(os.getpid)
    with pytest.raises(errors.OptionError, match="processes=2 inside a block"):
        spmd.launch.run(os.getpid, processes=2, simulate=4)
    with pytest.raises(errors.OptionError, match="not an int"):
        spmd.launch.run(3)


def test_one_call_at_a_time(both, tmp_path):
    def wait():
        (tmp_path / f"{jax.process_index()} is here").touch()
        until = time.monotonic() + 300
        while not (tmp_path / "go").exists() and time.monotonic() < until:
            time.sleep(0.01)

    thread = threading.Thread(target=both.run, args=(wait,))
    thread.start()
    try:
        until = time.monotonic() + 300
        while not (tmp_path / "0 is here").exists() and time.monotonic() < until:
            time.sleep(0.01)
        with pytest.raises(errors.OptionError, match="running another call"):
            both.run(os.getpid)
        with pytest.raises(errors.OptionError, match="running another call"):
            both.close()
    finally:
        (tmp_path / "go").touch()
        thread.join(timeout=300)
    assert not thread.is_alive() and both.run(os.getpid), "they are still there"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": 0}, "processes=0"),
        ({"processes": 2, "simulate": 0}, "simulate=0"),
        ({"processes": 2, "simulate": 2, "devices": [0, 1]}, "devices= is for GPUs"),
        ({"processes": 2, "devices": []}, r"devices=\[\]"),
        ({"processes": 2, "simulate": 2, "memory_fraction": 0.5}, "memory_fraction= is for GPUs"),
        ({"processes": 2, "memory_fraction": 2.0}, "memory_fraction=2.0"),
        ({"processes": 2, "stall": "stepp=3"}, 'did you mean "step"'),
        (
            {"processes": 1, "simulate": 2, "stall": "step=3"},
            "stall has no effect on a single process",
        ),
        ({"processes": 2, "grace": 0}, "grace=0"),
        ({"simulate": 2}, "this machine has no GPU.*\n    fix: processes=2"),
    ],
)
def test_bad_options_are_reported(options, message):
    with pytest.raises(errors.OptionError, match=message):
        spmd.launch.local(**options)


def test_without_cloudpickle(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(
        errors.MissingExtraError,
        match=r"fix: in the checkout of spmd: pip install '\.\[notebooks\]'",
    ):
        spmd.launch.local(processes=2, simulate=2)


def test_lines_between_calls_are_counted(capsys):
    lines = OutputBuffer()
    for number in range(MAX_BUFFERED + 7):
        lines.add(f"[0] {number}\n")
    lines.show()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == MAX_BUFFERED + 1 and "7 lines" in printed[-1]
    lines.add("[1] a line with \x1e in it\n")
    lines.add(f"[1] half{lines.next_mark()}\n")
    lines.until(1)
    assert capsys.readouterr().out == "[1] a line with \\x1e in it\n[1] half\n"


def test_shards_of_one_process_are_assembled():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jax.device_put(np.arange(16.0).reshape(4, 4), jax.NamedSharding(mesh, jax.P("a")))
    data, pieces = serialization.serialize_result({"x": x}, with_value=True)
    assert (
        not pieces
        and serialization.deserialize_result(data, {0: pieces})["x"].tolist()
        == np.arange(16.0).reshape(4, 4).tolist()
    )


BOOM, BROKEN = ("ValueError: boom", "Traceback 1"), ("ValueError: UNKNOWN: Gloo", "Traceback 0")


@pytest.mark.parametrize(
    ("failures", "first", "reported", "answered", "expected"),
    [
        (
            {1: BOOM},
            {1: 1},
            {1: (3, "ValueError: boom")},
            {1},
            (1, "process 1 failed: ValueError: boom", "Traceback 1"),
        ),
        (
            {0: BROKEN, 1: BOOM},
            {0: 1},
            {1: (3, "boom"), 0: (3, "Gloo")},
            {0, 1},
            (1, "process 1 failed: ValueError: boom", "Traceback 1"),
        ),
        ({0: BROKEN}, {1: -6}, {0: (3, "Gloo")}, {0}, (1, "process 1 has ended with signal 6", "")),
        ({0: BROKEN}, {1: 5}, {0: (3, "Gloo")}, {0}, (1, "process 1 has ended with code 5", "")),
        (
            {0: BROKEN},
            {1: 42},
            {0: (3, "stalled in step")},
            {0},
            (0, "process 0 failed at step 3: stalled in step", ""),
        ),
        (
            {1: BOOM},
            {0: 0},
            {1: (3, "boom")},
            {0, 1},
            (1, "process 1 failed: ValueError: boom", "Traceback 1"),
        ),
        (
            {},
            {1: 43},
            {1: (3, "stalled in step")},
            set(),
            (1, "process 1 failed at step 3: stalled in step", ""),
        ),
        ({1: BOOM}, {}, {}, {1}, (1, "process 1 failed: ValueError: boom", "Traceback 1")),
        (
            {},
            {1: 42},
            {},
            set(),
            (1, "process 1 has ended with code 42 (another process failed)", ""),
        ),
        ({}, {}, {}, set(), None),
    ],
)
def test_failure_reason(failures, first, reported, answered, expected):
    stalled = {rank for rank, (_, text) in reported.items() if text.startswith("stalled")}
    assert failure_reason(failures, first, reported, answered=answered, stalled=stalled) == expected


def fail(how):
    if jax.process_index() == 1:
        if how == "raise":
            raise ValueError("boom")
        if how == "exit":
            sys.exit(0)
        if how == "leave":
            os._exit(5)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "in a sum":
        return spread(np.ones(4, np.float32)).sum()
    time.sleep(300)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "raise",
            r"process 1 failed: ValueError: boom\n\nTraceback .*\n(.*\n)*.*raise "
            r"ValueError\(\"boom\"\)\n(.*\n)*ValueError: boom",
        ),
        pytest.param("exit", r"process 1 failed: sys\.exit\(0\)", marks=SLOW),
        pytest.param("leave", r"process 1 has ended with code 5", marks=SLOW),
        pytest.param("kill", r"process 1 has ended with signal 9", marks=SLOW),
        pytest.param("in a sum", r"process 1 has ended with signal 9", marks=SLOW),
    ],
)
def test_failure_is_raised_and_all_end(how, message):
    processes = spmd.launch.local(processes=2, simulate=1)
    pids = [process.pid for process in processes._running._group.processes.values()]
    began = time.monotonic()
    with pytest.raises(errors.ProcessError, match=message) as caught:
        processes.run(functools.partial(fail, how))
    assert time.monotonic() - began < 200 and caught.value.process == 1, (
        "the sleeping process was not waited for"
    )
    assert gone(pids, 0)
    with pytest.raises(
        errors.ProcessError,
        match=r"these processes have ended: process 1 .*\n    fix: start new ones",
    ):
        processes.run(os.getpid)
    processes.close()


@SLOW
def test_exit_between_calls_is_raised():
    with spmd.launch.local(processes=2, simulate=1) as processes:
        pids = [process.pid for process in processes._running._group.processes.values()]
        os.kill(pids[1], signal.SIGKILL)
        assert gone(pids[1:], 60)
        with pytest.raises(errors.ProcessError, match="process 1 has ended with signal 9"):
            processes.run(os.getpid)
    assert gone(pids, 0)


def script(code, meanwhile=lambda process: None, seconds=400):
    """Run a script as `__main__`; what it has printed, its exit code, and the ids of the processes
    it says.
    """
    command = [sys.executable, "-u", "-c", SCRIPT + code]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    try:
        meanwhile(process)
        reader.start()
        process.wait(timeout=seconds)
    finally:
        process.kill()
        process.wait()
        if reader.ident is not None:
            reader.join(timeout=10)
        process.stdout.close()
    return "".join(lines), process.returncode


def test_functions_and_classes_of_main():
    """In one call, from a script: closures, lambdas, classes, a recursive function; and what is not
    closed ends with the script.
    """
    text, code = script("""
both = spmd.launch.local(processes=2, simulate=1)
print("PIDS", *both.run(pids))
back = both.run(lambda pair: (double(pair.a), pair, lambda: double(pair.b)), Pair(2, 5))
print("BACK", back[0], type(back[1]) is Pair, back[1].b, back[2]())
""")
    assert code == 0 and "BACK 6 True 5 15" in text, text
    numbers = [int(word) for word in re.search(r"PIDS (\d+) (\d+)", text).groups()]
    assert len(set(numbers)) == 2 and gone(numbers, 0), "an abandoned group ends with its script"


def test_documentation_example_runs():
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    code = page.partition("## In a notebook\n")[2].partition("```python\n")[2].partition("```")[0]
    text, status = script(f"{code}\nprint('LOSS', loss, params['w'].shape, type(params['w']))\n")
    assert (
        status == 0
        and text.count("[0] 2 of 4 devices\n") == text.count("[1] 2 of 4 devices\n") == 2
    ), text
    loss = float(re.search(r"LOSS (\S+) \(4, 1\) <class 'numpy.ndarray'>", text).group(1))
    assert loss < 0.01, "zeros lose about 4"


@SLOW
@pytest.mark.parametrize("how", ["interrupt", "kill", "collect", "fork"])
def test_no_process_is_left_behind(how):
    seen = []

    def after(process):
        for line in process.stdout:
            if match := re.search(r"PIDS (\d+) (\d+)", line):
                seen.extend(map(int, match.groups()))
            if "NOW" in line:
                break
        if how == "interrupt":
            process.send_signal(signal.SIGINT)
        elif how == "kill":
            process.kill()

    last = {
        "collect": "numbers = [int(number) for number in both.run(pids)]\ndel both\nimport gc; "
        "gc.collect(); print('NOW')\n"
        "until, left = time.monotonic() + 60, lambda: [number for number in numbers if "
        "os.path.exists(f'/proc/{number}')]\n"
        "while left() and time.monotonic() < until: time.sleep(0.05)\nprint('LEFT' if left() else "
        "'OVER')",
        "fork": "print('NOW')\nif os.fork() == 0:\n"
        "    try: both.run(double, 2)\n    except spmd.SpmdError as error: print(error)\n    "
        "sys.exit(0)\n"
        "os.wait(); print('STILL', both.run(double, 2)); print('OVER')",
    }.get(
        how,
        "began = time.monotonic()\ndef sleep():\n    print('NOW'); time.sleep(1000)\n"
        "try: both.run(sleep)\nexcept KeyboardInterrupt: print('OVER', time.monotonic() - began)\n"
        "try: both.run(sleep)\nexcept spmd.SpmdError as error: print(error)\n",
    )
    text, code = script(
        "both = spmd.launch.local(processes=2, simulate=1)\nprint('PIDS', *both.run(pids))\n"
        + last,
        meanwhile=after,
    )
    assert len(seen) == 2
    assert gone(seen, 60)
    if how == "kill":
        assert code == -signal.SIGKILL
        return
    assert code == 0 and "OVER" in text, text
    if how == "interrupt":
        assert "these processes have ended: interrupted" in text
    if how == "fork":
        assert "STILL 6" in text and "belong to the parent of this fork" in text


@SLOW
def test_ctrl_c_lets_fit_return_and_stall_is_raised(tmp_path):
    code = """
import numpy as np, optax
def train():
    model = spmd.FunctionalModel(lambda key: {"w": np.ones((4, 1), np.float32)}, lambda params, x: x @ params["w"])
    data = {"x": np.ones((32, 4), np.float32), "y": np.zeros((32, 1), np.float32)}
    def show(info):
        if info.step == 5 and jax.process_index() == 0: print("NOW")
        if STALL and info.step == 6 and jax.process_index() == 1: time.sleep(1000)
    result = spmd.fit(model, data, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1), batch_size=8, steps=10**7,
                      checkpoint=FOLDER, callbacks=[show], progress=False)
    print("ENDED", result.stop_reason)
"""  # noqa: E501

    def after(process):
        for line in process.stdout:
            if "NOW" in line:
                break
        process.send_signal(signal.SIGINT)

    head = f"FOLDER = {str(tmp_path / 'run')!r}\nSTALL = False\n"
    text, _ = script(
        head + code + "spmd.launch.run(train, processes=2, simulate=1)", meanwhile=after
    )
    assert (
        "[0] ENDED interrupted" in text
        and "[1] ENDED interrupted" in text
        and "KeyboardInterrupt" in text
    ), text
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    head = "FOLDER = None\nSTALL = True\n"
    text, code = script(
        head + code + "spmd.launch.run(train, processes=2, simulate=1, stall='step=3')"
    )
    first = r"process \d failed at step \d: stalled in step \(limit 3 s\)"
    waited_for = (
        # where the one that waits is first to say so
        r"process 1 made no progress in step after step \d, without waiting for others"
    )
    assert code == 1 and re.search(f"ProcessError: ({first}|{waited_for})", text), text


@SLOW
def test_output_appears_in_the_calling_cell(tmp_path):
    import nbformat

    notebook = nbformat.v4.new_notebook()
    cells = [
        "import os, spmd\nnumber = 4",
        "both = spmd.launch.local(processes=2, simulate=1)",
        "def hello():\n    import jax\n    print('here', jax.process_index() + number)\n    return "
        "jax.process_count()\nboth.run(hello)",
        "def bad():\n    raise ValueError('boom')\ntry:\n    both.run(bad)\nexcept spmd.SpmdError "
        "as error:\n    print(error)",
        "with spmd.launch.local(processes=2, simulate=1):\n    print(spmd.launch.run(lambda: "
        "number + 1))",
    ]
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(notebook, tmp_path / "one.ipynb")
    run = (
        "import nbclient, nbformat; notebook = nbformat.read('one.ipynb', 4); "
        "nbclient.NotebookClient(notebook, timeout=100, kernel_name='python3').execute(); "
        "nbformat.write(notebook, 'done.ipynb')"
    )
    variables = environment(
        JUPYTER_RUNTIME_DIR=str(tmp_path / "runtime"), IPYTHONDIR=str(tmp_path / "ipython")
    )
    done = subprocess.run(
        [sys.executable, "-c", run],
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    shown = nbformat.read(tmp_path / "done.ipynb", 4).cells
    text = ["".join(out.get("text", "") for out in cell.outputs) for cell in shown]
    assert "[0] here 4\n" in text[2] and "[1] here 5\n" in text[2] and "here" not in text[1]
    assert shown[2].outputs[-1]["data"]["text/plain"] == "2"
    assert "raise ValueError('boom')" in text[3], "the traceback shows the cell's line"
    assert "5\n" in text[4]
