"""A kernel that trains: the display updates in place, an interrupt keeps the state, and a second
`fit` resumes.
"""

import queue
import re
import time

import pytest

from spmd.run.progress import REFRESH_SECONDS
from tests.processes import environment

pytestmark = pytest.mark.system

SETUP = """
import numpy as np, optax, spmd
x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
data = {"x": x, "y": x[:, :1]}
model = spmd.FunctionalModel(lambda key: {"w": np.zeros((8, 1), "float32")}, lambda params, x: x @ params["w"])
def fit(steps, **more):
    return spmd.fit(model, data, loss=spmd.losses.mean_squared_error, optimizer=optax.sgd(1e-3), batch_size=32, steps=steps,
                    checkpoint=spmd.Checkpoint(FOLDER, every=10**6), **more)
"""  # noqa: E501


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A separate kernel, which is always shut down."""
    from jupyter_client.manager import KernelManager

    for name, value in {
        "JUPYTER_RUNTIME_DIR": tmp_path / "runtime",
        "IPYTHONDIR": tmp_path / "ipython",
        "JAX_PLATFORMS": "cpu",
    }.items():
        monkeypatch.setenv(name, str(value))
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=environment())
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=300)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def messages(client, code, meanwhile=lambda message: None, seconds=400):
    """(time, message) of everything that the kernel sends while it runs a cell."""
    asked, received, until = client.execute(code), [], time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            message = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") != asked:
            continue
        received.append((message["header"]["date"].timestamp(), message))
        meanwhile(message)
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            return received
    raise TimeoutError(
        f"the cell did not end in {seconds} s: "
        f"{[message['content'] for _, message in received][-5:]}"
    )


def text(received):
    contents = [message["content"] for _, message in received]
    assert not [content for content in contents if "ename" in content], contents
    return "".join(
        content.get("text", "") + content.get("data", {}).get("text/plain", "")
        for content in contents
    )


def trains(message):
    """Whether a message redraws the display of steps."""
    return (
        message["msg_type"] == "update_display_data"
        and "samples/s" in message["content"]["data"]["text/plain"]
    )


def test_what_is_shown_stays_in_place_and_an_interrupt_keeps_the_state(kernel, tmp_path):
    manager, client = kernel
    text(messages(client, f"FOLDER = {str(tmp_path / 'run')!r}\n{SETUP}"))
    began = []

    def interrupt(message):
        if trains(message):
            began.append(message)
            if len(began) == 9:
                manager.interrupt_kernel()

    received = messages(
        client,
        "result = fit(10**7); print('ENDED', result.stop_reason, int(result.state.step)); result",
        interrupt,
    )
    shown = text(received)
    reached = int(re.search(r"ENDED interrupted (\d+)", shown).group(1))
    updates = [(at, message) for at, message in received if trains(message)]
    # "tracing" and so on are drawn at once
    drawn = sum(message["msg_type"] == "update_display_data" for _, message in received)
    assert len(updates) > 8 and len(received) < drawn + 10
    assert len(updates) <= (updates[-1][0] - updates[0][0]) / REFRESH_SECONDS + 3, (
        "by the kernel's clock, however late they are read"
    )
    assert len({message["content"]["transient"]["display_id"] for _, message in updates}) == 1
    newest = updates[-1][1]["content"]["data"]
    assert (
        "<polyline" in newest["text/html"]
        and "samples/s" in newest["text/plain"]
        and re.search("[▁▂▃▄▅▆▇█]{2,}", newest["text/plain"])
    )
    assert f"Result after step {reached}, stopped: interrupted; History of {reached} steps" in shown
    last = [
        message["content"]["data"]
        for _, message in received
        if message["msg_type"] == "execute_result"
    ]
    assert "<svg" in last[0]["text/html"]

    again = (
        f"result = fit({reached} + 50, resume=True); print('ENDED', result.stop_reason, "
        "int(result.state.step), len(result.history))"
    )
    assert f"ENDED None {reached + 50} 50" in text(messages(client, again))
    threads = (
        "import threading; print('THREADS', sorted(thread.name for thread in threading.enumerate() "
        "if 'spmd' in thread.name))"
    )
    assert "THREADS []" in text(messages(client, threads))
    for _ in range(2):  # a cell that is run again
        assert "AGAIN None" in text(
            messages(client, f"print('AGAIN', fit({reached} + 60, resume=True).stop_reason)")
        )
