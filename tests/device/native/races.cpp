// Races: accesses of two streams to the same bytes, one of them a write, that no event orders.
#include "memory.hpp"
#include "report.hpp"

#include <algorithm>

namespace emulated {
namespace {

constexpr size_t MOST_ACCESSES = 256;  // remembered per block

// True if rows of equal pitch lie in different columns.
bool in_other_columns(const Extent& a, const Extent& b) {
  if (!a.pitch || a.pitch != b.pitch) return false;
  size_t x = a.begin % a.pitch, y = b.begin % b.pitch;
  if (x + a.width > a.pitch || y + b.width > b.pitch) return false;
  return x + a.width <= y || y + b.width <= x;
}

bool overlap(const Extent& a, const Extent& b) {
  return a.begin < b.end && b.begin < a.end && !in_other_columns(a, b);
}

std::string text_of(const Access& access) {
  return std::string(access.writes ? "write by " : "read by ") + access.by + " on stream " +
         std::to_string(access.stream);
}

}  // namespace

void check_access(Lock& lock, const void* data, Extent bytes, int stream, const MomentPtr& now, bool writes,
                  const std::string& by) {
  Block* block = block_at(lock, data);
  if (!block || block->pinned) return;
  size_t offset = static_cast<const char*>(data) - block->data;
  bytes.begin += offset;
  bytes.end += offset;
  Access access{bytes, stream, count_in(now->clock, stream), writes, by};
  auto& earlier = block->accesses;
  auto is_before = [&](const Access& old) { return count_in(now->clock, old.stream) >= old.count; };
  for (const Access& old : earlier)
    if ((old.writes || writes) && overlap(old.bytes, bytes) && !is_before(old))
      count("races", text_of(access) + " is not ordered after the " + text_of(old) + ", in memory allocated by " +
                         block->allocated_by);
  if (!bytes.pitch)  // a later operation that is ordered after this one is ordered after these, too
    std::erase_if(earlier, [&](const Access& old) {
      bool covered = bytes.begin <= old.bytes.begin && old.bytes.end <= bytes.end;
      return covered && (writes ? is_before(old) : !old.writes && old.stream == stream);
    });
  earlier.push_back(std::move(access));
  if (earlier.size() > MOST_ACCESSES) earlier.erase(earlier.begin(), earlier.begin() + MOST_ACCESSES / 4);
}

}  // namespace emulated
