"""`spmd doctor`: what it prints of a machine, with problems and without, and that nothing it starts
can hang it.
"""

import copy
import json
import os
import subprocess
import sys

import pytest

from spmd.launch import doctor_checks, doctor_command
from spmd.launch.cli import main
from spmd.launch.doctor_checks import Output, problems, run_bounded
from spmd.launch.doctor_command import report, without_home

FOUND = {
    "versions": {
        "python": "3.12.1",
        "spmd": "0.1.0, a checkout at 0123abc",
        "jax": "0.10.2",
        "jaxlib": "0.10.2",
        "numpy": "2.4.0",
    },
    "machine": {"system": "Linux-6.8", "machine": "x86_64", "cpus": 32, "bytes": 256 << 30},
    "environment": {"XLA_FLAGS": "--xla_gpu_autotune_level=2"},
    "devices": {
        "devices": [{"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3", "bytes": 60 << 30}] * 8
    },
    "drivers": {"gpus": ["NVIDIA H100 80GB HBM3, 81559 MiB, 570.86"] * 8, "failure": ""},
    "extras": {
        "cuda": {"packages": ["jax"], "missing": [], "install": "pip install '.[cuda]'"},
        "wandb": {"packages": ["wandb"], "missing": ["wandb"], "install": "pip install '.[wandb]'"},
    },
    "network": {"loopback": "", "host_name": ""},
    "disk": {"folder": "/data/runs", "free": 900 << 30, "bytes_per_second": 1.2e9},
    "cache": {"folder": "~/.cache/spmd/programs", "enabled": True, "unsafe": "", "version": False}
    | {"entries": 1204, "bytes": 310 << 20, "writable": True},
}
REQUIRED = {"": ["jax>=0.10,<0.12", "jaxlib>=0.10,<0.12", "numpy>=2.0"]}


@pytest.fixture(autouse=True)
def known_requirements(monkeypatch):
    monkeypatch.setattr(doctor_checks, "requirements", lambda: REQUIRED)


def broken(**changes):
    """The machine above with some parts replaced."""
    found = copy.deepcopy(FOUND)
    for name, change in changes.items():
        found[name] |= change
    return found


def test_report_of_a_machine_without_problems(golden):
    assert problems(FOUND) == []
    golden("doctor_healthy", report(FOUND, []))


UNHEALTHY = {
    "versions": {"jax": "0.9.1", "numpy": None},
    "environment": {"JAX_PLATFORMS": "cpu"},
    "devices": {"devices": [{"platform": "cpu", "kind": "cpu", "bytes": 0}]},
    "network": {"loopback": "Operation not permitted", "host_name": "Name or service not known"},
    "disk": {"free": 1 << 30},
    "cache": {"writable": False},
}
OTHERS = {
    "devices_hang": {
        "devices": {"failure": "no answer within 60 s"},
        "drivers": {"gpus": [], "failure": "no answer within 10 s"},
    },
    "cuda_missing": {"devices": {"devices": [{"platform": "cpu", "kind": "cpu", "bytes": 0}]}},
    "read_only_folder": {"disk": {"failure": "Permission denied"}},
    "unsafe_cache": {
        "cache": {
            "unsafe": "every user can write to /tmp/programs (chmod o-w changes that), and loading "
            "a "
            "program runs it"
        }
    },
}


@pytest.mark.parametrize(
    ("driver", "extra"), [("570.86", "cuda12"), ("580.65.06", "cuda13"), ("[N/A]", "cuda13")]
)
def test_cuda_that_the_driver_supports(driver, extra):
    found = broken(
        devices={"devices": [{"platform": "cpu", "kind": "cpu", "bytes": 0}]},
        drivers={"gpus": [f"NVIDIA L4, 23034 MiB, {driver}"], "failure": ""},
    )
    (problem,) = problems(found)
    assert f".[{extra}]" in problem.fix


def test_report_of_a_machine_with_problems(golden):
    found = broken(**UNHEALTHY)
    golden("doctor_unhealthy", report(found, problems(found)))


@pytest.mark.parametrize("name", OTHERS)
def test_problem_has_a_fix(name, golden):
    wrong = problems(broken(**OTHERS[name]))
    assert all(problem.fix for problem in wrong)
    golden(f"doctor_{name}", "\n\n".join(map(str, wrong)))


def test_report_fits_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    found = broken(**UNHEALTHY)
    assert max(map(len, report(found, problems(found)).splitlines())) <= 80


def test_home_folder_is_not_shown(monkeypatch):
    monkeypatch.setenv("HOME", "/users/ada/")
    assert without_home('"/users/ada/runs /users/ada" /users/adam') == '"~/runs ~" /users/adam'


