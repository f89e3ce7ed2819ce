"""Of brax: the networks and the loss of its PPO, on random transitions. All is of float64.

A row is an unroll. The loss puts time first, normalises advantages over all unrolls, and draws
actions for its entropy.
"""

import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np

import spmd

# without what brax/__init__.py imports: physics, and with it mujoco
package = types.ModuleType("brax")
package.__path__ = importlib.util.find_spec("brax").submodule_search_locations
sys.modules["brax"] = package

from brax.training.acme import running_statistics, specs
from brax.training.agents.ppo.losses import PPONetworkParams, compute_ppo_loss
from brax.training.agents.ppo.networks import make_ppo_networks
from brax.training.types import Transition

from benchmarks.public_models.case import ROWS, STEPS, Case, Functions, as_floats

TIME, SEEN, ACTIONS = 5, 6, 2


def networks(**options):
    sizes = {"policy_hidden_layer_sizes": (16, 16), "value_hidden_layer_sizes": (16, 16)}
    return make_ppo_networks(
        SEEN, ACTIONS, preprocess_observations_fn=running_statistics.normalize, **sizes, **options
    )


def unrolls():
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.normal(size=(ROWS, TIME, *shape))

    def seldom():
        return (random.random((ROWS, TIME)) < 0.1) * 1.0

    def unroll():
        extras = {
            "raw_action": normal(ACTIONS),
            "log_prob": normal() - 2,
            "distribution_params": normal(2 * ACTIONS),
            "value": normal(),
        }
        extras = {"state_extras": {"truncation": seldom()}, "policy_extras": extras}
        return Transition(
            normal(SEEN), normal(ACTIONS), normal(), 1 - seldom(), normal(SEEN), extras
        )

    return [unroll() for _ in range(STEPS)]


def model_of(made):
    """Both networks; called with transitions, they give the loss."""

    def init(key):
        of_policy, of_value = jax.random.split(key)
        return PPONetworkParams(
            policy=made.policy_network.init(of_policy), value=made.value_network.init(of_value)
        )

    def apply(params, transitions, *, rng=None):
        return ppo_loss(made, params, transitions, rng)

    return Functions(
        spmd.FunctionalModel(init, apply), as_floats(init(jax.random.key(0)), "float64")
    )


def ppo_loss(made, params, transitions, rng):
    normalizer = running_statistics.init_state(specs.Array((SEEN,), jnp.float64))
    loss, _ = compute_ppo_loss(
        params, normalizer, transitions, rng, made, clipping_epsilon_value=0.2, entropy_cost=1e-2
    )
    return loss


def of_call(model, batch):
    return model(batch)


def cases():
    made = networks()

    def of_params(model, batch, rng):
        return ppo_loss(made, model.params, batch, rng)

    fixes = {
        "accumulate=4": (
            r"a sum over rows for sub (.|\n)*fix: accumulate=1",
            {"mesh": "data=2", "accumulate": 1},
        )
    }
    return [
        Case("PPO", model_of(made), of_call, unrolls(), draws=True, fixes=fixes),
        Case(
            "PPO, of the model's parameters",
            model_of(made),
            of_params,
            unrolls(),
            draws=True,
            fixes=fixes,
        ),
    ]
