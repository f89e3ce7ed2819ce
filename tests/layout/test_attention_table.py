"""The `[attention]` table: from the file to the kernel that is called, its notes, and what is wrong
with it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd
from spmd.errors import LayoutError, OptionError
from spmd.layout.schema import IMPLEMENTATIONS
from spmd.layout.toml_reader import loads
from spmd.layout.toml_writer import dumps
from spmd.nn import attention_kernels
from spmd.nn.attention_kernels import IN_PLACE, KERNELS, Attend, choose
from spmd.nn.parallel_context import ParallelConfig, parallel_scope
from spmd.nn.scoring import ScoreArrays, Scoring
from spmd.nn.unchanged_models import with_calls
from spmd.planner.cluster import Cluster
from spmd.planner.gpu_kernels import gpu_of
from tests.compare import assert_close

TOKENS = np.zeros((8, 32, 4, 16), np.float32)


def model(**options):
    """Attention of the batch with itself, weighted."""

    def apply(params, x):
        return (spmd.nn.attention(x * params["w"], x, x, **options) ** 2).mean(axis=(1, 2, 3))

    return spmd.FunctionalModel(lambda key: {"w": jnp.ones(16)}, apply)


def prepared(table, mesh="data=4,model=2", layout="data_parallel", **options):
    """A trainer after everything that is checked before the first step."""
    declared = dataclasses.replace(
        spmd.Layout.load(layout), attention=spmd.Attention(table), source="mine.toml", mesh=()
    )
    if "model" in mesh:
        declared = dataclasses.replace(declared, params=(spmd.Rule("w", ("model",)),))
    mesh = spmd.make_mesh(mesh, devices=jax.devices()[: spmd.MeshSpec.parse(mesh).size])
    chosen = {
        "loss": lambda model, batch: model(batch),
        "optimizer": optax.sgd(0.1),
        "mesh": mesh,
        "layout": declared,
    }
    trainer = spmd.Trainer(model(**options), **chosen)
    trainer.prepare(TOKENS)
    return trainer


def test_table_round_trips_and_an_empty_one_is_auto():
    for implementation in IMPLEMENTATIONS[1:]:
        layout = spmd.Layout(attention=spmd.Attention(implementation))
        assert loads(dumps(layout)) == layout != spmd.Layout()
        assert f'[attention]\nimplementation = "{implementation}"' in dumps(layout)
    assert set(KERNELS) - {"xla"} == set(IMPLEMENTATIONS) - {"auto", "as_written"}
    assert loads("[attention]") == loads("") == spmd.Layout(attention=spmd.Attention("auto"))


def test_unknown_values(golden):
    with pytest.raises(LayoutError) as caught:
        loads('[attention]\nimplementation = "flash"\nkernel = "cudnn"\n', "mine.toml")
    golden("attention_table_of_unknown_values", str(caught.value))


def test_choice_is_a_note():
    expected = "attention of 32 queries and keys, {} heads of 16, float32, a causal mask: {}."
    notes = prepared("chunked", causal=True).notes()
    assert [note for note in notes if "attention" in note] == [expected.format(2, "chunked")], (
        "the heads of one device"
    )
    for implementation in ("auto", "as_written"):  # on CPUs
        assert not [
            note for note in prepared(implementation, causal=True).notes() if "attention" in note
        ]


@pytest.mark.parametrize("implementation", ["cudnn", "triton", "splash"])
def test_an_implementation_that_the_platform_does_not_have(implementation, golden):
    with pytest.raises(LayoutError) as by_layout:
        prepared(implementation)
    with pytest.raises(OptionError) as by_argument:
        prepared("auto", implementation=implementation)
    golden(f"attention_{implementation}_is_not_there", f"{by_layout.value}\n\n{by_argument.value}")
    assert prepared("auto") and prepared("as_written", implementation="auto")


def test_a_loss_without_attention(golden):
    declared = spmd.Layout(attention=spmd.Attention("chunked"), source="mine.toml")
    plain = spmd.FunctionalModel(lambda key: {"w": jnp.ones(16)}, lambda params, x: x @ params["w"])
    trainer = spmd.Trainer(
        plain,
        loss=lambda model, batch: model(batch).mean(axis=(1, 2)),
        optimizer=optax.sgd(0.1),
        layout=declared,
    )
    with pytest.raises(LayoutError) as caught:
        trainer.prepare(TOKENS)
    golden("attention_table_that_applies_to_nothing", str(caught.value))


def test_what_a_ring_takes(golden):
    ring = {"layout": "context_parallel", "mesh": "data=2,context=4"}
    problems = []
    for table, options in (
        ("cudnn", {}),
        ("triton", {}),
        ("auto", {"mask": jnp.ones((32, 32), bool)}),
    ):
        with pytest.raises(OptionError) as caught:
            prepared(table, **ring, **options)
        problems.append(str(caught.value))
    golden("attention_that_the_ring_does_not_have", "\n\n".join(problems))
    for table in ("auto", "chunked"):
        notes = prepared(table, **ring, causal=True, window=3).notes()
        expected = (
            "attention of 32 queries and keys, 4 heads of 16, float32, a causal mask, a window, in "
            "a ring of 4 devices: chunked."
        )
        assert [note for note in notes if "attention" in note] == [expected]
    assert choose("auto", attend(causal=True, window=(3, 3)), "cuda", in_ring=True) == (
        "triton",
        {},
    )


def attend(
    dtype="bfloat16", queries=64, keys=64, heads=4, groups=4, size=64, arrays=None, **scoring
):
    """A call, as shapes."""
    query, key = (
        jax.ShapeDtypeStruct((2, length, n, size), jnp.dtype(dtype))
        for length, n in ((queries, heads), (keys, groups))
    )
    return Attend(Scoring(0.1, **scoring), query, key, key, ScoreArrays(**(arrays or {})))


IDS = jnp.zeros((2, 64), jnp.int32)
MASK = jnp.ones((2, 64), bool)
BIAS = jnp.ones((1, 4, 64, 64))
REFUSED = [
    ("cudnn", attend("float32"), "it takes bfloat16 and float16, not float32"),
    ("cudnn", attend(queries=197, keys=197), "Unsupported sequence length Q 197, KV 197"),
    ("cudnn", attend(size=60), "The head dim must be <= 256 and a multiple of 8, but got 60"),
    ("cudnn", attend(soft_cap=3.0, dropout=0.1), "it does not take a soft cap, dropout"),
    ("cudnn", attend(arrays={"key_mask": MASK}), "it does not take a key mask"),
    ("cudnn", attend(arrays={"segments": (IDS, IDS)}), "it does not take segment ids"),
    (
        "cudnn",
        attend(window=(3, 3)),
        "it takes a window only of keys before a query, under a causal mask, without key lengths",
    ),
    (
        "cudnn",
        attend(arrays={"bias": BIAS}),
        "it takes a bias as bfloat16[..., 64, 64], for even lengths, not float32[1, 4, 64, 64]",
    ),
    ("cudnn", attend(arrays={"mask": MASK[:, None, None]}), "it does not take a mask"),
    ("triton", attend(size=264), "it takes heads up to 256, not 264"),
    ("triton", attend("float64"), "it takes bfloat16, float16 and float32, not float64"),
    (
        "splash",
        attend(),
        "it takes lengths and head sizes that are multiples of 128, not 64, 64 and 64",
    ),
    (
        "splash",
        attend(queries=128, keys=256, size=128, window=(8, 8)),
        "it takes a window only for as many queries as keys",
    ),
    ("splash", attend(dropout=0.1), "it does not take dropout"),
]


@pytest.mark.parametrize(
    ("name", "call", "why"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_shapes_and_options_that_a_kernel_refuses(name, call, why):
    platform = "tpu" if name == "splash" else "cuda"
    with gpu_of(Cluster.parse("8xh100").target):
        assert choose(name, call, platform) == (name, {name: why})
        chosen, reasons = choose("auto", call, platform)
    assert chosen != name
    assert reasons.get(name, why) == why, "if none before it was taken"


def test_auto_takes_the_first_that_can():
    with gpu_of(Cluster.parse("8xh100").target):
        assert choose("auto", attend(causal=True, groups=2), "cuda") == ("cudnn", {})
        assert choose("auto", attend(causal=True, window=(8, None)), "gpu") == ("cudnn", {})
        assert choose("auto", attend(arrays={"key_lengths": IDS[:, 0]}), "cuda") == ("cudnn", {})
        assert (
            choose("auto", attend(arrays={"segments": (IDS, IDS)}, causal=True), "cuda")[0]
            == "triton"
        )
        assert choose("auto", attend(arrays={"bias": BIAS.astype("bfloat16")}), "cuda") == (
            "cudnn",
            {},
        )
        for options in (
            {"soft_cap": 2.0},
            {"dropout": 0.1},
            {"window": (3, 3)},
            {"arrays": {"key_mask": MASK}},
            {"arrays": {"bias": BIAS}},
        ):
            assert choose("auto", attend(**options), "cuda")[0] == "triton"
        assert choose("auto", attend(size=264), "cuda")[0] == "xla"
    assert choose("auto", attend(causal=True), "rocm")[0] == "triton", "without cuDNN"
    assert choose("auto", attend(queries=256, keys=128, size=128, causal=True), "tpu") == (
        "splash",
        {},
    )
    assert choose("auto", attend(dropout=0.5), "cpu") == ("xla", {})
    for platform, call in (("cuda", attend()), ("tpu", attend(queries=256, keys=256, size=128))):
        assert choose("auto", call, IN_PLACE + platform)[0] == "chunked", (
            "an estimate, where the target has a kernel"
        )
    assert choose("auto", attend(), IN_PLACE + "tpu")[0] == "xla", (
        "where it has none, the target stores scores, too"
    )
    assert choose("as_written", attend(), "cuda") == ("xla", {})


def sharded(mesh, heads, groups, axes=("data",), rows=8, arrays=None, parallel=None):
    """Shapes and manual axes that a kernel sees on a mesh, by way of one that is put in cuDNN's
    place.
    """
    seen = []

    def kernel(call):
        seen.append(
            (call.query.shape, call.key.shape, set(jax.sharding.get_abstract_mesh().manual_axes))
        )
        return attention_kernels._xla(call)

    config = ParallelConfig(
        spmd.make_mesh(mesh),
        axes,
        attention="cudnn",
        platform="cuda",
        used=set(),
        notes={},
        **(parallel or {}),
    )
    random = np.random.default_rng(0)
    inputs = [
        jnp.asarray(random.normal(size=(rows, 16, n, 8)), jnp.float32)
        for n in (heads, groups, groups)
    ]
    ids = jnp.asarray(random.integers(0, 2, (rows, 16)), jnp.int32)
    bias = (arrays or {}).pop("bias", None)

    def run(query, key, value, bias):
        return spmd.nn.attention(
            query, key, value, segment_ids=ids, causal=True, bias=bias, **(arrays or {})
        )

    def both_passes(*inputs):
        out, back = jax.vjp(run, *inputs)
        return out, *jax.tree.leaves(back(jnp.sin(out)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            KERNELS,
            "cudnn",
            dataclasses.replace(
                KERNELS["cudnn"], compute=kernel, takes=None, refuses=lambda call: None
            ),
        )
        with parallel_scope(config):
            ours = jax.jit(both_passes)(*inputs, bias)
    assert_close(ours, jax.jit(lambda *x: both_passes(*x))(*inputs, bias), 1e-5)
    return seen[0]


@pytest.mark.system
@pytest.mark.parametrize("rows, heads", [(8, 8), (1, 8), (8, 1), (1, 1)])
def test_arrays_of_scores_and_dropout_on_shards(rows, heads):
    """Each device has the mask, the bias and the random numbers of its rows and heads; gradients of
    a shared bias are summed.
    """
    random = np.random.default_rng(1)
    mask, bias = (
        jnp.asarray(random.normal(size=(rows, heads, 16, 16)), jnp.float32) for _ in range(2)
    )
    arrays = {"mask": mask > -1, "bias": bias, "dropout": 0.3, "dropout_key": jax.random.key(3)}
    assert sharded("data=2,model=4", 8, 4, arrays=arrays) == (
        (4, 16, 2, 8),
        (4, 16, 1, 8),
        {"data", "model"},
    )


@pytest.mark.system
def test_kernels_see_the_shards_of_a_device():
    """Rows over data axes, heads over others; groups are repeated where there are fewer than
    devices.
    """
    assert sharded("data=2,model=4", 8, 4) == ((4, 16, 2, 8), (4, 16, 1, 8), {"data", "model"})
    assert sharded("data=2,model=4", 8, 2) == ((4, 16, 2, 8), (4, 16, 1, 8), {"data", "model"})
    assert sharded("data=2,model=4", 8, 1) == ((4, 16, 2, 8), (4, 16, 1, 8), {"data", "model"})
    assert sharded("data=2,model=4", 6, 3) == ((4, 16, 6, 8), (4, 16, 3, 8), {"data", "model"}), (
        "4 devices do not divide 6 heads"
    )
    assert sharded("data=8,model=1", 3, 3) == ((1, 16, 3, 8), (1, 16, 3, 8), {"data", "model"})
    assert sharded("data=8,model=1", 3, 3, rows=4) == (
        (4, 16, 3, 8),
        (4, 16, 3, 8),
        {"data", "model"},
    )
    stages = {"pipeline": spmd.Pipeline("stage")}
    assert sharded("data=2,stage=4", 8, 8, parallel=stages) == (
        (4, 16, 8, 8),
        (4, 16, 8, 8),
        {"data", "stage"},
    )


def differentiating(derivative):
    """A loss that differentiates its attention, of any function of the batch."""

    def loss(model, x):
        if derivative == "reverse":
            return (jax.grad(lambda x: model(x).sum())(x) ** 2).mean(axis=(1, 2, 3))
        return jax.jvp(model, (x,), (jnp.ones_like(x),))[1] ** 2

    return loss


def attended(weights, x):
    """The model above, in plain JAX."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", x * weights, x) * x.shape[-1] ** -0.5
    seen = jnp.tri(x.shape[1], dtype=bool)
    out = jnp.einsum(
        "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1), x
    )
    return (out**2).mean(axis=(1, 2, 3))


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize(
    ("implementation", "derivative"),
    [("as_written", "forward"), ("as_written", "reverse"), ("chunked", "reverse")],
)
def test_a_loss_that_differentiates_its_attention(implementation, derivative):
    """Tiles are plain JAX in the backward pass, so they have a second derivative, too."""
    loss, tokens = (
        differentiating(derivative),
        np.random.default_rng(0).normal(size=TOKENS.shape).astype(np.float32),
    )
    layout = spmd.Layout(attention=spmd.Attention(implementation))
    value, gradient = jax.value_and_grad(lambda w: loss(lambda x: attended(w, x), tokens).mean())(
        jnp.ones(16)
    )
    rate = 1 / float(jnp.abs(gradient).max())  # so that the update is as large as the weights
    trainer = spmd.Trainer(model(causal=True), loss=loss, optimizer=optax.sgd(rate), layout=layout)
    state, metrics = trainer.step(trainer.init(), tokens)
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-5, abs=1e-12)
    assert_close(1 - state.params["w"], rate * gradient, 1e-4)


