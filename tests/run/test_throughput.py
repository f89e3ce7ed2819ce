"""How the time of a run is divided, with a fake clock."""

import time

import numpy as np
import pytest
from small import fit_net, labelled

import spmd
from spmd.run import throughput
from spmd.run.throughput import Throughput


@pytest.fixture
def clock(monkeypatch):
    """A fake of both clocks, which only the test advances."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

        def time(self):
            return self.now + 1e9

    fake = Clock()
    monkeypatch.setattr(throughput, "time", fake)
    return fake


def test_goodput_is_what_neither_compiling_nor_saving_took(clock):
    throughput_of_run = Throughput()
    clock.now += 30.0  # compiling
    throughput_of_run.step_done()
    throughput_of_run.rates(1, 32)
    for _ in throughput_of_run.count_waiting(range(2)):
        clock.now += 20.0
    with throughput_of_run.not_training():
        clock.now += 10.0
    measured = throughput_of_run.rates(201, 32 * 201)
    assert measured == {"steps_per_second": 4.0, "samples_per_second": 128.0, "data_wait": 0.0, "goodput": round(40 / 80, 3)}
    assert throughput_of_run.to_checkpoint() == [40.0, 1000.0 + 1e9]


def test_waiting_for_data_is_counted(clock):
    def slow():
        for item in range(4):
            clock.now += 5.0
            yield item

    throughput_of_run = Throughput()
    throughput_of_run.step_done()
    throughput_of_run.rates(0, 0)
    assert [item for item in throughput_of_run.count_waiting(slow()) if not setattr(clock, "now", clock.now + 15.0)] == [0, 1, 2, 3]
    assert throughput_of_run.rates(8, 8)["data_wait"] == 0.25 and throughput_of_run.waited == 20.0


def test_a_restart_carries_what_is_in_the_checkpoint_and_the_time_since_the_first_start(clock):
    first = Throughput()
    first.step_done()
    clock.now += 60.0
    carried = first.to_checkpoint()
    clock.now += 30.0  # made again
    second = Throughput(carried)
    clock.now += 10.0
    second.step_done()
    second.rates(0, 0)
    clock.now += 20.0
    assert second.rates(10, 10)["goodput"] == round((60 + 20) / 120, 3)


def test_records_of_a_run_have_them(tmp_path):
    class Memory:
        def __init__(self):
            self.records = []

        def write(self, record):
            self.records.append(record)

        def close(self):
            pass

    log = Memory()
    fit_net(labelled(80), epochs=3, log_every=1, loggers=[log])
    last = log.records[-1]
    assert 0.0 < last["goodput"] <= 1.0 and 0.0 <= last["data_wait"] <= 1.0


def test_replicas_are_checked_at_an_interval_of_steps(monkeypatch):
    seen = []
    monkeypatch.setattr("spmd.run.callbacks.check_replicas", lambda state, when: seen.append((int(np.asarray(state.step)), when)))
    fit_net(labelled(80), epochs=2, callbacks=[spmd.callbacks.CheckReplicas(every=3)])
    assert seen and [step for step, _ in seen] == list(range(3, 3 * len(seen) + 1, 3)) and seen[0][1] == "after step 3"
    with pytest.raises(spmd.SpmdError, match="CheckReplicas: every=0"):
        spmd.callbacks.CheckReplicas(every=0)


def test_the_clocks_of_this_file_are_the_real_ones_again():
    assert throughput.time is time
