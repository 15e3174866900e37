#include "node_kind.h"

#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <iterator>
#include <string>
#include <string_view>
#include <typeinfo>

#include "cheap_nodes.h"
#include "saved_node.h"

namespace memkit {
namespace {

namespace autograd = torch::autograd;

// Nodes of PyTorch's own that keep their output for backward (derivatives.yaml: `result`), by the name they print.
// Overwriting such an output makes backward raise; knowing the producer lets the message name it beforehand.
constexpr std::string_view kOutputSavers[] = {"SigmoidBackward",
                                              "TanhBackward",
                                              "ExpBackward",
                                              "Exp2Backward",
                                              "Expm1Backward",
                                              "SqrtBackward",
                                              "RsqrtBackward",
                                              "ReciprocalBackward",
                                              "SoftmaxBackward",
                                              "LogSoftmaxBackward",
                                              "SparseSoftmaxBackward",
                                              "SparseLogSoftmaxBackward",
                                              "SafeSoftmaxBackward",
                                              "MaskedSoftmaxBackward",
                                              "ReluBackward",
                                              "CumprodBackward",
                                              "TanBackward",
                                              "PowBackward1",
                                              "NormBackward",
                                              "LinalgVectorNormBackward",
                                              "CholeskyBackward",
                                              "LinalgInvExBackward",
                                              "LogsumexpBackward",
                                              "LogcumsumexpBackward",
                                              "ProdBackward",
                                              "AmaxBackward",
                                              "AminBackward",
                                              "StdBackward",
                                              "HypotBackward",
                                              "DistBackward",
                                              "CdistBackward",
                                              "PdistBackward",
                                              "EuclideanDistBackward",
                                              "CopysignBackward",
                                              "LdexpBackward",
                                              "SgnBackward",
                                              "PolarBackward",
                                              "PowBackward2",
                                              "MaxBackward1",
                                              "MinBackward1",
                                              "MedianBackward",
                                              "NanmedianBackward",
                                              "RreluWithNoiseBackward1",
                                              "ScatterReduceBackward",
                                              "SegmentReduceBackward",
                                              "IndexReduceBackward",
                                              "SpecialErfcxBackward",
                                              "SpecialI0EBackward",
                                              "SpecialI1Backward",
                                              "SpecialI1EBackward",
                                              "SpecialNdtriBackward",
                                              "SpecialLogNdtrBackward",
                                              "StandardGammaBackward",
                                              "CholeskySolveBackward",
                                              "CholeskyInverseBackward",
                                              "OrmqrBackward",
                                              "LinalgDetBackward",
                                              "LinalgPinvBackward",
                                              "LinalgLuSolveBackward",
                                              "LinalgSolveExBackward",
                                              "LinalgSolveTriangularBackward",
                                              "LinalgHouseholderProductBackward",
                                              "CudnnRnnBackward",
                                              "ScaledDotProductFlashAttentionBackward",
                                              "ScaledDotProductFlashAttentionForCpuBackward",
                                              "ScaledDotProductEfficientAttentionBackward",
                                              "ScaledDotProductCudnnAttentionBackward",
                                              "ScaledDotProductFusedAttentionOverrideableBackward"};

// "ReluBackward0" and in-place "EluBackward1" alike: the digits at the end number a function's overloads.
bool is_listed(const std::string& name) {
  for (std::string_view saver : kOutputSavers) {
    if (name.size() <= saver.size() + 1 && name.compare(0, saver.size(), saver) == 0) return true;
  }
  // In place, these keep their result where out of place they keep their input.
  for (std::string_view saver :
       {"EluBackward1", "LeakyReluBackward1", "CeluBackward1", "SeluBackward1", "HardtanhBackward1"}) {
    if (name == saver) return true;
  }
  return false;
}

// "ReflectionPad1DBackward0" and the like.
bool is_padding(const std::string& name) {
  return name.compare(0, 13, "ReflectionPad") == 0 || name.compare(0, 14, "ReplicationPad") == 0;
}

// Of the same memory as what they take.
constexpr std::string_view kViews[] = {"Alias",        "AsStrided",  "Diagonal",  "Expand", "Permute",
                                       "ReshapeAlias", "Select",     "Slice",     "Split",  "SplitWithSizes",
                                       "Squeeze",      "T",          "Transpose", "Unbind", "Unfold",
                                       "UnsafeSplit",  "UnsafeView", "Unsqueeze", "View"};

// A number at the end is what names of functions written in Python do not have.
bool shares_memory(const autograd::Node& node) {
  const std::string name = node.name();
  if (node.num_outputs() != 1 || !std::isdigit(static_cast<unsigned char>(name.back()))) return false;
  const std::string_view start = std::string_view(name).substr(0, name.rfind("Backward"));
  return std::find(std::begin(kViews), std::end(kViews), start) != std::end(kViews);
}

template <class N>
bool is_a(const autograd::Node& node) {
  return dynamic_cast<const N*>(&node);
}

NodeKind kind_by_casts(const autograd::Node& node) {
  using namespace autograd::generated;
  if (is_a<SavedNode>(node)) return NodeKind::own;
  if (is_a<AddBackward0>(node)) return NodeKind::add;
  if (is_a<ToCopyBackward0>(node)) return NodeKind::cast;
  if (is_a<CatBackward0>(node)) return NodeKind::cat;
  if (is_a<autograd::CopySlices>(node)) return NodeKind::slices;
  if (is_a<ConstantPadNdBackward0>(node) || is_padding(node.name())) return NodeKind::pad;
  if (is_product(node)) return NodeKind::product;
  if (is_function_of_kept(node)) return NodeKind::of_kept;
  if (shares_memory(node)) return NodeKind::view;
  return is_a<autograd::TraceableFunction>(node) && is_listed(node.name()) ? NodeKind::saver : NodeKind::other;
}

}  // namespace

NodeKind kind_of(const autograd::Node& node) {
  static std::atomic<uintptr_t> known[256];  // a type's address, and in its topmost byte, 0 there, its kind
  constexpr int shift = 56;
  const auto type = reinterpret_cast<uintptr_t>(&typeid(node));
  std::atomic<uintptr_t>& place = known[type / 8 % std::size(known)];
  if (const uintptr_t found = place.load(std::memory_order_relaxed); (found & ~(uintptr_t(255) << shift)) == type)
    return NodeKind(found >> shift);
  const NodeKind kind = kind_by_casts(node);
  place.store(type | uintptr_t(kind) << shift, std::memory_order_relaxed);
  return kind;
}

const autograd::Edge& behind_views(const autograd::Edge& edge) {
  const autograd::Edge* at = &edge;
  while (is_kind(at->function.get(), NodeKind::view)) at = &at->function->next_edge(0);
  return *at;
}

}  // namespace memkit
