// See memory.hpp. Freed memory is filled with 0xFF in stream order, so that an operation that runs too late reads NaN.
#include "memory.hpp"
#include "report.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>

namespace emulated {
namespace {

constexpr size_t GRAIN = 512;
constexpr int FRESH = 0xFF;
constexpr int MOST_DEVICES = 64;

struct Freed {
  Block* block;
  std::vector<MomentPtr> until;  // the last operations of other streams
};

struct Memory {
  std::map<const char*, Block*> blocks;  // by address, used and unused
  std::map<std::pair<int, size_t>, std::vector<Block*>> unused;  // by stream and size; stream -1 is pinned memory
  std::vector<Freed> waiting;
  std::array<Usage, MOST_DEVICES> usage;
};

Memory& memory() {
  static auto* memory = new Memory();
  return *memory;
}

void reuse(Lock& lock, Block* block) {
  if (block->pinned) {
    memset(block->data, FRESH, block->size);
    memory().unused[{-1, block->size}].push_back(block);
    return;
  }
  auto now = launch(lock, block->stream, "fill", [data = block->data, size = block->size] { memset(data, FRESH, size); });
  check_access(lock, block->data, {0, block->size}, block->stream, now, true, "reuse after free");
  memory().unused[{block->stream, block->size}].push_back(block);
}

// Reuse blocks whose last operations on other streams have ended.
void reuse_waiting(Lock& lock) {
  std::erase_if(memory().waiting, [&](Freed& freed) {
    bool ended = std::all_of(freed.until.begin(), freed.until.end(), [&](auto& end) { return has_reached(lock, end); });
    if (ended) reuse(lock, freed.block);
    return ended;
  });
}

Block* take(Lock& lock, int stream, size_t size) {
  reuse_waiting(lock);
  auto& unused = memory().unused[{stream, size}];
  if (!unused.empty()) {
    Block* block = unused.back();
    unused.pop_back();
    return block;
  }
  auto* block = new Block();
  block->data = static_cast<char*>(aligned_alloc(4096, (size + 4095) / 4096 * 4096));
  TORCH_CHECK(block->data, "the emulated device is out of memory");
  block->size = size;
  block->stream = stream;
  block->pinned = stream < 0;
  memset(block->data, FRESH, size);
  memory().blocks[block->data] = block;
  return block;
}

void free_device(void* context) {
  if (!context) return;
  auto* block = static_cast<Block*>(context);
  Lock lock(mutex());
  usage(lock, device_of(lock, block->stream)).allocated -= block->size;
  block->users.erase(block->stream);
  std::vector<MomentPtr> until;
  for (int user : block->users) until.push_back(launch(lock, user, "free"));
  block->users.clear();
  if (until.empty())
    reuse(lock, block);
  else
    memory().waiting.push_back({block, std::move(until)});
}

void free_pinned(void* context) {
  if (!context) return;
  auto* block = static_cast<Block*>(context);
  Lock lock(mutex());
  memory().waiting.push_back({block, std::exchange(block->transfers, {})});
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    c10::Device device(c10::DeviceType::CUDA, current_device());
    if (!num_bytes) return {nullptr, nullptr, &free_device, device};
    std::string by = calling_line();
    size_t size = (num_bytes + GRAIN - 1) / GRAIN * GRAIN;
    int stream = current_stream(device.index());
    Lock lock(mutex());
    Block* block = take(lock, stream, size);
    auto& used = usage(lock, device.index());
    if (block->allocated_by.empty()) used.reserved += size;
    used.allocated += size;
    used.total += size;
    used.peak = std::max(used.peak, used.allocated);
    block->allocated_by = by;
    auto now = launch(lock, stream, "allocate");  // whoever uses it on another stream has to wait for this one
    check_access(lock, block->data, {0, block->size}, stream, now, true, "allocation");
    return {block->data, block, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t count) const override { memcpy(to, from, count); }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    if (!num_bytes) return {nullptr, nullptr, &free_pinned, c10::DeviceType::CPU};
    size_t size = GRAIN;
    while (size < num_bytes) size *= 2;
    Lock lock(mutex());
    Block* block = take(lock, -1, size);
    return {block->data, block, &free_pinned, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { memcpy(to, from, count); }
};

}  // namespace

Block* block_at(Lock&, const void* data) {
  auto& blocks = memory().blocks;
  auto next = blocks.upper_bound(static_cast<const char*>(data));
  if (next == blocks.begin()) return nullptr;
  Block* block = std::prev(next)->second;
  return data < block->data + block->size ? block : nullptr;
}

c10::Allocator* device_allocator() {
  static DeviceAllocator allocator;
  return &allocator;
}

c10::Allocator* pinned_allocator() {
  static PinnedAllocator allocator;
  return &allocator;
}

void register_pinned(void* data, size_t size) {
  Lock lock(mutex());
  auto* block = new Block();
  block->data = static_cast<char*>(data);
  block->size = size;
  block->pinned = true;
  memory().blocks[block->data] = block;
}

void unregister_pinned(void* data) {
  Lock lock(mutex());
  memory().blocks.erase(static_cast<char*>(data));
}

Usage& usage(Lock&, c10::DeviceIndex device) { return memory().usage.at(device); }

}  // namespace emulated
