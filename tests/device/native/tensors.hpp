// Tensors of the emulated device: its memory seen by the host, and their accesses for the race detector.
#pragma once

#include "memory.hpp"
#include "report.hpp"

#include <ATen/ATen.h>

namespace emulated {

// The same memory as a CPU tensor, which does not own it.
at::Tensor host_view(const at::Tensor& tensor);

// See check_access. Tensors in host memory are not checked.
void check_tensor(Lock&, const at::Tensor& tensor, int stream, const MomentPtr& now, bool writes,
                  const std::string& by);

// The seed of the next random kernel.
uint64_t next_seed();

}  // namespace emulated
