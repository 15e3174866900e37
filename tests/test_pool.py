"""memkit.Pool: tensors, sizes, errors, reports, debug mode, sleep, fork."""

import copy
import ctypes
import gc
import io
import itertools
import os
import pickle
import subprocess
import sys
import threading

import numpy
import pytest
import torch
from torch import nn

import memkit
from memkit import Pool, PoolExhausted
from memkit.pool import parse_size

MIB = 1 << 20


@pytest.fixture
def pool():
    with Pool("8MiB") as made:
        yield made
        gc.collect()
        made.check()


def inside(pool, tensor):
    address = tensor.untyped_storage().data_ptr()
    return any(start <= address < start + size for start, size, _ in pool._core.chunks())


# -- sizes and errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("1B", 1),
        ("512MiB", 512 * MIB),
        ("512 mib", 512 * MIB),
        ("1.5KiB", 1536),
        ("2GB", 2 * 10**9),
        ("1TiB", 2**40),
        (" 3 kB ", 3000),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text, "Pool") == nbytes


@pytest.mark.parametrize(
    "size", ["", "MiB", "512XB", "-1MiB", "1e6", "0", 0, -5, 1 << 63, "9" * 30, "0.0GB", "1 2MiB"]
)
def test_wrong_sizes(size):
    with pytest.raises(ValueError, match=r"^Pool: expected size as bytes .*, got "):
        Pool(size)


@pytest.mark.parametrize("size", [1.5, None, True, b"1MiB", [1]])
def test_sizes_of_wrong_types(size):
    with pytest.raises(TypeError, match=r"^Pool: expected size as bytes or text like .*, got "):
        Pool(size)


def test_wrong_devices_and_limits():
    with pytest.raises(ValueError, match="expected a device like 'cpu' or 'cuda:0', got 'gpu'"):
        Pool("1MiB", "gpu")
    with pytest.raises(ValueError, match="expected a device of type cpu or cuda, got 'meta'"):
        Pool("1MiB", "meta")
    with pytest.raises(ValueError, match=r"expected one of \d+ CUDA devices, got 'cuda:99'"):
        Pool("1MiB", "cuda:99")
    with pytest.raises(ValueError, match="expected a max of at least the size"):
        Pool("2MiB", max="1MiB")
    with pytest.raises(ValueError, match="expected max as bytes"):
        Pool("2MiB", max="1QiB")


def test_a_pool_beyond_the_machine():
    with pytest.raises(PoolExhausted, match="available memory") as caught:
        Pool("1000TiB")
    assert caught.value.asked == 1000 << 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_pinned_memory_needs_cuda():
    with pytest.raises(RuntimeError, match="expected a CUDA device and driver for pin_memory=True"):
        Pool("1MiB", pin_memory=True)


