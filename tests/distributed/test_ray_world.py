"""The place of a worker of Ray Train, with a stub of Ray. `make test-engines` has the real one."""

import sys
import types

import pytest
from pyarrow import fs

from spmd.distributed import initialize
from spmd.distributed.ray_world import detect_ray
from spmd.distributed.world import World

SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


class Worker:
    """What Ray says in one of its workers; `sent` is what the first one has sent to all."""

    def __init__(self, rank, size, sent=None, folder="no-such-folder"):
        self.get_world_rank = lambda: rank
        self.get_world_size = lambda: size
        self.get_local_rank = lambda: rank
        self.get_local_world_size = lambda: size
        self.sent = sent

        self.get_storage = lambda: types.SimpleNamespace(
            storage_filesystem=fs.LocalFileSystem(), experiment_fs_path=str(folder)
        )

    def broadcast(self, offer):
        if offer is not None:
            self.sent = offer
        return self.sent


@pytest.fixture
def start(monkeypatch):
    """Make this process a worker."""
    for name in ("SPMD_COORDINATOR", "SPMD_TOKEN", "SPMD_PROCESSES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(initialize, "_restarted", None)

    def start(worker, gpus=()):
        def get_context():
            if worker is None:
                raise RuntimeError("`get_context` cannot be used outside of a training function.")
            return worker

        context = types.SimpleNamespace(get_accelerator_ids=lambda: {"GPU": gpus})
        broadcast = getattr(worker, "broadcast", None)
        modules = {
            "ray": {"get_runtime_context": lambda: context},
            "ray.util": {"get_node_ip_address": lambda: "127.0.0.1"},
            "ray.train": {"get_context": get_context},
            "ray.train.collective": {"broadcast_from_rank_zero": broadcast},
        }
        for name, contents in modules.items():
            module = types.ModuleType(name)
            module.__dict__.update(contents)
            monkeypatch.setitem(sys.modules, name, module)

    return start


def test_workers_agree_on_the_first_ones_address_and_token(start):
    first = Worker(0, 2)
    start(first)
    world = detect_ray()
    assert (world.rank, world.size, world.local_size) == (0, 2, 2)
    assert world.host == "127.0.0.1" and len(world.token) == 32
    start(Worker(1, 2, first.sent))
    assert detect_ray() == World(
        1, 2, world.address, "Ray Train", 1, 2, world.local_devices, world.token
    )


def test_address_and_token_may_be_chosen(start, monkeypatch):
    monkeypatch.setenv("SPMD_COORDINATOR", "10.0.0.9:4001")
    monkeypatch.setenv("SPMD_TOKEN", "secret")
    start(Worker(0, 2))
    world = detect_ray()
    assert (world.address, world.token) == ("10.0.0.9:4001", "secret")


def test_worker_has_the_variables_of_what_started_ray(start, monkeypatch):
    """`srun ray start` starts Ray in a step of two tasks, whose workers are others."""
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(initialize.coordination, "backends_initialized", lambda: True)
    start(Worker(1, 3, ("127.0.0.1:4000", "secret", False)))
    with pytest.raises(initialize.ClusterError, match=r"process 1 of 3 \(Ray Train\)"):
        initialize.join()


def test_a_driver_is_no_worker(start):
    start(None)
    assert detect_ray() is None


def test_a_single_worker_trains_alone(start, monkeypatch):
    """Also where a step of several tasks has started Ray."""
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    start(Worker(0, 1))
    assert detect_ray().size == 1 and initialize.join() is None


@pytest.mark.parametrize(
    ("visible", "assigned", "expected"),
    [
        ("2,3", ["2", "3"], None),  # its own alone
        ("0,1,2,3", ["2", "3"], (2, 3)),  # as TorchTrainer shows all of a host
        ("0,1,2,3", [], (2, 3)),  # an equal share
    ],
)
def test_gpus_of_a_worker(start, monkeypatch, visible, assigned, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    start(Worker(1, 2, ("127.0.0.1:4000", "secret", False)), assigned)
    assert detect_ray().local_devices == expected


def test_gpus_that_a_worker_does_not_see(start, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    start(Worker(1, 2, ("127.0.0.1:4000", "secret", False)), ["1"])
    with pytest.raises(initialize.ClusterError, match=r"has GPU 1, which .*\(GPU-a, GPU-b\)"):
        detect_ray()


def test_ray_that_gives_all_workers_the_first_gpu(start, monkeypatch):
    """As it does where it connects JAX itself (`JaxConfig(use_gpu=True)`)."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    start(Worker(1, 2, ("127.0.0.1:4000", "secret", False)), ["1"])
    with pytest.raises(initialize.ClusterError, match=r"has GPU 1, .*\(0\)[^$]*JaxConfig\(\)"):
        detect_ray()


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_ray_has_started_before(start, size, tmp_path):
    again = []
    for _ in range(3):
        start(Worker(0, size, folder=tmp_path))
        again.append(detect_ray().restarted)
    assert again == [False, True, True]
    # another run has another folder
    other = tmp_path / "other"
    other.mkdir()
    start(Worker(0, size, folder=other))
    assert not detect_ray().restarted


def test_other_workers_ask_the_first_whether_it_was_restarted(start, tmp_path):
    first = Worker(0, 2, folder=tmp_path)
    start(first)
    detect_ray()
    detect_ray()
    start(Worker(1, 2, first.sent))
    assert detect_ray().restarted


def test_single_worker_that_was_restarted_resumes(start, monkeypatch, tmp_path):
    for expected in (False, True):
        # another process
        monkeypatch.setattr(initialize, "_restarted", None)
        start(Worker(0, 1, folder=tmp_path))
        for _ in range(2):
            assert initialize.join() is None and initialize.was_restarted() is expected


def test_ray_that_does_not_say_whether_it_was_restarted(start, caplog, tmp_path):
    worker = Worker(0, 2, folder=tmp_path / "removed")
    start(worker)
    assert not detect_ray().restarted
    assert "whether it has started this run before" in caplog.text
    assert "fix: fit(resume=True)" in caplog.text


def test_ray_has_connected_the_processes(start, monkeypatch, tmp_path):
    """As it does with GPUs: the token and the restart are still of use."""
    monkeypatch.setattr(initialize, "_joined", None)
    monkeypatch.setattr(initialize, "_restarted", None)
    monkeypatch.setattr(initialize.coordination, "is_initialized", lambda: True)
    monkeypatch.setattr(initialize.coordination, "process_info", lambda: (1, 2, "10.0.0.1:5000"))
    monkeypatch.setattr(initialize.watchdog, "start", lambda *args: None)
    start(Worker(1, 2, ("10.0.0.1:4000", "secret", True)))
    world = initialize.join()
    assert (world.rank, world.size, world.address) == (1, 2, "10.0.0.1:5000")
    assert (world.source, world.token) == ("Ray Train", "secret")
    assert initialize.was_restarted()


def test_an_older_ray_train_is_an_error(start, monkeypatch):
    worker = Worker(1, 2)
    start(worker)
    monkeypatch.setitem(sys.modules, "ray.train.collective", None)
    with pytest.raises(initialize.ClusterError, match="cannot be sent to the others"):
        detect_ray()


def test_worker_may_train_alone(start, monkeypatch):
    monkeypatch.setenv("SPMD_PROCESSES", "1")
    start(Worker(0, 2))
    assert detect_ray() is None
