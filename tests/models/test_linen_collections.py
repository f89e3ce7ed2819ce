"""Collections of Linen modules beside the parameters: statistics are kept, and what is no statistic
is returned, or refused by name.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from flax.linen import fp8_ops

import spmd
from spmd.errors import ModelError

ROWS, WIDTH = 16, 4
RANDOM = np.random.default_rng(0)
BATCHES = [
    {
        "x": RANDOM.normal(size=(ROWS, WIDTH)).astype("f"),
        "y": RANDOM.normal(size=(ROWS, 2)).astype("f"),
    }
    for _ in range(3)
]


def squares(out, batch):
    return ((out - batch["y"]) ** 2).mean(-1)


def plain_loss(model, batch):
    return squares(model(batch["x"]), batch)


def trainer_of(model, loss=plain_loss, devices=1, layout="data_parallel"):
    mesh = spmd.make_mesh(f"data={devices}", devices=jax.devices()[:devices])
    return spmd.Trainer(model, loss=loss, optimizer=optax.sgd(0.1), mesh=mesh, layout=layout)


def trained(trainer):
    state, losses = trainer.init(BATCHES[0]), []
    for batch in BATCHES:
        state, metrics = trainer.step(state, batch)
        losses.append(metrics["loss"])
    return losses, state


def refused(model, loss=plain_loss, devices=1):
    with pytest.raises(ModelError) as raised:
        trained(trainer_of(model, loss, devices))
    return str(raised.value)


class Layer(linen.Module):
    """As a layer of a mixture of experts adds to the loss."""

    summed: bool = False

    @linen.compact
    def __call__(self, x, _=None):
        x = linen.Dense(WIDTH)(x)
        add = {"reduce_fn": lambda a, b: a + b, "init_fn": lambda: 0.0} if self.summed else {}
        self.sow("losses", "balance", (x**2).mean(-1), **add)
        self.sow("intermediates", "features", x)
        return linen.BatchNorm(use_running_average=False)(x), None


class Sows(linen.Module):
    summed: bool = False
    scanned: bool = False

    @linen.compact
    def __call__(self, x):
        if self.scanned:
            axes = {"params": 0, "batch_stats": 0, "losses": 0, "intermediates": 0}
            x, _ = linen.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=2)(
                self.summed
            )(x, None)
        else:
            x, _ = Layer(self.summed)(x)
        return linen.Dense(2)(x)


def with_balance(out, sown, batch):
    return squares(out, batch) + sum(
        leaf.reshape(-1, len(out)).sum(0) for leaf in jax.tree.leaves(sown["losses"])
    )


def reads(model, batch):
    out, sown = model(batch["x"], mutable=["losses"])
    return with_balance(out, sown, batch)


@pytest.mark.sampled(quick=6)
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("summed, scanned", [(False, False), (True, False), (False, True)])
def test_sown_losses_that_the_loss_reads_are_those_of_plain_flax(summed, scanned, devices):
    module = Sows(summed, scanned)
    variables = module.init(jax.random.key(0), BATCHES[0]["x"])
    params, stats, right = variables["params"], variables["batch_stats"], []

    def value(params, stats, batch):
        out, changed = module.apply(
            {"params": params, "batch_stats": stats}, batch["x"], mutable=["losses", "batch_stats"]
        )
        return with_balance(out, changed, batch).mean(), changed["batch_stats"]

    for batch in BATCHES:
        (loss, stats), grads = jax.value_and_grad(value, has_aux=True)(params, stats, batch)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        right.append(loss)
    # bound to its sown values, too
    losses, state = trained(trainer_of(module.bind(variables), reads, devices))
    np.testing.assert_allclose(losses, right, rtol=2e-5)
    assert list(state.stats) == ["batch_stats"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        jax.device_get(state.stats["batch_stats"]),
        stats,
    )


@pytest.mark.parametrize("summed, scanned", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("bound", [False, True])
def test_sown_losses_that_the_loss_does_not_read_are_refused(summed, scanned, bound):
    module = Sows(summed, scanned)
    if bound:  # as flax's users do: without what `init` has sown
        module = module.bind(
            {
                name: part
                for name, part in module.init(jax.random.key(0), BATCHES[0]["x"]).items()
                if name != "losses"
            }
        )
    path = f"losses/{'ScanLayer_0' if scanned else 'Layer_0'}/balance"
    text = refused(module)
    assert (
        f'  {path}\n      sown into the collection "losses", which the loss does not read' in text
    )
    assert 'fix: outputs, sown = model(x, mutable=["losses"]) in the loss' in text


def test_evaluation_returns_what_is_sown():
    class Simple(linen.Module):
        @linen.compact
        def __call__(self, x):
            self.sow("losses", "size", (x**2).mean(-1))
            return linen.Dense(2)(x)

    module = Simple()
    variables = module.init(jax.random.key(0), BATCHES[0]["x"])
    trainer = trainer_of(module.bind(variables), reads)
    out, sown = module.apply({"params": variables["params"]}, BATCHES[1]["x"], mutable=["losses"])
    ours = trainer.evaluate(trainer.init(BATCHES[0]), BATCHES[1], batch_size=ROWS)["loss"]
    np.testing.assert_allclose(ours, with_balance(out, sown, BATCHES[1]).mean(), rtol=1e-5)


def test_statistics_that_evaluation_would_change_are_refused_with_a_fix_that_works():
    class Normed(linen.Module):
        @linen.compact
        def __call__(self, x, train: bool = True, given: bool = False):
            return linen.Dense(2)(
                linen.BatchNorm(use_running_average=not train if given else False)(x)
            )

    def evaluated(loss):
        trainer = trainer_of(Normed(), loss)
        return trainer.evaluate(trainer.init(BATCHES[0]), BATCHES[1], batch_size=ROWS)

    with pytest.raises(
        ModelError, match=r'changes its statistics in evaluation: .*"mean" in "/BatchNorm_0"'
    ) as raised:
        evaluated(lambda model, batch: squares(model(batch["x"]), batch))
    assert "BatchNorm(use_running_average=not train)" in raised.value.fix
    assert np.isfinite(
        evaluated(lambda model, batch: squares(model(batch["x"], given=True), batch))["loss"]
    )


def test_mutable_must_be_names():
    text = refused(Sows(), lambda model, batch: squares(model(batch["x"], mutable=True)[0], batch))
    assert (
        text.startswith("model(..., mutable=True).")
        and 'fix: the names of collections, such as mutable=["losses"]' in text
    )


class Remembers(linen.Module):
    """Keeps rows: more of them with each call, or those of the newest batch."""

    grows: bool

    @linen.compact
    def __call__(self, x):
        rows = self.variable("memory", "rows", lambda: jnp.zeros((1, WIDTH)))
        rows.value = jnp.concatenate([rows.value, x[:1]]) if self.grows else x
        return linen.Dense(2)(x)


@pytest.mark.parametrize(
    "grows, devices, made, changed",
    [
        (True, 1, "float32[2, 4]", "float32[3, 4]"),
        (True, 8, "float32[2, 4]", "float32[3, 4]"),
        (False, 8, "float32[16, 4]", "float32[2, 4]"),
    ],
)
def test_collection_that_changes_its_shape_is_named(grows, devices, made, changed):
    text = refused(Remembers(grows), devices=devices)
    assert f"  memory/rows\n      its `init` made {made}, Remembers.__call__(float32[" in text
    assert f" makes {changed}" in text and "fix: a variable of one shape" in text


class Late(linen.Module):
    @linen.compact
    def __call__(self, x):
        if not self.is_initializing():
            self.variable("memory", "late", jnp.zeros, (2,)).value += 1.0
        return linen.Dense(2)(x)


def test_variable_that_init_does_not_make_is_named():
    assert (
        "  memory/late\n      its `init` made nothing, Late.__call__(float32[16, 4]) makes "
        "float32[2]" in refused(Late())
    )


class Disturbed(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2)(self.perturb("x", x))


@pytest.mark.parametrize("bound", [False, True])
def test_perturbations_are_no_state(bound):
    module = Disturbed()
    variables = module.init(jax.random.key(0), BATCHES[0]["x"])
    losses, state = trained(trainer_of(module.bind(variables) if bound else module, devices=8))
    assert state.stats == {} and "perturbations" in variables
    right = squares(
        module.apply({"params": variables["params"]}, BATCHES[0]["x"]), BATCHES[0]
    ).mean()
    np.testing.assert_allclose(losses[0], right, rtol=1e-5)


class Float8(linen.Module):
    flax_ops: bool = True

    @linen.compact
    def __call__(self, x):
        return linen.Dense(
            2, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp if self.flax_ops else None
        )(x)


def in_float8(x, contracted):
    """Float8 (e4m3) with a scale for each row along the contracted dim: its largest magnitude is
    the largest number of the dtype.
    """
    scale = np.abs(x).max(contracted, keepdims=True) / float(jnp.finfo(jnp.float8_e4m3fn).max)
    return np.asarray((x / scale).astype(jnp.float8_e4m3fn), np.float32) * scale


def test_collection_whose_update_is_a_gradient_is_refused_with_a_fix_that_works(tmp_path):
    text = refused(Float8())
    assert (
        'the module keeps a collection "_overwrite_with_gradient" (Dense_0/Fp8DirectDotGeneralOp_0/'
        in text
    )
    fix = '[[precision]] path = "**", products = "float8"'
    assert fix in text
    layout = tmp_path / "float8.toml"
    layout.write_text("\n".join(fix.replace("]] ", "]]\n").split(", ")))
    module = Float8(flax_ops=False)
    variables = module.init(jax.random.key(0), BATCHES[0]["x"])
    losses, _ = trained(trainer_of(module.bind(variables), layout=layout))
    x, dense = BATCHES[0]["x"], variables["params"]["Dense_0"]
    right = squares(
        in_float8(x, 1) @ in_float8(dense["kernel"], 0) + dense["bias"], BATCHES[0]
    ).mean()
    np.testing.assert_allclose(losses[0], right, rtol=1e-5)
    assert abs(losses[0] - squares(module.apply(variables, x), BATCHES[0]).mean()) > 1e-6
