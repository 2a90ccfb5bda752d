// See streams.hpp.
#include "streams.hpp"

#include "report.hpp"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>

namespace emulated {
namespace {

using std::chrono::steady_clock;

struct Operation {
  const char* name;
  std::function<void()> run;
  MomentPtr after, end;
  steady_clock::time_point launched;
};

struct Stream {
  int number;
  c10::DeviceIndex device;
  std::deque<Operation> operations;
  std::condition_variable launched;
  Clock clock;
  MomentPtr running;  // the end of the operation that was begun last
  bool aborted = false;
  bool has_thread = false;  // from the first launch on: a process that has launched nothing can be forked
};

struct Streams {
  std::vector<std::unique_ptr<Stream>> all;
  std::condition_variable progress;
  Clock host;  // operations that the host has waited for
  uint64_t launched = 0;
  std::vector<std::pair<MomentPtr, std::string>> calls;  // kernels of communicators that may not have ended
};

Streams& streams() {  // never destroyed: its threads run until the process ends
  static auto* streams = new Streams();
  return *streams;
}

thread_local bool is_stream_thread = false;
thread_local std::vector<int> current;  // by device

void run(Operation& operation) {
  if (!operation.run) return;
  try {
    operation.run();
  } catch (const c10::Error& error) {
    count("errors", std::string(operation.name) + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    count("errors", std::string(operation.name) + ": " + error.what());
  }
  operation.run = nullptr;  // its tensors are freed without the lock
}

void finish(Moment& moment) {
  moment.reached = true;
  moment.time = steady_clock::now();
  streams().progress.notify_all();
}

void work(Stream& stream) {
  is_stream_thread = true;
  Lock lock(mutex());
  while (true) {
    stream.launched.wait(lock, [&] { return !stream.operations.empty(); });
    Operation operation = std::move(stream.operations.front());
    stream.operations.pop_front();
    stream.running = operation.end;
    auto& set = settings();
    double lag_ms = stream.number < set.num_devices ? set.default_lag_ms : set.other_lag_ms;
    lock.unlock();
    std::this_thread::sleep_until(operation.launched + std::chrono::microseconds(int64_t(1e3 * lag_ms)));
    lock.lock();
    if (operation.after) streams().progress.wait(lock, [&] { return operation.after->reached; });
    lock.unlock();
    run(operation);
    lock.lock();
    finish(*operation.end);
  }
}

}  // namespace

std::mutex& mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

Settings& settings() {
  static Settings settings;
  return settings;
}

void start_devices(int count) {
  Lock lock(mutex());
  settings().num_devices = count;
  for (int device = 0; device < count; ++device) add_stream(lock, device);
}

int add_stream(Lock&, c10::DeviceIndex device) {
  auto& all = streams().all;
  all.push_back(std::make_unique<Stream>());
  Stream& stream = *all.back();
  stream.number = all.size() - 1;
  stream.device = device;
  return stream.number;
}

int number_of(const c10::Stream& stream) { return stream.id() ? stream.id() : stream.device_index(); }

c10::Stream stream_of(int number) {
  Lock lock(mutex());
  c10::Device device(c10::DeviceType::CUDA, device_of(lock, number));
  return c10::Stream(c10::Stream::UNSAFE, device, number < settings().num_devices ? 0 : number);
}

c10::DeviceIndex device_of(Lock&, int number) { return streams().all.at(number)->device; }

int& current_stream(c10::DeviceIndex device) {
  while (static_cast<int>(current.size()) <= device) current.push_back(current.size());
  return current[device];
}

std::vector<int> streams_on(Lock&, c10::DeviceIndex device) {
  std::vector<int> numbers;
  for (auto& stream : streams().all)
    if (stream->device == device) numbers.push_back(stream->number);
  return numbers;
}

MomentPtr launch(Lock&, int number, const char* name, std::function<void()> run, const MomentPtr& after) {
  Stream& stream = *streams().all.at(number);
  join(stream.clock, streams().host);
  if (after) join(stream.clock, after->clock);
  stream.clock.resize(std::max<size_t>(stream.clock.size(), number + 1));
  ++stream.clock[number];
  ++streams().launched;
  auto end = std::make_shared<Moment>();
  end->clock = stream.clock;
  if (stream.aborted) {
    finish(*end);
    return end;
  }
  stream.operations.push_back({name, std::move(run), after, end, steady_clock::now()});
  if (!stream.has_thread) std::thread([&stream] { work(stream); }).detach();
  stream.has_thread = true;
  stream.launched.notify_one();
  return end;
}

uint64_t num_launched() {
  Lock lock(mutex());
  return streams().launched;
}

MomentPtr launch_call(Lock& lock, int number, const std::string& name, std::function<void()> run) {
  auto& calls = streams().calls;
  calls.erase(std::remove_if(calls.begin(), calls.end(), [](auto& call) { return call.first->reached; }), calls.end());
  calls.emplace_back(launch(lock, number, "call", std::move(run)), name);
  return calls.back().first;
}

void abort_stream(int number) {
  std::deque<Operation> dropped;  // freed without the lock
  Lock lock(mutex());
  Stream& stream = *streams().all.at(number);
  stream.aborted = true;
  dropped.swap(stream.operations);
  for (auto& operation : dropped) finish(*operation.end);
  if (stream.running) finish(*stream.running);
  lock.unlock();
}

void await(const MomentPtr& moment, const std::string& why, bool value) {
  WithoutInterpreterLock released;
  Lock lock(mutex());
  double limit_s = settings().limit_s;
  auto& calls = streams().calls;
  std::vector<MomentPtr> awaited{moment};
  if (limit_s && value)
    for (auto& call : calls) awaited.push_back(call.first);
  auto has_ended = [&, next = size_t(0)]() mutable {
    while (next < awaited.size() && awaited[next]->reached) ++next;
    return next == awaited.size();
  };
  if (!limit_s) {
    streams().progress.wait(lock, has_ended);
  } else if (!streams().progress.wait_for(lock, std::chrono::duration<double>(limit_s), has_ended)) {
    auto call = std::find_if(calls.begin(), calls.end(), [](auto& call) { return !call.first->reached; });
    std::string what = call == calls.end() ? "earlier operations" : call->second;
    lock.unlock();
    TORCH_CHECK(false, "waits for ", why, " behind ", what, ", called from ", calling_line());
  }
  join(streams().host, moment->clock);
}

bool has_reached(Lock&, const MomentPtr& moment) {
  if (moment->reached) join(streams().host, moment->clock);
  return moment->reached;
}

bool on_stream_thread() { return is_stream_thread; }

}  // namespace emulated
