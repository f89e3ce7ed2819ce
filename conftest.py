"""Eight CPU devices for every test, and settings that turn carelessness into failures."""

import functools
import os
import shutil
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_collective_call_terminate_timeout_seconds=60"
# many tests compile the same program: it is kept for this run, for pytest's workers and for the processes that tests start
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get("JAX_COMPILATION_CACHE_DIR") or tempfile.mkdtemp(
    prefix=f"spmd-compiled-{os.getpid()}-"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
os.environ["SPMD_CACHE"] = str(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "plans")

import jax
import jax._src.compiler
import pytest

import spmd

spmd.simulate_devices(8)

# Compiling is most of what tests do, and takes a third of the time with these. `make test-all` compiles all as users do. Tests that say
# "optimized" always do: those that compare two programs to the last bit, or where a rounding decides what comes next.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True, "xla_cpu_use_fusion_emitters": False}
_overrides: dict[str, object] = {}
_as_users_do = jax._src.compiler.get_compile_options


def _get_compile_options(*args, env_options_overrides=None, **named):
    return _as_users_do(*args, env_options_overrides={**_overrides, **(env_options_overrides or {})}, **named)


jax._src.compiler.get_compile_options = _get_compile_options


@functools.cache
def _quick() -> dict[str, object]:
    """Of the options above those that this XLA has: versions differ, and one that it lacks fails every compilation."""

    def has(name: str) -> bool:
        try:
            jax.jit(lambda: 0).lower().compile(compiler_options={name: QUICK[name]})
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            return False
        return True

    return {name: value for name, value in QUICK.items() if has(name)}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Compile quickly, or as users do; no program made in one way serves a test of the other."""
    everything_optimized = bool(os.environ.get("SPMD_TEST_OPTIMIZED"))
    quick = not (everything_optimized or item.get_closest_marker("optimized"))
    if "SPMD_TEST_FLAGS" not in os.environ:  # the XLA_FLAGS of processes that tests start and that want the same
        flags = {} if everything_optimized else _quick()
        os.environ["SPMD_TEST_FLAGS"] = " ".join(f"--{name}={str(value).lower()}" for name, value in flags.items())
    if quick != bool(_overrides):
        jax.clear_caches()
        _overrides.clear()
        _overrides.update(_quick() if quick else {})


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
