#include "pool.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iterator>
#include <utility>

#include "forked.h"
#include "recycled.h"

namespace memkit {

using arena::Block;
using arena::Freed;

// Told by the arena, from any thread, also when the pool is gone.
struct PoolViolations {
  std::mutex mutex;
  std::vector<std::string> texts;

  void add(const std::string& text) {
    std::fprintf(stderr, "memkit.Pool: %s\n", text.c_str());
    const std::lock_guard<std::mutex> guard(mutex);
    texts.push_back(text);
  }
};

namespace {

constexpr std::size_t kRefusals = 16;

// Storages name the allocator that resizes them for as long as they live: so it stays, some 40 bytes a pool.
class PoolAllocator final : public c10::Allocator {
 public:
  explicit PoolAllocator(c10::Allocator* stock) : stock_(stock) {}
  void serve(const std::shared_ptr<Pool>& pool) { pool_ = pool; }

  c10::DataPtr allocate(std::size_t nbytes) override {
    const std::shared_ptr<Pool> pool = nbytes ? pool_.lock() : nullptr;
    if (pool && !pool->arena().inherited() && !pool->arena().closed())
      if (Block* block = pool->spare(nbytes)) return pool->device().wrap(block, nbytes);
    return stock_->allocate(nbytes);
  }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override { stock_->copy_data(to, from, nbytes); }

 private:
  c10::Allocator* stock_;
  std::weak_ptr<Pool> pool_;
};

// By id.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Pool>> pools;
};
Registry& registry() { return shared_by_threads<Registry>(); }

std::int64_t next_id() {
  const std::lock_guard<std::mutex> guard(registry().mutex);
  registry().pools.emplace_back();
  return static_cast<std::int64_t>(registry().pools.size()) - 1;
}

// What pool.use() lends to torch's CPU allocator.
struct LentBlock final : CpuBlock, Recycled<LentBlock> {
  Block* block;

  explicit LentBlock(Block* block) : CpuBlock{block->data(), &give_back}, block(block) {}
  static void give_back(CpuBlock* lent) noexcept {
    auto* self = static_cast<LentBlock*>(lent);
    arena::free(self->block);
    delete self;
  }
};

struct PoolStorage final : c10::StorageImpl, Recycled<PoolStorage> {
  using c10::StorageImpl::StorageImpl;
};
struct PoolTensor final : c10::TensorImpl, Recycled<PoolTensor> {
  using c10::TensorImpl::TensorImpl;
  // From no elements in one dimension, which it is made of: all else holds of any number.
  void set_length(std::int64_t n) {
    sizes_and_strides_.size_at_unchecked(0) = n;
    numel_ = n;
  }
};

std::size_t contiguous_bytes(at::IntArrayRef size, std::size_t itemsize) {
  std::size_t bytes = itemsize;
  bool negative = false, overflow = false, nothing = false;
  for (const std::int64_t n : size) {
    negative |= n < 0;
    nothing |= n == 0;
    overflow |= __builtin_mul_overflow(bytes, static_cast<std::size_t>(n), &bytes);
  }
  TORCH_CHECK_VALUE(!negative, "Pool.empty: expected sizes of at least 0, got ", size);
  TORCH_CHECK_VALUE(nothing || (!overflow && bytes < std::size_t(1) << 62),
                    "Pool.empty: expected less than 2^62 bytes, got sizes ", size);
  return nothing ? 0 : bytes;
}

void check_format(at::IntArrayRef size, at::MemoryFormat format) {
  const std::size_t dims = format == at::MemoryFormat::ChannelsLast ? 4 : 5;
  TORCH_CHECK_VALUE(format != at::MemoryFormat::Preserve,
                    "Pool.empty: expected a memory format with an order, got torch.preserve_format");
  TORCH_CHECK_VALUE(size.size() == dims, "Pool.empty: expected ", dims, " sizes with ", format, ", got ", size);
}

}  // namespace

Pool::Pool(std::unique_ptr<PoolDevice> device, arena::Options options)
    : id_(next_id()),
      device_(std::move(device)),
      keys_(device_->keys()),
      allocator_(new PoolAllocator(device_->stock())),
      debug_(options.debug),
      violations_(std::make_shared<PoolViolations>()) {
  options.alignment = device_->alignment();
  if (debug_) {
    options.memory = device_->memory();
    options.violated = [violations = violations_](const std::string& text) { violations->add(text); };
  }
  arena_ = arena::Arena::create(std::move(options), device_->upstream());
}

