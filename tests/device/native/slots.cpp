// Torch's slots for CUDA that a CPU build leaves empty: the device guard and the hooks.
#include "memory.hpp"
#include "report.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cmath>

namespace emulated {
namespace {

std::atomic<int> num_events{0};

struct Event {
  Event() { ++num_events; }
  ~Event() { --num_events; }
  MomentPtr moment;
};

MomentPtr moment_of(void* event) { return event ? static_cast<Event*>(event)->moment : nullptr; }

c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

MomentPtr end_of(int stream) {
  Lock lock(mutex());
  return launch(lock, stream, "record");
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return static_type; }
  c10::Device getDevice() const override { return {static_type, current_device()}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override { adopt_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device() = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return settings().num_devices; }

  c10::Stream getStream(c10::Device device) const override { return stream_of(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock(mutex());
    int number = add_stream(lock, index_of(device));
    lock.unlock();
    return stream_of(number);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int& current = current_stream(stream.device_index());
    c10::Stream before = stream_of(current);
    current = number_of(stream);
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    MomentPtr end = end_of(number_of(stream));
    Lock lock(mutex());
    return has_reached(lock, end);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_wait("stream.synchronize");
    await(end_of(number_of(stream)), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count_wait("synchronize");
    std::vector<MomentPtr> ends;
    {
      Lock lock(mutex());
      for (int stream : streams_on(lock, device < 0 ? current_device() : device))
        ends.push_back(launch(lock, stream, "record"));
    }
    for (auto& end : ends) await(end, "synchronize");
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event();
    static_cast<Event*>(*event)->moment = end_of(number_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!moment_of(event)) return;
    Lock lock(mutex());
    launch(lock, number_of(stream), "wait", {}, moment_of(event));
  }
  bool queryEvent(void* event) const override {
    if (!moment_of(event)) return true;
    call_runtime("event.query");
    Lock lock(mutex());
    return has_reached(lock, moment_of(event));
  }
  void synchronizeEvent(void* event) const override {
    if (queryEvent(event)) return;
    count_wait("event.synchronize", false);
    await(moment_of(event), "event.synchronize");
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    MomentPtr start = moment_of(first), end = moment_of(second);
    Lock lock(mutex());
    TORCH_CHECK(start && end && start->reached && end->reached, "both events have to be complete");
    return std::chrono::duration<double, std::milli>(end->time - start->time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Lock lock(mutex());
    if (Block* block = block_at(lock, data.get())) block->users.insert(number_of(stream));
  }
};

}  // namespace

// The second is for torch.Event.elapsed_time, which refuses subclasses.
extern "C" int emulated_num_events() { return num_events; }
extern "C" double emulated_elapsed_ms(void* first, void* second) {  // NaN if an event is not complete
  return Guard().queryEvent(first) && Guard().queryEvent(second) ? Guard().elapsedTime(first, second, 0) : NAN;
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  int getNumGPUs() const override { return settings().num_devices; }
  c10::DeviceIndex deviceCount() const override { return settings().num_devices; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return has_context(device); }
  c10::DeviceIndex current_device() const override { return emulated::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return emulated::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { choose_device(device, "set_device"); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(emulated::current_device(), device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  bool isPinnedPtr(const void* data) const override {
    Lock lock(mutex());
    Block* block = block_at(lock, data);
    return block && block->pinned;
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    Lock lock(mutex());
    Block* block = block_at(lock, data);
    TORCH_CHECK(block && !block->pinned, "no memory of the device");
    return {c10::DeviceType::CUDA, device_of(lock, block->stream)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator generator = at::detail::createCPUGenerator();
    return generator;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};

}  // namespace emulated

using EmulatedHooks = emulated::Hooks;
using EmulatedGuard = emulated::Guard;
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, EmulatedHooks)
}
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, EmulatedGuard)
}
