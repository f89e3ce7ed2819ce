"""Files of hosts: lines, or jobs and their tasks."""

import pytest

from spmd.errors import OptionError
from spmd.launch.hostfile import Host, read_hosts
from spmd.launch.settings import Settings
from spmd.launch.ssh_launcher import SshConfig


@pytest.fixture
def written(tmp_path):
    def write(text, name="hosts.txt"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_read_hosts_from_lines(written):
    text = (
        "# the two new ones\nada@gpu01 processes=8 address=10.0.0.1  # rack 4\n\ngpu02\nfd00::2 "
        "processes=1\n"
    )
    assert read_hosts(written(text)) == (
        Host("ada@gpu01", 8, "10.0.0.1"),
        Host("gpu02"),
        Host("fd00::2", 1),
    )
    assert [host.reached for host in read_hosts(written("ada@gpu01\ngpu02 address=10.0.0.2"))] == [
        "gpu01",
        "10.0.0.2",
    ]


def test_read_hosts_from_jobs(written):
    text = (
        '[jobs]\nchief = ["gpu01"]\nworker = ["gpu02", "gpu01", "gpu02"]\n[addresses]\ngpu01 = '
        '"10.0.0.1"\n'
    )
    assert read_hosts(written(text, "cluster.toml")) == (
        Host("gpu01", 2, "10.0.0.1", ("chief:0", "worker:1")),
        Host("gpu02", 2, "", ("worker:0", "worker:2")),
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("hosts.txt", "# empty\n", "has 0 hosts.\n    fix: from 1 to 4096."),
        (
            "hosts.txt",
            "gpu01\ngpu01\n",
            "line 2: gpu01 is listed twice.\n    fix: one line, with processes=2.",
        ),
        ("hosts.txt", "gpu01\nada@gpu01\n", "line 2: ada@gpu01 is listed twice."),
        ("hosts.txt", "[fd00::2]\n", "'[fd00::2]' is not a host name."),
        ("hosts.txt", "-oProxyCommand=x\n", "line 1: '-oProxyCommand=x' is not a host name."),
        ("hosts.txt", "gpu01;reboot\n", "'gpu01;reboot' is not a host name."),
        (
            "hosts.txt",
            "gpu01:2222\n",
            "'gpu01:2222' has a port.\n    fix: gpu01; a free port is chosen for each attempt.",
        ),
        (
            "hosts.txt",
            "gpu01 slots=8\n",
            'line 1: "slots=8".\n    fix: known: processes, address. Such as processes=8.',
        ),
        ("hosts.txt", "gpu01 proceses=8\n", 'did you mean "processes"'),
        ("hosts.txt", "gpu01 processes\n", 'line 1: "processes".'),
        ("hosts.txt", "gpu01 processes=0\n", "line 1: processes=0.\n    fix: from 1 to 256."),
        ("hosts.txt", "gpu01 processes=x\n", "line 1: processes=x.\n    fix: an integer from 1."),
        ("hosts.txt", "gpu01 processes=1 processes=2\n", "line 1: processes is given twice."),
        ("hosts.txt", "gpu01 address=$(id)\n", "'$(id)' is not a host name."),
        ("cluster.toml", "[jobs\n", "is not valid TOML"),
        ("cluster.toml", "[job]\nworker = []\n", '[job].\n    fix: did you mean "jobs"?'),
        ("cluster.toml", "[jobs]\n", "has 0 hosts."),
        (
            "cluster.toml",
            '[jobs]\nworker = "gpu01"\n',
            '[jobs] is malformed.\n    fix: lines such as worker = ["gpu01", "gpu02"].',
        ),
        (
            "cluster.toml",
            "[jobs]\nworker = [1]\n",
            "task 0 of worker is 1.\n    fix: the name of a host.",
        ),
        (
            "cluster.toml",
            '[jobs]\nworker = ["gpu01:2222"]\n',
            "task 0 of worker: 'gpu01:2222' has a port.",
        ),
        (
            "cluster.toml",
            '[jobs]\nps = ["a"]\nworker = ["b"]\n',
            'the job "ps".\n    fix: leave it out; the workers',
        ),
        (
            "cluster.toml",
            '[jobs]\nworker = ["gpu01"]\n[addresses]\ngpu02 = "10.0.0.1"\n',
            "address of gpu02, which has no task.",
        ),
    ],
)
def test_bad_hostfiles_are_refused(written, name, text, message):
    with pytest.raises(OptionError) as caught:
        read_hosts(written(text, name))
    assert message in str(caught.value)


def test_missing_hostfile(tmp_path):
    with pytest.raises(OptionError, match="cannot be read"):
        read_hosts(tmp_path / "hosts.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"least": 1},
            "min_hosts applies to restarts, and there are none.\n    fix: --max-restarts 10.",
        ),
        ({"least": 3, "settings": Settings(max_restarts=1)}, "min_hosts=3.\n    fix: from 1 to 2."),
        ({"ssh": " "}, "ssh ' ' is not a command on this machine."),
        ({"ssh": "no-such-ssh -p 1"}, "ssh 'no-such-ssh -p 1' is not a command on this machine."),
        ({"ssh": "ssh 'x"}, 'ssh "ssh \'x" cannot be read: No closing quotation.'),
        ({"variables": ("SPMD_TOKEN=1",)}, "env SPMD_TOKEN is set by the launcher"),
        ({"variables": ("A=1", "A=2")}, "env A is given twice: '1' and '2'."),
        (
            {"variables": ("CUDA_VISIBLE_DEVICES=0",)},
            "variable 'CUDA_VISIBLE_DEVICES=0': the launcher divides the GPUs.",
        ),
        (
            {"settings": Settings(simulate=2)},
            "b needs a number of processes, since simulate ignores GPUs.\n    fix: b processes=1",
        ),
        ({"variables": ("A B=",)}, "env='A B'.\n    fix: NAME=VALUE"),
        (
            {"variables": ("SPMD_NO_SUCH",)},
            "variable 'SPMD_NO_SUCH' is not set here.\n    fix: SPMD_NO_SUCH=VALUE.",
        ),
    ],
)
def test_bad_ssh_options_are_refused(options, message):
    with pytest.raises(OptionError) as caught:
        SshConfig((Host("a", 1), Host("b")), **options)
    assert str(caught.value).startswith(message)


def test_environment_passed_to_hosts(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("MY_SECRET", "x")
    passed = SshConfig(
        (Host("a", 1),), variables=("ONE=1=2",), settings=Settings(stall="step=5")
    ).environment()
    assert (passed["NCCL_DEBUG"], passed["ONE"], passed["SPMD_STALL"]) == (
        "INFO",
        "1=2",
        "step=5",
    ) and "MY_SECRET" not in passed
    assert SshConfig((Host("a", 1),), variables=("MY_SECRET",)).environment()["MY_SECRET"] == "x"