def test_a_loss_with_a_derivative_that_fused_attention_does_not_have(golden):
    layout = spmd.Layout(attention=spmd.Attention("chunked"), source="mine.toml")
    trainer = spmd.Trainer(
        model(causal=True), loss=differentiating("forward"), optimizer=optax.sgd(0.1), layout=layout
    )
    with pytest.raises(LayoutError) as caught:
        trainer.prepare(TOKENS)
    golden("attention_that_a_loss_differentiates", str(caught.value))


def on_gpus(call, *shapes, **options):
    """The jaxpr of a call on two H100s under the default, and the notes."""
    mesh = spmd.make_mesh("data=2", devices=jax.devices()[:2])
    config = with_calls(
        ParallelConfig(mesh, ("data",), platform="cuda", used=set(), notes={}, **options)
    )
    with gpu_of(Cluster.parse("2xh100").target), parallel_scope(config):
        return str(
            jax.make_jaxpr(call)(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes))
        ), config


HEADS = ((4, 64, 2, 64), jnp.bfloat16)


def test_what_a_model_asks_of_jax_is_left_to_jax_where_the_kernel_does_not_take_it():
    def call(x, mask):
        return jax.nn.dot_product_attention(x, x, x, mask=mask, implementation="cudnn")

    jaxpr, config = on_gpus(call, HEADS, ((4, 1, 64, 64), bool))
    assert "dot_product_attention_fwd" in jaxpr and not config.notes, "JAX makes a bias of the mask"


