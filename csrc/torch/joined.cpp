#include "joined.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/narrow.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "checks.h"
#include "node_kind.h"
#include "rebuild.h"
#include "saved_node.h"

namespace memkit {
namespace {

using at::Tensor;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::generated::CatBackward0;

// Smaller ones are not worth the time.
constexpr int64_t kLeastBytes = 1 << 14, kLeastPart = kLeastBytes / 16;
// At most a fourth of a concatenation is copied: to copy and to make it again takes time.
constexpr int64_t kCopied = 4;

// A result in the graph. Nodes come and go at the same address, but not with the same number of one thread.
using Place = std::tuple<const Node*, uint64_t, uint64_t, uint32_t>;

Place place_of(const Node& node, uint32_t output) { return {&node, node.thread_id(), node.sequence_nr(), output}; }

// Those that stand for leaves have no number of their own.
bool has_place(const Edge& edge) { return edge.is_valid() && edge.function->sequence_nr() != UINT64_MAX; }

// Where a result lies in a tensor that is kept; as in `Part`.
struct Slice {
  std::weak_ptr<const Original> kept;
  bool is_whole = true;  // the result itself, and no copy of it
  int64_t dim = -1, start = 0, length = 0;
  int64_t version = -1;  // of the result when a copy was made of it, if that is known
};

// The last concatenation of which its tensors are known, with their versions then.
struct KnownJoin {
  Place place;
  std::vector<int64_t> versions;

  int64_t version(const Tensor& x, size_t i) const {
    const bool is_it = place == place_of(*x.grad_fn(), x.output_nr()) && i < versions.size();
    return is_it ? versions[i] : -1;
  }
};
thread_local KnownJoin known_joined;

// What graphs keep, of any thread. Entries outlive what they stand for until there are twice as many as were alive.
// Everything that is kept is put here, and where nothing is concatenated nobody asks for it: it is sorted when somebody does.
template <class Value>
class InGraphs {
 public:
  void put(const Place& place, Value value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (unsorted_.size() + found_.size() >= limit_) {
      const auto is_dead = [](const auto& entry) { return !is_alive(entry.second); };
      unsorted_.erase(std::remove_if(unsorted_.begin(), unsorted_.end(), is_dead), unsorted_.end());
      for (auto at = found_.begin(); at != found_.end();) at = is_dead(*at) ? found_.erase(at) : std::next(at);
      limit_ = std::max<size_t>(1024, 2 * (unsorted_.size() + found_.size()));
    }
    unsorted_.emplace_back(place, std::move(value));
  }

  std::optional<Value> get(const Place& place) {
    const std::lock_guard<std::mutex> lock(mutex_);
    sort();
    const auto at = found_.find(place);
    return at == found_.end() ? std::nullopt : std::optional<Value>(at->second);
  }

 private:
  void sort() {
    for (auto& [place, value] : unsorted_)
      if (is_alive(value)) found_.insert_or_assign(place, std::move(value));
    unsorted_.clear();
  }

  static bool is_alive(const Slice& slice) { return !slice.kept.expired(); }
  static bool is_alive(const std::weak_ptr<const Joined>& joined) { return !joined.expired(); }

