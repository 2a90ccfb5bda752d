// How fast a link hands chunks to its connections.
//
// Left alone, connections take all there is at once, and it waits in queues below us, where a
// chunk of a lesser turn that comes later cannot pass it. So a link sends hardly faster than it
// has seen the peer acknowledge, and what waits, waits here, in the order of turns.
#pragma once
#include <algorithm>
#include <cstdint>

namespace weft {

class Pace {
public:
    // Whether the next chunk may leave.
    bool ready(int64_t now) const { return rate_ == 0 || now >= due_ns_; }

    int64_t due_ns() const { return due_ns_; }

    void sent(uint64_t bytes, int64_t now) {
        if (rate_ == 0) return;
        double gain = since_growth_ < PATIENCE ? 2.0 : 1.125;
        due_ns_ = std::max(due_ns_, now - SLACK_NS) + static_cast<int64_t>(bytes * 1e9 / (gain * rate_));
    }

    void delivered(uint64_t bytes) { bytes_ += bytes; }

    // There was nothing to send: this window does not show what the link carries.
    void idle() { idle_ = true; }

    // To be called often. A peer nearer than NEAR_NS is in the same site, and not paced.
    void watch(int64_t now, int64_t rtt_ns) {
        if (rtt_ns < NEAR_NS) return;
        int64_t window = std::clamp(rtt_ns / 4, WINDOW_NS, 5 * WINDOW_NS), passed = now - since_ns_;
        if (passed < window) return;
        bool late = passed > window + window / 4;  // we slept, and acknowledgements have gathered
        if (!late && !was_late_ && bytes_) note(bytes_ * 1e9 / passed);
        was_late_ = late;
        since_ns_ = now;
        bytes_ = 0;
        idle_ = false;
    }

private:
    static constexpr int64_t NEAR_NS = 2000000, WINDOW_NS = 10000000, SLACK_NS = 2000000;
    static constexpr int PATIENCE = 8;  // windows

    double rate_ = 0, best_ = 0;  // bytes per second
    int64_t due_ns_ = 0, since_ns_ = 0;
    uint64_t bytes_ = 0;
    int since_growth_ = 0;
    bool idle_ = false, was_late_ = false;

    void note(double rate) {
        since_growth_ = rate > 1.1 * rate_ ? 0 : since_growth_ + 1;
        if (rate > rate_) rate_ = rate;
        else if (!idle_) rate_ = std::max(rate_ + (rate - rate_) / 8, best_ / 2);
        best_ = std::max(best_, rate_);
    }
};

}  // namespace weft
