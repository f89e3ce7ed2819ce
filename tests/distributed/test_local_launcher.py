"""`spmd launch` with real processes over loopback: they train, report every fault, and end in the
same bits.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import JOB, launch

from spmd.distributed.world import free_port
from spmd.launch.local_launcher import forward_signals
from spmd.launch.process_group import ProcessGroup
from tests.processes import environment, handled_by

SLOW = pytest.mark.slow


def job(*words, restarts=0, stall="", **more):
    options = [
        "--processes",
        2,
        "--simulate",
        2,
        "--max-restarts",
        restarts,
        *(["--stall", stall] if stall else []),
    ]
    return launch(*options, JOB, *words, **more)


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = job("--folder", tmp_path_factory.mktemp("undisturbed"))
    assert run.code == 0, run.text
    assert len(set(run.hashes)) == 1 and len(run.hashes) == 2 and run.hashes[0][1] == "40"
    return run.hashes[0]


@pytest.mark.system
@pytest.mark.parametrize(
    ("fault", "rank", "message"),
    [
        (
            "raise",
            1,
            r"\[0\] spmd 0: process 1 on \S+ failed at step 2\d \(\w+\): CallbackError: .* raises "
            r"ValueError: boom on process 1",
        ),
        pytest.param(
            "raise",
            0,
            r"\[1\] spmd 1: process 0 on \S+ failed at step 2\d \(\w+\): CallbackError: .* raises "
            r"ValueError: boom on process 0",
            marks=SLOW,
        ),
        pytest.param(
            "exit",
            1,
            r"\[0\] spmd 0: process 1 on \S+ failed at step 2\d \(\w+\): SystemExit: 3",
            marks=SLOW,
        ),
        pytest.param("KILL", 1, r"spmd launch: process 1 ended with signal 9", marks=SLOW),
        pytest.param("KILL", 0, r"spmd launch: process 0 ended with signal 9", marks=SLOW),
        pytest.param(
            "sleep",
            1,
            r"spmd \d: stalled: no progress for \S+ s in step \(limit 5\)(.|\n)*process 1: step "
            r"25, step",
            marks=SLOW,
        ),
        pytest.param(
            "STOP", 1, r"spmd 0: stalled: no progress for \S+ s in step \(limit 5\)", marks=SLOW
        ),
        pytest.param(
            "STOP", 0, r"spmd 1: stalled: no progress for \S+ s in step \(limit 5\)", marks=SLOW
        ),
    ],
)
def test_fault_is_reported_and_the_final_state_is_identical(
    undisturbed, tmp_path, fault, rank, message
):
    stalls = fault in ("sleep", "STOP")
    run = job(
        "--folder",
        tmp_path / "run",
        "--fault",
        fault,
        "--rank",
        rank,
        restarts=2,
        stall="step=5" if stalls else "step=100",
    )
    assert run.code == 0, run.text
    assert set(run.hashes) == {undisturbed} and len(run.hashes) == 2
    assert re.search(message, run.text), run.text
    assert ("stalled: " in run.text) == stalls, (
        "what ends is seen before anybody has waited for too long"
    )
    down = run.when("spmd launch: restart 1 of at most 2") - run.when("FAULT at")
    assert "spmd launch: restart 2" not in run.text
    again = [at for at, line in run.lines if "STEP 26" in line][-1] - run.when("FAULT at")
    print(
        f"FIGURE {fault} on process {rank}: all down after {down:.1f} s, step 26 made again after "
        f"{again:.1f} s"
    )


@SLOW
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (
            "os exit",
            r"ended with code 0 before the end of its script, last heartbeat in \w+ after step \d+",
        ),
        (
            "STOP",
            r"was killed, stopped, or blocked by code that holds the GIL, last heartbeat in \w+ "
            r"after step \d+",
        ),
        (
            "GIL",
            r"was killed, stopped, or blocked by code that holds the GIL, last heartbeat in \w+ "
            r"after step \d+",
        ),
        ("stop", r"left its run alone after step 2\d \(info.stop: enough\)"),
        ("exit 0", r"finished its script after step 2\d, and others did not"),
        (
            "sleep",
            "(at step 25: stalled in step|made no progress in step after step 25, without waiting "
            "for others)",
        ),
    ],
)
def test_process_that_failed_first_is_named(tmp_path, fault, what, rank):
    run = job(
        "--folder", tmp_path / "run", "--fault", fault, "--rank", rank, stall="step=5", seconds=90
    )
    message = [line for _, line in run.lines if line.startswith("spmd launch: process")]
    print("FIGURE", message)
    assert run.code not in (0, None) and "HASH" not in run.text, run.text
    assert re.match(f"spmd launch: process {rank} {what}", message[-1]), run.text


@pytest.mark.system
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "learning rate",
            r"number \d+ in the step is -?1.0+e-01 \(f32\) in process 0, and -?5.0+e-01 \(f32\) in "
            r"process 1",
        ),
        pytest.param(
            "weights",
            r"number \d+ in the initial values is 0 \(i32\) in process 0, and 1 \(i32\) in process "
            r"1",
            marks=SLOW,
        ),
        pytest.param(
            "data", r"data contents x is \w+ in process 0, and \w+ in process 1", marks=SLOW
        ),
        pytest.param(
            "callbacks",
            r"callbacks CheckReplicas is nothing in process 0, and 10 in process 1",
            marks=SLOW,
        ),
        pytest.param(
            "layout",
            r"layout gradients.codec is bfloat16 in process 0, and nothing in process 1",
            marks=SLOW,
        ),
    ],
)
def test_mismatch_is_reported_before_training(tmp_path, fault, message):
    run = job("--folder", tmp_path / "run", "--fault", fault, restarts=2)
    assert run.code == 78 and "restart 1" not in run.text and "HASH" not in run.text
    assert set(re.findall(rf"(?m)^\[([01])\] .*{message}", run.text)) == {"0", "1"}, run.text
    assert "no restart: processes that disagree would disagree again" in run.text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@SLOW
@pytest.mark.parametrize(
    ("moment", "rank"),
    [
        ("begun", 1),
        *[(moment, 0) for moment in ("begun", "written", "half sealed", "sealed", "committed")],
    ],
)
def test_kill_during_a_save(undisturbed, tmp_path, moment, rank):
    """What is half there is not taken for a checkpoint, and is no damage either."""
    run = job(
        "--folder",
        tmp_path / "run",
        "--fault",
        f"save {moment}",
        "--rank",
        rank,
        "--at",
        10,
        restarts=2,
    )
    assert run.code == 0 and set(run.hashes) == {undisturbed} and len(run.hashes) == 2, run.text
    assert (
        f"spmd launch: process {rank} ended with signal 9" in run.text
        and "spmd launch: restart 2" not in run.text
    )
    resumed = [record for record in records(tmp_path / "run") if record.get("event") == "resumed"]
    assert [record["step"] for record in resumed] == [20 if moment == "committed" else 10]
    assert not (tmp_path / "run" / "damaged").exists()


@SLOW
def test_nan_ends_the_run_without_a_restart_loop(tmp_path):
    run = job("--folder", tmp_path / "run", "--fault", "nan", restarts=5)
    assert run.code == 1 and "spmd launch: restart 2" not in run.text and "HASH" not in run.text
    assert (
        len(set(re.findall(r'DivergedError: step (\d+): metric "loss" is nan', run.text))) == 1
    ), run.text
    assert "no restart: the same error occurred twice at the same step" in run.text


@SLOW
def test_full_disk_is_reported_and_the_previous_checkpoint_is_intact(undisturbed, tmp_path):
    """A file system that holds one checkpoint and half another, in a mount namespace of the
    launcher.
    """
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("a small file system needs privileges, and unshare")
    run = job("--folder", tmp_path / "small" / "run", restarts=3, small=tmp_path / "small")
    assert run.code == 1 and "HASH" not in run.text, run.text
    folder = tmp_path / "small" / "run"
    assert f"CheckpointError: a checkpoint could not be written to {folder}: " in run.text, run.text
    assert "fix: see whether the disk of that folder works" in run.text, run.text
    kept = tmp_path / "kept"
    assert [
        path.name for path in (kept / "run" / "checkpoints").iterdir() if path.name.isdigit()
    ], "the previous checkpoint is intact"
    rest = job("--folder", kept / "run", "--resume")
    assert rest.code == 0 and set(rest.hashes) == {undisturbed}, rest.text


@SLOW
def test_finished_process_is_not_waited_for(tmp_path):
    """Its script leaves, with code 0, before `fit`, where the other waits for it."""
    run = job("--folder", tmp_path / "run", "--fault", "leaves", seconds=60)
    assert run.code == 1 and "HASH" not in run.text, run.text
    assert "[0] spmd 0: process 1 has finished its script, and is waited for in compile" in run.text


@SLOW
def test_repeated_error_is_not_restarted(tmp_path):
    run = job("--folder", tmp_path / "run", "--fault", "raise", "--always", restarts=5)
    assert run.code == 1 and "restart 1 of at most 5" in run.text and "restart 2" not in run.text
    assert "no restart: the same error occurred twice at the same step" in run.text


@SLOW
@pytest.mark.parametrize("whom", ["one process", "the launcher"])
def test_sigterm_saves_at_the_same_step_and_resumes_exactly(undisturbed, tmp_path, whom):
    folder = tmp_path / "run"
    if whom == "one process":
        first = job("--folder", folder, "--fault", "TERM", restarts=2)
        assert "no restart: it was asked to stop, and has saved" in first.text
    else:

        def ask(process, run):
            while not any("FAULT at" in line for _, line in run.lines) and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)

        first = job(
            "--folder", folder, "--fault", "none of these", "--steps", 100_000, meanwhile=ask
        )
    assert first.code == 143, first.text
    saved = max(int(path.name) for path in (folder / "checkpoints").iterdir())
    assert 25 < saved < 1000, first.text
    if whom == "one process":
        rest = job("--folder", folder, "--resume")
        assert rest.code == 0 and set(rest.hashes) == {undisturbed}, rest.text


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1], ids=str)
def test_chosen_signals_are_forwarded_as_sigterm(number, monkeypatch):
    monkeypatch.setenv("SPMD_STOP_SIGNALS", "USR1")
    group, sent = ProcessGroup({}), []
    with handled_by(signal.SIG_DFL), forward_signals(group, sent.append):
        signal.raise_signal(number)
        signal.raise_signal(number)
    assert sent == [signal.SIGTERM] and group.stop_signal == signal.SIGTERM


@SLOW
def test_processes_end_with_the_launcher(tmp_path):
    seen = []

    def end(process, run):
        while not any("FAULT at" in line for _, line in run.lines) and process.poll() is None:
            time.sleep(0.02)
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid), "-f", "spmd.launch.runner"],
            capture_output=True,
            text=True,
            check=True,
        )
        seen.extend(map(int, children.stdout.split()))
        process.kill()

    job("--fault", "none of these", "--steps", 1_000_000, meanwhile=end)
    assert len(seen) == 2
    until = time.monotonic() + 120
    while any(Path(f"/proc/{number}").exists() for number in seen) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{number}").exists() for number in seen)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes", "2"], "there is no script to run"),
        (["--processes", "2", "nothing.py"], 'there is no script "nothing.py"'),
        (["--processes", "0", __file__], "--processes 0."),
        (["--processes", "2", "--stall", "stepp=3", __file__], 'did you mean "step"'),
        (["--processes", "2", "--stall", "step=x", __file__], '"x" is not a number'),
        (["--devices", "a", __file__], '--devices "a"'),
        (["--devices", "0,0", __file__], "--devices 0,0."),
        (["--devices", "-1", __file__], "--devices -1."),
        (
            ["--devices", "0", "--simulate", "2", __file__],
            "--devices is for GPUs, but --simulate 2 simulates CPU devices",
        ),
        (["--no-preallocate", "--simulate", "2", __file__], "preallocate is for GPUs"),
        (
            ["--processes", "1", "--simulate", "2", "--stall", "step=3", __file__],
            "stall has no effect on a single process",
        ),
        (["--memory-fraction", "2", "--processes", "1", __file__], "--memory-fraction 2.0."),
    ],
)
def test_bad_options_are_reported(words, message, capsys):
    from spmd.launch.cli import main

    assert main(["launch", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--mem", "--p", "--no"])
def test_option_of_the_script_may_begin_as_several_of_the_launcher(option, monkeypatch):
    from spmd.launch import local_launcher
    from spmd.launch.cli import main

    started = []
    monkeypatch.setattr(
        local_launcher, "launch", lambda argv, config, log: started.append(argv) or 0
    )
    assert main(["launch", "--processes", "2", "--simulate", "2", __file__, option, "3"]) == 0
    assert started == [[__file__, option, "3"]]


OWN = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
rank, address = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(address, 2, rank, coordinator_bind_address=address)
import spmd
print("JOINED", spmd.join(), len(jax.devices()))
model = spmd.FunctionalModel(lambda key: {"w": jax.numpy.zeros((1, 1))}, lambda params, x: x @ params["w"])
import numpy as np, optax
x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
options = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.sgd(0.5), "batch_size": 16, "epochs": 20}
result = spmd.fit(model, (x, 3 * x), **options, progress=False)
print("WEIGHT", round(float(result.state.params["w"][0, 0]), 3))
"""  # noqa: E501


