// What the emulated device has observed: races, host waits, contexts, failed kernels.
#pragma once

#include <string>

namespace emulated {

// Count an observation. Kinds: races, waits, thread waits, contexts, errors, operators.
void count(const char* kind, const std::string& what);

// A blocking call of the host, by a thread that Python has started or by another. With `torch.cuda.set_sync_debug_mode`, what torch warns of is warned of or refused.
void count_wait(const std::string& why, bool torch_warns = true);

// The two innermost Python lines of the caller outside torch, DeepSpeed, transformers and the emulation.
std::string calling_line();

// Observations as lines "kind\tnumber\ttext".
std::string observations();
void forget_observations();

int& sync_debug_mode();

// Releases the interpreter lock, if this thread holds it.
class WithoutInterpreterLock {
 public:
  WithoutInterpreterLock();
  ~WithoutInterpreterLock();

 private:
  void* state_ = nullptr;
};

}  // namespace emulated
