"""examples/dpo.py: its loss is equation 7, and it teaches what the pairs prefer."""

import jax
import numpy as np
import pytest

from examples import dpo

pytestmark = pytest.mark.system


def test_loss_is_equation_seven():
    """On logits given in place of a model: by hand from each answer's log-probability."""
    pairs, rng = dpo.load_pairs(4, seed=0), np.random.default_rng(0)
    logits = {kind: rng.normal(size=(4, dpo.LENGTH, 128)).astype(np.float32) for kind in dpo.KINDS}
    ref = {kind: rng.normal(size=4).astype(np.float32) for kind in dpo.KINDS}
    by_tokens = {pairs[kind]["tokens"].tobytes(): logits[kind] for kind in dpo.KINDS}
    losses, metrics = dpo.dpo_loss(0.3)(
        lambda tokens: by_tokens[tokens.tobytes()], {**pairs, "ref": ref}
    )
    for row in range(4):
        ratio = {}
        for kind in dpo.KINDS:
            rows = pairs[kind]
            places = np.flatnonzero(rows["mask"][row])
            log_softmax = jax.nn.log_softmax(logits[kind][row], axis=-1)
            ratio[kind] = (
                sum(float(log_softmax[at, rows["targets"][row, at]]) for at in places)
                - ref[kind][row]
            )
        margin = 0.3 * (ratio["chosen"] - ratio["rejected"])
        assert float(losses[row]) == pytest.approx(np.log1p(np.exp(-margin)), rel=1e-5)
        assert float(metrics["margin"][row]) == pytest.approx(margin, rel=1e-4)


def test_pairs_have_the_same_prompt_and_count_their_answers():
    pairs, tokenizer = dpo.load_pairs(8, seed=0), dpo.characters()
    for row in range(8):
        prompts, answers = set(), []
        for kind in dpo.KINDS:
            rows = pairs[kind]
            at = np.flatnonzero(rows["mask"][row])
            prompts.add(
                "".join(tokenizer.id_to_token(token) for token in rows["tokens"][row][: at[0] + 1])
            )
            answers.append(
                "".join(tokenizer.id_to_token(token) for token in rows["targets"][row][at])
            )
        word = prompts.pop().removesuffix("?")
        assert not prompts and answers == [f" {word}.<end>", f" {word.upper()}!<end>"]


def test_preferred_answers_become_likelier(capsys):
    result = dpo.main(["--layout", "fsdp", "--mesh", "data=8", "--steps", "60"])
    assert (
        result.history["loss"][0] == pytest.approx(np.log(2), rel=1e-4)
        and result.history["loss"][-1] < 0.1
    )
    before, after = [
        int(word.rstrip("%"))
        for word in capsys.readouterr().out.split("likelier")[-1].split()
        if word.endswith("%")
    ]
    assert before < 80 and after > 95