def test_command_that_hangs_is_killed_with_its_descendants():
    script = 'echo begun; sleep 600 & echo "{}"; wait'
    assert run_bounded(["sh", "-c", script], 0.5) == Output(
        "begun\n{}\n", "no answer within 0.5 s"
    )  # its output is closed, so all are gone


def test_command_that_fails_says_why(tmp_path):
    assert run_bounded(["sh", "-c", "echo one >&2; echo two >&2; exit 3"], 60) == Output("", "two")
    assert run_bounded(["sh", "-c", "exit 3"], 60) == Output("", "exit code 3")
    assert run_bounded(["sh", "-c", "kill -9 $$"], 60) == Output("", "exit code -9")
    missing = str(tmp_path / "missing")  # in no folder of $PATH, of which some may be unreadable
    assert run_bounded([missing], 60) == Output("", "No such file or directory")


def test_devices_that_hang_leave_the_rest(monkeypatch, tmp_path):
    # killed after 0.5 s
    monkeypatch.setattr(doctor_checks, "PROBE", "import time; time.sleep(600)")
    devices, cache = doctor_checks.devices_and_cache(0.5)
    assert devices == {"failure": "no answer within 0.5 s"} == cache
    found = broken() | {"devices": devices, "cache": cache}
    assert [problem.where for problem in problems(found)] == ["JAX finds no devices"]
    assert "JAX: no answer within 0.5 s" in report(found, [])


def test_extras_of_extras_are_looked_at(monkeypatch):
    declared = {"": [], "data": ["grain>=0.2"], "dev": ["spmd[data]", "pytest>=9"]}
    monkeypatch.setattr(doctor_checks, "requirements", lambda: declared)
    monkeypatch.setattr(
        doctor_checks, "_version", lambda package: None if package == "grain" else "1.0"
    )
    assert {name: extra["missing"] for name, extra in doctor_checks.extras().items()} == {
        "data": ["grain"],
        "dev": ["grain"],
    }


def test_extras_of_required_packages_are_looked_at(monkeypatch):
    """`jax[cuda13]` requires `jax-cuda13-plugin[with-cuda]`, which alone brings cuDNN; the
    compiler's extra has the plugin without it.
    """
    required = {
        "jax": ['plugin[with-cuda]; extra == "cuda13"', 'plugin; extra == "local"'],
        "plugin": ['cudnn>=9; extra == "with-cuda"'],
    }
    monkeypatch.setattr(
        doctor_checks,
        "requirements",
        lambda: {"": [], "cuda": ["jax[cuda13]>=0.10"], "compiler": ["plugin"]},
    )
    monkeypatch.setattr(
        doctor_checks, "_version", lambda package: None if package == "cudnn" else "1.0"
    )
    monkeypatch.setattr(doctor_checks.importlib.metadata, "requires", required.get)
    assert {name: extra["missing"] for name, extra in doctor_checks.extras().items()} == {
        "cuda": ["cudnn"],
        "compiler": [],
    }


def test_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    assert doctor_checks.disk(tmp_path / "file")["failure"] == "Not a directory"
    assert doctor_checks.disk(tmp_path)["bytes_per_second"] > 0 and os.listdir(tmp_path) == ["file"]


def test_exit_code_and_json(monkeypatch, capsys):
    for found, code in ((FOUND, 0), (broken(**UNHEALTHY), 1)):
        monkeypatch.setattr(doctor_command, "examine", lambda *given, found=found: found)
        assert main(["doctor", "--json"]) == code
        shown = json.loads(capsys.readouterr().out)
        assert len(shown.pop("problems")) == (0, 7)[code] and shown == found


@pytest.mark.system
def test_doctor_examines_this_machine_without_jax_in_its_process(tmp_path):
    """With jax unusable in the process that prints: it is imported only in another."""
    code = (
        "import sys; sys.modules['jax'] = None; from spmd.launch.cli import main; "
        "sys.exit(main(['doctor', '--json', *sys.argv[1:]]))"
    )
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "SPMD_CACHE": str(tmp_path),
        "HOME": str(tmp_path),
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", code, "--folder", tmp_path],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    found = json.loads(done.stdout)
    assert done.returncode == (1 if found["problems"] else 0), done.stderr
    assert {device["platform"] for device in found["devices"]["devices"]} == {"cpu"}
    assert (
        found["disk"]["folder"] == "~"
        and found["cache"]["folder"] == "~/programs"
        and str(tmp_path) not in done.stdout
    )
