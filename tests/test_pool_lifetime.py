"""A pool's memory: who keeps a block, copies, resizing, the end of the pool, threads, forks."""

import copy
import ctypes
import gc
import io
import pickle
import threading
import time
import weakref

import pytest
import torch
from pool_cases import in_a_child, in_threads, inside, resident
from torch import nn

from memkit import Pool

MIB = 1 << 20


# -- lifetime ----------------------------------------------------------------------------------------------------------


KEEPERS = {
    "view": lambda t: t.view(-1)[5:],
    "numpy": lambda t: t.numpy(),
    "dlpack": lambda t: torch.utils.dlpack.to_dlpack(t),
    "from dlpack": lambda t: torch.from_dlpack(t),
    "storage": lambda t: t.untyped_storage(),
    "set_": lambda t: torch.empty(0).set_(t),
    "detach": lambda t: t.detach(),
    "memoryview": lambda t: memoryview(t.numpy()),
    "autograd": lambda t: (t * torch.ones(1, requires_grad=True)).sum(),
    "parameter": nn.Parameter,
    "transposed": lambda t: t.t(),
}


@pytest.mark.parametrize("name", KEEPERS)
def test_a_block_lives_as_long_as_anything_that_reads_it(name, pool):
    made = pool.zeros(10, 10)
    keeper = KEEPERS[name](made)
    del made
    gc.collect()
    assert pool.stats().live_blocks == 1
    del keeper
    gc.collect()
    assert pool.stats().live_blocks == 0


def test_a_block_returns_at_once(pool):
    made = pool.empty(1000)
    address = made.data_ptr()
    del made
    assert pool.stats().live_blocks == 0
    assert pool.empty(1000).data_ptr() == address


def test_resize(pool):
    made = pool.empty(10).fill_(7)
    made.resize_(5)
    made.resize_(4000)
    assert (made[:5] == 7).all()
    assert inside(pool, made)
    assert pool.stats().allocated == 16000
    storage = made.untyped_storage()
    storage.resize_(0)
    assert pool.stats().live_blocks == 0
    storage.resize_(16000)
    made.fill_(1)
    made.resize_(16 * MIB)  # the pool grows
    assert made[3999] == 1
    full = Pool("1MiB", grow=False)
    other = full.zeros(4)
    other.resize_(MIB)  # from torch's allocator: there is no room
    assert not inside(full, other)
    assert full.stats().live_blocks == 0
    del full
    other.resize_(2 * MIB).fill_(1)


def test_copies(pool, tmp_path):
    made = pool.zeros(64, dtype=torch.float64).normal_()
    big = pool.empty(100_000)
    file = tmp_path / "t.pt"
    torch.save(made, file)
    assert file.stat().st_size < 4000  # its own storage, not the pool
    assert torch.equal(torch.load(file), made)
    assert torch.equal(pickle.loads(pickle.dumps(made)), made)
    assert torch.equal(copy.deepcopy(made), made)
    assert torch.equal(copy.copy(made), made)
    assert torch.equal(made.clone(), made)
    assert torch.equal(torch.from_numpy(made.numpy()), made)
    buffer = io.BytesIO()
    torch.save({"a": made, "view": made[3:5]}, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer)["view"], made[3:5])
    before = made.clone()
    made.share_memory_()
    assert made.is_shared()
    assert torch.equal(made, before)
    assert pool.stats().live_blocks == 1
    assert big.numel() == 100_000
    other = torch.empty(0, dtype=torch.float64).set_(made)
    assert other.data_ptr() == made.data_ptr()


def test_module_on_pool_memory(pool):
    model = nn.Linear(8, 8)
    for parameter in model.parameters():
        parameter.data = pool.new_like(parameter).copy_(parameter)
    twin = copy.deepcopy(model)
    x = torch.randn(2, 8)
    assert torch.equal(model(x), twin(x))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state)
    assert inside(pool, model.weight)


def test_after_close():
    pool = Pool("2MiB")
    made = pool.full((1000,), 5.0)
    pool.close()
    pool.close()
    for call in (lambda: pool.empty(1), lambda: pool.zeros(2), lambda: pool.scope().__enter__()):
        with pytest.raises(RuntimeError, match="clos"):
            call()
    assert (made == 5).all()
    made.resize_(2000)
    assert made[999] == 5
    assert "closed" in repr(pool)
    assert pool.empty(0).numel() == 0
    del made
    gc.collect()
    assert pool.stats().reserved == 0


def test_a_forgotten_pool_keeps_its_tensors():
    made = Pool("1MiB").full((1000,), 2.0)
    gc.collect()
    assert (made == 2).all()


@pytest.mark.parametrize("name", ["_empty", "_zeros", "_ones", "_full", "anything"])
def test_a_pool_in_a_cycle_is_collected(name):
    pool = Pool("1MiB")
    gone = weakref.ref(pool)
    setattr(pool, name, lambda kept=pool: kept)
    del pool
    gc.collect()
    assert gone() is None


