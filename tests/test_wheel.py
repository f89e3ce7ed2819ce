"""The wheel, installed elsewhere: it holds the layouts, and fits a model without the source
tree.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[1]
CODE = """
import spmd, sys
spmd.simulate_devices(4)
import jax.numpy as jnp, numpy as np, optax
from spmd.layout.layout_files import shipped_folder
assert shipped_folder().is_relative_to(sys.argv[1]), shipped_folder()
model = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((8, 1))}, lambda params, x: x @ params["w"])
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
result = spmd.fit(model, (x, x.sum(1, keepdims=True)), loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(0.1),
                  layout="fsdp", batch_size=16, epochs=30)
assert result.history["loss"][-1] < 1e-3 and not result.state.params["w"].sharding.is_fully_replicated
print(spmd.__file__)
"""  # noqa: E501


def run(*command, cwd):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def test_the_wheel_stands_alone(tmp_path):
    # built by the backend itself, so that nothing has to be fetched
    built = run(
        sys.executable,
        "-c",
        "import hatchling.build as b, sys; print(b.build_wheel(sys.argv[1]))",
        str(tmp_path),
        cwd=ROOT,
    )
    assert built.returncode == 0, built.stderr
    wheel = tmp_path / built.stdout.split()[-1]
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {path.name for path in (ROOT / "layouts").glob("*.toml")}
    assert len(shipped) >= 5 and {f"spmd/layouts/{name}" for name in shipped} <= set(names)
    assert not any(name.startswith(("tests/", "examples/", "layouts/")) for name in names)
    target = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(target)  # what pip does with a pure wheel
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # everything that is installed here, but for the source tree; -S, so that no .pth file brings it
    # back
    paths = [str(target), *(path for path in sys.path[1:] if path != str(ROOT))]
    code = f"import sys; sys.path = {paths!r}\n{CODE}"
    fitted = run(sys.executable, "-S", "-c", code, str(target), cwd=elsewhere)
    assert fitted.returncode == 0, fitted.stderr[-3000:]
    assert fitted.stdout.strip().startswith(str(target))
