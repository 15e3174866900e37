// memkit._C: what is not an operator. The operators register themselves with the dispatcher when this library loads.
#include <pybind11/pybind11.h>

#include "cpu/isa.h"
#include "torch/consumer.h"
#include "torch/fast_call.h"
#include "torch/known_gradients.h"
#include "torch/lean.h"
#include "torch/named_ops.h"
#include "torch/norm_call.h"
#include "torch/optimizer_call.h"
#include "torch/planning.h"
#include "torch/pool_python.h"
#include "torch/saved_tensor.h"
#include "torch/tap.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "memkit's compiled core; use memkit.functional, memkit.nn, memkit.memory";
  m.def("cpu_isa", [] { return memkit::cpu::name(memkit::cpu::isa()); });
  m.def("conv_parts", memkit::conv_parts);
  memkit::bind_fast_call(m);
  memkit::bind_consumer(m);
  memkit::bind_dropout(m);
  memkit::bind_glu(m);
  memkit::bind_scale_shift(m);
  memkit::bind_linear_scale(m);
  memkit::bind_pooling(m);
  memkit::bind_rotary(m);
  memkit::bind_softmax(m);
  memkit::bind_lean(m);
  memkit::bind_known_gradients(m);
  memkit::bind_saved_tensor(m);
  memkit::bind_losses(m);
  memkit::bind_norms(m);
  memkit::bind_channel_norms(m);
  memkit::bind_tap(m);
  memkit::bind_pool(m);
  memkit::bind_planning(m);
  memkit::bind_optimizers(m);
}