def test_a_pool_is_not_copied(pool):
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="expected to stay in its process"):
            call(pool)


def test_fork(pool):
    made = pool.full((1000,), 3.0)
    held = [made]
    plan = pool.record(lambda: torch.ones(3))

    def work():
        assert held[0].eq(3).all()
        held.pop().fill_(9)
        gc.collect()
        for call in (
            lambda: pool.empty(3),
            lambda: pool.zeros(3),
            lambda: torch.ops.memkit.pool_empty(pool._id, [3]),
            lambda: pool.use().__enter__(),
            lambda: pool.scope().__enter__(),
            lambda: pool.replay(plan).__enter__(),
            pool.sleep,
            pool.wake,
        ):
            with pytest.raises(RuntimeError, match=r"made before a fork\(\)"):
                call()
        assert "parent" in repr(pool)
        pool.close()
        assert torch.ones(3).sum() == 3

    in_a_child(work)
    assert (made == 3).all()
    held.clear()
    assert pool.stats().live_blocks == 1


@pytest.mark.parametrize("busy", ["make", "debug"])
def test_fork_while_other_threads_work(busy):
    """No child inherits a mutex that a thread of the parent's had locked."""
    stop, debugged = threading.Event(), Pool("1MiB", debug=True)
    one = torch.ones(64)

    def work(_):
        with debugged.use():
            while not stop.is_set():
                if busy == "make":
                    Pool("4KiB")
                else:
                    torch.add(one, 1)

    def in_child():
        Pool("4KiB", debug=True).ones(3)
        with pytest.raises(RuntimeError, match="made before a fork"):
            debugged.replay(plan).__enter__()

    plan = debugged.record(lambda: torch.ones(7))
    thread = threading.Thread(target=in_threads, args=(work, 3))
    thread.start()
    try:
        for _ in range(40):
            in_a_child(in_child)
    finally:
        stop.set()
        thread.join()


def test_fork_inside_a_scope(pool):
    held = []

    def work():
        assert held[0].eq(3).all()
        with pytest.raises(RuntimeError, match="made before a fork"):
            pool.empty(3)

    with pool.scope():
        held.append(pool.full((1000,), 3.0))
        in_a_child(work)
        held.clear()


def test_threads(pool):
    def work(seed):
        held = []
        for i in range(3000):
            n = (seed * 37 + i * 101) % 5000 + 1
            held.append((pool.empty(n, dtype=torch.uint8).fill_(i % 251), i % 251))
            if len(held) > 10:
                t, value = held.pop((seed + i) % 10)
                assert int(t[0]) == value == int(t[-1])

    in_threads(work, 8)
    assert pool.stats().live_blocks == 0
    assert pool.stats().allocations >= 24000


def test_other_threads_go_on_while_the_pool_grows():
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    with Pool(MIB) as pool:
        thread.start()
        start = time.perf_counter()
        made = pool.empty(512 * MIB, dtype=torch.uint8)
        end = time.perf_counter()
        stop.set()
        thread.join()
        del made
    margin = (end - start) / 4  # a thread may have waited for its turn at either end
    assert any(start + margin < at < end - margin for at in ticks)


def test_threads_that_grow_at_once():
    """None is refused what is there, and the pool grows by what they lack."""
    for limit in ("100MiB", None, "32MiB") * 5:
        with Pool("2MiB", max=limit) as pool:
            ready, held = threading.Barrier(8), []

            def work(_, pool=pool, ready=ready, held=held):
                ready.wait()
                held.append(pool.empty(3 * MIB, dtype=torch.uint8))

            in_threads(work, 8)
            assert pool.stats().reserved <= 32 * MIB
            held.clear()


@pytest.mark.parametrize("operations", [200_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_resident_memory_stays_flat(pool, operations):
    def churn(n):
        for i in range(n):
            pool.empty(i % 3000 + 1)

    churn(20_000)
    before = resident()
    churn(operations)
    assert resident() - before < 2 * MIB


def test_threads_that_end_leave_nothing(pool):
    def drop_all(_):
        made = [pool.empty(8) for _ in range(100)]
        del made

    in_threads(drop_all, 2)
    before = resident()
    for _ in range(600):
        in_threads(drop_all, 1)
    assert resident() - before < 2 * MIB
    assert pool.stats().live_blocks == 0


class MallocInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "in_use",
            "free",
            "keepcost",
        ]
    ]


def test_many_tensors_at_once_leave_nothing(pool):
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocInfo
    made = [pool.empty(8) for _ in range(100_000)]
    alive = mallinfo().in_use
    del made
    assert alive - mallinfo().in_use > 20 * MIB  # 304 bytes each, and what Python takes from malloc
