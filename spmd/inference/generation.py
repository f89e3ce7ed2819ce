"""Generate text from a language model, token by token: one compiled program that reads the prompts
and then writes until all rows have ended.
"""

import dataclasses
import functools
import logging
import math
import numbers
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd.base.specs import entry_axes
from spmd.base.tree import Tree
from spmd.data.generation_config import asked_sampling
from spmd.errors import DataError, OptionError, check_integer, option, short_repr, type_name
from spmd.inference.forward import to_host
from spmd.layout.schema import Layout
from spmd.mesh import make_mesh, outside_of_mesh
from spmd.models.base import Call, Model, Variables
from spmd.models.flax_nnx import ORIGIN
from spmd.models.frozen import is_quantized
from spmd.models.wrap import wrap
from spmd.nn.parallel_context import ParallelConfig, parallel_scope
from spmd.nn.unchanged_models import with_calls
from spmd.train.model_setup import PlacedModel
from spmd.train.precision import cast_variables, compute_dtype
from spmd.train.state import State, check_alive

# lengths are rounded up to multiples of this, so that prompts of like lengths use the same program
UNIT = 16
MODEL_FIX = (
    "a module of spmd.pretrained.load, or one with  init_cache(rows, length, dtype)  and  "
    "model(tokens, positions=, cache=)."
)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The choice of the next token from its logits; temperature 0 takes the most likely one.

    Attributes:
      temperature: divides the logits.
      top_k: only the so many most likely tokens are drawn; None: all.
      top_p: only the most likely tokens that together have this probability are drawn (Holtzman et
        al., arXiv:1904.09751); None: all.
      repetition_penalty: logits of tokens that the text has already, the prompt included, are
        divided by it, and negative ones multiplied, before all else, also at temperature 0 (Keskar
        et al., arXiv:1909.05858); 1: they stay.

    >>> Sampling(0.7, top_k=50).greedy, Sampling().greedy
    (False, True)
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if not _is_number(self.temperature) or self.temperature < 0:
            raise OptionError(
                f"{option('temperature', short_repr(self.temperature))}.",
                fix="a number from 0; 0 takes the most likely token.",
            )
        check_integer(self.top_k, "top_k", optional=True)
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise OptionError(
                f"{option('top_p', short_repr(self.top_p))}.", fix="a probability above 0, up to 1."
            )
        if not _is_number(self.repetition_penalty) or self.repetition_penalty <= 0:
            why = f"{option('repetition_penalty', short_repr(self.repetition_penalty))}."
            raise OptionError(why, fix="a number above 0; 1 changes nothing.")
        if self.greedy and (self.top_k is not None or self.top_p is not None):
            raise OptionError(
                "top_k and top_p do nothing at temperature 0, which takes the most likely token.",
                fix=f"{option('temperature', 1.0)}.",
            )

    @property
    def greedy(self) -> bool:
        """True if nothing is drawn."""
        return self.temperature == 0

    def choose(
        self, logits: jax.Array, keys: jax.Array, repeated: jax.Array | None = None
    ) -> jax.Array:
        """Tokens int32[rows] from logits float32[rows, vocab], each drawn with its row's key.

        `repeated`: bool[rows, vocab], tokens that the text has already, which `repetition_penalty`
        is for.
        """
        if repeated is not None:
            penalty = self.repetition_penalty
            # Divided, a negative logit would become more likely.
            penalised = jnp.where(logits < 0, logits * penalty, logits / penalty)
            logits = jnp.where(repeated, penalised, logits)
        if self.greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_k is not None:
            count = min(self.top_k, logits.shape[-1])
            likeliest_logits, _ = jax.lax.top_k(logits, count)
            least = likeliest_logits[:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p is not None:
            ordered = jnp.sort(logits, axis=-1, descending=True)
            probabilities = jax.nn.softmax(ordered, axis=-1)
            # less its own probability, so that the most likely token is always among them
            likelier = jnp.cumsum(probabilities, axis=-1) - probabilities
            likeliest = jnp.where(likelier < self.top_p, ordered, jnp.inf)
            least = likeliest.min(axis=-1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


class Generator:
    """A language model ready to write; its program is compiled at the first call, and again for
    longer prompts.

    Args:
      model: a result of `fit`, or a module with a cache of keys and values, such as
        `spmd.pretrained.load` gives; or a `Trainer`, of which each call names a `state`.
      mesh, layout: as for `fit`; rows are sharded over the layout's data axes, keys and values of
        heads over the axis of `kv_heads` in its `[axes]`. None: those of the result; for a module,
        the mesh on which its arrays lie, and no layout: the compiler chooses.

    Raises:
      OptionError: the model has no cache.

    Example:
      >>> from spmd.pretrained.decoder import Decoder
      >>> from spmd.pretrained.decoder_config import DecoderConfig, LayerKind
      >>> config = DecoderConfig(
      ...     vocab=10,
      ...     width=8,
      ...     heads=2,
      ...     kv_heads=1,
      ...     head_dim=4,
      ...     mlp_width=16,
      ...     layers=(LayerKind(),),
      ... )
      >>> write = Generator(Decoder(config, rngs=nnx.Rngs(0)))
      >>> (
      ...     write([[1, 2]], max_new_tokens=3)[0].shape,
      ...     write([[3]], max_new_tokens=3, temperature=0.5)[0].shape,
      ... )
      ((3,), (3,))
    """

    def __init__(self, model: Any, *, mesh: Any = None, layout: str | Path | Layout | None = None):
        self._placed_model: PlacedModel | None = None
        self._variables: Variables | None = None
        self._products: dict[str, Any] = {}
        self._dtype = None
        used_mesh, used_layout = None, None
        abstract: Any
        if isinstance(model, nnx.Module):
            self._given: Model = wrap(model)
            self._variables = self._given.concrete
            abstract = self._variables
            used_mesh = _mesh_of(abstract)
        else:
            placed = _placed_model_of(model)
            self._placed_model = placed
            self._given = placed.given
            abstract = placed.abstract_variables
            used_mesh, used_layout = placed.mesh, placed.resolved.layout
            self._products = {"products": placed.products}
            self._dtype = compute_dtype(placed.config.precision)
            if hasattr(model, "state"):
                self._variables = self._of_state(model.state)
        module = _abstract_module(self._given, abstract)
        if not hasattr(module, "init_cache"):
            raise OptionError(
                f"{type(module).__name__} has no cache of keys and values.", fix=MODEL_FIX
            )
        self._mesh: Mesh | None = used_mesh
        if mesh is not None:
            self._mesh = make_mesh(mesh)
        self._layout = used_layout
        if layout is not None:
            self._layout = Layout.load(layout)
        config = getattr(module, "config", None)
        self._vocab = getattr(config, "vocab", None)
        self._longest = getattr(config, "learned_positions", None)
        self._made_for = getattr(config, "max_positions", None)
        origin = getattr(module, ORIGIN, None)
        self._asked = None
        if origin is not None:
            self._asked = asked_sampling(origin.folder)
        self._said: set[str] = set()
        self._program = jax.jit(self._write, static_argnames=("sampling", "new", "length"))

    def _of_state(self, state: State) -> Variables:
        """The model's arrays in a state of its run."""
        if self._placed_model is None:
            raise OptionError(
                "state= is for a generator of a run, and this one is of a module.",
                fix="Generator(trainer), or leave it out.",
            )
        check_alive(state)
        return self._placed_model.states.variables(state)

    @functools.cached_property
    def _parallel(self) -> ParallelConfig:
        if self._layout is None:
            # arrays may be sharded in any way, and XLA cannot partition a kernel of attention
            return with_calls(ParallelConfig(None, (), attention="as_written"))
        data: tuple[str, ...] = ()
        if self._mesh is not None:
            data = tuple(axis for axis in self._layout.data_axes() if axis in self._mesh.shape)
        implementation = self._layout.attention.implementation
        return with_calls(ParallelConfig(self._mesh, data, attention=implementation))

    def _bind(self, variables: Variables) -> Any:
        call = Call(training=False, dtype=self._dtype, **self._products)
        return self._given.bind(cast_variables(variables, self._dtype), call)

    def _sharded(self, cache: Tree) -> Tree:
        """A cache [layers, rows, length, kv_heads, head_dim]: rows over the data axes, heads over
        those of `kv_heads`.
        """
        parallel = self._parallel
        if parallel.mesh is None:
            return cache
        mesh = parallel.mesh
        named = dict((self._layout or Layout()).axes)
        heads = tuple(axis for axis in entry_axes(named.get("kv_heads")) if axis in mesh.shape)
        ways = math.prod(mesh.shape[axis] for axis in heads)

        def shard(leaf: jax.Array) -> jax.Array:
            by_head = None
            if heads and leaf.shape[3] % ways == 0:
                by_head = heads
            spec = PartitionSpec(None, parallel.data or None, None, by_head, None)
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

        return jax.tree.map(shard, cache)

    def _write(
        self,
        variables: Variables,
        prompt: jax.Array,
        lengths: jax.Array,
        stop: jax.Array,
        key: jax.Array,
        *,
        sampling: Any,
        new: int,
        length: int,
    ) -> tuple[jax.Array, jax.Array]:
        """Tokens int32[rows, new] that follow the prompts [rows, longest], and the number of them
        that each row has before it ended.
        """
        rows = prompt.shape[0]
        by_row = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))

        def step(token: jax.Array, positions: jax.Array, cache: Tree) -> tuple[jax.Array, Tree]:
            with parallel_scope(self._parallel):
                return self._bind(variables)(token, positions=positions, cache=cache)

        def continues(state: tuple) -> jax.Array:
            number, _, done, *_ = state
            return (number < new) & ~done.all()

        def write(state: tuple) -> tuple:
            number, token, done, counts, written, repeated, cache = state
            position = lengths - 1 + number
            logits, cache = step(token[:, None], position[:, None], cache)
            keys = jax.vmap(jax.random.fold_in, (0, None))(by_row, number)
            chosen = sampling.choose(logits[:, 0].astype(jnp.float32), keys, repeated)
            # The loop ends for all rows together: a row that has ended runs along, and writes 0.
            token = jnp.where(done, 0, chosen)
            if repeated is not None:
                repeated = repeated.at[jnp.arange(rows), token].set(True)
            written = jax.lax.dynamic_update_index_in_dim(written, token, number, 1)
            counts = counts + ~done
            is_end = token[:, None] == stop
            done = done | is_end.any(axis=1)
            return number + 1, token, done, counts, written, repeated, self._sharded(cache)

        dtype = self._dtype or _common_dtype(variables)
        positions = jnp.broadcast_to(jnp.arange(prompt.shape[1]), prompt.shape)
        cache = self._sharded(self._bind(variables).init_cache(rows, length, dtype))
        # only the shape of the logits is used, so XLA does not compute their values
        logits, cache = step(prompt, positions, cache)
        repeated = None
        if sampling.repetition_penalty != 1:
            of_text = positions < lengths[:, None]
            repeated = jnp.zeros((rows, logits.shape[-1]), bool)
            # `max`, because a token may be in a row twice, and `set` takes either of two values.
            repeated = repeated.at[jnp.arange(rows)[:, None], prompt].max(of_text)
        last = jnp.take_along_axis(prompt, lengths[:, None] - 1, axis=1)[:, 0]
        counts = jnp.zeros(rows, jnp.int32)
        number = jnp.zeros((), jnp.int32)
        done = lengths < 0
        written = jnp.zeros((rows, new), jnp.int32)
        start = (number, last, done, counts, written, repeated, self._sharded(cache))
        _, _, _, counts, written, *_ = jax.lax.while_loop(continues, write, start)
        return written, counts

    def __call__(
        self,
        tokens: Any,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: Sequence[int] = (),
        state: State | None = None,
    ) -> list[np.ndarray]:
        """The tokens that follow each prompt; arguments, results and errors as of `generate`.

        `state`: one of the run that this generator is for, in place of the result's; the program
        stays the same.
        """
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty)
        check_integer(max_new_tokens, "max_new_tokens")
        check_integer(seed, "seed", 0)
        variables = self._variables
        if state is not None:
            variables = self._of_state(state)
        if variables is None:
            raise OptionError(
                "a generator of a trainer has no state.",
                fix="state=trainer.init(), or one that a step returned.",
            )
        prompts = _prompts(tokens, self._vocab)
        ends = _stop_tokens(stop, self._vocab)
        longest = max(map(len, prompts))
        if self._longest is not None and longest + max_new_tokens > self._longest:
            why = (
                f"a prompt of {longest} tokens and {option('max_new_tokens', max_new_tokens)} need "
                f"{longest + max_new_tokens} positions"
            )
            room = self._longest - longest
            fix = "shorter prompts."
            if room > 0:
                fix = f"{option('max_new_tokens', room)}, or shorter prompts."
            raise DataError(f"{why}; the model has {self._longest}.", fix=fix)
        self._report(sampling, longest + max_new_tokens)
        workers = math.prod(self._parallel.axis_size(axis) for axis in self._parallel.data)
        # Rows are sharded over the workers, so their number must be a multiple of the workers.
        rows = [*prompts, *[prompts[-1]] * (-len(prompts) % workers)]
        length = -(-(longest + max_new_tokens) // UNIT) * UNIT
        if self._longest is not None:
            length = min(length, self._longest)
        width = min(-(-longest // UNIT) * UNIT, length)
        prompt = np.zeros((len(rows), width), np.int32)
        for number, row in enumerate(rows):
            prompt[number, : len(row)] = row
        lengths = np.array([len(row) for row in rows], np.int32)
        # placed as numbers: the callback slices a numpy array, which cannot have keys
        # The kind is fixed, so that jax_default_prng_impl does not change what is drawn.
        key = np.asarray(jax.random.key_data(jax.random.key(seed, impl="threefry2x32")))
        data = self._parallel.data
        key_on_mesh = jax.random.wrap_key_data(self._placed(key, ()), impl="threefry2x32")
        written, counts = self._program(
            variables,
            self._placed(prompt, data),
            self._placed(lengths, data),
            self._placed(ends, ()),
            key_on_mesh,
            sampling=sampling,
            new=max_new_tokens,
            length=length,
        )
        written = to_host(written)
        counts = to_host(counts)
        return [written[number, : counts[number]] for number in range(len(prompts))]

    def _report(self, sampling: Sampling, length: int) -> None:
        """Warn, once, of options that the model's folder asks for and this call does not apply, and
        of texts longer than the model was made for.
        """
        if self._made_for is not None and length > self._made_for:
            self._warn(
                f"texts of up to {length} tokens with the prompt, and config.json says that the "
                f"model was made for {self._made_for}."
            )
        if self._asked is None:
            return
        if self._asked.unknown:
            self._warn(
                f"{self._asked.where}: not applied, for there is no such option: "
                f"{', '.join(self._asked.unknown)}."
            )
        if self._asked.options and Sampling(**self._asked.options) != sampling:
            self._warn(
                f"{self._asked.where} asks for {self._asked.text}, which is not used unless a call "
                "has it."
            )

    def _warn(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logging.getLogger("spmd").warning(text)

    def _placed(self, x: np.ndarray, rows: tuple[str, ...]) -> jax.Array:
        """An array that every process has, on the mesh: dim 0 over these axes."""
        if self._mesh is None:
            return jnp.asarray(x)
        at = NamedSharding(self._mesh, PartitionSpec(rows or None))
        return jax.make_array_from_callback(x.shape, at, lambda index: x[index])


@outside_of_mesh()
def generate(
    model: Any,
    tokens: Any,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: Sequence[int] = (),
    mesh: Any = None,
    layout: str | Path | Layout | None = None,
) -> list[np.ndarray]:
    """The tokens that a language model writes after each prompt.

    Prompts and new tokens are one compiled program: the prompts are read at once, then tokens are
    written one after the other with a cache of keys and values, until all rows have ended. What a
    row draws depends on the seed, its number and its text alone, not on the mesh. For several calls
    make a `spmd.Generator` once, which keeps the program.

    Args:
      model: a result of `fit`, or a module with a cache, such as `spmd.pretrained.load` gives.
      tokens: prompts: a list of lists of token ids, which may differ in length, or int[rows,
        length]. In all processes the same.
      max_new_tokens: at most so many tokens are written to each row.
      temperature: 0 takes the most likely token; otherwise logits are divided by it and a token is
        drawn.
      top_k, top_p: limits of what is drawn (`Sampling`).
      repetition_penalty: above 1, tokens that a text has already are less likely (`Sampling`).
      seed: of the draws.
      stop: token ids that end a row; the one that ended it is its last.
      mesh, layout: where rows and the cache lie (`Generator`).

    Returns:
      For each prompt the new tokens, int32[up to max_new_tokens], on the host.

    Raises:
      OptionError: an option is out of range, a token of `stop` is not in the vocabulary, or the
        model has no cache.
      DataError: a prompt is empty, has ids that are not in the vocabulary, or is too long for the
        model.

    Example:
      >>> from spmd.pretrained.decoder import Decoder
      >>> from spmd.pretrained.decoder_config import DecoderConfig, LayerKind
      >>> config = DecoderConfig(
      ...     vocab=10,
      ...     width=8,
      ...     heads=2,
      ...     kv_heads=1,
      ...     head_dim=4,
      ...     mlp_width=16,
      ...     layers=(LayerKind(),) * 2,
      ... )
      >>> model = Decoder(config, rngs=nnx.Rngs(0))
      >>> [len(row) for row in generate(model, [[1, 2, 3], [4]], max_new_tokens=5)]
      [5, 5]
    """
    options: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
    }
    return Generator(model, mesh=mesh, layout=layout)(
        tokens, max_new_tokens=max_new_tokens, seed=seed, stop=stop, **options
    )


def _placed_model_of(model: Any) -> PlacedModel:
    """Return the placed model of a result of `fit`, of a trainer, or itself.

    Raises:
      OptionError: it is none of these.
    """
    trainer = getattr(model, "trainer", model)
    placed = getattr(trainer, "placed", trainer)
    if not isinstance(placed, PlacedModel):
        raise OptionError(
            f"model={short_repr(model)} is {type_name(model)}.",
            fix=f"a result of fit, {MODEL_FIX}",
        )
    return placed


def _common_dtype(variables: Variables) -> Any:
    """Return the dtype to which JAX promotes the parameters that are not quantized."""
    trees = (variables.params, variables.frozen)
    leaves = jax.tree.leaves(trees, is_leaf=is_quantized)
    dtypes = [leaf.dtype for leaf in leaves if not is_quantized(leaf)]
    return jnp.result_type(*dtypes)


def _abstract_module(model: Model, variables: Variables) -> Any:
    """The model's module without values in its arrays, to read its attributes."""
    modules = []
    jax.eval_shape(
        lambda values: modules.append(model.bind(values, Call(training=False))), variables
    )
    return modules[0]


def _mesh_of(variables: Variables) -> Mesh | None:
    """The mesh on which arrays lie; None for one device."""
    for leaf in jax.tree.leaves(variables):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            # it is an AbstractMesh only for arrays inside a trace
            return leaf.sharding.mesh  # type: ignore[return-value]
    return None


def _prompts(tokens: Any, vocab: int | None) -> list[np.ndarray]:
    """The prompts as int32 arrays.

    Raises:
      DataError: there are none; one is empty, is no list of whole numbers, or has ids out of range.
    """
    fix = "a list of lists of token ids, one for each prompt, such as [[1, 15, 7], [1, 9]]."
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence | np.ndarray | jax.Array):
        raise DataError(f"tokens={short_repr(tokens)} is {type_name(tokens)}.", fix=fix)
    if len(tokens) == 0:
        raise DataError("tokens: no prompt.", fix=fix)
    prompts = []
    for number, row in enumerate(tokens):
        try:
            ids = np.asarray(row)
        # numpy raises ValueError for nested lists of different lengths.
        except ValueError:
            ids = np.zeros((0, 0))
        are_integers = ids.size == 0 or np.issubdtype(ids.dtype, np.integer)
        if ids.ndim != 1 or not are_integers:
            raise DataError(f"tokens[{number}]={short_repr(row)} is no list of token ids.", fix=fix)
        if ids.size == 0:
            raise DataError(
                f"tokens[{number}] is empty.",
                fix="one token at least, such as the one that begins a text.",
            )
        limit = vocab or 2**31
        bad = ids[(ids < 0) | (ids >= limit)]
        if bad.size:
            raise DataError(
                f"tokens[{number}] has id {bad[0]}; the model has {vocab} tokens, from 0.",
                fix="the tokenizer of this model.",
            )
        prompts.append(ids.astype(np.int32))
    return prompts


def _stop_tokens(stop: Sequence[int], vocab: int | None) -> np.ndarray:
    """Ids as int32[count], with -1, which no token has, so that the array is never empty."""
    if isinstance(stop, str | bytes) or not isinstance(stop, Sequence | np.ndarray):
        raise OptionError(
            f"{option('stop', short_repr(stop))}.", fix="a list of token ids, such as [2]."
        )
    for token in stop:
        check_integer(token, "stop", 0)
        if vocab is not None and token >= vocab:
            fix = (
                "stop=[...] (--stop) with tokens of this model; the default is the eos_token_id of "
                "its folder."
            )
            raise OptionError(
                f"stop has id {token}; the model has {vocab} tokens, from 0, and would never end a "
                "text with it.",
                fix=fix,
            )
    return np.array([-1, *stop], np.int32)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
