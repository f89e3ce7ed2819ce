"""A job of a real SLURM on two hosts in namespaces, one of which has no network for a while.

`make test-engines` installs SLURM and runs this. Without it, or where no namespaces can be made,
the test is skipped: neither is part of what spmd needs.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from simulated_hosts import has_namespaces, simulated_hosts

from tests.engines import slurm
from tests.engines.test_engines import check_resumed, folders, weights
from tests.processes import end, environment

pytestmark = pytest.mark.system

JOB = Path(slurm.__file__).with_name("engine_job.py")


def wait_until(happened, output, process):
    """Wait for something that the job does."""
    # A bound for a job that hangs, and no judge.
    deadline = time.monotonic() + 300
    while not happened():
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)


def test_host_that_has_no_network_for_a_while(tmp_path):
    """SLURM never learns that the tasks on that host have ended; the launcher does."""
    if reason := slurm.missing():
        pytest.skip(reason)
    if not has_namespaces():
        pytest.skip("namespaces cannot be made here")
    undisturbed, disturbed = folders(tmp_path)
    output = tmp_path / "output"
    with simulated_hosts(tmp_path, 2) as hosts:
        places = []
        for number, host in enumerate(hosts.hosts, 1):
            enter = ("nsenter", "-t", str(host.holder), "-n", "-u", "-m")
            places.append(slurm.Place(host.name, f"10.77.0.{number}", enter))
        with slurm.cluster(places) as variables, output.open("w") as file:

            def start(*command):
                words = [*places[0].enter, *map(str, command)]
                return subprocess.Popen(
                    words, env=environment(**variables), stdout=file, stderr=subprocess.STDOUT
                )

            process = start("srun", "-N2", "-n2", sys.executable, JOB, undisturbed)
            try:
                code = process.wait(timeout=300)
            finally:
                end(process)
            expected = weights(code, output.read_text(), undisturbed)

            spmd = [sys.executable, "-m", "spmd", "launch", "--srun", "--max-restarts", "1"]
            process = start("salloc", "-N2", "-n2", *spmd, JOB, disturbed, "--wait")
            try:
                wait_until((disturbed / "disturbed").exists, output, process)
                hosts[1].connect("down")
                wait_until(lambda: "its step is ended" in output.read_text(), output, process)
                hosts[1].connect("up")
                code = process.wait(timeout=300)
            finally:
                end(process)
    text = output.read_text()
    assert "no answer for 20 s; that host, or the network to it, is lost" in text
    assert "restart 1 of at most 1" in text
    assert weights(code, text, disturbed) == expected
    check_resumed(disturbed, text)