std::shared_ptr<Pool> Pool::create(std::unique_ptr<PoolDevice> device, arena::Options options) {
  std::shared_ptr<Pool> pool(new Pool(std::move(device), std::move(options)));
  static_cast<PoolAllocator*>(pool->allocator_)->serve(pool);
  const std::lock_guard<std::mutex> guard(registry().mutex);
  registry().pools[static_cast<std::size_t>(pool->id_)] = pool;
  return pool;
}

std::shared_ptr<Pool> Pool::find(std::int64_t id) {
  const std::lock_guard<std::mutex> guard(registry().mutex);
  const auto& pools = registry().pools;
  return id >= 0 && id < static_cast<std::int64_t>(pools.size()) ? pools[static_cast<std::size_t>(id)].lock() : nullptr;
}

Pool::~Pool() {
  // Tensors outlive their pool, awake.
  if (asleep() && !arena_->inherited()) try {
      wake();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "memkit.Pool: tensors of a pool that slept when it died are lost: %s\n", error.what());
    }
  if (file_ >= 0) ::close(file_);
  close();
}

std::vector<std::shared_ptr<Pool>> Pool::all_cuda() {
  std::vector<std::shared_ptr<Pool>> found;
  const std::lock_guard<std::mutex> guard(registry().mutex);
  for (const auto& each : registry().pools)
    if (auto pool = each.lock(); pool && pool->device().device().is_cuda()) found.push_back(std::move(pool));
  return found;
}

Block* Pool::take(std::size_t nbytes, Tag tag, For whom, std::unique_ptr<arena::Failure>* failure) {
  arena::Request request{nbytes, device_->lane()};
  if (tag) {
    request.tag = *tag;
  } else {
    for (const PoolTag* named = pool_thread.tags; named; named = named->outer)
      if (named->pool == id_) {
        request.tag = named->tag;
        break;
      }
  }
  if (debug_) request.stack = capture_python_stack();
  check_awake(request.tag);
  request.capture = device_->make_room(*arena_, nbytes);
  PoolLayer* layer = whom == For::torch_past_layers ? nullptr : pool_thread.layers;
  while (layer && (layer->pool.get() != this || (layer->torch_only && whom == For::user))) layer = layer->outer;
  if (!layer)
    if (Block* block = arena_->serve(request)) {
      if (asleep()) wake_block(block);
      return block;
    }
  arena::Allocation got = allocate(&request, layer);
  if (!got && failure && got.failure->reason == arena::Failure::exhausted) {
    *failure = std::move(got.failure);
    return nullptr;
  }
  if (!got) raise_pool_failure(*got.failure);
  if (asleep()) wake_block(got.block);
  return got.block;
}

// By the layer, where there is one, or from the arena; again, where the pool has begun to go to sleep or to wake since.
arena::Allocation Pool::allocate(arena::Request* request, PoolLayer* layer) {
  for (;;) {
    arena::Allocation got = layer ? layer->allocate(*request) : allocate(*request);
    if (!got && got.failure->reason == arena::Failure::exhausted && settle_replays())
      got = layer && !layer->torch_only ? layer->allocate(*request) : allocate(*request);
    if (got || got.failure->reason != arena::Failure::asleep) return got;
    check_awake(request->tag);
    request->capture = device_->make_room(*arena_, request->size);
  }
}

arena::Allocation Pool::allocate(const arena::Request& request) {
  for (;;) {
    arena::Allocation got = arena_->allocate(request);
    if (got.waits.empty() || device_->wait(request.lane, got)) return got;
  }
}

c10::DataPtr Pool::data(std::size_t nbytes, Tag tag) {
  if (!nbytes) return {nullptr, device_->device()};
  return device_->wrap(take(nbytes, tag), nbytes);
}

CpuBlock* Pool::allocate(std::size_t nbytes) {
  if (arena_->inherited()) return nullptr;  // a worker process forked inside use() goes on with torch's allocator
  Block* block = take(nbytes, std::nullopt, For::torch);
  try {
    return new LentBlock(block);
  } catch (...) {
    arena::free(block);
    throw;
  }
}

