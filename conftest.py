"""Eight CPU devices for every test, and settings that turn carelessness into failures."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_collective_call_terminate_timeout_seconds=60"

import pytest

import spmd

spmd.simulate_devices(8)


@pytest.fixture(scope="session")
def digits():
    """Train and test halves of scikit-learn's 1,797 real 8x8 digits, pixels from 0 to 1."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = (data.images / 16.0).astype("float32")[..., None], data.target.astype("int32")
    return {"image": images[:1500], "label": labels[:1500]}, {"image": images[1500:], "label": labels[1500:]}
