"""The model's own operations in a step, which MFU counts: those of its products, without
recomputation, replicas and bubbles.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmd.jaxpr.inner_programs import counted_parts, inner_jaxprs, repeats
from spmd.jaxpr.programs import equations, named_axes
from spmd.layout.schema import Attention, Layout
from spmd.mesh import MeshSpec, abstract_mesh
from spmd.planner.cost import attention_products
from spmd.train.activations import Seen
from spmd.train.compiled_step import TrainingProgram
from spmd.train.loss_trace import trace_objective

# a backward pass takes twice the operations of the forward pass (Chowdhery et al. 2022,
# arXiv:2204.02311, appendix B)
PASSES = 3
WIDEST = 8  # outputs for each input of a layer inside a model; a head over a vocabulary has more


def trace_model(program: TrainingProgram) -> Any:
    """The jaxpr of the loss on a full batch, for a single device, with attention as it is
    written.
    """
    layout = Layout(attention=Attention("as_written"))
    # the model's own code may name each of them
    names = dict.fromkeys([*program.placed.mesh.axis_names, *layout.data_axes()])
    placed = program.placed.with_layout(
        abstract_mesh(MeshSpec(tuple((name, 1) for name in names))), layout, accumulate=1
    )
    _, jaxpr = trace_objective(
        placed,
        placed.objective.for_training(),
        program.sample,
        program.rows,
        Seen(placed.resolved),
        {},
    )
    return jaxpr.jaxpr


def model_flops(jaxpr: Any) -> float:
    """FLOPs of the model in a step, of all devices: three times those of the loss, whose jaxpr this
    is.
    """
    return PASSES * flops(jaxpr)


def flops(jaxpr: Any) -> float:
    """FLOPs of the matrix products, convolutions and attention kernels of a jaxpr; a loop of
    unknown length counts once.

    >>> w = jax.numpy.ones((8, 8))
    >>> def run(x):
    ...     return jax.lax.scan(lambda x, _: (x @ w, None), x, length=5)[0]
    >>> flops(jax.make_jaxpr(run)(jax.numpy.ones((4, 8))).jaxpr) == 5 * 2 * 4 * 8 * 8
    True
    """
    return sum(map(flops_of, jaxpr.eqns))


def main_dtype(jaxpr: Any) -> str:
    """The dtype in which a jaxpr multiplies most; a loop counts once.

    >>> main_dtype(jax.make_jaxpr(lambda x: x @ x)(jnp.ones((4, 4), "bfloat16")).jaxpr)
    'bfloat16'
    """
    by_dtype: dict[str, float] = {}
    for equation in equations(jaxpr):
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            dtype = str(equation.invars[0].aval.dtype)
            by_dtype[dtype] = by_dtype.get(dtype, 0.0) + flops_of(equation)
    return max(by_dtype, key=lambda dtype: by_dtype[dtype], default="float32")


def empty_places(jaxpr: Any, times: int = 1) -> float:
    """Return the FLOPs among `model_flops` that are spent on experts' places that no token has
    chosen: an expert has more places than an even share of the choices.
    """
    total, choices, experts = 0.0, 0, 0
    for equation in jaxpr.eqns:
        name, sides = equation.primitive.name, [variable.aval for variable in equation.invars]
        # The router of a mixture of experts; the products that follow, batched over as many
        # experts, are theirs.
        if name == "top_k":
            experts = sides[0].shape[-1]
            choices = sides[0].size // experts * equation.outvars[0].aval.shape[-1]
        elif (
            name == "dot_general"
            and choices
            and equation.params["dimension_numbers"][1] == ((0,), (0,))
            and sides[0].shape[0] == experts
        ):
            places = math.prod(sides[0].shape[:2])
            total += PASSES * times * flops_of(equation) * max(1 - choices / places, 0.0)
        for inner in inner_jaxprs(equation):
            total += empty_places(inner, times * repeats(equation))
    return total


def flops_of(equation: Any) -> float:
    """FLOPs of one equation of a jaxpr."""
    name, params = equation.primitive.name, equation.params
    inputs = [variable.aval for variable in equation.invars]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return (
            2.0
            * equation.outvars[0].aval.size
            * math.prod(inputs[0].shape[dim] for dim in contracted)
        )
    if name == "conv_general_dilated":
        kernel = inputs[1]
        return (
            2.0
            * equation.outvars[0].aval.size
            * kernel.size
            / kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        )
    if name.startswith("ragged_dot"):
        # Each row is multiplied by the matrix of its own group alone.
        return 2.0 * inputs[0].size * inputs[1].shape[-1]
    if name.startswith("dot_product_attention_fwd"):  # cuDNN's, whose primitives JAX keeps private
        return attention_products("", inputs[0].shape, inputs[1].shape)
    if name == "pallas_call" and (
        attention := attention_products(params.get("name") or "", *(x.shape for x in inputs[:2]))
    ):
        return attention
    devices = 1
    if name == "shard_map":  # of the model's own code: its jaxpr is what one device does
        devices = math.prod(params["mesh"].shape[axis] for axis in named_axes(params))
    counts = [flops(jaxpr) for jaxpr in inner_jaxprs(equation)]
    return sum(counted_parts(equation, counts, float)) * repeats(equation) * devices


@dataclasses.dataclass(frozen=True)
class LargeProducts:
    """Products of a model that are much larger than what they are made of.

    Attributes:
      scores: (queries, keys) of attention that multiplies all positions of a row at once.
      logits: (width, vocabulary) of a head that multiplies all tokens of a batch at once.
    """

    scores: frozenset[tuple[int, int]]
    logits: frozenset[tuple[int, int]]


def _longest_free_dim(side: Any, summed: Sequence[int], batch: Sequence[int]) -> int:
    """Return the size of the longest dim of an operand of a product that is neither summed over nor
    a batch dim; 1 if there is none.
    """
    sizes = [size for dim, size in enumerate(side.shape) if dim not in {*summed, *batch}]
    return max(sizes, default=1)


def large_products(program: TrainingProgram, jaxpr: Any) -> LargeProducts:
    """Return the large products of a program whose loss has this jaxpr."""
    leaves = jax.tree.leaves(program.sample)
    lengths = {size for leaf in leaves for size in leaf.shape[1:]}
    tokens = max(
        (leaf.size for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.integer)), default=0
    )
    scores, logits = set(), set()
    for equation in equations(jaxpr):
        if equation.primitive.name != "dot_general":
            continue
        contracted, batches = equation.params["dimension_numbers"]
        sides, out = [variable.aval for variable in equation.invars], equation.outvars[0].aval
        width = math.prod(sides[0].shape[dim] for dim in contracted[0])
        # The longest of the dims that are left: a query's group of heads may be a dim of its own.
        left = _longest_free_dim(sides[0], contracted[0], batches[0])
        right = _longest_free_dim(sides[1], contracted[1], batches[1])
        pair = (left, right)
        batch = batches[0]
        if batch and out.size > sum(side.size for side in sides) and lengths & {*pair}:
            scores.add(pair)
        elif (
            not batch
            and out.shape
            and out.shape[-1] > WIDEST * width
            and 2 * out.size // out.shape[-1] > tokens > 0
        ):
            logits.add((width, out.shape[-1]))
    return LargeProducts(frozenset(scores), frozenset(logits))
