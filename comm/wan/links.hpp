// The links of an endpoint, by peer.
#pragma once
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "link.hpp"

namespace weft {

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

class Links {
public:
    std::vector<Completed> completed;  // completed requests of all links, not reported yet

    explicit Links(const Options &options) : options_(options) {}

    // Returns the link to `peer`, and creates it at first use.
    Link &of(uint32_t peer) {
        auto &slot = links_[peer];
        if (!slot) slot = std::make_unique<Link>(peer, options_, completed, now_ns());
        return *slot;
    }

    auto begin() { return links_.begin(); }
    auto end() { return links_.end(); }

private:
    const Options &options_;
    std::map<uint32_t, std::unique_ptr<Link>> links_;
};

}  // namespace weft
