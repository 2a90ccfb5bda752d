// How fast a link hands chunks to its connections.
//
// Left alone, connections take all there is at once, and it waits in queues below us, where a
// chunk of a lesser turn that comes later cannot pass it. So a link sends hardly faster than it
// has seen the peer acknowledge, and what waits, waits here, in the order of turns.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

namespace weft {

class Pace {
public:
    // Whether the next chunk may leave.
    bool ready(int64_t now) const { return rate_ == 0 || now >= due_ns_; }

    int64_t due_ns() const { return due_ns_; }

    void sent(uint64_t bytes, int64_t now) {
        if (rate_ == 0) return;
        double gain = since_growth_ < PATIENCE ? 2.0 : 1.25;
        due_ns_ = std::max(due_ns_, now - SLACK_NS) + static_cast<int64_t>(bytes * 1e9 / (gain * rate_));
    }

    void delivered(uint64_t bytes, int64_t now) {
        if (chunks_++) bytes_ += bytes;
        else first_ns_ = now, bytes_ = 0;
        last_ns_ = now;
    }

    // To be called often. A peer nearer than NEAR_NS is in the same site, and not paced.
    void watch(int64_t now, int64_t rtt_ns) {
        if (rtt_ns < NEAR_NS || !chunks_) return;
        int64_t window = std::clamp(rtt_ns / 4, WINDOW_NS, 5 * WINDOW_NS), passed = last_ns_ - first_ns_;
        if (passed >= window && chunks_ > CHUNKS) note(bytes_ * 1e9 / passed);
        else if (now - last_ns_ < rtt_ns) return;
        chunks_ = 0;
    }

private:
    static constexpr int64_t NEAR_NS = 2000000, WINDOW_NS = 10000000, SLACK_NS = 2000000;
    static constexpr uint64_t CHUNKS = 8;
    static constexpr size_t PATIENCE = 8, MEMORY = 16;  // windows

    double rate_ = 0, grown_ = 0;  // bytes per second; when it last grew
    int64_t due_ns_ = 0;
    int64_t first_ns_ = 0, last_ns_ = 0;  // acknowledgements of this window
    uint64_t chunks_ = 0, bytes_ = 0;     // in it; bytes after the first
    size_t since_growth_ = 0;
    std::deque<double> samples_;

    // Windows with the end of a burst show too little, those after a pause of ours too much.
    void note(double rate) {
        samples_.push_back(rate);
        if (samples_.size() > MEMORY) samples_.pop_front();
        std::vector<double> sorted(samples_.begin(), samples_.end());
        std::sort(sorted.begin(), sorted.end());
        rate_ = sorted[(sorted.size() - 1) * 3 / 4];
        since_growth_++;
        if (rate_ > 1.1 * grown_) since_growth_ = 0;
        if (rate_ > 1.1 * grown_ || rate_ < grown_ / 2) grown_ = rate_;
    }
};

}  // namespace weft
