"""No secret of a command or a URL is shown, and what is no secret is."""

import pytest

from spmd.base.redact import redact_command, redact_text


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "HIDE"],
        ["--api_key=HIDE"],
        ["--api-key=HIDE ME: all of it"],
        ["--wandb.apiKey", "HIDE"],
        ["-hf-token", "HIDE"],
        ["--HF_TOKEN", "HIDE"],
        ["--aws-secret-access-key", "HIDE"],
        ["--secret-of-staging", "HIDE"],
        ["--password", "HIDE"],
        ["--db-passwd", "HIDE"],
        ["+trainer.hub.token=HIDE"],
        ["WANDB_API_KEY=HIDE"],
        ["--config", '{"api_key": "HIDE", "lr": 1}'],
        ["-c", "login(token='HIDE ME')"],
        ["--uri", "http://user:HIDE@127.0.0.1:1"],
        ["--uri=http://user:HI@DE@host/path"],
        ["--uri", "http://user:HI/DE@host/path"],
        ["--uri", "https://HIDE@github.com/org/name"],
        ["--uri", "https://host/path?token=HIDE&page=1"],
    ],
    ids=" ".join,
)
def test_redact_command_hides_secrets(words):
    shown = " ".join(redact_command(["python", "train.py", *words, "--lr", "0.1"]))
    assert "***" in shown and not any(part in shown for part in ("HI", "ME", "DE", "all of it"))
    assert shown.startswith("python train.py ") and shown.endswith(" --lr 0.1")


@pytest.mark.parametrize(
    "words",
    [
        ["--lr", "0.1", "--mesh=data=4,model=2", "--data", "s3://bucket/a@b"],
        ["--max-tokens", "512", "--tokenizer", "gpt2", "--num_key_value_heads=8"],
        ["--keyboard", "x", "--key-size=4", "--token-file", "t.txt", "key"],
        ["--push-to", "ann@host:/path", "https://host:80/a/b?page=2", "http://[::1]:80/"],
    ],
    ids=" ".join,
)
def test_redact_command_shows_everything_else(words):
    assert redact_command(words) == words


def test_redact_text_keeps_the_sentence():
    text = "API request to http://user:pa55@127.0.0.1:1/api/2.0 failed: no key: 3; api_key='x y'."
    assert redact_text(text) == (
        "API request to http://***@127.0.0.1:1/api/2.0 failed: no key: 3; api_key=***."
    )
    text = "apikey: abc, Access-Token: abc, no such key: 3, tokens: 4, wrong password: try again"
    assert redact_text(text) == (
        "apikey: ***, Access-Token: ***, no such key: 3, tokens: 4, wrong password: try again"
    )
    assert redact_text("api_key:\nError: no answer") == "api_key:\nError: no answer"


def test_cost_of_a_long_word_is_linear():
    word = "--files=" + "a-secre-password" * 10_000
    assert redact_command([word]) == [word]