  std::mutex mutex_;
  size_t limit_ = 1024;
  std::vector<std::pair<Place, Value>> unsorted_;
  std::map<Place, Value> found_;
};

template <class Value>
InGraphs<Value>& in_graphs() {
  static auto* const one = new InGraphs<Value>;  // graphs may outlive static objects
  return *one;
}

// What made x, where that is a concatenation worth the time.
const CatBackward0* cat_of(const Tensor& x) {
  const Node* node = x.grad_fn().get();
  if (!is_kind(node, NodeKind::cat) || int64_t(bytes_of(x)) < kLeastBytes || !is_plain(x)) return nullptr;
  return static_cast<const CatBackward0*>(node);
}

// Where along its dimension each tensor of a concatenation starts, and the end; nothing where one has no such dimension.
std::vector<int64_t> starts_of(const CatBackward0& cat, int64_t dim, const Tensor& made) {
  std::vector<int64_t> starts{0};
  for (const auto& sizes : cat.tensors_args_sizes_symint) {
    const auto length = int64_t(sizes.size()) == made.dim() ? sizes[dim].maybe_as_int() : std::nullopt;
    if (!length) return {};
    starts.push_back(starts.back() + *length);
  }
  if (starts.back() != made.size(dim) || starts.size() != cat.num_outputs() + 1) return {};
  return starts;
}

std::optional<Part> rebuilt(const Edge& edge, const Tensor& made) {
  const auto* source = source_of(edge);
  if (!source || rebuild_depth(*source) >= kRebuildDepth ||
      source->input_metadata(edge.input_nr).dtype() != made.dtype())
    return std::nullopt;
  return Part{edge.function, nullptr};
}

// Whether what was kept is what was joined: written to by nobody ever, or kept before it was joined and not written to since.
bool was_joined(const Original& kept, const Node& cat) {
  const bool before = kept.thread == cat.thread_id() && kept.sequence <= cat.sequence_nr();
  return kept.is_unchanged() && (kept.version == 0 || before);
}

// Part number i of x, where a tensor that others keep may have it.
struct Candidate {
  Part part;
  bool is_sure;  // else whether it has is for its numbers to say
};

std::optional<Candidate> kept_by_others(const Tensor& x, size_t i, const Keeper& keeper) {
  const Edge& edge = x.grad_fn()->next_edge(i);
  if (!has_place(edge)) return std::nullopt;
  const auto slice = in_graphs<Slice>().get(place_of(*edge.function, edge.input_nr));
  auto kept = slice ? slice->kept.lock() : nullptr;
  if (!kept || (!kept->node && kept->give_back.ptr() != keeper.give_back.ptr())) return std::nullopt;
  const Part part{nullptr, kept, slice->dim, slice->start, slice->length};
  if (slice->is_whole) return was_joined(*kept, *x.grad_fn()) ? std::optional(Candidate{part, true}) : std::nullopt;
  // Of another concatenation: whether somebody has written to the part in between its version says, or its numbers.
  if (kept->nbytes > x.nbytes() || !kept->is_unchanged()) return std::nullopt;
  const bool is_sure = slice->version >= 0 && slice->version == known_joined.version(x, i);
  if (!is_sure && !(x.is_cpu() && kept->value.defined())) return std::nullopt;
  return Candidate{part, is_sure};
}

// A part of x, as it is or within x, for other concatenations; not in the place of the part itself.
void note_slice(const Tensor& x, size_t i, Slice slice) {
  const Edge& edge = x.grad_fn()->next_edge(i);
  if (!has_place(edge) || edge.function->input_metadata(edge.input_nr).dtype() != x.dtype()) return;
  slice.version = known_joined.version(x, i);
  const Place place = place_of(*edge.function, edge.input_nr);
  const auto known = in_graphs<Slice>().get(place);
  if (!known || known->kept.expired()) in_graphs<Slice>().put(place, std::move(slice));
}

}  // namespace

Tensor Original::unpack() const {
  if (node) return rebuild(*node);
  if (packed) {
    const pybind11::gil_scoped_acquire gil;
    return give_back(packed).cast<Tensor>();
  }
  check_unchanged(value, version, counter.current_version());
  return value;
}

void check_unchanged(const Tensor& kept, uint32_t version, uint32_t now) {
  TORCH_CHECK(
      now == version,
      "one of the variables needed for gradient computation has been modified by an inplace operation: expected ",
      describe(kept), " at version ", version, ", got version ", now);
  check_there(kept);
}

Tensor Part::of(const Tensor& original) const { return dim < 0 ? original : original.narrow(dim, start, length); }

Tensor Joined::made_again() const {
  static std::mutex one_at_a_time;
  static auto* const last = new std::weak_ptr<Held>;  // of another, which may go with the GIL alone
  {
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    if (held_->made.defined() && held_->made._version() == held_->version) return held_->made;
  }
  std::map<const Original*, Tensor> unpacked;  // each once: hooks may cost
  std::vector<Tensor> tensors;
  for (const Part& part : parts) {
    if (part.kept && !unpacked.count(part.kept.get())) unpacked.emplace(part.kept.get(), part.kept->unpack());
    tensors.push_back(part.node ? rebuild(*part.node) : part.of(unpacked.at(part.kept.get())));
  }
  Tensor made = at::cat(tensors, dim);
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  if (const auto other = last->lock()) other->made.reset();
  *held_ = Held{made, made._version()};
  *last = held_;
  return made;
}

std::shared_ptr<const Joined> joined_of(const Tensor& x, const Keeper& keeper) {
  const auto* cat = cat_of(x);
  if (!cat) return nullptr;
  const Place place = place_of(*cat, x.output_nr());
  if (const auto known = in_graphs<std::weak_ptr<const Joined>>().get(place))
    if (auto joined = known->lock()) return joined;
  if (in_graphs<Slice>().get(place).value_or(Slice()).kept.lock()) return nullptr;  // by another consumer

  const int64_t dim = at::maybe_wrap_dim(cat->dim, x.dim());
  const std::vector<int64_t> starts = starts_of(*cat, dim, x);
  if (starts.empty()) return nullptr;
  const auto length = [&](size_t i) { return starts[i + 1] - starts[i]; };
  const auto narrow = [&](size_t i) { return x.detach().narrow(dim, starts[i], length(i)); };
  auto joined = std::make_shared<Joined>(dim);
  std::vector<size_t> unsure;
  int64_t copied = 0;
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    auto part = rebuilt(cat->next_edge(i), x);
    if (!part) {
      if (auto found = kept_by_others(x, i, keeper)) {
        if (!found->is_sure) unsure.push_back(i);
        part = std::move(found->part);
      }
    }
    if (!part) copied += length(i);
    joined->parts.push_back(part.value_or(Part{}));
  }
  const auto is_too_much = [&] { return copied * kCopied > starts.back(); };
  for (auto i = unsure.begin(); i != unsure.end() && !is_too_much(); ++i) {
    Part& part = joined->parts[*i];
    if (part.of(part.kept->value).equal(narrow(*i))) continue;
    part = Part{};
    copied += length(*i);
  }
  if (is_too_much()) return nullptr;
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    Part& part = joined->parts[i];
    if (part.node || part.kept) continue;
    part.kept = keeper.keep(narrow(i).clone());
    note_slice(x, i, Slice{part.kept, false});
  }
  in_graphs<std::weak_ptr<const Joined>>().put(place, joined);
  return joined;
}