BAD_CALLS = {
    "negative": (lambda p: p.empty(-1), ValueError, r"Pool.empty: expected sizes of at least 0, got \[-1\]"),
    "negative of two": (lambda p: p.empty(2, -3), ValueError, "sizes of at least 0"),
    "bytes overflow": (lambda p: p.empty(1 << 61), ValueError, r"expected less than 2\^62 bytes"),
    "product overflows": (lambda p: p.empty(1 << 40, 1 << 40), ValueError, r"expected less than 2\^62 bytes"),
    "int overflows": (lambda p: p.empty(1 << 70), ValueError, r"expected sizes below 2\^63"),
    "text": (lambda p: p.empty("4"), TypeError, "expected sizes as ints or one tuple of ints, got str"),
    "float": (lambda p: p.empty(4.0), TypeError, "got float"),
    "in a tuple": (lambda p: p.empty((1, None)), TypeError, "got NoneType"),
    "tuple and int": (lambda p: p.empty((1, 2), 3), TypeError, "got tuple"),
    "twice": (lambda p: p.empty(1, size=(2,)), TypeError, "sizes once"),
    "dtype": (lambda p: p.empty(1, dtype="float"), TypeError, "expected dtype to be a torch.dtype, got str"),
    "keyword": (lambda p: p.empty(1, device="cpu"), TypeError, "expected keywords among .*, got device"),
    "tag": (lambda p: p.empty(1, tag=3), TypeError, "expected tag to be a str, got int"),
    "format": (lambda p: p.empty(1, memory_format=torch.channels_last), ValueError, r"expected 4 sizes with"),
    "preserve": (
        lambda p: p.empty(1, memory_format=torch.preserve_format),
        ValueError,
        "expected a memory format with an order",
    ),
    "grad": (
        lambda p: p.empty(1, dtype=torch.int32, requires_grad=True),
        ValueError,
        "expected a floating-point or complex dtype",
    ),
    "strides": (lambda p: p.empty_strided((2, 2), (1,)), ValueError, "expected a stride for each size"),
    "negative stride": (lambda p: p.empty_strided((2,), (-1,)), ValueError, "strides of at least 0"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_calls(case, pool):
    call, error, text = BAD_CALLS[case]
    before = pool.stats()
    with pytest.raises(error, match=text):
        call(pool)
    assert pool.stats() == before


def test_exhausted():
    pool = Pool("1MiB", grow=False)
    held = [pool.empty(64 << 10, dtype=torch.uint8, tag=f"layer{i % 2}") for i in range(15)]
    del held[::2]
    with pytest.raises(
        PoolExhausted, match=r"^Pool: asked for 512.00 KiB; .* free, largest free block .*; held by"
    ) as caught:
        pool.empty(512 << 10, dtype=torch.uint8)
    error = caught.value
    assert isinstance(error, torch.OutOfMemoryError)
    assert error.asked == 512 << 10
    assert error.free == 9 * 64 << 10
    assert error.largest_free == 128 << 10
    assert 0.7 < error.fragmentation < 0.8
    assert error.holders == [("layer1", 7 * 64 << 10, 7)]
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.free, again.holders) == (str(error), error.free, error.holders)
    assert pool.stats().failures == 1
    assert held


def test_growth_and_its_limit():
    pool = Pool("1MiB", max="4MiB")
    first = pool.zeros(MIB, dtype=torch.uint8)
    second = pool.full((2 * MIB,), 3, dtype=torch.uint8)
    assert pool.stats().growths == 1
    assert pool.stats().reserved <= 4 * MIB
    with pytest.raises(PoolExhausted, match=r"of at most 4\.00 MiB"):
        pool.empty(2 * MIB, dtype=torch.uint8)
    assert (first == 0).all()
    assert (second == 3).all()
    del second
    assert pool.trim() > 0
    assert pool.stats().reserved == MIB


# -- tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (7, 5), (2, 3, 4, 5)])
def test_as_torch_empty(shape, dtype, pool):
    for made in (
        pool.empty(*shape, dtype=dtype),
        pool.empty(shape, dtype=dtype),
        pool.empty(list(shape), dtype=dtype),
    ):
        stock = torch.empty(shape, dtype=dtype)
        assert made.shape == stock.shape
        assert made.stride() == stock.stride()
        assert made.dtype == dtype
        assert made.device.type == "cpu"
        assert made.is_contiguous()
        assert made.untyped_storage().nbytes() == stock.untyped_storage().nbytes()
        assert not made.numel() or inside(pool, made)
    assert pool.empty(torch.Size(shape)).dtype is torch.get_default_dtype()
    assert pool.empty(size=shape).shape == shape


def test_other_ints_as_sizes(pool):
    assert pool.empty(numpy.int64(3), torch.tensor(2)).shape == (3, 2)


def test_layouts(pool):
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert pool.empty(2, 3, 4, 5, memory_format=torch.channels_last).stride() == image.stride()
    assert pool.empty(2, 3, 4, 5, memory_format=torch.contiguous_format).is_contiguous()
    for stock in (
        image,
        image[:, :, ::2],
        torch.empty(4, 6).t(),
        torch.empty(1, 3).expand(5, 3),
        torch.empty(0, 3),
    ):
        assert pool.empty_like(stock).stride() == torch.empty_like(stock).stride()
        assert pool.new_like(stock).stride() == stock.stride()
        assert pool.new_like(stock).shape == stock.shape
    like = pool.empty_like(image, dtype=torch.float64, memory_format=torch.contiguous_format)
    assert like.is_contiguous()
    assert like.dtype == torch.float64
    made = pool.empty_strided((2, 3), (10, 2))
    assert made.stride() == (10, 2)
    assert made.untyped_storage().nbytes() == (10 + 4 + 1) * 4


def test_values(pool):
    assert torch.equal(pool.zeros(3, 4), torch.zeros(3, 4))
    for value in (3, 2.5, True, 1j):
        stock = torch.full((2, 3), value)
        made = pool.full((2, 3), value)
        assert torch.equal(made, stock)
        assert made.dtype == stock.dtype
    assert pool.zeros(2, requires_grad=True).requires_grad
    assert pool.full((2,), 1.0, requires_grad=True).is_leaf
    assert pool.empty(2, requires_grad=True).requires_grad


def test_alignment_and_no_overlap(pool):
    held = [pool.empty(i, dtype=torch.uint8) for i in range(1, 300, 7)]
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in held)
    assert all(start % 64 == 0 for start, _ in ranges)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))


