"""Who writes which shard to memory, who gets a copy, which step is complete, and what a host
lacks.
"""

import itertools
import random

import pytest

from spmd.run.memory_plan import FoundPiece, Shipment, complete_steps, plan_shipments, plan_writes

DESCRIBED = {"a": "float32[8]", "b": "float32[100]"}
HALVES = [("a", ((0, 4),)), ("a", ((4, 8),))]
REPLICATED = ("b", ((0, 100),))


def test_each_host_writes_each_shard_once_and_sends_what_is_nowhere_else():
    """Two hosts of two processes; the halves of `a` are on one host each, `b` is on all."""
    holders = {HALVES[0]: {0, 1}, HALVES[1]: {2, 3}, REPLICATED: {0, 1, 2, 3}}
    plans = [plan_writes(holders, DESCRIBED, [[0, 1], [2, 3]], rank) for rank in range(4)]
    assert [plan.write for plan in plans] == [
        (HALVES[0],),
        (REPLICATED,),
        (HALVES[1],),
        (REPLICATED,),
    ]
    assert [plan.send for plan in plans] == [(HALVES[0],), (), (HALVES[1],), ()]
    assert [plan.receiver for plan in plans] == [2, 3, 0, 1]
    assert {plan.host_bytes for plan in plans} == {16 + 400 + 16}


def test_one_host_sends_nothing():
    plan = plan_writes({HALVES[0]: {0}, HALVES[1]: {1}}, DESCRIBED, [[0, 1]], 1)
    assert (plan.write, plan.send, plan.receiver) == ((HALVES[1],), (), None)


@pytest.mark.parametrize("hosts", [[[0, 1], [2]], [[0], [1, 2]], [[0, 2], [1], [3]]], ids=str)
def test_ring_of_unequal_hosts(hosts):
    ranks = sorted(itertools.chain(*hosts))
    plans = {rank: plan_writes({HALVES[0]: {0}}, DESCRIBED, hosts, rank) for rank in ranks}
    for number, host in enumerate(hosts):
        assert {plans[rank].receiver for rank in host} <= set(hosts[(number + 1) % len(hosts)])


def test_any_one_host_may_be_lost():
    """Whatever the placement: what the other hosts hold, with the copies, is complete."""
    chance = random.Random(0)
    for _ in range(200):
        hosts = [[0, 1], [2], [3, 4]][: chance.choice([2, 3])]
        ranks = [rank for host in hosts for rank in host]
        keys = [("b", ((first, first + 10),)) for first in range(0, 100, 10)]
        holders = {key: set(chance.sample(ranks, chance.randint(1, len(ranks)))) for key in keys}
        plans = {rank: plan_writes(holders, DESCRIBED, hosts, rank) for rank in ranks}
        held = [set(itertools.chain(*(plans[rank].write for rank in host))) for host in hosts]
        assert set().union(*held) == set(keys)
        for rank, plan in plans.items():
            target = next(number for number, host in enumerate(hosts) if plan.receiver in host)
            assert rank not in hosts[target] and set(plan.send) <= set(plan.write)
            held[target] |= set(plan.send)
        for lost in range(len(hosts)):
            assert set().union(
                *(keys for number, keys in enumerate(held) if number != lost)
            ) == set(keys)


def found(host, step, rank, *keys, start="s", name=None):
    return FoundPiece(host, name or f"{step}.{rank}", step, start, rank, frozenset(keys))


def test_complete_steps_need_every_shard_of_one_start():
    needed = set(HALVES)
    both = [found(0, 20, 0, HALVES[0]), found(1, 20, 1, HALVES[1])]
    assert complete_steps(both, needed) == [(20, "s")]
    assert complete_steps([*both, found(0, 24, 0, HALVES[0])], needed) == [(20, "s")], (
        "24 lacks a half"
    )
    assert complete_steps([*both, found(0, 24, 0, *HALVES)], needed) == [(24, "s"), (20, "s")]
    assert complete_steps([both[0], found(1, 20, 1, HALVES[1], start="t")], needed) == [], (
        "two starts of the run"
    )
    assert complete_steps([found(1, 20, 1, *HALVES)], needed) == [], "nothing of process 0"


def test_shipments_complete_every_host():
    needs = [{HALVES[0]}, {HALVES[1]}]
    at_home = [found(0, 20, 0, HALVES[0]), found(1, 20, 1, HALVES[1]), found(1, 20, 0)]
    assert plan_shipments(at_home, needs) == []
    copies_only = [found(1, 20, 1, HALVES[1]), found(1, 20, 0, HALVES[0])]
    assert plan_shipments(copies_only, needs) == [Shipment(1, 0, "20.0", (HALVES[0],))]
    without_meta = [found(0, 20, 0, HALVES[0]), found(1, 20, 1, HALVES[1])]
    assert plan_shipments(without_meta, needs) == [Shipment(0, 1, "20.0", ())]
    swapped = [found(0, 20, 0), found(0, 20, 1, HALVES[1]), found(1, 20, 0, HALVES[0])]
    assert plan_shipments(swapped, needs) == [
        Shipment(1, 0, "20.0", (HALVES[0],)),
        Shipment(0, 1, "20.1", (HALVES[1],)),
    ]
