"""Adapters in layers: what they compute, where their parameters lie, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from spmd.layout.trained import Adapter
from spmd.models.base import Call
from spmd.models.lora import adapter_paths, add_adapters, merge_adapters
from spmd.models.wrap import wrap
from spmd.nn import LayerStack
from spmd.pretrained.decoder import Decoder
from spmd.pretrained.decoder_config import DecoderConfig
from tests.compare import assert_close

WIDTH, MLP, LAYERS = 16, 32, 4


def linear(inputs, outputs, names, rngs, **options):
    init = nnx.with_partitioning(nnx.initializers.normal(0.2), names, eager_sharding=False)
    return nnx.Linear(inputs, outputs, kernel_init=init, rngs=rngs, **options)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = linear(WIDTH, MLP, ("embed", "mlp"), rngs)
        self.down = linear(MLP, WIDTH, ("mlp", "embed"), rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Network(nnx.Module):
    def __init__(self, seed=0, stacked=True):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(8, WIDTH, rngs=rngs)
        blocks = [Block(rngs) for _ in range(LAYERS)]
        self.stack = LayerStack(blocks) if stacked else nnx.Sequential(*blocks)
        self.head = linear(WIDTH, 8, ("embed", "vocab"), rngs)

    def __call__(self, x):
        return self.head(self.stack(x))


def adapted(*adapters, stacked=True, moved=True):
    """A network with adapters; `moved`: their second matrices are no zeros."""
    model = Network(stacked=stacked)
    add_adapters(model, adapters, nnx.Rngs(1))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)) if moved else ():
        if path[-1] == "lora_b":
            variable.set_value(
                0.3 * jax.random.normal(jax.random.key(2), variable.get_value().shape)
            )
    return model


def params(model):
    return spmd.base.tree.flatten(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(3), (8, WIDTH))


@pytest.mark.system
@pytest.mark.parametrize("rslora", [False, True])
def test_adapter_adds_its_product(rslora, x):
    model = adapted(Adapter("**/up", rank=4, alpha=6.0, rslora=rslora))
    layer = model.stack.layer(1)
    scale = 6.0 / (2.0 if rslora else 4.0)
    extra = scale * x @ layer.up.lora_a[...] @ layer.up.lora_b[...]
    expected = x @ layer.up.kernel[...] + layer.up.bias[...] + extra
    np.testing.assert_allclose(layer.up(x), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(extra).max() > 0.1


def test_new_adapters_change_nothing(x):
    model = adapted(Adapter("**/{up,down}", rank=4), Adapter("head", rank=2), moved=False)
    assert list(adapter_paths(model)) == ["head", "stack/layers/down", "stack/layers/up"]
    np.testing.assert_array_equal(model(x), Network()(x))


@pytest.mark.system
def test_first_matrix_is_uniform_and_each_layer_draws():
    model = adapted(Adapter("**/{up,down}", rank=8))
    for name, inputs in (("up", WIDTH), ("down", MLP)):
        a = np.asarray(params(model)[f"stack/layers/{name}/lora_a"])
        bound = inputs**-0.5
        assert (
            a.shape == (LAYERS, inputs, 8)
            and np.abs(a).max() <= bound
            and np.abs(a).max() > 0.95 * bound
        )
        assert abs(a.std() / (bound / 3**0.5) - 1) < 0.1
        assert np.abs(np.corrcoef(a.reshape(LAYERS, -1)) - np.eye(LAYERS)).max() < 0.3


@pytest.mark.system
def test_stack_equals_list(x):
    """Layer by layer, with the same numbers."""
    stacked, listed = (
        adapted(Adapter("**/up", rank=4)),
        adapted(Adapter("**/up", rank=4), stacked=False),
    )
    for path, variable in nnx.to_flat_state(nnx.state(listed.stack, nnx.Param)):
        _, number, *rest = path
        variable.set_value(params(stacked)["/".join(["stack", "layers", *rest])][number])
    np.testing.assert_allclose(stacked(x), listed(x), rtol=1e-5, atol=1e-5)


@pytest.mark.system
def test_names_and_layers_are_the_kernels():
    built = wrap(adapted(Adapter("**/{up,down}", rank=4), Adapter("head", rank=2)))
    names, stacks = built.names(None, None), built.stacks()
    expected = {
        "stack/layers/up": ("embed", "mlp"),
        "stack/layers/down": ("mlp", "embed"),
        "head": ("embed", "vocab"),
    }
    for path, (inputs, outputs) in expected.items():
        assert names[f"{path}/lora_a"] == (inputs, None) and names[f"{path}/lora_b"] == (
            None,
            outputs,
        )
        layers = LAYERS if path != "head" else None
        assert (
            stacks.get(f"{path}/lora_a")
            == stacks.get(f"{path}/lora_b")
            == stacks.get(f"{path}/kernel")
            == layers
        )


def test_parameters_lie_as_the_kernel_lies(x):
    mesh, model = spmd.make_mesh("data=4,model=2"), Network()
    kernel = model.stack.layers.up.kernel
    kernel.set_value(
        jax.device_put(
            kernel.get_value(), NamedSharding(mesh, PartitionSpec(None, "data", "model"))
        )
    )
    add_adapters(model, [Adapter("**/up", rank=4)], nnx.Rngs(0))
    layer = model.stack.layers.up
    assert layer.lora_a.get_value().sharding.spec == PartitionSpec(None, "data", None)
    assert layer.lora_b.get_value().sharding.spec == PartitionSpec(None, None, "model")
    merged = merge_adapters(model).stack.layers.up.kernel.get_value()
    assert merged.sharding == kernel.get_value().sharding
    np.testing.assert_array_equal(merged, kernel.get_value())


@pytest.mark.system
def test_dtypes():
    """As the kernel, or float32 if that has fewer bits; the result has the layer's dtype."""
    for given, kept in (
        (jnp.bfloat16, jnp.float32),
        (jnp.float16, jnp.float32),
        (jnp.float32, jnp.float32),
    ):
        layer = nnx.Linear(WIDTH, MLP, param_dtype=given, rngs=nnx.Rngs(0))
        add_adapters(layer, [Adapter("**", rank=4)], nnx.Rngs(1))
        assert layer.lora_a.get_value().dtype == layer.lora_b.get_value().dtype == kept
        assert layer(jnp.ones((2, WIDTH), given)).dtype == given
        assert merge_adapters(layer).kernel.get_value().dtype == given
    layer = nnx.Linear(
        WIDTH, MLP, dtype=jnp.bfloat16, preferred_element_type=jnp.float32, rngs=nnx.Rngs(0)
    )
    add_adapters(layer, [Adapter("**", rank=4)], nnx.Rngs(1))
    program = jax.make_jaxpr(lambda x: layer(x))(jnp.ones((2, WIDTH)))
    factors = [
        v.aval.dtype
        for eqn in program.eqns
        if eqn.primitive.name == "dot_general"
        for v in eqn.invars
    ]
    assert factors == [jnp.bfloat16] * 6


