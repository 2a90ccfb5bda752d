// Memory of the emulated device: a caching allocator with pools per stream, pinned host memory, and a race detector.
#pragma once

#include "streams.hpp"

#include <c10/core/Allocator.h>

#include <set>
#include <string>

namespace emulated {

// Bytes that an operation accesses: all from `begin` to `end`, or rows of `width` bytes every `pitch` bytes.
struct Extent {
  size_t begin, end, width = 0, pitch = 0;
};

struct Access {
  Extent bytes;  // relative to the block
  int stream;
  uint64_t count;  // of the stream's clock
  bool writes;
  std::string by;
};

struct Block {
  char* data = nullptr;
  size_t size = 0;
  int stream = 0;
  bool pinned = false;
  std::set<int> users;                // other streams, by record_stream
  std::vector<MomentPtr> transfers;   // copies from or to pinned memory
  std::vector<Access> accesses;
  std::string allocated_by;
};

Block* block_at(Lock&, const void* data);

// Report a race if an earlier access to the same bytes is not ordered before `now`, the operation that was launched.
void check_access(Lock&, const void* data, Extent bytes, int stream, const MomentPtr& now, bool writes,
                  const std::string& by);

c10::Allocator* device_allocator();  // allocates on this thread's current device and stream
c10::Allocator* pinned_allocator();
void register_pinned(void* data, size_t size);
void unregister_pinned(void* data);

struct Usage {
  uint64_t allocated = 0, peak = 0, reserved = 0, total = 0;
};
Usage& usage(Lock&, c10::DeviceIndex device);

// The device that this thread has chosen, and contexts that calls would create.
c10::DeviceIndex& current_device();
void choose_device(c10::DeviceIndex device, const char* by);
void call_runtime(const char* what);  // a call that creates a context on the current device
bool has_context(c10::DeviceIndex device);
void adopt_device(c10::DeviceIndex device);  // by autograd's threads

}  // namespace emulated