bool is_joined(const Node& node, uint32_t output) {
  if (!is_kind(&node, NodeKind::cat)) return false;
  const auto known = in_graphs<std::weak_ptr<const Joined>>().get(place_of(node, output));
  return known && !known->expired();
}

void note_joined(const Tensor& x, const std::vector<Tensor>& tensors) {
  if (!cat_of(x)) return;
  known_joined = KnownJoin{place_of(*x.grad_fn(), x.output_nr()), {}};
  for (const Tensor& tensor : tensors)
    known_joined.versions.push_back(tensor.is_inference() ? -1 : int64_t(tensor._version()));
}

void note_kept(const Tensor& x, const std::shared_ptr<const Original>& kept) {
  if (int64_t(bytes_of(x)) < kLeastPart || !x.grad_fn() || !is_plain(x)) return;
  if (copies_parameters && may_be_freed(x)) return;
  in_graphs<Slice>().put(place_of(*x.grad_fn(), x.output_nr()), Slice{kept});
  const auto* cat = x._version() == 0 ? cat_of(x) : nullptr;
  if (!cat) return;
  const int64_t dim = at::maybe_wrap_dim(cat->dim, x.dim());
  const std::vector<int64_t> starts = starts_of(*cat, dim, x);
  for (size_t i = 0; i + 1 < starts.size(); ++i)
    note_slice(x, i, Slice{kept, false, dim, starts[i], starts[i + 1] - starts[i]});
}

}  // namespace memkit