def test_rows_that_the_workers_do_not_divide_are_not_computed_by_each_of_them():
    def call(x):
        return jax.vmap(lambda row: jax.nn.dot_product_attention(row, row, row, is_causal=True))(x)

    jaxpr, config = on_gpus(call, HEADS)
    assert "dot_product_attention_fwd" not in jaxpr
    (note,) = config.notes
    assert note.startswith("note: ") and note.endswith(
        "with all scores; cudnn: the workers do not divide 1 rows."
    )
    jaxpr, config = on_gpus(lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True), HEADS)
    assert "dot_product_attention_fwd" in jaxpr and not any(
        note.startswith("note: ") for note in config.notes
    )


SECOND = {
    "a mask": lambda x: jax.nn.dot_product_attention(
        x, x, x, mask=jnp.tril(jnp.ones((32, 32), bool))[None, None]
    ),
    "asked for": lambda x: jax.nn.dot_product_attention(
        x, x, x, is_causal=True, implementation="xla"
    ),
    "one query": lambda x: jax.nn.dot_product_attention(x[:, :1], x, x),
}


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("second", SECOND)
def test_attention_that_a_ring_does_not_take_is_computed_as_it_is_written(second):
    """Beside attention that goes around it; the loss and the gradient are those of plain JAX."""
    tokens = np.random.default_rng(0).normal(size=TOKENS.shape).astype(np.float32)

    def apply(first):
        return lambda params, x: (SECOND[second](first(x * params["w"])) ** 2).mean(axis=(1, 2, 3))

    ring = spmd.FunctionalModel(
        lambda key: {"w": jnp.ones(16)}, apply(lambda x: spmd.nn.attention(x, x, x, causal=True))
    )
    chosen = {
        "loss": lambda model, batch: model(batch),
        "optimizer": optax.sgd(0.1),
        "layout": "context_parallel",
    }
    trainer = spmd.Trainer(ring, mesh="data=2,context=4", **chosen)
    state, metrics = trainer.step(trainer.init(), tokens)
    plain = apply(lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True))
    value, gradient = jax.value_and_grad(lambda w: plain({"w": w}, tokens).mean())(jnp.ones(16))
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-5)
    assert_close((1 - state.params["w"]) / 0.1, gradient, 1e-4)
    notes = [note for note in trainer.notes() if note.startswith("note: ")]
    assert any(note.endswith("computed as it is written, with all scores.") for note in notes)
