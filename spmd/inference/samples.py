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
    """A text that a model has written after `step` updates.

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
        written: Any = self.tokens
        if self.text is not None:
            written = self.text
        text = f"{self.prompt} -> {written}".replace("\n", "\\n")
        return f"step {self.step}: {text}"


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
        is_list = isinstance(prompts, Sequence | np.ndarray)
        if isinstance(prompts, str | bytes) or not is_list or not len(prompts):
            raise OptionError(
                f"Samples: prompts={short_repr(prompts)} is {type_name(prompts)}.", fix=PROMPTS_FIX
            )
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if tokenizer is None and (texts or chat is not None):
            option = "chat"
            if texts:
                option = short_repr(texts[0])
            raise OptionError(f"Samples: {option} without a tokenizer.", fix=PROMPTS_FIX)
        self.every = every
        self.exact = True
        self.together = True
        self.prompts = list(prompts)
        self.show = show
        self.written = []
        self._coder: Prompts | None = None
        self._tokens = list(prompts)
        if tokenizer is not None:
            self._coder = coder = Prompts(tokenizer, chat)
            for at, prompt in enumerate(self.prompts):
                if isinstance(prompt, str):
                    self._tokens[at] = coder.encode(prompt)
            if stop is None:
                stop = coder.stop
        stop_tokens: list[int] = []
        if stop is not None:
            stop_tokens = list(stop)
        self._options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "stop": stop_tokens,
            "seed": seed,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "repetition_penalty": repetition_penalty,
        }
        self._generator: Generator | None = None

    def on_start(self, info: Info) -> None:
        """Compile, and write before training."""
        self._generator = None
        self._write(info)

    def on_step(self, info: Info) -> None:
        """Write."""
        self._write(info)

    def _write(self, info: Info) -> None:
        watch = watchdog.current()
        phase = "eval"
        if self._generator is None:
            phase = "compile"
        with watch.in_phase(phase), watch.local_work(False):
            if self._generator is None:
                self._generator = Generator(info.placed)
            written = self._generator(self._tokens, state=info.state, **self._options)
        for prompt, tokens in zip(self.prompts, written, strict=True):
            text = None
            if self._coder is not None:
                text = self._coder.decode(tokens)
            sample = Sample(info.step, prompt, tokens, text)
            self.written.append(sample)
            if jax.process_index() == 0:
                self.show(sample)
