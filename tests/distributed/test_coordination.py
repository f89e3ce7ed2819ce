"""What is private to JAX, in the release that is installed: two processes use each function of
`spmd.distributed.coordination` once.
"""

import os
import socket
import subprocess
import sys

from tests.processes import environment

RUN = """
import sys
from spmd.distributed import coordination
from spmd.distributed.world import World

rank, address = int(sys.argv[1]), sys.argv[2]
assert not coordination.is_initialized() and not coordination.backends_initialized()
coordination.initialize(World(rank, 2, address, "a test"), address, 60, "127.0.0.1")
assert coordination.is_initialized() and coordination.process_info() == (rank, 2, address)
coordination.put(f"names/{rank}", "first")
coordination.put(f"names/{rank}", f"process {rank}")
assert [coordination.get(f"names/{n}", 60) for n in (rank, 1 - rank)][0] == f"process {rank}"
try:
    coordination.get("never", 0.01)
except TimeoutError as error:
    print(error)
coordination.put(f"ready/{rank}", "")
coordination.get(f"ready/{1 - rank}", 60)
print(dict(sorted(coordination.read_dir("names/").items())))
coordination.shutdown()
assert not coordination.is_initialized()
print("the end", flush=True)
coordination.exit_now(7)
"""


def test_coordination_service_of_this_jax():
    """Also behind a proxy, by which gRPC would never reach it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {
        **os.environ,
        "https_proxy": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
        "no_proxy": "example.com",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(rank), address],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    names = {"0": "process 0", "1": "process 1"}
    for process, (out, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 7, err
        assert "proxy" not in err
        assert out.splitlines() == ["never was not set within 0.01 s", str(names), "the end"]


def test_exit_waits_for_nothing_that_hangs():
    """Such as a file system that is away, in which a lock is to be released."""
    code = (
        "import time; from spmd.distributed import coordination as c; "
        "c.before_exit(lambda: time.sleep(600)); c.exit_now(7)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), timeout=300, check=False)
    assert done.returncode == 7
