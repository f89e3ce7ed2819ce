"""The one table of JAX's primitives, which all readers of traced programs ask.

A primitive that is not in the table is `Kind.UNKNOWN`: another version's, or another library's.
`tests/jaxpr/test_primitives.py` fails, with its name, for one that the installed JAX has.
"""

import dataclasses
import enum


class Kind(enum.Enum):
    """The kind of a primitive, by what it does with the entries of its inputs."""

    ELEMENTWISE = "an entry of the result is a function of the entries at its place"
    REDUCTION = "one result for all entries along some dims"
    CUMULATIVE = "a reduction, with all intermediate results"
    WINDOW = "a reduction of overlapping slices"
    MOVEMENT = "entries at other places, repeated or left out, as params say"
    LOOKUP = "entries from, or to, places that another input holds"
    PRODUCT = "sums of products"
    FACTORIZATION = "factors of matrices, or solutions"
    TRANSFORM = "sums of all entries along some dims, times constants"
    ORDER = "entries, or their places, by size"
    CREATION = "an array made of params"
    RANDOM = "random numbers"
    KEY = "keys of random numbers"
    COLLECTIVE = "entries of several devices"
    CALL = "runs one program, once"
    CUSTOM = "runs one program, once, which has a derivative of its own"
    REGION = "runs one program on each device, on its shards"
    CONTROL = "runs programs as often as inputs or params say"
    KERNEL = "runs a program of another language"
    EFFECT = "orders effects, or moves arrays between memories"
    UNKNOWN = "not in the table"


ALL = "all inputs"


@dataclasses.dataclass(frozen=True)
class Primitive:
    """An entry of the table.

    Attributes:
      kind: what it does.
      linear: the inputs in which it is jointly linear where the others are fixed; `ALL`; () if it
        is linear in none; None: not known.
      bilinear: it is linear in each of its inputs, and not in two together.
      flat: its derivative is zero wherever it has one.
    """

    kind: Kind
    linear: tuple[int, ...] | str | None = None
    bilinear: bool = False
    flat: bool = False

    def linear_inputs(self, count: int) -> tuple[int, ...] | None:
        """Return the numbers of the inputs, of `count`, in which the primitive is jointly linear;
        None if that is not known.
        """
        if self.linear is None or isinstance(self.linear, tuple):
            return self.linear
        return tuple(range(count))

    @property
    def is_elementwise(self) -> bool:
        """Return whether an entry of the result is a function of the entries at its place."""
        return self.kind is Kind.ELEMENTWISE


# Names by kind. A name of an earlier or later version than the installed one is marked.
NAMES = {
    Kind.ELEMENTWISE: """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
        bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos
        cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
        igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min
        mul name ne neg nextafter not one_minus_square or polygamma population_count pow pvary
        random_gamma_grad real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
        shift_left shift_right_arithmetic shift_right_logical sharding_constraint sign sin sinh sqrt
        square stop_gradient sub tan tanh xor zeta""",
    Kind.REDUCTION: """
        argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
        reduce_xor""",
    Kind.CUMULATIVE: "cumlogsumexp cummax cummin cumprod cumsum",
    Kind.WINDOW: """
        reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
        select_and_scatter select_and_scatter_add""",
    Kind.MOVEMENT: """
        broadcast_in_dim concatenate expand_dims pad reshape rev slice split squeeze tile
        transpose""",
    Kind.LOOKUP: """
        dynamic_slice dynamic_update_slice gather scatter scatter-add scatter-max scatter-min
        scatter-mul scatter-sub scatter_add scatter_max scatter_min scatter_mul scatter_sub""",
    Kind.PRODUCT: "conv_general_dilated dot_general ragged_dot ragged_dot_general",
    Kind.FACTORIZATION: """
        cholesky cholesky_update custom_linear_solve eig eigh geqrf hessenberg householder_product
        lu lu_pivots_to_permutation qr schur svd triangular_solve tridiagonal
        tridiagonal_solve""",
    Kind.TRANSFORM: "fft",
    Kind.ORDER: "approx_top_k sort top_k",
    Kind.CREATION: "axis_index create_token empty empty2 iota",
    Kind.RANDOM: "random_bits random_gamma rng_bit_generator rng_uniform threefry2x32",
    Kind.KEY: "random_clone random_fold_in random_seed random_split random_unwrap random_wrap",
    Kind.COLLECTIVE: """
        all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast pgather pmax pmin
        ppermute psum psum2 psum_invariant psum_scatter ragged_all_to_all reduce_scatter
        unreduced_psum unreduced_reduce_scatter""",
    Kind.CALL: "call checkpoint closed_call core_call eval_jaxpr jit pjit remat remat2",
    Kind.CUSTOM: "custom_jvp_call custom_lin custom_vjp_call custom_vjp_call_jaxpr",
    Kind.REGION: "shard_map",
    Kind.CONTROL: "cond run_state scan while",
    Kind.KERNEL: "ffi_call pallas_call pure_callback io_callback debug_callback",
    Kind.EFFECT: """
        addupdate after_all device_put get optimization_barrier reshard mesh_cast swap""",
}

