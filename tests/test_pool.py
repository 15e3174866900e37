"""memkit.Pool: tensors, sizes, errors, reports, debug mode, sleep, fork."""

import itertools
import pickle
import subprocess
import sys
import threading
import time

import numpy
import pytest
import torch
from pool_cases import inside
from torch import nn

import memkit
from memkit import Pool, PoolExhausted
from memkit.pool import parse_size

MIB = 1 << 20


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
        (numpy.int64(4096), 4096),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text, "Pool") == nbytes


@pytest.mark.parametrize(
    "size",
    [
        "",
        "MiB",
        "512XB",
        "-1MiB",
        "1e6",
        "0",
        0,
        -5,
        1 << 63,
        "9" * 30,
        "9" * 5000,
        "9" * 400 + ".5",
        "0.0GB",
        "1 2MiB",
    ],
    ids=lambda size: repr(size)[:30],
)
def test_wrong_sizes(size):
    with pytest.raises(ValueError, match=r"^Pool: expected size as bytes .*, got "):
        Pool(size)


@pytest.mark.parametrize("size", [1.5, None, True, b"1MiB", [1]])
def test_sizes_of_wrong_types(size):
    with pytest.raises(TypeError, match=r"^Pool: expected size as bytes or text like .*, got "):
        Pool(size)


@pytest.mark.parametrize("flag", ["grow", "debug", "pin_memory"])
def test_flags_of_wrong_types(flag):
    with pytest.raises(TypeError, match=rf"^Pool: expected {flag} to be a bool, got str$"):
        Pool("1MiB", **{flag: "no"})


def test_wrong_devices_and_limits():
    with pytest.raises(ValueError, match="expected a device like 'cpu' or 'cuda:0', got 'gpu'"):
        Pool("1MiB", "gpu")
    with pytest.raises(ValueError, match="expected a device of type cpu or cuda, got 'meta'"):
        Pool("1MiB", "meta")
    with pytest.raises(ValueError, match=r"expected a CUDA device .* there are \d+, got 'cuda:99'"):
        Pool("1MiB", "cuda:99")
    with pytest.raises(ValueError, match="expected a max of at least the size"):
        Pool("2MiB", max="1MiB")
    with pytest.raises(ValueError, match="expected max as bytes"):
        Pool("2MiB", max="1QiB")


def test_a_pool_beyond_the_machine():
    with pytest.raises(PoolExhausted, match=r"^Pool: asked for 1000\.00 TiB, .* available memory") as caught:
        Pool("1000TiB")
    assert (caught.value.asked, caught.value.limit) == (1000 << 40, "available")


def test_growth_beyond_the_machine(pool):
    held = pool.full((1000,), 3.0)
    with open("/proc/meminfo") as file:
        sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file}
    asked = 2 * (sizes["MemTotal"] + sizes["SwapTotal"])
    for make in (pool.empty, lambda n, dtype: in_use(pool, n, dtype)):
        with pytest.raises(PoolExhausted, match=r"the system has .* of available memory") as caught:
            make(asked, dtype=torch.uint8)
        assert (caught.value.asked, caught.value.limit) == (asked, "available")
    assert pool.stats().reserved == 8 * MIB
    assert held.eq(3).all()


def in_use(pool, n, dtype):
    with pool.use():
        return torch.empty(n, dtype=dtype)


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
    "bool": (lambda p: p.empty(True), TypeError, "expected sizes as ints or one tuple of ints, got bool"),
    "bool in a tuple": (lambda p: p.zeros((2, False)), TypeError, "got bool"),
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
    "no strides": (lambda p: p.empty_strided(2, 1), TypeError, "size to be a tuple of ints, got int"),
    "like an array": (
        lambda p: p.empty_like(numpy.zeros(3)),
        TypeError,
        "^Pool.empty_like: expected input to be a Tensor, got ndarray",
    ),
    "like sparse ones": (
        lambda p: p.empty_like(torch.eye(3).to_sparse()),
        ValueError,
        "^Pool.empty_like: expected a strided tensor, got one of torch.sparse_coo",
    ),
    "as an array": (
        lambda p: p.new_like(numpy.zeros(3)),
        TypeError,
        "^Pool.new_like: expected input to be a Tensor, got ndarray",
    ),
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
        PoolExhausted, match=r"^Pool: asked for 512.00 KiB, .* free, largest free block .*; held by"
    ) as caught:
        pool.empty(512 << 10, dtype=torch.uint8)
    error = caught.value
    assert isinstance(error, torch.OutOfMemoryError)
    assert error.asked == 512 << 10
    assert error.free == 9 * 64 << 10
    assert error.largest_free == 128 << 10
    assert 0.7 < error.fragmentation < 0.8
    assert error.holders == [("layer1", 7 * 64 << 10, 7)]
    assert error.limit == "grow"
    assert "must not grow (grow=False)" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))
    assert pool.stats().failures == 1
    assert held