def test_product_of_the_layer_is_used(x):
    """`dot_general`, `precision` and `promote_dtype` of the layer."""
    calls = []

    def dot_general(*args, precision=None, **options):
        calls.append(precision)
        return jax.lax.dot_general(*args, precision=precision, **options)

    layer = nnx.Linear(WIDTH, MLP, dot_general=dot_general, precision="highest", rngs=nnx.Rngs(0))
    add_adapters(layer, [Adapter("**", rank=4)], nnx.Rngs(1))
    layer(x)
    assert calls == ["highest"] * 3


@pytest.mark.system
def test_merged_module_equals_its_adapters(x):
    model = adapted(
        Adapter("**/{up,down}", rank=4, alpha=4.0, dropout=0.5), Adapter("head", rank=2, alpha=2.0)
    )
    model.eval()
    before = params(model)
    merged = merge_adapters(model)
    np.testing.assert_allclose(merged(x), model(x), rtol=1e-5, atol=1e-5)
    assert adapter_paths(merged) == {} and params(merged).keys() == params(Network()).keys()
    assert type(merged.head) is nnx.Linear and not jax.tree.leaves(nnx.state(merged, nnx.RngState))
    assert (
        jax.tree.all(jax.tree.map(np.array_equal, before, params(model)))
        and len(adapter_paths(model)) == 3
    )
    assert np.abs(merged(x) - Network()(x)).max() > 0.1


@pytest.mark.system
def test_dropout_of_the_adapters_input(x):
    """A mask for each layer of a stack and each call; none in evaluation; the kernel's input is not
    dropped.
    """
    model = adapted(Adapter("**/up", rank=4, dropout=0.5))
    first, second = model(x), model(x)
    assert np.abs(first - second).max() > 0.1
    model.eval()
    np.testing.assert_array_equal(model(x), model(x))
    np.testing.assert_array_equal(model(x), adapted(Adapter("**/up", rank=4))(x))
    keys = jax.random.key_data(model.stack.layers.up.lora_dropout.rngs.key.get_value())
    assert len(np.unique(keys, axis=0)) == LAYERS
    layer = model.stack.layer(0)
    layer.train()
    layer.up.lora_b.set_value(jnp.zeros_like(layer.up.lora_b.get_value()))
    np.testing.assert_array_equal(layer.up(x), x @ layer.up.kernel[...] + layer.up.bias[...])