# Linear in some of their inputs, where the others are fixed.
LINEAR = {
    ALL: """
        add add_any all_gather all_to_all broadcast_in_dim complex concatenate conj
        convert_element_type copy copy_p cumsum expand_dims fft imag name neg pad ppermute psum
        psum2 psum_invariant psum_scatter pvary real reduce_precision reduce_scatter reduce_sum
        reduce_window_sum reshape rev sharding_constraint slice split squeeze stop_gradient sub tile
        transpose""",
    (0,): "div dynamic_slice gather",
    (0, 1): "dynamic_update_slice",
    (0, 2): "scatter scatter-add scatter-sub scatter_add scatter_sub",
}
BILINEAR = "conv_general_dilated dot_general mul ragged_dot ragged_dot_general"
# Piecewise constant, or of whole numbers and truth values.
FLAT = """
    and argmax argmin ceil clz eq eq_to floor ge gt is_finite le le_to lt lt_to ne not or
    population_count reduce_and reduce_or reduce_xor round shift_left shift_right_arithmetic
    shift_right_logical sign stop_gradient xor"""
# Linear in none of their inputs.
CURVED = """
    abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt clamp cos cosh
    cumlogsumexp cummax cummin cumprod digamma erf erf_inv erfc exp exp2 expm1 integer_pow lgamma
    log log1p log2 logistic max min one_minus_square polygamma pow reduce_max reduce_min
    reduce_prod reduce_window_max reduce_window_min rem rsqrt sin sinh sort sqrt square tan tanh
    top_k"""


def _table() -> dict[str, Primitive]:
    linear: dict[str, tuple[int, ...] | str] = dict.fromkeys((*FLAT.split(), *CURVED.split()), ())
    linear |= {name: inputs for inputs, names in LINEAR.items() for name in names.split()}
    bilinear, flat = frozenset(BILINEAR.split()), frozenset(FLAT.split())
    return {
        name: Primitive(kind, linear.get(name), name in bilinear, name in flat)
        for kind, names in NAMES.items()
        for name in names.split()
    }


TABLE = _table()
_UNKNOWN = Primitive(Kind.UNKNOWN)


def known(name: str) -> Primitive:
    """Return the kind of a primitive by its name.

    Example:
      >>> known("dot_general").kind.name, known("dot_general").bilinear
      ('PRODUCT', True)
      >>> known("scatter-add").linear, known("exp").linear, known("of_tomorrow").linear
      ((0, 2), (), None)
    """
    return TABLE.get(name, _UNKNOWN)


def of_kind(*kinds: Kind) -> frozenset[str]:
    """Return the names of all primitives of some kinds.

    Example:
      >>> sorted(of_kind(Kind.PRODUCT))[:2]
      ['conv_general_dilated', 'dot_general']
    """
    return frozenset(name for name, primitive in TABLE.items() if primitive.kind in kinds)
