"""A small tokenizer, made here, and documents for it."""

import json

import numpy as np
import tokenizers

SPECIAL = ["<eos>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS = (
    "the a cat dog sat ran on under mat tree and then it slept woke ate fish bone quickly slowly"
).split()


def sentences(count, seed=0, longest=20):
    """Sentences of 1 to `longest` words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, longest + 1))) + "." for _ in range(count)]


def folder(path, special=SPECIAL, **settings):
    """A folder with a byte-level BPE of 300 tokens, and settings."""
    path.mkdir(exist_ok=True)
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    # as published ones: offsets without leading spaces
    bpe.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    bpe.train_from_iterator(sentences(50), trainer)
    bpe.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": CHATML, **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def tokenizer(path):
    return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))


def json_lines(path, documents):
    path.write_text(
        "".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8"
    )
    return path


def messages(*contents, system=None):
    """A conversation: user and assistant in turn."""
    turns = [
        {"role": ("user", "assistant")[at % 2], "content": content}
        for at, content in enumerate(contents)
    ]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *turns]}
