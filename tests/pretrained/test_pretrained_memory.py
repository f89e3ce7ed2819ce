"""Host memory of `load`, measured from outside: that of the arrays on the devices, and a bound that
does not grow with the model.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from host_memory_job import COUNT, INPUTS, OUTPUTS, write

from spmd.pretrained.read_weights import IN_FLIGHT
from tests.processes import environment

JOB = Path(__file__).parent / "host_memory_job.py"
SLACK = 32 << 20  # bytes: buffers of threads, and what allocators keep


def peaks(folder, *ways):
    run = subprocess.run(
        [sys.executable, JOB, folder, *ways],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return list(map(int, run.stdout.split()))


@pytest.mark.system
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="the most memory that a program had is read from Linux's /proc",
)
def test_load_has_bounded_host_memory(tmp_path):
    """Simulated devices keep their arrays in host memory, so the measure is a process that makes
    them without reading.
    """
    write(tmp_path)
    made, loaded = peaks(tmp_path, "make", "load")
    (read_first,) = peaks(tmp_path, "all_at_once")
    assert made > COUNT * INPUTS * OUTPUTS * 4
    assert loaded - made <= IN_FLIGHT + SLACK < read_first - made, (made, loaded, read_first)