c10::DataPtr Pool::lend(std::size_t nbytes, std::string* refusal) {
  std::unique_ptr<arena::Failure> failure;
  if (Block* block = take(nbytes, std::nullopt, For::torch_past_layers, &failure)) return device_->lend(block, nbytes);
  *refusal = pool_failure_text(*failure);
  const std::lock_guard<std::mutex> guard(refusals_mutex_);
  refusals_.push_back(std::move(failure));
  if (refusals_.size() > kRefusals) refusals_.pop_front();
  return {};
}

std::unique_ptr<arena::Failure> Pool::refusal(const std::string& text) {
  std::unique_ptr<arena::Failure> found;
  if (arena_->inherited()) return found;
  const std::lock_guard<std::mutex> guard(refusals_mutex_);
  const auto at = std::find_if(refusals_.rbegin(), refusals_.rend(), [&](const auto& failure) {
    return text.find(pool_failure_text(*failure)) != std::string::npos;
  });
  if (at == refusals_.rend()) return found;
  found = std::move(*at);
  refusals_.erase(std::next(at).base());
  return found;
}

Block* Pool::spare(std::size_t nbytes) {
  if (asleep()) return nullptr;
  device_->make_room(*arena_, nbytes);
  const arena::Request request{nbytes, device_->lane()};
  arena::Allocation got = allocate(request);
  if (!got && got.failure->reason == arena::Failure::exhausted && settle_replays()) got = allocate(request);
  if (got && asleep()) wake_block(got.block);
  return got.block;
}

at::Tensor Pool::wrap(std::size_t nbytes, Dtype dtype, Tag tag) {
  TORCH_CHECK_VALUE(!at::isQIntType(dtype), "Pool: expected a dtype that is not quantized, got ", dtype);
  c10::intrusive_ptr<c10::StorageImpl> storage = c10::make_intrusive<PoolStorage>(
      c10::StorageImpl::use_byte_size_t(), nbytes, data(nbytes, tag), allocator_, /*resizable=*/true);
  return at::detail::make_tensor<PoolTensor>(std::move(storage), keys_, at::scalarTypeToTypeMeta(dtype));
}

at::Tensor Pool::empty(at::IntArrayRef size, Dtype dtype, std::optional<at::MemoryFormat> format, Tag tag) {
  const bool ordered = format && *format != at::MemoryFormat::Contiguous;
  if (ordered) check_format(size, *format);
  at::Tensor tensor = wrap(contiguous_bytes(size, at::elementSize(dtype)), dtype, tag);
  if (size.size() == 1)
    static_cast<PoolTensor*>(tensor.unsafeGetTensorImpl())->set_length(size[0]);
  else
    tensor.unsafeGetTensorImpl()->generic_set_sizes_contiguous(size);
  if (ordered) tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return tensor;
}

at::Tensor Pool::empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Dtype dtype, Tag tag) {
  TORCH_CHECK_VALUE(size.size() == stride.size(), "Pool.empty_strided: expected a stride for each size, got sizes ",
                    size, " and strides ", stride);
  for (const std::int64_t n : size)
    TORCH_CHECK_VALUE(n >= 0, "Pool.empty_strided: expected sizes of at least 0, got ", size);
  for (const std::int64_t n : stride)
    TORCH_CHECK_VALUE(n >= 0, "Pool.empty_strided: expected strides of at least 0, got ", stride);
  at::Tensor tensor = wrap(at::detail::computeStorageNbytes(size, stride, at::elementSize(dtype)), dtype, tag);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return tensor;
}

std::size_t Pool::trim() { return arena_->trim(); }

void Pool::close() {
  settle_replays();
  arena_->close();
  if (arena_->inherited()) return;
  device_->reclaim(*arena_);
}

void Pool::check_own(const char* op) const {
  TORCH_CHECK(!arena_->inherited(), op, ": expected a pool of this process, got one that was made before a fork()");
}

void Pool::check_open(const char* op) const {
  check_own(op);
  TORCH_CHECK(!arena_->closed(), op, ": expected an open pool, got one that was closed");
}

std::vector<std::string> Pool::violations() const {
  const std::lock_guard<std::mutex> guard(violations_->mutex);
  return violations_->texts;
}

}  // namespace memkit
