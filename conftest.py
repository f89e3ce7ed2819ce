"""Eight CPU devices for every test, and compile options and caches that make the tests fast."""

import functools
import gc
import hashlib
import os
import platform
import shutil
import tempfile
from pathlib import Path

os.environ.pop("COLUMNS", None)  # tables in goldens are as wide as they want
# by the user, such as --xla_cpu_max_isa=AVX2
os.environ.setdefault("SPMD_TEST_GIVEN_FLAGS", os.environ.get("XLA_FLAGS", ""))
os.environ["XLA_FLAGS"] = (
    os.environ["SPMD_TEST_GIVEN_FLAGS"] + " --xla_cpu_collective_call_terminate_timeout_seconds=60"
)
# Plans and programs of the processes that tests start are kept for one run: such a process may be
# killed while it writes. Pytest's workers share it with the process that began the run.
os.environ["SPMD_TEST_CACHE"] = os.environ.get("SPMD_TEST_CACHE") or tempfile.mkdtemp(
    prefix="spmd-tests-"
)
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["SPMD_TEST_CACHE"]
os.environ["SPMD_CACHE"] = os.environ["SPMD_TEST_CACHE"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"

import jax
import jax._src.compiler
import jax._src.interpreters.mlir
import jax._src.lru_cache
import pytest
from jax.experimental.compilation_cache import compilation_cache

import spmd
from spmd.program_cache.folder import misordered
from tests.sampling import sample

ON_GPU = os.environ.get("SPMD_TEST_GPU") == "gpu"  # tests/gpu, on a machine with a GPU
if ON_GPU:
    os.environ["SPMD_TEST_OPTIMIZED"] = "1"  # GPUs have other options
else:
    spmd.simulate_devices(8)
if not ON_GPU and misordered():
    jax.config.update("jax_enable_compilation_cache", False)
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # of processes that tests start
# scripts
collect_ignore_glob = [
    "tests/*/fixtures/make_*.py",
    "tests/*/fixtures/check_*.py",
    "tests/*/*_job.py",
]
if "SPMD_TEST_GPU" not in os.environ:
    # benchmarks/gpu/run.py runs them, on a GPU or in a rehearsal
    collect_ignore_glob.append("tests/gpu/test_on_one_gpu.py")


def _kept_programs() -> Path:
    """Where the programs that the tests themselves compile are kept from run to run; other versions
    and processors have other ones.
    """
    cpu = Path("/proc/cpuinfo")
    features = (
        {line for line in cpu.read_text().splitlines() if line.startswith(("flags", "Features"))}
        if cpu.exists()
        else set()
    )
    machine = hashlib.sha256(
        "\n".join([platform.machine(), *sorted(features)]).encode()
    ).hexdigest()[:12]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "spmd-tests" / f"jax-{jax.__version__}-{machine}"


_put_as_jax_does = jax._src.lru_cache.LRUCache.put


def _put(self, key: str, value: bytes) -> None:
    """`LRUCache.put` that other processes see entirely or not at all."""
    if "://" in str(self.path):  # the library's own cache, in tests of it
        return _put_as_jax_does(self, key, value)
    path = Path(str(self.path)) / f"{key}-cache"
    path.parent.mkdir(parents=True, exist_ok=True)  # the folder may be removed while tests run
    partial = path.with_name(f"{key}.{os.getpid()}")
    partial.write_bytes(value)
    partial.replace(path)


def _bound(folder: Path, most: int) -> None:
    """Remove the oldest programs until the rest has at most `most` bytes."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.stat().st_mtime, reverse=True):
        most -= entry.stat().st_size
        if most < 0:
            Path(entry.path).unlink(missing_ok=True)


jax._src.lru_cache.LRUCache.put = _put
jax.config.update("jax_compilation_cache_dir", str(_kept_programs()))
# A kept program carries the names of scopes, which tests read: another name is another program.
# Without source lines in it, an edit that only moves lines keeps the program.
jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
jax.config.update("jax_traceback_in_locations_limit", 0)

# Compiling is most of what tests do, and takes a third of the time with these. `make test-all`
# compiles all as users do. Tests that say "optimized" always do: those that compare two programs to
# the last bit, or where a rounding decides what comes next.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    # splitting costs more than it gains where workers use all cores
    "xla_cpu_parallel_codegen_split_count": 1,
}
_overrides: dict[str, object] = {}
_as_users_do = jax._src.compiler.get_compile_options


def _get_compile_options(*args, env_options_overrides=None, **named):
    return _as_users_do(
        *args, env_options_overrides={**_overrides, **(env_options_overrides or {})}, **named
    )


jax._src.compiler.get_compile_options = _get_compile_options
# One context for all programs that a process lowers: making one takes as long as compiling an
# addition, and tests lower thousands.
jax._src.interpreters.mlir.make_ir_context = functools.cache(
    jax._src.interpreters.mlir.make_ir_context
)


@functools.cache
def _quick() -> dict[str, object]:
    """The options above that this XLA has: versions differ, and an unknown option fails every
    compilation.
    """

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
    if quick != bool(_overrides):
        jax.clear_caches()
        _overrides.clear()
        _overrides.update(_quick() if quick else {})
    # The XLA_FLAGS of processes that the test starts (tests/processes.py): they compile as it does.
    flags = [f"--{name}={str(value).lower()}" for name, value in _overrides.items()]
    os.environ["SPMD_TEST_FLAGS"] = " ".join([os.environ["SPMD_TEST_GIVEN_FLAGS"], *flags])


@functools.cache
def _converts_float16() -> bool:
    try:
        jax.jit(lambda x: x.astype("float32")).lower(
            jax.ShapeDtypeStruct((4,), "float16")
        ).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Skip what XLA:CPU compiles for no processor without the instruction F16C: conversions of
    float16, through which float8 goes too.
    """
    report = yield
    if (
        report.failed
        and "Failed to materialize symbols" in report.longreprtext
        and not _converts_float16()
    ):
        path, line, _ = report.location
        report.outcome, report.longrepr = (
            "skipped",
            (path, line, "XLA:CPU converts no float16 with the instructions of this processor"),
        )
    return report


# Examples in docstrings that start processes, train, or compile much.
LONG_EXAMPLES = (
    "spmd/inference/",
    "spmd/launch/notebook.py",
    "spmd/models/quantized.py",
    "spmd/nn/bidirectional.py",
    "spmd/nn/low_precision.py",
    "spmd/nn/moe.py",
    "spmd/planner/",
    "spmd/pretrained/decoder.py",
    "spmd/pretrained/encoder.py",
    "spmd/base/rng.py",
    "spmd/wire/check_codec.py",
)


COLLECTED = pytest.StashKey[list[pytest.Item]]()


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(config, items):
    """Mark long examples and the cases of sampled tests."""
    for item in items:
        if item.nodeid.startswith(LONG_EXAMPLES):
            item.add_marker("system")
    sample(items)
    config.stash[COLLECTED] = list(items)
    # each change of options drops all programs
    items.sort(key=lambda item: item.get_closest_marker("optimized") is not None)


def pytest_collection_finish():
    """What is imported by now stays: the collector need not look through it, nor as often as by
    default, for 6 % of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def pytest_configure(config):
    """Once a run: limit the size of the kept programs."""
    _kept_programs().mkdir(parents=True, exist_ok=True)
    if not hasattr(config, "workerinput"):
        _bound(_kept_programs(), 2 << 30)


def pytest_unconfigure(config):
    """The process that began the run removes the run's own cache."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["SPMD_TEST_CACHE"], ignore_errors=True)


@pytest.fixture
def collected(pytestconfig):
    """All cases of this run's files, those that are not chosen too."""
    return pytestconfig.stash[COLLECTED]


@pytest.fixture
def without_compilation_cache():
    """Programs for a GPU that is not there can be kept, but not loaded."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def digits():
    """Train and test halves of scikit-learn's 1,797 real 8x8 digits, pixels from 0 to 1."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = (data.images / 16.0).astype("float32")[..., None], data.target.astype("int32")
    return {"image": images[:1500], "label": labels[:1500]}, {
        "image": images[1500:],
        "label": labels[1500:],
    }


GOLDENS = Path(__file__).parent / "tests" / "goldens"


def pytest_addoption(parser):
    """`--regenerate-goldens`, which is read by `golden`."""
    parser.addoption(
        "--regenerate-goldens",
        action="store_true",
        help="write the texts that tests compare with tests/goldens/*.txt",
    )


@pytest.fixture
def golden(request):
    """`golden(name, text)` fails unless tests/goldens/NAME.txt holds `text` and a newline, or
    writes that file.
    """

    def check(name: str, text: str) -> None:
        path = GOLDENS / f"{name}.txt"
        if request.config.getoption("--regenerate-goldens"):
            path.write_text(text + "\n", encoding="utf-8")
        assert text == path.read_text(encoding="utf-8").removesuffix("\n")

    return check
