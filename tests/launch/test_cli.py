"""The `spmd` command, as it is typed."""

import os
import re
import subprocess
import sys

import pytest

import spmd
from spmd.launch.cli import main
from spmd.layout.layout_files import shipped
from spmd.wire.codec import CODECS

MODELS = """
import jax.numpy as jnp
from flax import linen, nnx
import spmd


class MLP(nnx.Module):
    def __init__(self, rngs):
        named = lambda *axes: nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
        self.up = nnx.Linear(64, 512, rngs=rngs, kernel_init=named("embed", "mlp"))
        self.down = nnx.Linear(512, 64, rngs=rngs, kernel_init=named("mlp", "embed"))

    def __call__(self, x):
        return self.down(self.up(x))


class Wide(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        named = linen.with_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
        x = linen.Dense(512, kernel_init=named)(x)
        return linen.BatchNorm(use_running_average=not train)(x)


class Branches(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 10, rngs=rngs)
        if self.up.kernel[0, 0] > 0:
            self.odd = True


def mlp():
    return MLP(nnx.Rngs(0))


def huge():
    return nnx.Linear(2**20, 2**20, use_bias=False, rngs=nnx.Rngs(0))


def branches():
    return Branches(nnx.Rngs(0))


wide = Wide()
plain = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"])


def build_plain():
    return plain
"""  # noqa: E501


REGISTERS = """
import dataclasses
import jax.numpy as jnp
import spmd
from spmd import wire

@wire.register("thin")
@dataclasses.dataclass(frozen=True)
class Thin(wire.RowCodec):
    depth: int = 1
    error = 2.0**-11

    def encode(self, rows):
        return rows.astype(jnp.float16)

    def decode(self, payload, width):
        return payload.astype(jnp.float32)

plain = spmd.FunctionalModel(lambda key: {"w": jnp.zeros((64, 8))}, lambda params, x: x @ params["w"])
"""  # noqa: E501


@pytest.fixture
def spmd_command(tmp_path, monkeypatch, capsys, request):
    """Run the command in a folder with models; gives exit code, output and errors."""
    module = f"models_{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(words):
        code = main(words.replace("models", module).split())
        out, err = capsys.readouterr()
        return code, out.replace(module, "models"), err.replace(module, "models")

    return run


def test_layouts_lists_every_layout(spmd_command):
    code, out, err = spmd_command("layouts")
    assert (code, err) == (0, "")
    assert (
        "\ndata_parallel           Every worker holds the whole model; the batch is split; "
        "gradients are averaged.\n" in out
    )
    assert [line.split()[0] for line in out.splitlines()] == list(shipped())


def test_show_prints_the_file(spmd_command):
    code, out, err = spmd_command("layouts show fsdp")
    assert (code, out, err) == (0, shipped()["fsdp"].read_text(), "")


def test_show_refuses_an_unknown_layout(spmd_command):
    assert spmd_command("layouts show fsd") == (
        2,
        "",
        'LayoutError: no layout "fsd" is shipped.\n    fix: did you mean "fsdp"?\n',
    )


CHECKED = """\
layouts/fsdp_tensor_parallel.toml on mesh data=64, model=8: 64 workers, gradients by reduce_scatter, codec exact

parameter    array             spec               chosen by           bytes/device  copies
------------------------------------------------------------------------------------------
down/bias    float32[64]       ["data"]           default shard:data  4 B           x8
down/kernel  float32[512, 64]  ["model", "data"]  axes (mlp, embed)   256 B         x1
up/bias      float32[512]      ["data"]           default shard:data  32 B          x8
up/kernel    float32[64, 512]  ["data", "model"]  axes (embed, mlp)   256 B         x1

66,112 parameters in 4 arrays, 258.2 KiB; 548 B on each of 512 devices (516 B if nothing were replicated: 32 bytes, 6%, are copies).
"""  # noqa: E501


def test_check_for_512_absent_devices(spmd_command):
    assert spmd_command(
        "layouts check fsdp_tensor_parallel --model models:mlp --mesh data=64,model=8"
    ) == (0, CHECKED, "")