@pytest.mark.system
def test_join_after_jax_distributed_initialize(tmp_path):
    """As a script may that knows nothing of `spmd launch`."""
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    command = [sys.executable, "-c", OWN]
    both = [
        subprocess.Popen(
            [*command, str(rank), address], stdout=subprocess.PIPE, text=True, env=environment()
        )
        for rank in (0, 1)
    ]
    try:
        message = [process.communicate(timeout=100)[0] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    for rank, (process, text) in enumerate(zip(both, message, strict=True)):
        assert process.returncode == 0
        assert (
            f"JOINED process {rank} of 2 (jax.distributed), process 0 at {address} 4" in text
            and "WEIGHT 3.0" in text
        )


def listening(pid):
    """Addresses, as the system has them, that a process listens at."""
    sockets = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    addresses = []
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                addresses.append(words[1].partition(":")[0])
    return addresses


@SLOW
def test_only_the_chosen_address_is_exposed(tmp_path):
    """Process 0 has the coordination service, and all have Gloo's sockets: on loopback, where all
    is on one host.
    """
    listeners = []

    def look(process, run):
        while not any("FAULT at" in line for _, line in run.lines) and process.poll() is None:
            time.sleep(0.02)
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid), "-f", "spmd.launch.runner"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        listeners.extend(
            (pid, address) for pid in [*children, process.pid] for address in listening(pid)
        )

    run = job("--folder", tmp_path / "run", "--fault", "wait", meanwhile=look)
    assert run.code == 0, run.text
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert (
        len({pid for pid, _ in listeners}) >= 1
        and {address for _, address in listeners} <= loopback
    ), listeners
