"""A callback that lets a language model write during training."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from spmd.data.prompts import Prompts
from spmd.distributed import watchdog
from spmd.errors import OptionError, check_integer, short_repr, type_name
from spmd.inference.generation import Generator, Sampling
from spmd.run.callbacks import Callback, Info

PROMPTS_FIX = (
    'a list of texts, with tokenizer=FOLDER, or of lists of token ids, such as ["Once upon"].'
)


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a model has written after `step` updates.

    Attributes:
      step: updates made when it was written.
      prompt: as it was given.
      tokens: int32[up to max_new_tokens].
      text: of them; None without a tokenizer.
    """

    step: int
    prompt: Any
    tokens: np.ndarray
    text: str | None

    def __str__(self) -> str:
        prompt, written = (
            str(part).replace("\n", "\\n")
            for part in (self.prompt, self.tokens if self.text is None else self.text)
        )
        return f"step {self.step}: {prompt} -> {written}"


class Samples(Callback):
    """Let the model write on from prompts before the first step and then every `every` steps, and
    print it.

    All samples use one compiled program, with the run's layout. Training is not changed by a bit;
    it waits while the model writes. Every process must have it; process 0 prints.

    Args:
      prompts: texts, or lists of token ids.
      every: steps between two samples.
      max_new_tokens, temperature, top_k, top_p, repetition_penalty, seed: as of `spmd.generate`.
        The seed is the same each time.
      tokenizer: a folder with a tokenizer.json, the path of one, or a `tokenizers.Tokenizer`; None:
        prompts and results are token ids.
      chat: prompts are what a user says, in this format, and the model answers (`spmd.data.text`).
      stop: token ids that end a text; None: those that the tokenizer's folder names.
      show: is called with each `Sample`.

    Attributes:
      written: all samples so far.

    Raises:
      OptionError: an option is out of range, or texts without a tokenizer; when the run begins, a
        model that has no cache.
      DataError: as of `spmd.generate`, or a folder without a tokenizer.

    Example:
      >>> samples = Samples([[1, 2, 3]], every=100, max_new_tokens=20)
      >>> samples.every, samples.written
      (100, [])
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        *,
        every: int = 100,
        max_new_tokens: int = 50,
        tokenizer: Any = None,
        chat: str | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop: Sequence[int] | None = None,
        show: Callable[[Sample], Any] = print,
    ):
        check_integer(every, "Samples: every")
        check_integer(max_new_tokens, "Samples: max_new_tokens")
        check_integer(seed, "Samples: seed", 0)
        Sampling(temperature, top_k, top_p, repetition_penalty)
        if (
            isinstance(prompts, str | bytes)
            or not isinstance(prompts, Sequence | np.ndarray)
            or not len(prompts)
        ):
            raise OptionError(
                f"Samples: prompts={short_repr(prompts)} is {type_name(prompts)}.", fix=PROMPTS_FIX
            )
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if tokenizer is None and (texts or chat is not None):
            raise OptionError(
                f"Samples: {short_repr(texts[0]) if texts else 'chat'} without a tokenizer.",
                fix=PROMPTS_FIX,
            )
        self.every, self.exact, self.together = every, True, True
        self.prompts, self.show, self.written = list(prompts), show, []
        self._coder = None if tokenizer is None else Prompts(tokenizer, chat)
        self._tokens = [
            self._coder.encode(one) if self._coder is not None and isinstance(one, str) else one
            for one in self.prompts
        ]
        ends = self._coder.stop if self._coder is not None else ()
        sampled: dict[str, Any] = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "repetition_penalty": repetition_penalty,
        }
        self._options = {
            "max_new_tokens": max_new_tokens,
            "stop": list(ends if stop is None else stop),
            "seed": seed,
            **sampled,
        }
        self._generator: Generator | None = None

    def on_start(self, info: Info) -> None:
        """Compile, and write what the model writes before training."""
        self._generator = None
        self._write(info)

    def on_step(self, info: Info) -> None:
        """Write."""
        self._write(info)

    def _write(self, info: Info) -> None:
        watch, first = watchdog.current(), self._generator is None
        with watch.in_phase("compile" if first else "eval"), watch.local_work(False):
            if self._generator is None:
                self._generator = Generator(info.placed)
            written = self._generator(self._tokens, state=info.state, **self._options)
        for prompt, tokens in zip(self.prompts, written, strict=True):
            text = None if self._coder is None else self._coder.decode(tokens)
            self.written.append(sample := Sample(info.step, prompt, tokens, text))
            if jax.process_index() == 0:
                self.show(sample)