@pytest.mark.system
def test_check_uses_no_device(tmp_path):
    (tmp_path / "models.py").write_text(MODELS)
    words = ["layouts", "check", "fsdp", "--model", "models:huge", "--mesh", "data=1024"]
    # any use of a device would fail
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    done = subprocess.run(
        [sys.executable, "-m", "spmd", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "1,099,511,627,776 parameters in 1 array, 4.0 TiB; 4.0 GiB on each of 1024 devices"
        in done.stdout
    )


@pytest.mark.parametrize("width", [60, 80])
def test_list_of_layouts_fits_the_terminal(spmd_command, monkeypatch, width):
    lists = []
    for columns in (width, 10_000):
        monkeypatch.setenv("COLUMNS", str(columns))
        code, out, _ = spmd_command("layouts")
        lists.append(out)
        assert code == 0 and max(map(len, out.splitlines())) <= columns
    assert (
        sorted(lists[0].split()) == sorted(lists[1].split()) and "fsdp_tensor_parallel" in lists[0]
    )


DOCTOR = (
    "from spmd.launch import cli, doctor_command as d; d.examine, d.problems = lambda *_: {}, "
    "list; cli.main(['doctor', '--json'])"
)


@pytest.mark.system
@pytest.mark.parametrize(
    "words", [("-m", "spmd", "layouts"), ("-c", DOCTOR)], ids=["layouts", "doctor"]
)
def test_closed_stdout_is_no_error(words):
    """As `spmd layouts | head -1` does: no traceback."""
    command = [sys.executable, *words]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0
    process.stderr.close()


def test_check_of_a_layout_file(spmd_command, tmp_path):
    (tmp_path / "mine.toml").write_text(
        '[mesh]\ndata = 4\nmodel = 2\n[[params]]\npath = "w"\nspec = ["-", "model"]\n'
    )
    code, out, _ = spmd_command("layouts check mine.toml --model models:plain")
    assert code == 0
    assert (
        'w          float32[64, 8]  ["-", "model"]  rule 1, line 4  1.0 KiB       x4'
        in out.splitlines()
    )


def test_check_of_a_layout_file_may_name_what_the_model_registers(spmd_command, tmp_path):
    (tmp_path / "mine.toml").write_text(
        '[gradients]\nreduction = "all_reduce"\ncodec = "thin"\ndepth = 2\n'
    )
    (tmp_path / "registers.py").write_text(REGISTERS)
    try:
        code, out, err = spmd_command(
            "layouts check mine.toml --model registers:plain --mesh data=4"
        )
        assert (code, err) == (0, "") and "thin" in out
    finally:
        CODECS.pop("thin", None)
        sys.modules.pop("registers", None)


@pytest.mark.parametrize("model", ["plain", "build_plain"])
def test_check_takes_a_model_or_a_factory(spmd_command, model):
    code, out, _ = spmd_command(f"layouts check data_parallel --model models:{model} --mesh data=4")
    assert code == 0
    assert (
        "512 parameters in 1 array, 2.0 KiB; 2.0 KiB on each of 4 devices (512 B if nothing were "
        "replicated: 1,536 bytes, 75%, are copies)." in out
    )


@pytest.mark.parametrize("batch", ["x=float32[8,64],y=int32[8]", "z=bfloat16[4,64]"])
def test_check_of_a_linen_module(spmd_command, batch):
    code, out, err = spmd_command(
        f"layouts check tensor_parallel --model models:wide --mesh data=4,model=2 --batch {batch}"
    )
    assert (code, err) == (0, "")
    assert (
        'Dense_0/kernel     float32[64, 512]  ["-", "model"]  axes (embed, mlp)  64.0 KiB      x4'
        in out.splitlines()
    )


CHECK = "layouts check fsdp --model models:"
ERRORS = {
    "no mesh": (
        f"{CHECK}plain",
        "OptionError: mesh data=-1: -1 stands for the remaining devices, and a check uses none.\n  "
        "  fix: --mesh data=8.",
    ),
    "not module:factory": (
        "layouts check fsdp --model models --mesh data=4",
        'OptionError: --model "models" is not MODULE:FACTORY.\n    fix: such as  --model '
        "models:gpt  for  def gpt()  in models.py.",
    ),
    "no module": (
        "layouts check fsdp --model modles:plain --mesh data=4",
        'OptionError: --model "modles:plain": there is no module "modles" in this folder or this '
        "Python.\n"
        "    fix: run it from the folder that holds it, or use its full name: "
        "package.module:factory.",
    ),
    "no attribute": (
        f"{CHECK}plian --mesh data=4",
        'OptionError: --model "models:plian": module "models" has no "plian".\n    fix: did you '
        'mean "plain"?',
    ),
    "class": (
        f"{CHECK}MLP --mesh data=4",
        "ModelError: --model MLP is a class.\n    fix: a function that builds it: lambda: "
        "MLP(rngs=nnx.Rngs(0)).",
    ),
    "linen without a batch": (
        f"{CHECK}wide --mesh data=4",
        "OptionError: the shapes of a linen module depend on its input.\n    fix: --batch "
        '"x=float32[8,28,28,1]", the arrays of a batch.',
    ),
    "linen with an unclear batch": (
        f"{CHECK}wide --mesh data=4 --batch a=float32[8,64],b=int32[8]",
        "OptionError: --batch: the model's input may be any of a, b.\n"
        "    fix: give only the input, or name it one of x, inputs, input, image, images, tokens, "
        "features, input_ids.",
    ),
    "no dtype": (
        f"{CHECK}wide --mesh data=4 --batch x=float23[8,64]",
        'OptionError: --batch "x=float23[8,64]": there is no dtype "float23".\n    fix: such as '
        "float32, bfloat16 or int32.",
    ),
    "no shape": (
        f"{CHECK}wide --mesh data=4 --batch x=float32[8,64],y=int32",
        'OptionError: --batch: "y=int32" is not NAME=DTYPE[SIZES].\n    fix: such as '
        '"x=float32[8,28,28,1]".',
    ),
    "batch does not divide": (
        f"{CHECK}plain --mesh data=4 --batch x=float32[6,64]",
        "DataError: the batch does not fit layouts/fsdp.toml on mesh data=4\n1 problem:\n\n  batch "
        "of 6 rows\n"
        "      is not divisible by 4 workers (data=4): 6 / 4 leaves 2.\n      fix: batch_size=4 or "
        "batch_size=8.",
    ),
    "mesh words": (
        f"{CHECK}plain --mesh data:4",
        'MeshError: mesh "data:4": "data:4" is not NAME=SIZE.\n    fix: write it like '
        '"data=4,model=2".',
    ),
    "axis with the name of an option": (
        "layouts check tensor_parallel --model models:plain --mesh data=4,model=-1",
        "OptionError: mesh data=4, model=-1: -1 stands for the remaining devices, and a check uses "
        "none.\n    fix: --mesh data=4,model=8.",
    ),
    "axis with the name of an option that does not fit": (
        "layouts check tensor_parallel --model models:plain --mesh data=4,model=2",
        "LayoutError: layouts/tensor_parallel.toml does not fit this model on mesh data=4, model=2",
    ),
    "does not fit": (
        "layouts check tensor_parallel --model models:plain --mesh data=4,modle=2",
        "LayoutError: layouts/tensor_parallel.toml does not fit this model on mesh data=4, modle=2",
    ),
}


@pytest.mark.parametrize("words, text", ERRORS.values(), ids=ERRORS)
def test_error_is_printed_without_traceback(spmd_command, words, text):
    code, out, err = spmd_command(words)
    assert (code, out) == (2, "")
    assert err.startswith(text) if text.startswith("LayoutError") else err == f"{text}\n"


def test_errors_of_a_script_are_in_python(spmd_command, tmp_path):
    (tmp_path / "script.py").write_text('import spmd\nspmd.Profile(steps="4:2")\n')
    refused = (
        'OptionError: Profile: {} has no step.\n    fix: the smaller number first, such as "2:4".\n'
    )
    assert spmd_command("profile script.py") == (2, "", refused.format('steps="4:2"'))
    assert spmd_command("profile script.py --steps 4:2") == (2, "", refused.format('--steps "4:2"'))


def test_error_names_the_line_of_an_untraceable_model(spmd_command):
    code, _, err = spmd_command(f"{CHECK}branches --mesh data=4")
    assert code == 2
    assert err.startswith(
        "ModelError: the model's factory cannot be traced without data: TracerBoolConversionError: "
    )
    assert err.endswith("    in models.py, line 28: if self.up.kernel[0, 0] > 0:\n")


def test_error_in_the_users_module_keeps_its_traceback(spmd_command, tmp_path):
    (tmp_path / "broken_models.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        main(["layouts", "check", "fsdp", "--model", "broken_models:plain", "--mesh", "data=4"])


def test_no_command_prints_help(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    out, err = capsys.readouterr()
    assert (caught.value.code, err) == (0, "")
    assert out.startswith("usage: spmd") and re.search(
        r"\n    doctor +examine this installation, for a bug report\n", out
    )


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"spmd {spmd.__version__}\n")


@pytest.mark.parametrize("words, error", [
    ("plann train.py", 'spmd: error: there is no command "plann": did you mean "plan"?'),
    ("layouts shwo fsdp", 'spmd layouts: error: there is no command "shwo": did you mean "show"?'),
    ("data xyz", 'spmd data: error: there is no command "xyz": known: bench.'),
])  # fmt: skip
def test_unknown_command_suggests_the_nearest(words, error, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert (caught.value.code, capsys.readouterr().err.splitlines()[-1]) == (2, error)
