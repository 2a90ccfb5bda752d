// A link's pacing and congestion window, after BBR (Cardwell et al. 2016).
//
// Without it, connections would take all data at once. It would then queue in the kernel and on the
// line, where a more urgent chunk that comes later cannot overtake it, or behind the full window of
// one of many connections. So a link sends only slightly faster than its measured delivery rate, and
// keeps hardly more than the bandwidth-delay product in flight (plus what delayed acknowledgements
// cover): data queues here, in the order of priorities.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

namespace weft {

// Windowed minimum or maximum: the best sample of the last one to two windows.
template <typename Better>
class WindowedBest {
public:
    void add(double value, int64_t now, int64_t window_ns) {
        if (now - since_ns_ < window_ns) {
            current_ = better(value, current_);
            return;
        }
        before_ = now - since_ns_ < 2 * window_ns ? current_ : value;
        current_ = value;
        since_ns_ = now;
    }

    double best() const { return better(current_, before_); }

    // Time that does not count.
    void shift(int64_t pause_ns) { since_ns_ += pause_ns; }

private:
    int64_t since_ns_ = INT64_MIN / 2;
    double current_ = 0, before_ = 0;

    static double better(double one, double other) { return Better()(one, other) ? one : other; }
};

class Pacer {
public:
    // True if the next chunk may be sent.
    bool ready(int64_t now) const { return rate_ == 0 || (now >= due_ns_ && has_room()); }

    // When pacing allows the next chunk; 0 if it may be sent now or the window is full.
    int64_t due_ns(int64_t now) const { return rate_ > 0 && now < due_ns_ && has_room() ? due_ns_ : 0; }

    // The queue is empty, so the pace limits nothing. The arrival rate of chunks around this time then measures
    // the sender's demand, not the bandwidth of the line.
    void idle() { paused_ = true; }

    // Returns the number of the burst, for `delivered`.
    uint32_t sent(uint64_t bytes, int64_t now) {
        burst_ += std::exchange(paused_, false);
        pace(bytes, now);
        return burst_;
    }

    // Bytes that will not be acknowledged because their connection broke.
    void lost(uint64_t bytes) { in_flight_ -= bytes; }

    // A chunk of `burst`, sent at `sent_ns`, arrived at `arrived_ns` on the peer's clock, of which only differences
    // count. They distinguish queueing of chunks from queueing of acknowledgements.
    void delivered(uint64_t bytes, uint32_t burst, int64_t sent_ns, double arrived_ns, int64_t now) {
        in_flight_ -= bytes;
        double back_ns = now - arrived_ns;
        forward_ns_.add(arrived_ns - sent_ns, now, trip_span_ns());
        return_ns_.add(back_ns, now, trip_span_ns());
        late_ns_ += (back_ns - return_ns_.best() - late_ns_) / 16;
        if (std::exchange(arriving_, burst) != burst) chunks_ = 0;
        if (chunks_++) bytes_ += bytes;
        else first_ns_ = last_ns_ = arrived_ns, bytes_ = 0;
        last_ns_ = std::max(last_ns_, arrived_ns);
        heard_ns_ = now;
    }

    // Call often. A peer nearer than NEAR_NS is in the same site and not paced, also if only a later
    // round trip shows that it is near.
    void update(int64_t now, int64_t rtt_ns) {
        far_ = rtt_ns > FAR_NS;
        if (rtt_ns < NEAR_NS) return void(rate_ = 0);
        if (rate_ == 0 || in_flight_ <= bytes_of(DRAINED * trip_ns())) drained_ns_ = now;
        drains_ = now - drained_ns_ > trip_span_ns();
        if (!chunks_) return;
        int64_t window = std::clamp(rtt_ns / 4, WINDOW_NS, 5 * WINDOW_NS);
        double passed = last_ns_ - first_ns_;
        if (passed >= window && chunks_ > CHUNKS && bytes_ >= LEAST_BYTES) note(bytes_ * 1e9 / passed, now);
        else if (now - heard_ns_ < rtt_ns) return;
        chunks_ = 0;
    }

    // The peer answers again, over new connections, after `silence_ns`. Earlier measurements still hold, and lower
    // rates during TCP's slow start are ignored.
    void resume(int64_t now, int64_t silence_ns, int64_t rtt_ns) {
        starting_until_ns_ = now + SLOW_START_TRIPS * rtt_ns;
        max_rate_.shift(silence_ns);
        drained_ns_ = due_ns_ = now;
        chunks_ = 0;
    }