def test_grad_modes(pool):
    with torch.inference_mode():
        assert pool.empty(3).is_inference()
    weight = pool.zeros(3, requires_grad=True)
    (weight * 2).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
    parameter = nn.Parameter(pool.empty(4))
    assert inside(pool, parameter)


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


def test_a_pool_is_not_copied(pool):
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="expected to stay in its process"):
            call(pool)


def test_fork(pool):
    made = pool.full((1000,), 3.0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ok = bool((made == 3).all())
            made.fill_(9)
            made = None
            gc.collect()
            try:
                pool.empty(3)
            except RuntimeError as error:
                ok = ok and "fork" in str(error)
            ok = ok and "parent" in repr(pool)
            with pool.use():
                ok = ok and bool(torch.ones(3).sum() == 3)
            code = 0 if ok else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert (made == 3).all()
    assert pool.stats().live_blocks == 1


def test_threads(pool):
    errors = []

    def work(seed):
        try:
            held = []
            for i in range(3000):
                n = (seed * 37 + i * 101) % 5000 + 1
                held.append((pool.empty(n, dtype=torch.uint8).fill_(i % 251), i % 251))
                if len(held) > 10:
                    t, value = held.pop((seed + i) % 10)
                    assert int(t[0]) == value == int(t[-1])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert pool.stats().live_blocks == 0
    assert pool.stats().allocations >= 24000


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_resident_memory_stays_flat(pool):
    def churn(n):
        for i in range(n):
            pool.empty(i % 3000 + 1)

    churn(20_000)
    before = resident()
    churn(200_000)
    assert resident() - before < 2 * MIB


# -- reports -----------------------------------------------------------------------------------------------------------


def test_stats_and_repr():
    pool = Pool("1MiB")
    a = pool.empty(1000, dtype=torch.uint8, tag="a")
    with pool.tag("b"):
        b = pool.empty(3000, dtype=torch.uint8)
        with pool.tag("c"):
            c = pool.empty(10, dtype=torch.uint8)
            d = pool.empty(20, dtype=torch.uint8, tag="d")
        e = pool.empty(1, dtype=torch.uint8)
    s = pool.stats()
    assert (s.allocated, s.live_blocks, s.allocations, s.frees) == (4031, 5, 5, 0)
    assert s.reserved == MIB == s.active + s.free
    assert (s.hits, s.growths, s.chunks) == (5, 0, 1)
    assert pool.holders() == [("b", 3001, 2), ("a", 1000, 1), ("d", 20, 1), ("c", 10, 1)]
    assert repr(pool).startswith("Pool(1 MiB on cpu: 3.937 KiB in 5 blocks, peak 3.937 KiB, largest free ")
    del a, b, c, d, e
    assert pool.stats().allocated_peak == 4031
    pool.reset_peaks()
    assert pool.stats().allocated_peak == 0
    assert pool.check() == repr(pool)
    with pytest.raises(ValueError, match="expected a name"):
        pool.tag("")


def test_tags_are_the_threads(pool):
    made = []
    with pool.tag("mine"):
        thread = threading.Thread(target=lambda: made.append(pool.empty(1)))
        thread.start()
        thread.join()
    assert [tag for tag, _, _ in pool.holders()] == [""]


def test_snapshot(tmp_path):
    pool = Pool("2MiB", debug=True)
    held = [pool.empty(1000, tag="weights"), pool.empty(5)]
    path = tmp_path / "pool.pickle"
    pool.snapshot(path)
    with path.open("rb") as file:
        data = pickle.load(file)
    from torch.cuda import _memory_viz

    segment = data["segments"][0]
    assert segment["total_size"] == 2 * MIB == sum(block["size"] for block in segment["blocks"])
    live = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
    assert [block["requested_size"] for block in live] == [4000, 20]
    assert live[0]["frames"][0]["name"] == "weights"
    assert any(frame["name"] == "test_snapshot" for frame in live[1]["frames"])
    assert "2.0MiB" in _memory_viz.segsum(data).replace(" ", "")
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<script" in plot(data)
    page = tmp_path / "page.html"
    command = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(path), "-o", str(page)]
    subprocess.run(command, check=True, capture_output=True)
    assert page.exists()
    assert len(held) == 2


def test_profiler_sees_the_pool(pool):
    with torch.profiler.profile(profile_memory=True) as profile:
        with torch.profiler.record_function("making"):
            made = pool.empty(1000)
        with torch.profiler.record_function("dropping"):
            del made
    memory = {event.key: event.self_cpu_memory_usage for event in profile.key_averages()}
    assert memory["making"] == 4000
    assert memory["dropping"] == -4000
    pool.empty(10)


