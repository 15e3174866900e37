// memkit::_rotary: q and k turned by their positions. Backward turns back, so that nothing but the tables is kept.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <limits>

#include "checks.h"
#include "eager.h"
#include "engine.h"
#include "fresh.h"
#include "named_ops.h"
#include "operators.h"
#include "optional.h"
#include "saved_node.h"
#include "transforms.h"

namespace memkit::rotary_op {
namespace {

namespace autograd = torch::autograd;
using at::Tensor;
using Both = std::tuple<Tensor, Tensor>;

constexpr std::string_view kOp = "apply_rotary";

// How q and k lie and are turned. heads_at: the dimension of the heads, 1 or 2; positions are in the other. rotary: elements of
// a head that are turned, 0 for as many as the tables have columns.
struct Way {
  bool interleaved = false;
  int64_t heads_at = 1, rotary = 0;
  bool back = false;

  int64_t steps_at() const { return 3 - heads_at; }
  c10::SymInt turned(const Tensor& cos) const { return rotary ? c10::SymInt(rotary) : cos.sym_size(-1); }
};

Both call(const Tensor& q, const OptionalTensor& k, const Tensor& cos, const Tensor& sin, const OptionalTensor& ids,
          const Way& way) {
  return MEMKIT_CALL("memkit::_rotary", Both(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                             const OptionalTensor&, bool, int64_t, int64_t, bool))(
      q, k, cos, sin, ids, way.interleaved, way.heads_at, way.rotary, way.back);
}
void call_(Tensor& q, const OptionalTensor& k, const Tensor& cos, const Tensor& sin, const OptionalTensor& ids,
           const Way& way) {
  MEMKIT_CALL("memkit::_rotary_", void(Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                       const OptionalTensor&, bool, int64_t, int64_t, bool))
  (q, k, cos, sin, ids, way.interleaved, way.heads_at, way.rotary, way.back);
}

// -- checks

void check(const Tensor& q, const OptionalTensor& k, const Tensor& cos, const Tensor& sin, const OptionalTensor& ids,
           const Way& way) {
  TORCH_CHECK_VALUE(way.heads_at == 1 || way.heads_at == 2, kOp, ": expected heads in dimension 1 or 2, got ",
                    way.heads_at);
  check_float_tensor(kOp, q);
  TORCH_CHECK_VALUE(q.dim() == 4, kOp, ": expected q with 4 dimensions (batch, heads, positions, head size), got ",
                    q.sym_sizes());
  if (k) {
    check_float_tensor(kOp, *k);
    TORCH_CHECK_VALUE(k->dim() == 4 && k->sym_size(0) == q.sym_size(0) && k->sym_size(3) == q.sym_size(3) &&
                          k->sym_size(way.steps_at()) == q.sym_size(way.steps_at()),
                      kOp, ": expected q and k alike but for the number of heads, got ", q.sym_sizes(), " and ",
                      k->sym_sizes());
    TORCH_CHECK_TYPE(k->scalar_type() == q.scalar_type(), kOp, ": expected q and k of one dtype, got ", describe(q),
                     " and ", describe(*k));
  }
  check_float_tensor(kOp, cos);
  check_float_tensor(kOp, sin);
  TORCH_CHECK_VALUE(cos.sym_sizes() == sin.sym_sizes(), kOp, ": expected cos and sin of one shape, got ",
                    cos.sym_sizes(), " and ", sin.sym_sizes());
  TORCH_CHECK_TYPE(cos.scalar_type() == sin.scalar_type(), kOp, ": expected cos and sin of one dtype, got ",
                   describe(cos), " and ", describe(sin));
  const c10::SymInt length = q.sym_size(way.steps_at());
  const bool shaped =
      cos.dim() == 2 || (cos.dim() == 3 && !ids && (cos.sym_size(0) == 1 || cos.sym_size(0) == q.sym_size(0)));
  TORCH_CHECK_VALUE(shaped && (ids || cos.sym_size(-2) >= length), kOp,
                    ": expected cos and sin of [positions, columns], or without position_ids [batch or 1, positions, "
                    "columns], for at least ",
                    length, " positions, got ", cos.sym_sizes(), " for q ", q.sym_sizes());
  const c10::SymInt columns = cos.sym_size(-1), turned = way.turned(cos);
  TORCH_CHECK_VALUE(
      turned > 0 && turned % 2 == 0 && turned <= q.sym_size(3) && (columns == turned || columns * 2 == turned), kOp,
      ": expected tables with a column for each of an even number of a head's ", q.sym_size(3),
      " elements, or with half as many columns as rotary_dim says, got ", columns, " columns and rotary_dim ",
      way.rotary);
  if (ids) {
    TORCH_CHECK_TYPE(ids->scalar_type() == at::kLong, kOp, ": expected position_ids in int64, got ", describe(*ids));
    const bool fits =
        (ids->dim() == 1 || (ids->dim() == 2 && (ids->sym_size(0) == 1 || ids->sym_size(0) == q.sym_size(0)))) &&
        ids->sym_size(-1) == length;
    TORCH_CHECK_VALUE(fits, kOp, ": expected position_ids of [batch or 1, ", length, "], got ", ids->sym_sizes());
  }
  for (const OptionalTensor& other : {k, OptionalTensor(cos), OptionalTensor(sin), ids})
    TORCH_CHECK(!other || other->device() == q.device(), kOp, ": expected all tensors on one device, got ", q.device(),
                " and ", other->device());
}

// A kernel on a GPU stops at a position that has no row; here the error comes before anything is written.
void check_positions(const Tensor& ids, int64_t rows) {
  if (!ids.is_cpu() || ids.numel() == 0) return;
  const auto [least, most] = at::aminmax(ids);
  const int64_t low = least.item<int64_t>(), high = most.item<int64_t>();
  TORCH_CHECK_INDEX(low >= 0 && high < rows, kOp, ": expected position_ids in [0, ", rows - 1, "], got ", low, " to ",
                    high);
}

// -- backends

// Tables as the kernels read them.
struct Tables {
  Tensor cos, sin;
  Tables(const Tensor& c, const Tensor& s, at::ScalarType dtype) : cos(c), sin(s) {
    if ((dtype == at::kDouble) != (c.scalar_type() == at::kDouble)) {
      const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
      cos = c.to(wide), sin = s.to(wide);
    }
    if (cos.stride(-1) != 1 || cos.strides() != sin.strides()) cos = cos.contiguous(), sin = sin.contiguous();
  }
};

bool has_rows(const Tensor& x) { return x.sym_size(3) <= 1 || x.sym_stride(3) == 1; }
Tensor with_rows(const Tensor& x) { return has_rows(x) ? x : x.contiguous(); }
Tensor new_like(const Tensor& x) {
  Tensor fresh = fresh_like(x);
  return has_rows(fresh) ? fresh : at::empty_like(x, at::MemoryFormat::Contiguous);
}

RotaryHeads heads_of(const Tensor& x, const Tensor& out, const Way& way) {
  RotaryHeads h;
  h.x = x.const_data_ptr();
  h.out = out.mutable_data_ptr();
  h.heads = x.size(way.heads_at);
  h.batch = x.stride(0), h.head = x.stride(way.heads_at), h.step = x.stride(way.steps_at());
  h.out_batch = out.stride(0), h.out_head = out.stride(way.heads_at), h.out_step = out.stride(way.steps_at());
  return h;
}

// q and k have rows; out_q and out_k may be these.
void run(const Tensor& q, const OptionalTensor& k, const Tensor& out_q, const OptionalTensor& out_k, const Tensor& c,
         const Tensor& s, const OptionalTensor& ids, const Way& way) {
  if (ids) check_positions(*ids, c.size(-2));
  const Tables tables(c, s, q.scalar_type());
  RotaryArgs args;
  args.dtype = dtype_of(q);
  args.table_dtype = dtype_of(tables.cos);
  args.batch = q.size(0), args.length = q.size(way.steps_at()), args.width = q.size(3);
  args.rotary = way.rotary ? way.rotary : c.size(-1);
  args.interleaved = way.interleaved;
  args.back = way.back;
  args.q = heads_of(q, out_q, way);
  if (k) args.k = heads_of(*k, *out_k, way);
  args.heads_outside = args.q.head > args.q.step;
  args.cos = tables.cos.const_data_ptr();
  args.sin = tables.sin.const_data_ptr();
  args.table_rows = c.size(-2);
  args.table_row = tables.cos.stride(-2);
  if (c.dim() == 3 && c.size(0) > 1) args.table_batch = tables.cos.stride(0);
  if (c.size(-1) == args.rotary) {  // a column for each element
    args.pair = way.interleaved ? 2 : 1;
    args.other = way.interleaved ? 1 : args.rotary / 2;
  }
  if (ids) {
    args.positions = ids->const_data_ptr<int64_t>();
    args.position_step = ids->stride(-1);
    if (ids->dim() == 2 && ids->size(0) > 1) args.position_batch = ids->stride(0);
  }
  run_rotary(args, q.device());
}

Both rotary(const Tensor& q, const OptionalTensor& k, const Tensor& cos, const Tensor& sin, const OptionalTensor& ids,
            bool interleaved, int64_t heads_at, int64_t rotary, bool back) {
  const Way way{interleaved, heads_at, rotary, back};
  check(q, k, cos, sin, ids, way);
  const Tensor x = with_rows(q), x2 = k ? with_rows(*k) : Tensor();
  const Tensor y = new_like(x), y2 = k ? new_like(x2) : at::empty({0}, q.options());
  if (!q.is_meta()) run(x, k ? OptionalTensor(x2) : std::nullopt, y, OptionalTensor(y2), cos, sin, ids, way);
  return {y, y2};
}

// Whether two views of one storage share no element: at equal distances along some dimensions, as slices of a packed projection
// are, what they cover along the others is apart, and together no longer than the smallest of those distances.
bool are_apart(const Tensor& a, const Tensor& b) {
  if (!a.is_alias_of(b) || a.numel() == 0 || b.numel() == 0) return true;
  for (int within = 0; within < 8; ++within) {  // a bit for each of the first three dimensions
    int64_t end_a = a.storage_offset() + a.size(3), end_b = b.storage_offset() + b.size(3);
    int64_t smallest = std::numeric_limits<int64_t>::max();
    bool alike = true;
    for (int64_t d = 0; d < 3; ++d) {
      if (within >> d & 1) {
        end_a += (a.size(d) - 1) * a.stride(d), end_b += (b.size(d) - 1) * b.stride(d);
      } else if (a.size(d) > 1 || b.size(d) > 1) {
        alike = alike && a.stride(d) == b.stride(d);
        smallest = std::min(smallest, a.stride(d));
      }
    }
    const bool apart = end_a <= b.storage_offset() || end_b <= a.storage_offset();
    const int64_t both = std::max(end_a, end_b) - std::min(a.storage_offset(), b.storage_offset());
    if (alike && apart && both <= smallest) return true;
  }
  return false;
}

void check_memory(const Tensor& x, const OptionalTensor& k, const Tensor& cos, const Tensor& sin,
                  const OptionalTensor& ids) {
  check_inplace(kOp, x, memory_blocker(x));
  if (k) check_inplace(kOp, *k, memory_blocker(*k));
  if (!x.has_storage() || x.is_meta() || (k && !k->has_storage())) return;
  for (const OptionalTensor& other : {OptionalTensor(cos), OptionalTensor(sin), ids})
    TORCH_CHECK(!other || !other->has_storage() || !(other->is_alias_of(x) || (k && other->is_alias_of(*k))), kOp,
                ": expected, in place, tables and position_ids in memory of their own, got ", describe(*other),
                ", which shares the storage of what is overwritten");
  TORCH_CHECK(!k || are_apart(x, *k), kOp, ": expected, in place, q and k in memory apart, got ", describe(x), " and ",
              describe(*k), ", which may overlap");
}

void rotary_(Tensor& q, const OptionalTensor& k, const Tensor& cos, const Tensor& sin, const OptionalTensor& ids,
             bool interleaved, int64_t heads_at, int64_t rotary, bool back) {
  const Way way{interleaved, heads_at, rotary, back};
  check(q, k, cos, sin, ids, way);
  check_memory(q, k, cos, sin, ids);
  if (q.is_meta()) return;
  const Tensor x = with_rows(q), x2 = k ? with_rows(*k) : Tensor();
  const OptionalTensor both = k ? OptionalTensor(x2) : std::nullopt;
  run(x, both, x, both, cos, sin, ids, way);
  if (!x.is_same(q)) q.copy_(x);
  if (k && !x2.is_same(*k)) k->copy_(x2);
}

// -- autograd

// By ATen's operators, for transforms and for tables that require grad.
Tensor by_stock(const Tensor& x, const Tensor& cos, const Tensor& sin, const OptionalTensor& ids, const Way& way) {
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const c10::SymInt turned = way.turned(cos), half = turned / 2;
  // Angle tables along the pairs' first and second elements, of shape [batch or 1, positions, half] and room for the heads.
  const auto column = [&](const Tensor& table, int64_t which) {
    Tensor t = (ids ? table.index({*ids}) : table.narrow_symint(-2, 0, x.sym_size(way.steps_at()))).to(wide);
    if (t.sym_size(-1) == turned)
      t = way.interleaved ? t.slice_symint(-1, which, std::nullopt, 2) : t.narrow_symint(-1, half * which, half);
    return t.unsqueeze(way.heads_at == 1 ? -3 : -2);
  };
  const Tensor w = x.to(wide), part = w.narrow_symint(-1, 0, turned);
  const Tensor one = way.interleaved ? part.slice_symint(-1, 0, std::nullopt, 2) : part.narrow_symint(-1, 0, half);
  const Tensor two = way.interleaved ? part.slice_symint(-1, 1, std::nullopt, 2) : part.narrow_symint(-1, half, half);
  const Tensor ca = column(cos, 0), cb = column(cos, 1);
  const Tensor sa = way.back ? column(sin, 1).neg() : column(sin, 0),
               sb = way.back ? column(sin, 0).neg() : column(sin, 1);
  const Tensor y = one * ca - two * sa, y2 = two * cb + one * sb;
  const Tensor out = way.interleaved ? at::stack({y, y2}, -1).flatten(-2) : at::cat({y, y2}, -1);
  const c10::SymInt rest = x.sym_size(-1) - turned;
  return (rest == 0 ? out : at::cat({out, w.narrow_symint(-1, turned, rest)}, -1)).to(x.scalar_type());
}

struct RotaryBackward : SavedNode {
  Way way;
  bool has_ids = false;

