// Functions that Python calls through ctypes.
#include "memory.hpp"
#include "report.hpp"

#include <array>
#include <cstring>
#include <thread>

using namespace emulated;

extern "C" {

void emulated_start(int devices) {
  start_devices(devices);
  c10::SetAllocator(c10::DeviceType::CUDA, device_allocator(), 10);
}

int emulated_get_device() { return current_device(); }
void emulated_set_device(int device, const char* by) { choose_device(device, by); }
void emulated_guard_device(int device) { current_device() = device; }
void emulated_call_runtime(const char* what) { call_runtime(what); }

// A stream as torch's id.
int64_t emulated_current_stream(int device) { return stream_of(current_stream(device)).id(); }
void emulated_set_stream(int64_t id, int device) { current_stream(device) = id ? id : device; }
void emulated_set_lag(double default_ms, double other_ms) {
  Lock lock(mutex());
  settings().default_lag_ms = default_ms;
  settings().other_lag_ms = other_ms;
}

void emulated_set_limit(double seconds) {
  Lock lock(mutex());
  settings().limit_s = seconds;
}
void emulated_abort_stream(int64_t number) { abort_stream(number); }
void emulated_count_wait(const char* why) { count_wait(why); }

void emulated_sleep(double ms) {
  Lock lock(mutex());
  launch(lock, current_stream(current_device()), "sleep",
         [ms] { std::this_thread::sleep_for(std::chrono::microseconds(int64_t(1e3 * ms))); });
}

uint64_t emulated_usage(int device, int which) {
  Lock lock(mutex());
  Usage& used = usage(lock, device);
  return std::array{used.allocated, used.peak, used.reserved, used.total}.at(which);
}
void emulated_reset_peak(int device) {
  Lock lock(mutex());
  usage(lock, device).peak = usage(lock, device).allocated;
}
void emulated_register_pinned(void* data, size_t size) { register_pinned(data, size); }
void emulated_unregister_pinned(void* data) { unregister_pinned(data); }

uint64_t emulated_num_launched() { return num_launched(); }
void emulated_set_sync_debug_mode(int mode) { sync_debug_mode() = mode; }
int emulated_get_sync_debug_mode() { return sync_debug_mode(); }
void emulated_forget() { forget_observations(); }
char* emulated_observations() { return strdup(observations().c_str()); }

}  // extern "C"
