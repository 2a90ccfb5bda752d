// Contexts: which thread has chosen which device, and which calls create a context on another device than the rank's.
#include "memory.hpp"
#include "report.hpp"

#include <atomic>

namespace emulated {
namespace {

std::atomic<int> own_device{-1};  // the first that this process has chosen
std::atomic<uint64_t> contexts{0};
thread_local c10::DeviceIndex device_of_thread = 0;
thread_local bool has_chosen = false;

void create_context(c10::DeviceIndex device, const char* by) {
  contexts |= uint64_t(1) << device;
  if (own_device >= 0 && device != own_device)
    count("contexts", "device " + std::to_string(device) + " by " + by + " at " + calling_line());
}

}  // namespace

c10::DeviceIndex& current_device() { return device_of_thread; }

void choose_device(c10::DeviceIndex device, const char* by) {
  int none = -1;
  own_device.compare_exchange_strong(none, device);
  device_of_thread = device;
  has_chosen = true;
  create_context(device, by);
}

void adopt_device(c10::DeviceIndex device) {
  device_of_thread = device;
  has_chosen = true;
}

void call_runtime(const char* what) {
  if (!on_stream_thread() && (!has_chosen || device_of_thread != own_device)) create_context(device_of_thread, what);
}

bool has_context(c10::DeviceIndex device) { return contexts >> device & 1; }

}  // namespace emulated
