// Memory for messages that pass through: blocks are used again, because the kernel zeroes every page
// on first use.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

namespace weft {

// Used by one thread; it outlives the blocks that it returns, and caches no more than were in use at once.
class RelayMemory {
public:
    // Returns uninitialised memory, which returns to the cache with its last reference.
    std::shared_ptr<char[]> take(uint64_t bytes) {
        uint64_t size = std::max<uint64_t>(1, (bytes + GRAIN - 1) / GRAIN) * GRAIN;
        Block block = freed(size);
        if (!block) block = fresh(size);
        used_bytes_ += size;
        return std::shared_ptr<char[]>(block.release(), [this, size](char *data) { give_back(Block(data), size); });
    }

    uint64_t bytes() const { return used_bytes_ + free_bytes_; }

private:
    using Block = std::unique_ptr<char[]>;
    static constexpr uint64_t GRAIN = 4 << 10;

    std::deque<std::pair<uint64_t, Block>> free_;  // by size; the last freed, likeliest to be in a cache, at the end
    uint64_t used_bytes_ = 0, free_bytes_ = 0, most_bytes_ = 0;

    Block freed(uint64_t size) {
        for (auto at = free_.rbegin(); at != free_.rend(); ++at) {
            if (at->first != size) continue;
            Block block = std::move(at->second);
            free_.erase(std::next(at).base());
            free_bytes_ -= size;
            return block;
        }
        return nullptr;
    }

    Block fresh(uint64_t size) {
        uint64_t most = std::max(most_bytes_, used_bytes_ + size);
        for (; !free_.empty() && bytes() + size > most; free_.pop_front()) free_bytes_ -= free_.front().first;
        Block block(new char[size]);
        most_bytes_ = most;
        return block;
    }

    void give_back(Block block, uint64_t size) {
        used_bytes_ -= size;
        free_.emplace_back(size, std::move(block));
        free_bytes_ += size;
    }
};

}  // namespace weft