  std::string name() const override { return "memkit::rotary_backward"; }

 protected:
  autograd::variable_list backward(autograd::variable_list&& grads) override {
    Tensor grad = std::move(grads[0]);
    if (!grad.defined()) return {Tensor()};
    const Tensor cos = unpack(0), sin = unpack(1);
    const OptionalTensor ids = has_ids ? OptionalTensor(unpack(2)) : std::nullopt;
    if (!at::GradMode::is_enabled() && is_sole_owner(grad)) {
      call_(grad, std::nullopt, cos, sin, ids, way);
      return {grad};
    }
    return {std::get<0>(call(grad, std::nullopt, cos, sin, ids, way))};
  }
};

// The node of one of q and k: each may be a view of another base.
auto new_node(const Tensor& x, const OptionalTensor& ids, Way way) {
  auto node = make_node<RotaryBackward>();
  node->set_next_edges(autograd::collect_next_edges(x));
  way.back = !way.back;
  node->way = way;
  node->has_ids = ids.has_value();
  return node;
}
template <class NodeOf>
void keep(NodeOf& node, const Tensor& cos, const Tensor& sin, const OptionalTensor& ids) {
  node->save(cos);
  node->save(sin);
  if (ids) node->save(*ids);
}

Both rotary_autograd(const Tensor& q, const OptionalTensor& k, const Tensor& cos, const Tensor& sin,
                     const OptionalTensor& ids, bool interleaved, int64_t heads_at, int64_t rotary, bool back) {
  const Way way{interleaved, heads_at, rotary, back};
  check(q, k, cos, sin, ids, way);
  if (needs_stock(q, k, cos, sin) || autograd::compute_requires_grad(cos, sin))
    return {by_stock(q, cos, sin, ids, way), k ? by_stock(*k, cos, sin, ids, way) : at::empty({0}, q.options())};
  Both out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = call(q, k, cos, sin, ids, way);
  }
  const auto record = [&](const Tensor& x, Tensor& y) {
    if (!autograd::compute_requires_grad(x)) return;
    auto node = new_node(x, ids, way);
    autograd::set_history(y, node);
    keep(node, cos, sin, ids);
  };
  record(q, std::get<0>(out));
  if (k) record(*k, std::get<1>(out));
  return out;
}

void rotary_autograd_(Tensor& q, const OptionalTensor& k, const Tensor& cos, const Tensor& sin,
                      const OptionalTensor& ids, bool interleaved, int64_t heads_at, int64_t rotary, bool back) {
  const Way way{interleaved, heads_at, rotary, back};
  check(q, k, cos, sin, ids, way);
  check_memory(q, k, cos, sin, ids);
  std::vector<Tensor> overwritten{q};
  if (k) overwritten.push_back(*k);
  for (const Tensor& x : overwritten) {
    check_inplace(kOp, x, inplace_blocker(x));
    autograd::check_inplace(x, autograd::compute_requires_grad(x));
  }
  if (needs_stock(q, k, cos, sin) || autograd::compute_requires_grad(cos, sin)) {
    for (Tensor& x : overwritten) x.copy_(by_stock(x.clone(), cos, sin, ids, way));
    return;
  }
  std::vector<NodePtr> nodes;
  for (const Tensor& x : overwritten) {
    if (!autograd::compute_requires_grad(x)) {
      nodes.emplace_back();
      continue;
    }
    auto node = new_node(x, ids, way);
    keep(node, cos, sin, ids);
    nodes.emplace_back(std::move(node));
  }
  {
    const at::AutoDispatchBelowAutograd below;  // the ADInplaceOrView kernel bumps the versions
    call_(q, k, cos, sin, ids, way);
  }
  for (size_t i = 0; i < nodes.size(); ++i)
    if (nodes[i]) autograd::rebase_history(overwritten[i], std::move(nodes[i]));
}

void rotary_bumping_(Tensor& q, const OptionalTensor& k, const Tensor& cos, const Tensor& sin,
                     const OptionalTensor& ids, bool interleaved, int64_t heads_at, int64_t rotary, bool back) {
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_(q, k, cos, sin, ids, {interleaved, heads_at, rotary, back});
  }
  autograd::impl::bump_version(q);  // afterwards: where the kernel raises, nothing was written
  if (k) autograd::impl::bump_version(*k);
}

