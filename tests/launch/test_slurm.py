"""SLURM: the script's text, what is refused, and the script run by stubs of SLURM's commands that
start real processes.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmd.distributed.initialize import was_restarted
from spmd.errors import OptionError
from spmd.launch.cli import main
from spmd.launch.restart_policy import ALL, exit_code, no_restart_reason, summarize_attempt
from spmd.launch.settings import Settings
from spmd.launch.slurm import SlurmJob, script
from spmd.launch.srun import _exit_code, _signal, _step, command
from tests.processes import environment

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / "tests" / "distributed" / "faulty_job.py"
SLOW = pytest.mark.slow

# srun of one node: tasks with the variables that it gives them, their lines with labels; it ends
# with the highest code, and SIGTERM is for it a reason to kill all tasks at once, as for the real
# one
SRUN = """#!{python}
import os, pathlib, signal, subprocess, sys, threading
words, options = sys.argv[1:], []
while words[0].startswith("--"):
    options.append(words.pop(0))
assert "--label" in options and "--kill-on-bad-exit=0" in options and "--export=ALL" in options, options
size, steps = int(os.environ["SLURM_NTASKS"]), pathlib.Path(os.environ["STUB_STEPS"])
job = os.environ["SLURM_JOB_ID"]
step = len(list(steps.iterdir()))
step_variables = {{"SLURM_STEP_ID": str(step), "SLURM_STEP_NODELIST": "node1", "SLURM_STEP_NUM_TASKS": str(size), "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": str(size)}}
tasks = [subprocess.Popen(words, env={{**os.environ, **step_variables, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(size)]
(steps / f"{{job}}.{{step}}").write_text(" ".join(str(task.pid) for task in tasks))
def kill(*_):
    print("srun: forcing job termination", flush=True)
    [task.kill() for task in tasks]
signal.signal(signal.SIGTERM, kill)
def copy(rank, task):
    for line in task.stdout:
        print(f"{{rank}}: {{line}}", end="", flush=True)
readers = [threading.Thread(target=copy, args=pair) for pair in enumerate(tasks)]
[reader.start() for reader in readers]
codes = [task.wait() for task in tasks]
[reader.join() for reader in readers]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""  # noqa: E501
SBATCH = """#!{python}
import os, re, subprocess, sys
text = sys.stdin.read()
options = dict(re.findall(r"(?m)^#SBATCH --([a-z-]+)=(.*)$", text))
nodes, tasks = int(options["nodes"]), int(options["nodes"]) * int(options["ntasks-per-node"])
print("Submitted batch job 4242", flush=True)
open("job.sh", "w").write(text)
env = {{**os.environ, "SLURM_JOB_ID": "4242", "SLURM_NTASKS": str(tasks), "SLURM_NNODES": str(nodes)}}
sys.exit(subprocess.run(["bash", "job.sh"], env=env).returncode)
"""  # noqa: E501
SCANCEL = """#!{python}
import os, pathlib, signal, sys
name, step = sys.argv[1].removeprefix("--signal="), sys.argv[2]
for number in (pathlib.Path(os.environ["STUB_STEPS"]) / step).read_text().split():
    os.kill(int(number), getattr(signal, "SIG" + name))
"""
STUBS = {
    "srun": SRUN,
    "sbatch": SBATCH,
    "scancel": SCANCEL,
    "squeue": """\
#!/bin/sh
state=${{STUB_STATE:-RUNNING}}
case "$*" in *%A*) state="$SLURM_JOB_ID $state"; esac
echo "$state"
""",
    "scontrol": '#!/bin/sh\necho "scontrol $*"\n',
}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A folder to work in, and commands of SLURM on the PATH."""
    for folder in ("bin", "steps"):
        (tmp_path / folder).mkdir()
    for name, text in STUBS.items():
        (tmp_path / "bin" / name).write_text(text.format(python=sys.executable))
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB_STEPS", str(tmp_path / "steps"))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for step in (tmp_path / "steps").iterdir():
        for number in map(int, step.read_text().split()):
            if (
                Path(f"/proc/{number}/environ").exists()
                and str(tmp_path).encode() in Path(f"/proc/{number}/environ").read_bytes()
            ):
                os.kill(number, signal.SIGKILL)


def run(*words, seconds=400, meanwhile=lambda process, lines: None, **variables):
    """Run `spmd launch` and give its exit code and what it printed; whatever is left of it is
    ended.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "spmd", "launch", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**variables),
        start_new_session=True,
    )
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
    reader.start()
    try:
        meanwhile(process, lines)
        code = process.wait(timeout=seconds)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        reader.join(timeout=30)
        process.stdout.close()
    return code, "".join(lines)


def batch(*words, options=(), **more):
    submit = ["--slurm", "--nodes", 1, "--processes-per-node", 2, "--simulate", 2, *options]
    return run(*submit, JOB, *words, **more)


def hashes(text):
    return re.findall(r"(?m)^(?:[01]: |\[[01]\] )HASH (\w+ \d+)$", text)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What a run comes to that has nothing to do with SLURM."""
    code, text = run(
        "--processes", 2, "--simulate", 2, JOB, "--folder", tmp_path_factory.mktemp("undisturbed")
    )
    assert code == 0 and len(hashes(text)) == 2 and len(set(hashes(text))) == 1, text
    return hashes(text)[0]


@pytest.mark.system
def test_slurm_job_runs(cluster):
    code, text = batch("--folder", cluster / "run", options=["--env", "STUB_TELLS=a b"])
    assert code == 0, text
    assert (
        "Submitted batch job 4242" in text
        and len(hashes(text)) == 2
        and len(set(hashes(text))) == 1
    ), text
    assert "export STUB_TELLS='a b'" in (cluster / "job.sh").read_text()
    assert re.search(r"0: spmd 0: process 0 of 2 \(SLURM job 4242\), process 0 at 127.0.0.1:", text)
    assert not (cluster / ".spmd").exists(), "reports are taken away"


@SLOW
@pytest.mark.parametrize("fault", ["raise", "KILL"])
def test_fault_is_reported_and_the_final_state_is_identical(cluster, undisturbed, fault):
    code, text = batch("--folder", cluster / "run", "--fault", fault, options=["--max-restarts", 2])
    assert code == 0, text
    assert hashes(text) == [undisturbed] * 2, text
    reported = {
        "raise": r"spmd launch: process 1 at step 2\d: .*ValueError: boom on process 1",
        "KILL": "spmd launch: process 1 was killed, stopped, or blocked by code that holds the GIL",
    }
    assert re.search(reported[fault], text), text
    assert "spmd launch: restart 1 of at most 2" in text and "restart 2" not in text
    ports = set(re.findall(r"process 0 at 127.0.0.1:(\d+)", text))
    assert len(ports) == 2, "each step of srun has its own port"
    assert not (cluster / ".spmd").exists()


@SLOW
def test_repeated_error_is_not_restarted(cluster):
    code, text = batch(
        "--folder", cluster / "run", "--fault", "raise", "--always", options=["--max-restarts", 5]
    )
    assert code == 1, "that of the process that failed; srun ends with the 42 of the other"
    assert "no restart: the same error occurred twice at the same step" in text, text


@SLOW
@pytest.mark.parametrize("state", ["COMPLETING", "RUNNING"])
def test_sigterm_requeues_the_job_and_it_resumes(cluster, undisturbed, state):
    words, options = ["--folder", cluster / "run"], ["--requeue", "--max-restarts", 2]
    code, text = batch(*words, "--fault", "TERM", options=options, STUB_STATE=state)
    assert code == 143, text
    assert ("scontrol requeue 4242" in text) == (state == "RUNNING"), (
        "a cancelled job is not requeued"
    )
    assert "no restart: it was asked to stop, and has saved" in text
    if state == "RUNNING":
        code, text = batch(*words, options=options, SLURM_RESTART_COUNT="1")
        assert code == 0 and hashes(text) == [undisturbed] * 2, text


@SLOW
def test_sigterm_to_the_launcher_reaches_the_tasks_not_srun(cluster, monkeypatch):
    for name, value in (("SLURM_JOB_ID", "77"), ("SLURM_NTASKS", "2"), ("SLURM_NNODES", "1")):
        monkeypatch.setenv(name, value)

    def ask(process, lines):
        while not any("FAULT at" in line for line in lines) and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)

    words = ["--folder", cluster / "run", "--fault", "none of these", "--steps", 100_000]
    code, text = run("--srun", "--simulate", 2, "--max-restarts", 1, JOB, *words, meanwhile=ask)
    assert code == 143 and "forcing job termination" not in text and "restart 1" not in text, text
    assert max(int(path.name) for path in (cluster / "run" / "checkpoints").iterdir()) > 25


@pytest.mark.system
def test_sigterm_before_any_task_runs_ends_srun(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    (cluster / "bin" / "srun").write_text(
        "#!/bin/sh\necho waiting for resources\nexec sleep 1000\n"
    )

    def ask(process, lines):
        while not lines and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)

    code, text = run("--srun", "--max-restarts", 3, JOB, meanwhile=ask)
    assert code == 143 and "no restart: it was stopped by signal 15" in text, text


def test_sbatch_script():
    config = SlurmJob(
        nodes=4,
        gpus_per_node=8,
        cpus=12,
        memory="64G",
        time="1-12:00:00",
        partition="gpu,long",
        account="team-1",
        name="gpt",
        output="runs/%j.log",
        requeue=True,
        extra=("--constraint=a100",),
        env=(("NCCL_SOCKET_IFNAME", "=ib0"), ("NOTE", "it's $HOME; `x`")),
        python="/opt/my python",
        settings=Settings(
            max_restarts=3, grace=89.5, stall="step=120", memory_fraction=0.9, preallocate=False
        ),
    )
    assert script(["train.py", "--name", "a b", "$(rm x)"], config) == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=gpt\n"
        "#SBATCH --nodes=4\n"
        "#SBATCH --ntasks-per-node=8\n"
        "#SBATCH --gpus-per-node=8\n"
        "#SBATCH --cpus-per-task=12\n"
        "#SBATCH --mem=64G\n"
        "#SBATCH --time=1-12:00:00\n"
        "#SBATCH --partition=gpu,long\n"
        "#SBATCH --account=team-1\n"
        "#SBATCH --output=runs/%j.log\n"
        "#SBATCH --signal=TERM@90\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --requeue\n"
        "#SBATCH --constraint=a100\n"
        "\n"
        "export NCCL_SOCKET_IFNAME==ib0\n"
        "export NOTE='it'\"'\"'s $HOME; `x`'\n"
        "code=0\n"
        "'/opt/my python' -m spmd launch --srun --max-restarts 3 --grace 89.5 --stall step=120 "
        "--memory-fraction 0.9 --no-preallocate"
        " train.py --name 'a b' '$(rm x)' || code=$?\n"
        "# it has saved after SIGTERM; a cancelled job is no longer RUNNING\n"
        'if [ "$code" -eq 143 ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = '
        "RUNNING ]; then\n"
        '    scontrol requeue "$SLURM_JOB_ID"\n'
        "fi\n"
        'exit "$code"'
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "nodes=0.\n    fix: from 1 to 100000."),
        (
            {"processes_per_node": 3, "gpus_per_node": 8},
            "8 GPUs of a node cannot be shared equally by 3 processes.\n    fix: as many, or a "
            "divisor.",
        ),
        (
            {"gpus_per_node": 8, "settings": Settings(simulate=2)},
            "gpus_per_node= is for GPUs, but simulate=2",
        ),
        ({"settings": Settings(stall="step=3")}, "stall has no effect on a single process"),
        ({"settings": Settings(grace=70000.0)}, "grace=70000.\n    fix: from 1 to 65535."),
        (
            {"memory": "64 G"},
            "memory='64 G'.\n    fix: of each node, such as 64G; 0 for all of it.",
        ),
        (
            {"time": "tomorrow"},
            "time='tomorrow'.\n    fix: minutes, or a time such as 12:00:00 or 1-12:00:00.",
        ),
        (
            {"time": "0:30"},
            "grace=30 seconds of a job that has only 30 (time=0:30).\n    fix: a longer time "
            "limit.",
        ),
        (
            {"extra": ("--array=0-3",)},
            'sbatch option "--array=0-3" starts independent jobs.\n    fix: --nodes',
        ),
        ({"extra": ("-a0-3",)}, 'sbatch option "-a0-3" starts independent jobs.'),
        ({"partition": "gpu\n#SBATCH --nodes=9"}, r"partition='gpu\n#SBATCH --nodes=9'."),
        ({"account": "a b"}, "account='a b'.\n    fix: letters, digits and _.+-."),
        ({"name": "x; rm"}, "name='x; rm'."),
        ({"output": "a log"}, "output='a log'.\n    fix: a path of letters, digits and ./%+@=,:-."),
        (
            {"extra": ("--nodes=9",)},
            'sbatch option "--nodes=9": --nodes has its own option here, or is already set.',
        ),
        ({"extra": ("-N9",)}, 'sbatch option "-N9"'),
        ({"extra": ("--mem 9",)}, 'sbatch option "--mem 9": --mem has its own option here'),
        (
            {"extra": ("nodes",)},
            'sbatch option "nodes".\n    fix: as sbatch expects it, such as --constraint=a100.',
        ),
        ({"extra": ("--a\n--b",)}, r"sbatch='--a\n--b'."),
        (
            {"srun_options": ("--label",)},
            'srun option "--label": --label has its own option here, or is already set.',
        ),
        ({"srun_options": ("-n9",)}, 'srun option "-n9": -n has its own option here'),
        ({"srun_options": ("--ntask=9",)}, "--ntask has its own option here"),
        ({"srun_options": ("--cpus-per-gpu=4",)}, "--cpus-per-gpu has its own option here"),
        (
            {"srun_options": ("--container-image train.sqsh",)},
            'srun option "--container-image train.sqsh" is more than one word.\n    fix: = between',
        ),
        (
            {"srun_options": ("container",)},
            'srun option "container".\n    fix: as srun expects it, such as --container-image',
        ),
        ({"srun_options": ("--a\n--b",)}, r"srun='--a\n--b'."),
        ({"env": (("A B", "x"),)}, "env='A B'.\n    fix: NAME=VALUE"),
        ({"env": (("A", "x\ny"),)}, r"env A='x\ny'."),
        ({"env": (("A", "x"), ("A", "y"))}, "env A is given twice: 'x' and 'y'."),
        (
            {"env": (("SPMD_PROCESS", "x"),)},
            "env SPMD_PROCESS is set by the launcher in each process.",
        ),
        ({"env": (("SPMD_STALL", "x"),)}, "env SPMD_STALL is set by an option.\n    fix: --stall."),
        (
            {"env": (("JAX_PLATFORMS", "x"),), "settings": Settings(simulate=2)},
            "env JAX_PLATFORMS is set by an option.",
        ),
        ({"python": "py\tthon"}, r"python='py\tthon'."),
    ],
)
def test_bad_job_options_are_refused(options, message):
    with pytest.raises(OptionError) as caught:
        SlurmJob(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slurm", "--nodes", "2"], "there is no script to run."),
        (["--slurm", "nothing.py"], 'there is no script "nothing.py".'),
        (["--slurm", "--dry-run", "train.py", "a\nb"], r"an argument of the script='a\nb'."),
        (
            ["--slurm", __file__],
            "this machine has no sbatch.\n    fix: run it on a login node of the cluster; or "
            "--dry-run, which prints the script.",
        ),
        (
            ["--slurm", "--output", "logs/%j", __file__],
            "--output 'logs/%j': there is no folder logs, and SLURM does not create it.\n    fix: "
            "mkdir -p logs",
        ),
        (
            ["--slurm", "--processes", "2", __file__],
            "--processes has no effect with --slurm.\n    fix: --nodes; also --processes-per-node",
        ),
        (["--slurm", "--processes", "0", __file__], "--processes has no effect with --slurm."),
        (
            ["--slurm", "--image", "x", __file__],
            "--image has no effect with --slurm.\n    fix: leave it out or --kubernetes.",
        ),
        (
            ["--slurm", "--env", "X", __file__],
            "--env 'X' has no value.\n    fix: --env NAME=VALUE.",
        ),
        (
            ["--srun", __file__],
            "this is not inside a SLURM allocation: SLURM_JOB_ID is not set.\n    fix: spmd launch "
            "--slurm",
        ),
        (
            ["--srun", "--nodes", "2", __file__],
            "--nodes has no effect with --srun.\n    fix: leave it out or --slurm or --kubernetes.",
        ),
        (
            ["--nodes", "2", __file__],
            "--nodes has no effect on one machine.\n    fix: leave it out or --slurm or "
            "--kubernetes.",
        ),
        (
            ["--dry-run", __file__],
            "--dry-run has no effect on one machine.\n    fix: leave it out or --slurm.",
        ),
    ],
)
def test_bad_options_are_reported(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *words]) == 2
    assert message in capsys.readouterr().err


def test_options_of_srun_reach_it(capsys, tmp_path, monkeypatch):
    words = ["--srun-option", "container-image=train.sqsh", "--srun-option=--mpi=none"]
    assert main(["launch", "--slurm", "--dry-run", *words, __file__]) == 0
    script = capsys.readouterr().out
    line = next(line for line in script.splitlines() if " -m spmd launch " in line)
    passed = ["--srun-option=--container-image=train.sqsh", "--srun-option=--mpi=none"]
    assert shlex.split(line)[4:8] == ["launch", "--srun", *passed]

    # as the script runs it
    shown = tmp_path / "shown"
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\necho "$@" > {shown}\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "2(x2)")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1(x2)")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    main(["launch", "--srun", *passed, __file__])
    assert " --cpus-per-task=2 --container-image=train.sqsh --mpi=none " in shown.read_text()
    assert "each process has 2 of its node's CPUs" in capsys.readouterr().err


def test_sbatch_options_with_and_without_dashes(capsys):
    assert (
        main(
            [
                "launch",
                "--slurm",
                "--dry-run",
                "--sbatch",
                "constraint=a100",
                "--sbatch=--exclusive",
                "--sbatch=gpus=4",
                "-m",
                "my.train",
                "--slurm",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert (
        "#SBATCH --constraint=a100\n#SBATCH --exclusive\n#SBATCH --gpus=4\n" in text
        and "#SBATCH --job-name=train\n" in text
    )
    assert text.endswith("-m spmd launch --srun -m my.train --slurm\n"), (
        "what follows the script is the script's"
    )


def test_script_may_have_options_of_the_same_names(capsys):
    assert (
        main(
            [
                "launch",
                "--slurm",
                "--dry-run",
                "train.py",
                "-m",
                "x",
                "--nodes",
                "9",
                "--",
                "--srun",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "#SBATCH --nodes=1\n" in text and text.endswith(
        "--srun train.py -m x --nodes 9 -- --srun\n"
    )


class Asked:
    def __init__(self):
        self.numbers = []

    def signal(self, number):
        self.numbers.append(number)


def test_srun_is_signalled_if_scancel_fails(cluster):
    stop_signal, said = Asked(), []
    (cluster / "bin" / "scancel").write_text("#!/bin/sh\nexit 1\n")
    _signal(stop_signal, signal.SIGTERM, "77.0", said.append)
    assert (
        stop_signal.numbers == [signal.SIGTERM]
        and "scancel --signal=TERM 77.0: exit code 1; signalling srun instead" in said[0]
    )
    _signal(stop_signal, signal.SIGINT, None, said.append)
    _signal(stop_signal, signal.SIGKILL, None, said.append)
    assert stop_signal.numbers[1:] == [signal.SIGTERM, signal.SIGKILL] and len(said) == 1


def test_step_id_is_read_from_records(tmp_path):
    assert _step(tmp_path, "77") is None
    for reported, step in (("77.3", "77.3"), ("78.3", None), ("--user=root", None)):
        (tmp_path / "srun.json").write_text(json.dumps({"id": reported}))
        assert _step(tmp_path, "77") == step


def test_srun_command():
    assert command(["train.py"], {})[:5] == [
        "srun",
        "--label",
        "--export=ALL",
        "--kill-on-bad-exit=0",
        "--wait=360",
    ]
    assert "--cpus-per-task=12" in command(["train.py"], {"SLURM_CPUS_PER_TASK": "12"})
    # an equal share of what the allocation has, on the smallest node
    nodes = {"SLURM_JOB_CPUS_PER_NODE": "64(x2),32", "SLURM_TASKS_PER_NODE": "8(x3)"}
    assert "--cpus-per-task=4" in command(["train.py"], nodes | {"SLURM_NTASKS": "24"})
    # srun starts one task on each node, whatever SLURM says of tasks that could be
    assert "--cpus-per-task=32" in command(["train.py"], nodes)
    container = command(["train.py"], {}, ("--container-image=train.sqsh",))
    assert container[5] == "--container-image=train.sqsh"
    assert command(["train.py", "--x"], {})[-3:] == ["spmd.launch.runner", "train.py", "--x"]


@pytest.mark.parametrize(
    ("code", "plain"),
    [(0, 0), (1, 1), (42, 42), (137, -9), (134, -6), (143, 143), (250, 250), (-9, -9)],
)
def test_srun_exit_codes(code, plain):
    assert _exit_code(code) == plain


def test_reported_codes_take_precedence_over_srun():
    reported = [
        {"name": "1", "at": 1.0, "step": 26, "error": "ValueError: boom", "code": 3},
        {"name": "srun", "at": 0.5, "id": "4242.0"},
    ]
    attempt = summarize_attempt(reported, {ALL: 42}, {ALL: 42})
    assert (
        attempt.codes == {ALL: 42, 1: 3}
        and exit_code(attempt) == 3
        and attempt.cause == "process 1 at step 26: ValueError: boom"
    )
    disagreed = summarize_attempt([{**reported[0], "code": 78}], {ALL: 78}, {ALL: 78})
    assert "disagree" in no_restart_reason([disagreed], 5)
    killed = summarize_attempt([], {ALL: -9}, {ALL: -9})
    assert killed.cause == "the step of srun ended with signal 9" and exit_code(killed) == 137


@pytest.mark.parametrize(
    ("environment", "again"),
    [
        ({}, False),
        ({"SLURM_RESTART_COUNT": "0"}, False),
        ({"SLURM_RESTART_COUNT": "2", "SPMD_ATTEMPT": "0"}, True),
        ({"SPMD_ATTEMPT": "1"}, True),
    ],
)
def test_was_restarted(environment, again, monkeypatch):
    for name in ("SLURM_RESTART_COUNT", "SPMD_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert was_restarted() is again
