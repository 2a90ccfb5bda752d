// How fast a link hands chunks to its connections.
//
// Left alone, connections take all there is at once, and it waits in queues below us, where a
// chunk of a lesser turn that comes later cannot pass it, or behind the full window of one of
// many connections, while the others go on with what is of a later turn. So a link sends hardly
// faster than chunks have arrived, and has hardly more on its way than is in flight at that rate,
// acknowledgements that wait at the other end included: what waits, waits here, in the order of turns.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

namespace weft {

// The best of what was seen within the last one to two spans of time.
template <typename Better>
class Recent {
public:
    void see(double value, int64_t now, int64_t span_ns) {
        if (now - since_ns_ < span_ns) {
            current_ = better(value, current_);
            return;
        }
        before_ = now - since_ns_ < 2 * span_ns ? current_ : value;
        current_ = value;
        since_ns_ = now;
    }

    double best() const { return better(current_, before_); }

private:
    int64_t since_ns_ = INT64_MIN / 2;
    double current_ = 0, before_ = 0;

    static double better(double one, double other) { return Better()(one, other) ? one : other; }
};

class Pace {
public:
    // Whether the next chunk may leave.
    bool ready(int64_t now) const { return rate_ == 0 || (now >= due_ns_ && has_room()); }

    // When it may, if nothing but time is lacking; otherwise 0.
    int64_t due_ns(int64_t now) const { return rate_ > 0 && now < due_ns_ && has_room() ? due_ns_ : 0; }

    void sent(uint64_t bytes, int64_t now) {
        in_flight_ += bytes;
        chunk_ = std::max(chunk_, bytes);
        if (rate_ == 0) return;
        double gain = grows() ? 2.0 : 1.25;
        double pause_ns = std::min(bytes * 1e9 / (gain * rate_), LONGEST_PAUSE_NS);
        due_ns_ = std::max(due_ns_, now - (far_ ? 2 : 1) * SLACK_NS) + static_cast<int64_t>(pause_ns);
    }

    // What the peer will not acknowledge, for its connection broke.
    void lost(uint64_t bytes) { in_flight_ -= bytes; }

    // A chunk that left at `sent_ns` arrived at `arrived_ns` of the peer's clock, of which only
    // differences count. It tells a queue on our way from one that acknowledgements wait in.
    void delivered(uint64_t bytes, int64_t sent_ns, double arrived_ns, int64_t now) {
        in_flight_ -= bytes;
        double back_ns = now - arrived_ns;
        way_ns_.see(arrived_ns - sent_ns, now, trip_span_ns());
        back_ns_.see(back_ns, now, trip_span_ns());
        late_ns_ += (back_ns - back_ns_.best() - late_ns_) / 16;
        if (chunks_++) bytes_ += bytes;
        else first_ns_ = last_ns_ = arrived_ns, bytes_ = 0;
        last_ns_ = std::max(last_ns_, arrived_ns);
        heard_ns_ = now;
    }

    // To be called often. A peer nearer than NEAR_NS is in the same site, and not paced; no longer,
    // where the first round trip known was that of a busy machine.
    void watch(int64_t now, int64_t rtt_ns) {
        far_ = rtt_ns > FAR_NS;
        if (rtt_ns < NEAR_NS) return void(rate_ = 0);
        if (rate_ == 0 || in_flight_ <= bytes_of(DRAINED * trip_ns())) drained_ns_ = now;
        drains_ = now - drained_ns_ > trip_span_ns();
        if (!chunks_) return;
        int64_t window = std::clamp(rtt_ns / 4, WINDOW_NS, 5 * WINDOW_NS);
        double passed = last_ns_ - first_ns_;
        if (passed >= window && chunks_ > CHUNKS) note(bytes_ * 1e9 / passed, now);
        else if (now - heard_ns_ < rtt_ns) return;
        chunks_ = 0;
    }

    // Whether the way is so long that nobody notices 2 ms.
    bool far() const { return far_; }

private:
    static constexpr int64_t NEAR_NS = 2000000, FAR_NS = 15000000, WINDOW_NS = 10000000, SLACK_NS = 2000000;
    static constexpr uint64_t CHUNKS = 8;
    static constexpr size_t PATIENCE = 8, MEMORY = 16;  // windows
    static constexpr double SPARE = 4;                  // chunks beside what the line holds
    // Where the way gets longer for good, less comes back in a window because less is under way for
    // its length; the rate that was must outlive that, or it would go down and down.
    static constexpr int64_t TRIP_SPAN_NS = 2500000000, RATE_SPAN_NS = 10000000000;
    static constexpr double TRIPS = 25;                 // or so many trips, where they are long
    static constexpr double LEAST_SHARE = 1 / 1.5;      // of the greatest rate
    static constexpr double FULL = 1.15, DRAINED = 0.9;  // times what the line holds
    static constexpr double LONGEST_PAUSE_NS = 1e9;     // whatever the peer says

    bool far_ = false;
    double rate_ = 0, grown_ = 0;  // bytes per second; when it last grew
    int64_t due_ns_ = 0;
    double first_ns_ = 0, last_ns_ = 0;   // arrivals of this window, on the peer's clock
    uint64_t chunks_ = 0, bytes_ = 0;     // in it; bytes after the first
    int64_t heard_ns_ = 0;                // the last acknowledgement, on our clock
    size_t since_growth_ = 0;
    uint64_t in_flight_ = 0, chunk_ = 0;  // bytes that are not acknowledged; of the largest chunk
    std::deque<double> samples_;
    // The shortest way of a chunk to the peer and of an acknowledgement back, with the difference
    // of the clocks in the one and out of the other; and how much longer the last ones took back.
    Recent<std::less<>> way_ns_, back_ns_;
    double late_ns_ = 0;
    // Where chunks never cease, the line is let run empty now and then: its queue would count as its way.
    bool drains_ = false;
    int64_t drained_ns_ = 0;
    Recent<std::greater<>> greatest_;

    bool grows() const { return since_growth_ < PATIENCE; }

    bool has_room() const {
        if (drains_) return in_flight_ < bytes_of(DRAINED * trip_ns());
        double full_ns = (grows() ? 2.0 : FULL) * trip_ns() + late_ns_;
        return in_flight_ < bytes_of(full_ns) + std::max(rate_ * SLACK_NS * 1e-9, SPARE * chunk_);
    }

    double bytes_of(double ns) const { return std::max(rate_, LEAST_SHARE * greatest_.best()) * ns * 1e-9; }

    int64_t trip_span_ns() const {
        return static_cast<int64_t>(std::clamp(TRIPS * trip_ns(), 1.0 * TRIP_SPAN_NS, 4.0 * TRIP_SPAN_NS));
    }

    double trip_ns() const { return std::max(0.0, way_ns_.best() + back_ns_.best()); }

    // Windows with the end of a burst show too little, those after a pause of ours too much.
    void note(double rate, int64_t now) {
        samples_.push_back(rate);
        if (samples_.size() > MEMORY) samples_.pop_front();
        std::vector<double> sorted(samples_.begin(), samples_.end());
        std::sort(sorted.begin(), sorted.end());
        rate_ = sorted[(sorted.size() - 1) * 3 / 4];
        greatest_.see(rate_, now, RATE_SPAN_NS);
        since_growth_++;
        if (rate_ > 1.1 * grown_) since_growth_ = 0;
        if (rate_ > 1.1 * grown_ || rate_ < grown_ / 2) grown_ = rate_;
    }
};

}  // namespace weft
