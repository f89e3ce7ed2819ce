"""Eight CPU devices for every test, and settings that turn carelessness into failures."""

import os
import shutil
import tempfile
from pathlib import Path

# compiling is most of what tests do, and takes a third of the time so; `make test-all` compiles as users do
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_collective_call_terminate_timeout_seconds=60",
        "" if os.environ.get("SPMD_TEST_OPTIMIZED") else "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "" if os.environ.get("SPMD_TEST_OPTIMIZED") else "--xla_cpu_use_fusion_emitters=false",
    ]
)
# many tests compile the same program: it is kept for this run, for pytest's workers and for the processes that tests start
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get("JAX_COMPILATION_CACHE_DIR") or tempfile.mkdtemp(
    prefix=f"spmd-compiled-{os.getpid()}-"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
os.environ["SPMD_CACHE"] = str(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "plans")

import pytest

import spmd

spmd.simulate_devices(8)


def pytest_unconfigure(config):
    """What this process has made it takes away."""
    folder = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    if folder.name.startswith(f"spmd-compiled-{os.getpid()}-"):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def digits():
    """Train and test halves of scikit-learn's 1,797 real 8x8 digits, pixels from 0 to 1."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = (data.images / 16.0).astype("float32")[..., None], data.target.astype("int32")
    return {"image": images[:1500], "label": labels[:1500]}, {"image": images[1500:], "label": labels[1500:]}