Both rotary_batched(const Tensor& q, const OptionalTensor& k, const Tensor& cos, const Tensor& sin,
                    const OptionalTensor& ids, bool interleaved, int64_t heads_at, int64_t rotary, bool back) {
  const Way way{interleaved, heads_at, rotary, back};
  return {by_stock(q, cos, sin, ids, way), k ? by_stock(*k, cos, sin, ids, way) : at::empty({0}, q.options())};
}

// -- the eager entry

bool overwrites(Inplace inplace, const Tensor& x) {
  return eager::resolve_inplace(inplace, kOp, x) == eager::Way::overwrite;
}

// The arguments are the caller's own handles: a copy would count as a reference to the memory.
Both rotary_both(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, const OptionalTensor& ids,
                 bool interleaved, int64_t heads_at, int64_t rotary, Inplace inplace) {
  const Way way{interleaved, heads_at, rotary, false};
  if (inplace != Inplace::never) check(q, k, cos, sin, ids, way);
  const bool q_too = overwrites(inplace, q), over = overwrites(inplace, k) && q_too;
  const pybind11::gil_scoped_release no_gil;
  if (!over) return call(q, k, cos, sin, ids, way);
  Tensor self = q;
  call_(self, k, cos, sin, ids, way);
  return {self, k};
}