# -- debug mode --------------------------------------------------------------------------------------------------------


def test_debug_poison():
    pool = Pool("1MiB", debug=True)
    made = pool.empty(100)
    assert made.isnan().all()
    assert pool.empty(100, dtype=torch.bfloat16).isnan().all()
    peek = numpy.frombuffer((ctypes.c_char * 400).from_address(made.data_ptr()), dtype=numpy.float32)
    del made
    assert (peek > 3e38).all()


def test_debug_canaries(capfd):
    pool = Pool("1MiB", debug=True)
    made = pool.empty(10, tag="culprit")
    beyond = torch.frombuffer((ctypes.c_char * 48).from_address(made.data_ptr()), dtype=torch.uint8)
    beyond[40:] = 0
    del made
    with pytest.raises(RuntimeError, match=r"something wrote after its block: 40 bytes at .* of culprit"):
        pool.check()
    assert "culprit" in capfd.readouterr().err


# -- sleep -------------------------------------------------------------------------------------------------------------


def test_sleep_and_wake(tmp_path):
    pool = Pool("64MiB")
    held = [pool.full((n,), float(n)) for n in (1, 1000, 1_000_000, 5_000_000)]
    addresses = [t.data_ptr() for t in held]
    before = resident()
    assert pool.sleep() == pool.stats().reserved
    assert before - resident() > 50 * MIB
    assert "asleep" in repr(pool)
    with pytest.raises(RuntimeError, match="a pool that sleeps; call wake"):
        pool.empty(1)
    with pytest.raises(RuntimeError, match="sleeps already"):
        pool.sleep()
    del held[1]
    pool.wake()
    assert [t.data_ptr() for t in held] == [addresses[0], *addresses[2:]]
    assert all((t == t.numel()).all() for t in held)
    pool.check()
    with pytest.raises(RuntimeError, match="awake"):
        pool.wake()
    pool.sleep(file=tmp_path / "contents")
    assert (tmp_path / "contents").stat().st_size >= 24_000_000
    pool.wake()
    assert (held[1] == 1_000_000).all()


def test_sleep_of_a_tag():
    pool = Pool("64MiB")
    weights = [pool.full((1_000_000,), 3.0, tag="weights") for _ in range(2)]
    cache = pool.full((1_000_000,), 4.0, tag="cache")
    assert pool.sleep("weights") >= 8_000_000
    with pytest.raises(RuntimeError, match="a tag that sleeps"):
        pool.empty(1, tag="weights")
    assert (cache == 4).all()
    del weights[0]
    other = pool.full((1_000_000,), 5.0)  # where the freed one was
    pool.wake()
    assert (weights[0] == 3).all()
    assert (other == 5).all()
    assert (cache == 4).all()
    with pytest.raises(ValueError, match="expected a tag or None"):
        pool.sleep("")


# -- compile -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend, pool):
    def step(x):
        a = pool.empty(x.shape[0], 4, dtype=x.dtype)
        b = pool.zeros(x.shape[0], 4)
        c = pool.full((4,), 2.0)
        d = pool.empty_like(x)
        d.copy_(x)
        a.fill_(1)
        return a + b, b + c, d * 2

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for n in (3, 5, 7):
        x = torch.randn(n, 4)
        for got, expected in zip(compiled(x), step(x), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.slow
def test_compile_inductor(pool):
    @torch.compile(fullgraph=True)
    def two(x):
        a, b = pool.empty(4, 4), pool.empty(4, 4)
        return a, b, x + 1

    a, b, c = two(torch.ones(2))
    assert a.data_ptr() != b.data_ptr()
    assert torch.equal(c, torch.full((2,), 2.0))


def test_operators(pool):
    assert torch.ops.memkit.pool_empty(pool._id, [2, 3]).shape == (2, 3)
    made = torch.ops.memkit.pool_empty_strided(pool._id, [2, 3], [1, 2], dtype=torch.int8)
    assert made.stride() == (1, 2)
    assert inside(pool, made)
    with pytest.raises(ValueError, match="expected the id of a living pool, got 1000000"):
        torch.ops.memkit.pool_empty(1_000_000, [1])
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.memkit.pool_empty.default, (pool._id, [2, 3]), test_utils=tests)
    with torch._subclasses.FakeTensorMode():
        assert isinstance(pool.empty(3), torch._subclasses.FakeTensor)


def test_lazy_names():
    assert memkit.Pool is Pool
    assert memkit.PoolExhausted is PoolExhausted
    assert memkit.pool.Pool is Pool
