"""A pool under random use, against a model of it: contents survive, numbers agree, invariants hold."""

import random

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memkit import Pool, PoolExhausted

CAPACITY = 1 << 20
TAGS = (None, "a", "b")


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.pool = Pool(CAPACITY, grow=False)
        self.live = {}  # number: (tensor, fill, bytes, tag)
        self.scopes = []  # contexts, each with the numbers made in it
        self.scoped = set()  # numbers made in any scope: while one lives, so does its whole region
        self.next = 0

    def keep(self, tensor, tag):
        fill = self.next % 251
        tensor.fill_(fill)
        self.live[self.next] = (tensor, fill, tensor.nbytes, tag or "")
        if self.scopes:
            self.scopes[-1][1].append(self.next)
            self.scoped.add(self.next)
        self.next += 1

    def attempt(self, make, tag=None):
        try:
            made = make()
        except PoolExhausted as error:
            exhausted = error
        else:
            self.keep(made, tag)
            return
        assert exhausted.asked > exhausted.largest_free or self.scopes

    @rule(nbytes=st.integers(0, CAPACITY // 4), tag=st.sampled_from(TAGS))
    def empty(self, nbytes, tag):
        self.attempt(lambda: self.pool.empty(nbytes, dtype=torch.uint8, tag=tag), tag)

    @rule(nbytes=st.integers(1, 5000))
    def use(self, nbytes):
        def make():
            with self.pool.use():
                return torch.empty(nbytes, dtype=torch.uint8)

        self.attempt(make)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        number = data.draw(st.sampled_from(sorted(self.live)))
        self.check_contents(number)
        del self.live[number]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def view_outlives(self, data):
        number = data.draw(st.sampled_from(sorted(self.live)))
        tensor, fill, nbytes, tag = self.live[number]
        self.live[number] = (tensor.view(-1), fill, nbytes, tag)

    @rule()
    def enter_scope(self):
        if len(self.scopes) < 4:
            scope = self.pool.scope()
            scope.__enter__()
            self.scopes.append((scope, []))

    @precondition(lambda self: self.scopes)
    @rule(clean=st.booleans())
    def leave_scope(self, clean):
        scope, numbers = self.scopes.pop()
        living = [number for number in numbers if number in self.live]
        if clean:
            for number in living:
                self.check_contents(number)
                del self.live[number]
            living = []
        living = [number for number in living if self.live[number][2]]
        if living:
            with pytest.raises(RuntimeError, match=f"got {len(living)}: "):
                scope.__exit__(None, None, None)
            if self.scopes:
                self.scopes[-1][1].extend(living)
        else:
            scope.__exit__(None, None, None)

    @precondition(lambda self: not self.scopes)
    @rule()
    def sleep_and_wake(self):
        self.pool.sleep()
        self.pool.wake()

    def check_contents(self, number):
        tensor, fill, nbytes, _ = self.live[number]
        assert tensor.nbytes == nbytes
        assert bool((tensor == fill).all())

    @invariant()
    def sound(self):
        self.pool.check()
        stats = self.pool.stats()
        assert stats.reserved == CAPACITY
        assert stats.active + stats.free == CAPACITY
        if not self.scopes and not self.scoped & self.live.keys():
            assert stats.live_blocks == sum(1 for one in self.live.values() if one[2])
            assert stats.allocated == sum(one[2] for one in self.live.values())

    def teardown(self):
        for number in list(self.live):
            self.check_contents(number)
        self.live.clear()
        while self.scopes:
            self.scopes.pop()[0].__exit__(None, None, None)
        assert self.pool.stats().live_blocks == 0
        assert self.pool.stats().largest_free == CAPACITY
        self.pool.check()


PoolMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPoolMachine = PoolMachine.TestCase


@pytest.mark.slow
@pytest.mark.parametrize("debug", [False, True])
def test_a_million_operations(debug):
    draw = random.Random(0)
    pool = Pool("8MiB", max="32MiB", debug=debug)
    live, failures = [], 0
    operations = 1_000_000 if not debug else 100_000
    for i in range(operations):
        if live and draw.random() < 0.5:
            at = draw.randrange(len(live))
            live[at], live[-1] = live[-1], live[at]
            tensor, fill = live.pop()
            assert int(tensor[0]) == fill
            assert int(tensor[-1]) == fill
        else:
            nbytes = int(2 ** draw.uniform(0, 19))
            try:
                live.append((pool.empty(nbytes, dtype=torch.uint8).fill_(i % 251), i % 251))
            except PoolExhausted:
                failures += 1
                del live[len(live) // 2 :]
        if i % (operations // 100) == 0:
            pool.check()
    live.clear()
    del tensor
    assert pool.stats().live_blocks == 0
    assert pool.stats().failures == failures
    pool.trim()
    assert pool.stats().reserved == 8 << 20
