"""Hosts that are lost, and hosts whose name is a loopback address: processes in network namespaces,
started by hand.
"""

import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
import threading

import pytest
from simulated_hosts import simulated_hosts

from spmd.distributed import links
from tests.processes import environment

JOB = """
import sys
import jax.numpy as jnp, numpy as np, optax, spmd

spmd.join()
model = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((4, 1))}, lambda params, x: x @ params["w"])
data = {"x": np.ones((96, 4), np.float32), "y": np.ones((96, 1), np.float32)}
options = {"loss": spmd.losses.mean_squared_error, "optimizer": optax.sgd(0.1), "batch_size": 12}
report = lambda info: print("STEP 5", flush=True) if info.step == 5 else None
spmd.fit(model, data, steps=int(sys.argv[1]), callbacks=[report], **options)
print("END", flush=True)
"""  # noqa: E501


@pytest.fixture(params=[2])
def hosts(request, tmp_path):
    with simulated_hosts(tmp_path, request.param) as hosts:
        if hosts[0].holder is None:
            pytest.skip("network namespaces need privileges, and ip, unshare and nsenter")
        yield hosts


@contextlib.contextmanager
def started(hosts, steps, stall="step=inf"):
    """A process on each host; killed and reaped on leaving, and after 300 s whatever happens."""
    processes, count = [], len(hosts.hosts)
    shared = {
        "SPMD_PROCESSES": count,
        "SPMD_COORDINATOR": "10.77.0.1:6000",
        "SPMD_TOKEN": "t",
        "SPMD_STALL": stall,
        "SPMD_SIMULATE": 1,
    }
    for rank, host in enumerate(hosts.hosts):
        command = [
            "nsenter",
            "-t",
            str(host.holder),
            "-n",
            "-u",
            "-m",
            sys.executable,
            "-c",
            JOB,
            str(steps),
        ]
        variables = environment(SPMD_PROCESS=rank, **shared)
        processes.append(
            subprocess.Popen(
                command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    alarm = threading.Timer(300, lambda: [process.kill() for process in processes])
    alarm.start()
    try:
        yield processes
    finally:
        alarm.cancel()
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.system
def test_lost_host_is_named_by_both_sides(hosts):
    """JAX's heartbeat would abort both with signal 6, 10 s later."""
    with started(hosts, 10**7) as processes:
        for process in processes:
            assert any(line == "STEP 5\n" for line in process.stdout), process.stderr.read()
        hosts[1].connect("down")
        errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [42, 42], errors
    lost = "no answer for 20 s; that host, or the network to it, is lost\n"
    assert re.search(rf"(?m)^spmd 0: process 1 on b \(process id \d+\): {lost}", errors[0]), errors[
        0
    ]
    assert f"\nspmd 1: process 0 at 10.77.0.1:6000: {lost}" in errors[1], errors[1]
    assert not any("Check failure stack trace" in text or "Traceback" in text for text in errors), (
        errors
    )


@pytest.mark.system
@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_broken_link_between_two_hosts_is_named_in_the_stall(hosts):
    """Both reach process 0, and it them; only what one has sent the other is not acknowledged."""
    with started(hosts, 10**7, stall="step=30") as processes:
        for process in processes:
            assert any(line == "STEP 5\n" for line in process.stdout), process.stderr.read()
        hosts.disconnect(1, 2)
        errors = [process.communicate()[1] for process in processes]
    assert {process.returncode for process in processes} <= {42, 43}, errors
    found = re.findall(
        r"(?m)^spmd \d: process (\d): step \d+, step, last progress .* s ago; no answer from "
        r"10\.77\.0\.(\d)$",
        "\n".join(errors),
    )
    assert found and {*found} <= {("1", "3"), ("2", "2")}, errors
    assert not any("Check failure stack trace" in text for text in errors), errors


@pytest.mark.system
def test_hosts_whose_names_are_loopback_addresses_train(hosts, tmp_path):
    """As in Debian's /etc/hosts."""
    (tmp_path / "hosts" / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 a b\n")
    with started(hosts, 6) as processes:
        ended = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0] and all(
        out.endswith("STEP 5\nEND\n") for out, _ in ended
    ), ended


@pytest.mark.skipif(
    sys.platform != "linux", reason="the state of TCP connections is read on Linux alone"
)
@pytest.mark.parametrize(
    "listens",
    [
        "127.0.0.1",
        pytest.param(
            "::",
            marks=pytest.mark.skipif(
                not socket.has_dualstack_ipv6(), reason="this machine has no IPv6"
            ),
        ),
    ],
)
def test_addresses_of_connections_without_a_change_to_them(monkeypatch, listens):
    """With 0 in place of 5, every connection counts; a table of IPv6 has IPv4 addresses too."""
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    with socket.create_server(
        (listens, 0), family=family, dualstack_ipv6=family == socket.AF_INET6
    ) as listener:
        with (
            socket.create_connection(("127.0.0.1", listener.getsockname()[1])) as ours,
            listener.accept()[0] as theirs,
        ):
            assert links.unanswered() == []
            monkeypatch.setattr(links, "REPEATS", 0)
            # which Python gives each socket that it makes from a descriptor
            socket.setdefaulttimeout(30)
            try:
                found = links.unanswered()
            finally:
                socket.setdefaulttimeout(None)
            assert "127.0.0.1" in found and not any("ffff" in host for host in found)
            assert all(os.get_blocking(each.fileno()) for each in (ours, theirs, listener))


def test_without_descriptors_nothing_is_known_and_nothing_fails(monkeypatch):
    def listdir(folder):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), folder)

    monkeypatch.setattr(os, "listdir", listdir)
    assert links.unanswered() == []


class Answers:
    """A connection whose `recv` raises an error."""

    def __init__(self, number):
        self.number = number

    def recv(self, size):
        raise OSError(self.number, os.strerror(self.number))


def test_lost_names_hosts_that_do_not_answer_and_no_others():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as ours,
    ):
        theirs = links.keep(listener.accept()[0])
        kept = {1: ("process 1", theirs)}
        assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and links.lost(kept) == []
        assert links.local_address(kept) == "127.0.0.1"
        ours.close()  # it has ended
        assert links.lost(kept) == []
        theirs.close()
    broken = {
        number: (f"process {number}", Answers(number))
        for number in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ECONNRESET)
    }
    assert links.lost(broken) == [f"process {errno.ETIMEDOUT}", f"process {errno.EHOSTUNREACH}"]
