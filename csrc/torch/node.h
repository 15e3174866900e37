// Autograd nodes are owned by c10::intrusive_ptr from PyTorch 2.13 on and by std::shared_ptr before.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace torch::autograd {
TORCH_API void deleteNode(Node* function);  // no longer declared where nodes are intrusive, and not called there
}

namespace memkit {

using NodePtr = std::decay_t<decltype(std::declval<torch::autograd::Edge>().function)>;

template <class N, class Pointer = NodePtr>
auto make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::shared_ptr<N>(new N(), torch::autograd::deleteNode);
  } else {
    return c10::make_intrusive<N>();
  }
}

// collect_next_edges in one allocation.
template <class... Variables>
torch::autograd::edge_list edges_of(const Variables&... variables) {
  torch::autograd::detail::MakeNextFunctionList made;
  made.next_edges.reserve(sizeof...(variables));
  made.apply(variables...);
  return std::move(made.next_edges);
}

}  // namespace memkit