Tensor rotary_one(const Tensor& x, const Tensor& cos, const Tensor& sin, const OptionalTensor& ids, bool interleaved,
                  int64_t heads_at, int64_t rotary, Inplace inplace) {
  const Way way{interleaved, heads_at, rotary, false};
  if (inplace != Inplace::never) check(x, std::nullopt, cos, sin, ids, way);
  const bool over = overwrites(inplace, x);
  const pybind11::gil_scoped_release no_gil;
  if (!over) return std::get<0>(call(x, std::nullopt, cos, sin, ids, way));
  Tensor self = x;
  call_(self, std::nullopt, cos, sin, ids, way);
  return self;
}

constexpr char kBoth[] = "apply_rotary", kOne[] = "apply_rotary_to_one";

void register_rotary(torch::Library& m) {
  m.impl("_rotary", rotary);
  m.impl("_rotary_", rotary_);
}

}  // namespace

TORCH_LIBRARY_IMPL(memkit, CPU, m) { register_rotary(m); }
TORCH_LIBRARY_IMPL(memkit, CUDA, m) { register_rotary(m); }
TORCH_LIBRARY_IMPL(memkit, Meta, m) { register_rotary(m); }
TORCH_LIBRARY_IMPL(memkit, Autograd, m) {
  m.impl("_rotary", rotary_autograd);
  m.impl("_rotary_", rotary_autograd_);
}
TORCH_LIBRARY_IMPL(memkit, ADInplaceOrView, m) { m.impl("_rotary_", rotary_bumping_); }
TORCH_LIBRARY_IMPL(memkit, FuncTorchBatched, m) { m.impl("_rotary", rotary_batched); }

}  // namespace memkit::rotary_op

void memkit::bind_rotary(pybind11::module_& m) {
  eager::bind<rotary_op::rotary_both, rotary_op::kBoth>(m);
  eager::bind<rotary_op::rotary_one, rotary_op::kOne>(m);
}