def test_growth_and_its_limit():
    pool = Pool("1MiB", max="4MiB")
    first = pool.zeros(MIB, dtype=torch.uint8)
    second = pool.full((2 * MIB,), 3, dtype=torch.uint8)
    assert pool.stats().growths == 1
    assert pool.stats().reserved <= 4 * MIB
    with pytest.raises(PoolExhausted, match=r"must not grow beyond max=4\.00 MiB") as caught:
        pool.empty(2 * MIB, dtype=torch.uint8)
    assert caught.value.limit == "max"
    assert (first == 0).all()
    assert (second == 3).all()
    del second
    assert pool.trim() > 0
    assert pool.stats().reserved == MIB


def test_what_slept_may_have_gone_back_to_the_system():
    pool = Pool("1MiB", max="40MiB")
    kept = pool.full((8 * MIB,), 1, dtype=torch.uint8)
    with pool.tag("a"):
        sleeper = pool.full((16 * MIB,), 2, dtype=torch.uint8)
        other = pool.full((2 * MIB,), 3, dtype=torch.uint8)
    pool.sleep("a")
    del sleeper
    assert pool.trim() >= 14 * MIB
    pool.wake()
    assert (kept == 1).all()
    assert (other == 3).all()
    pool.check()


def test_sleep_while_others_trim():
    pool, stop, errors = Pool("2MiB"), threading.Event(), []
    kept = pool.full((MIB,), 5, dtype=torch.uint8)

    def until_stopped(work):
        while not stop.is_set() and not errors:
            try:
                work()
            except Exception as error:
                if "sleeps" not in str(error):
                    errors.append(error)

    def nap():
        pool.sleep()
        pool.wake()

    works = (nap, pool.trim, lambda: [pool.empty(3 * MIB, dtype=torch.uint8) for _ in range(3)])
    threads = [threading.Thread(target=until_stopped, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    time.sleep(1)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert (kept == 5).all()
    pool.check()


def test_addresses_that_are_limited_are_not_taken_in_advance():
    code = """
import resource, torch, memkit
used = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
pool = memkit.Pool("1MiB")
held = [pool.empty(3 << 20) for _ in range(8)]
torch.empty(128 << 20)
pool.check()
del held
assert pool.trim() > 90 << 20
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


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
    assert torch.equal(pool.ones((3, 4), dtype=torch.int8), torch.ones(3, 4, dtype=torch.int8))
    assert pool.ones(2, 3, 4, 5, memory_format=torch.channels_last).stride() == (60, 1, 15, 3)
    for value in (3, 2.5, True, 1j, numpy.float32(1.5), numpy.int16(2), torch.tensor(3), numpy.bool_(True)):
        stock = torch.full((2, 3), value)
        made = pool.full((2, 3), value)
        assert torch.equal(made, stock)
        assert made.dtype == stock.dtype
        assert inside(pool, made)
    assert pool.full((2,), 3, dtype=torch.float16).dtype == torch.float16
    assert pool.zeros(2, requires_grad=True).requires_grad
    for made in (pool.full((2,), 1.0, requires_grad=True), pool.ones(2, requires_grad=True)):
        assert made.is_leaf
        assert made.requires_grad
    assert not pool.ones(2).requires_grad
    with pytest.raises(ValueError, match="requires_grad=True"):
        pool.full((2,), 1, requires_grad=True)
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


# -- compile -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend, pool):
    def step(x):
        a = pool.empty(x.shape[0], 4, dtype=x.dtype)
        b = pool.zeros(x.shape[0], 4)
        c = pool.full((4,), 2.0) + pool.ones(4)
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


def test_quantized_dtypes_are_refused(pool):
    for make in (lambda d: pool.empty(3, dtype=d), lambda d: pool.empty_strided((3,), (1,), dtype=d)):
        with pytest.raises(ValueError, match="a dtype that is not quantized, got QInt8"):
            make(torch.qint8)


def test_modes_see_strided_tensors(pool):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    makers = (
        lambda x: pool.empty_strided((3, 2), (1, 3)),
        lambda x: pool.new_like(x),
        lambda x: pool.empty_like(x),
    )
    for make in makers:
        with FakeTensorMode():
            made = make(torch.empty(2, 3).t())
            assert isinstance(made, FakeTensor)
            assert made.stride() == (1, 3)
        graph = make_fx(make)(torch.ones(2, 3).t())
        assert "pool_empty_strided" in graph.code


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint64, torch.complex64, torch.bool])
def test_full_takes_what_torch_takes(dtype):
    pool = Pool("1MiB")
    assert torch.equal(pool.full((2,), 2**63, dtype=dtype), torch.full((2,), 2**63, dtype=dtype))
    if dtype in (torch.float32, torch.uint64):
        with pytest.raises(RuntimeError, match="overflow"):
            pool.full((2,), 1 + 2j, dtype=dtype)
