// Streams of the emulated device: threads that run operations in launch order, and the order between them.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace emulated {

// A vector clock: for each stream, the number of its operations that come before.
using Clock = std::vector<uint64_t>;

inline void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

inline uint64_t count_in(const Clock& clock, int stream) {
  return stream < static_cast<int>(clock.size()) ? clock[stream] : 0;
}

// The end of an operation, which events record.
struct Moment {
  bool reached = false;
  std::chrono::steady_clock::time_point time;
  Clock clock;
};
using MomentPtr = std::shared_ptr<Moment>;

// One mutex guards the whole device. A function with a `Lock&` parameter needs it locked. Neither the interpreter lock
// nor the destructor of a tensor may be awaited while it is locked.
using Lock = std::unique_lock<std::mutex>;
std::mutex& mutex();

struct Settings {
  int num_devices = 1;
  double default_lag_ms = 0, other_lag_ms = 0;  // delay of each operation after its launch, by kind of stream
  double limit_s = 0;  // of waits of the host, if it is not 0
};
Settings& settings();

// Streams are numbered. Number d < num_devices is the default stream of device d, which torch calls 0.
void start_devices(int count);
int add_stream(Lock&, c10::DeviceIndex device);
int number_of(const c10::Stream& stream);
c10::Stream stream_of(int number);
c10::DeviceIndex device_of(Lock&, int number);
int& current_stream(c10::DeviceIndex device);  // of this thread
std::vector<int> streams_on(Lock&, c10::DeviceIndex device);

// Queue `run`, which starts after `after`. The clock of the result counts this operation.
MomentPtr launch(Lock&, int stream, const char* name, std::function<void()> run = {}, const MomentPtr& after = {});
uint64_t num_launched();

// Queue a communicator's kernel. Until it ends it holds the device.
MomentPtr launch_call(Lock&, int stream, const std::string& name, std::function<void()> run);

// End what is queued on a stream and what runs there, whose results are garbage then.
void abort_stream(int stream);

// Block the host until `moment`; later launches are ordered after it. With a limit, a host that needs a `value` also waits
// for all communicators' kernels, which may hold the device, and fails after the limit.
void await(const MomentPtr& moment, const std::string& why, bool value = false);
bool has_reached(Lock&, const MomentPtr& moment);
bool on_stream_thread();

}  // namespace emulated