    // True if the round trip is so long that 2 ms do not matter.
    bool far() const { return far_; }

private:
    static constexpr int64_t NEAR_NS = 2000000, FAR_NS = 15000000, WINDOW_NS = 10000000, SLACK_NS = 2000000;
    static constexpr uint64_t CHUNKS = 8, LEAST_BYTES = 64 << 10;  // smaller messages measure the ends, not the line
    static constexpr size_t STALLED_WINDOWS = 8, MEMORY = 16;  // windows
    static constexpr double SPARE = 4;                  // chunks in addition to the bandwidth-delay product
    // When the route gets longer, fewer bytes are delivered per window, because too little is in flight
    // for the new length; the old rate must be remembered longer than that, or it would spiral down.
    static constexpr int64_t TRIP_SPAN_NS = 2500000000, RATE_SPAN_NS = 10000000000;
    static constexpr int64_t SLOW_START_TRIPS = 10;
    static constexpr double TRIPS = 25;                 // or so many round trips, where they are long
    static constexpr double LEAST_SHARE = 1 / 1.5;      // of the maximum rate
    static constexpr double FULL = 1.15, DRAINED = 0.9;  // times the bandwidth-delay product
    static constexpr double LONGEST_PAUSE_NS = 1e9;     // whatever the peer claims

    bool far_ = false;
    double rate_ = 0, grown_ = 0;  // bytes per second; when it last grew
    int64_t due_ns_ = 0;
    double first_ns_ = 0, last_ns_ = 0;   // arrivals of this window, on the peer's clock
    uint64_t chunks_ = 0, bytes_ = 0;     // in it; bytes after the first chunk
    int64_t heard_ns_ = 0;                // time of the last acknowledgement
    uint32_t burst_ = 0, arriving_ = 0;   // sent without a pause between: the last one, and the one of this window
    bool paused_ = false;                 // since the last chunk
    size_t since_growth_ = 0;
    uint64_t in_flight_ = 0, chunk_ = 0;  // unacknowledged bytes; bytes of the largest chunk
    std::deque<double> samples_;
    // Minimum one-way delays of chunks and of acknowledgements (the clock offset is in both, with
    // opposite signs); and by how much recent acknowledgements exceeded it.
    WindowedBest<std::less<>> forward_ns_, return_ns_;
    double late_ns_ = 0;
    // Under continuous load the line is drained now and then (BBR's ProbeRTT): its queue would otherwise
    // count as propagation delay.
    bool drains_ = false;
    int64_t drained_ns_ = 0;
    int64_t starting_until_ns_ = 0;
    WindowedBest<std::greater<>> max_rate_;

    void pace(uint64_t bytes, int64_t now) {
        in_flight_ += bytes;
        chunk_ = std::max(chunk_, bytes);
        if (rate_ == 0) return;
        double gain = grows() ? 2.0 : 1.25;
        double pause_ns = std::min(bytes * 1e9 / (gain * rate_), LONGEST_PAUSE_NS);
        due_ns_ = std::max(due_ns_, now - (far_ ? 2 : 1) * SLACK_NS) + static_cast<int64_t>(pause_ns);
    }

    bool grows() const { return since_growth_ < STALLED_WINDOWS; }

    bool has_room() const {
        if (drains_) return in_flight_ < bytes_of(DRAINED * trip_ns());
        double full_ns = (grows() ? 2.0 : FULL) * trip_ns() + late_ns_;
        return in_flight_ < bytes_of(full_ns) + std::max(rate_ * SLACK_NS * 1e-9, SPARE * chunk_);
    }

    double bytes_of(double ns) const { return std::max(rate_, LEAST_SHARE * max_rate_.best()) * ns * 1e-9; }

    int64_t trip_span_ns() const {
        return static_cast<int64_t>(std::clamp(TRIPS * trip_ns(), 1.0 * TRIP_SPAN_NS, 4.0 * TRIP_SPAN_NS));
    }

    double trip_ns() const { return std::max(0.0, forward_ns_.best() + return_ns_.best()); }

    // Samples at the end of a burst are too low, those after a pause too high: take the third quartile.
    void note(double rate, int64_t now) {
        if (now < starting_until_ns_ && rate < rate_) return;
        samples_.push_back(rate);
        if (samples_.size() > MEMORY) samples_.pop_front();
        std::vector<double> sorted(samples_.begin(), samples_.end());
        std::sort(sorted.begin(), sorted.end());
        rate_ = sorted[(sorted.size() - 1) * 3 / 4];
        max_rate_.add(rate_, now, RATE_SPAN_NS);
        since_growth_++;
        if (rate_ > 1.1 * grown_) since_growth_ = 0;
        if (rate_ > 1.1 * grown_ || rate_ < grown_ / 2) grown_ = rate_;
    }
};

}  // namespace weft