def loss(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean(axis=1)


@pytest.mark.system
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [("data=8", "fsdp"), ("data=2,model=4", "tensor_parallel"), ("data=4,stage=2", "pipeline")],
)
def test_layouts_equal_one_device(mesh, layout):
    """With dropout: gradients and masks of adapters as those of one device, and shards of them."""
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(16, WIDTH)).astype("float32"),
        "y": rng.normal(size=(16, 8)).astype("float32"),
    }

    def train(mesh, layout):
        model = adapted(Adapter("**/{up,down}", rank=4, alpha=4.0, dropout=0.3))
        trainer = spmd.Trainer(
            model, loss=loss, optimizer=optax.sgd(0.03), mesh=mesh, layout=layout
        )
        state = trainer.init()
        for _ in range(2):
            state, metrics = trainer.step(state, batch)
        return metrics["loss"], spmd.base.tree.flatten(state.params)

    (theirs, expected), (ours, found) = (
        train(spmd.make_mesh("data=1", devices=jax.devices()[:1]), "data_parallel"),
        train(mesh, layout),
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    moved = params(adapted(Adapter("**/{up,down}", rank=4)))
    assert np.isfinite(theirs)
    for path, leaf in found.items():
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-4, atol=1e-6, err_msg=path)
        if "lora" in path:
            assert np.abs(np.asarray(leaf) - moved[path]).max() > 1e-3, "it was trained"
    assert any(
        "lora" in path and not leaf.sharding.is_fully_replicated for path, leaf in found.items()
    )


def test_bound_model_keeps_its_adapters(x):
    """Dtypes of a step, recomputed layers and changed outputs are further subclasses."""
    model = adapted(Adapter("**/up", rank=4))
    built = wrap(model)
    policy = jax.checkpoint_policies.nothing_saveable
    call = Call(
        training=True,
        dtype=jnp.float32,
        remat=(("stack/layers/up", policy),),
        output_hook=lambda path: (lambda y: y + 1) if path else None,
    )
    bound = built.bind(built.concrete, call)
    assert list(adapter_paths(bound)) == ["stack/layers/up"]
    layer = model.stack.layer(0)
    assert_close(bound.stack.layer(0).up(x), layer.up(x) + 1)


MISFITS = {
    "misspelt": [Adapter("**/upp", rank=2, line=3)],
    "of_another_kind": [Adapter("embed", rank=2)],
    "of_what_holds_layers": [Adapter("stack/layers", rank=2)],
    "of_parameters": [Adapter("**/up/kernel", rank=2)],
    "nothing_near": [Adapter("xyz", rank=2)],
    "all_at_once": [
        Adapter("**/{up,down}", rank=20, line=2),
        Adapter("**/up", rank=2, line=6),
        Adapter("**", rank=2, except_=("**/up", "heda", "**/down"), line=10),
        Adapter("**/down", rank=2, except_=("**/down",), line=14),
    ],
}


@pytest.mark.parametrize("name", MISFITS)
def test_adapter_that_does_not_fit(name, golden):
    model = Network()
    with pytest.raises(spmd.errors.LayoutError) as raised:
        add_adapters(model, MISFITS[name], nnx.Rngs(0))
    golden(f"adapters_{name}", str(raised.value))
    assert adapter_paths(model) == {}, "nothing was changed"


def test_adapters_are_not_added_twice(golden):
    model = adapted(Adapter("head", rank=2))
    with pytest.raises(spmd.errors.LayoutError) as raised:
        add_adapters(model, [Adapter("{head,**/up}", rank=2)], nnx.Rngs(0))
    golden("adapters_of_the_model", str(raised.value))


@pytest.mark.system
def test_layer_that_is_not_called(golden):
    """Its kernel is used without the adapter, whose gradients would be zero; in a step, that is an
    error.
    """
    batch = {"x": np.ones((8, WIDTH), np.float32), "y": np.ones((8, 8), np.float32)}

    def loss_of_kernel(model, batch):
        return jnp.square(model.stack(batch["x"]) @ model.head.kernel[...] - batch["y"]).mean(
            axis=1
        )

    def train(loss):
        model = adapted(Adapter("{head,**/up}", rank=2))
        spmd.Trainer(model, loss=loss, optimizer=optax.sgd(0.1), mesh="data=8").prepare(batch)

    train(loss)
    with pytest.raises(spmd.errors.ModelError) as raised:
        train(loss_of_kernel)
    golden("adapters_of_a_layer_that_is_not_called", str(raised.value))


def test_head_of_a_decoder_with_adapters(golden):
    """`output_head` gives the kernel, to which adapters do not belong."""
    sizes = {
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = Decoder(DecoderConfig.from_config({"model_type": "llama", **sizes}), rngs=nnx.Rngs(0))
    add_adapters(model, [Adapter("head", rank=2)], nnx.Rngs(0))
    with pytest.raises(spmd.errors.ModelError) as raised:
        model.output_head()
    golden("adapters_of_a_decoders_head", str(raised.value))
