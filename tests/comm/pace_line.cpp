// A link with a pace on a line of one rate: what it carries, and what waits on the line.
#include <deque>

#include "pace.hpp"

struct Result {
    double carried;     // share of the line's rate, over the last second
    double backlog_ms;  // of the line's queue, on average over the last second
};

struct Sent {
    int64_t at, acknowledged;
};

// `busy_ms` of every `cycle_ms` there is something to send; the line is cut from `cut_ms` to `healed_ms`,
// and the way takes `later_rtt_ms` in the second half of the time.
extern "C" Result pace_on_line(double rate, double rtt_ms, double later_rtt_ms, double window_bytes, int seconds,
                               int busy_ms, int cycle_ms, int cut_ms, int healed_ms) {
    const int64_t MS = 1000000;
    const double chunk = 8192;
    weft::Pace pace;
    std::deque<Sent> flying;  // chunks on their way
    double free_ns = 0, carried = 0, backlog = 0;
    int samples = 0;
    for (int64_t ms = 1; ms <= seconds * 1000; ms++) {
        int64_t now = ms * MS;
        bool cut = ms >= cut_ms && ms < healed_ms, last = ms > (seconds - 1) * 1000;
        if (ms == seconds * 500) rtt_ms = later_rtt_ms;
        while (!cut && !flying.empty() && flying.front().acknowledged <= now) {
            pace.delivered(static_cast<uint64_t>(chunk), flying.front().at, now);
            flying.pop_front();
            carried += last ? chunk : 0;
        }
        pace.watch(now, static_cast<int64_t>(rtt_ms * MS));
        while (ms % cycle_ms < busy_ms && pace.ready(now) && flying.size() * chunk < window_bytes) {
            pace.sent(static_cast<uint64_t>(chunk), now);
            free_ns = std::max(free_ns, static_cast<double>(now)) + chunk * 1e9 / rate;
            flying.push_back({now, static_cast<int64_t>(free_ns + rtt_ms * MS)});
        }
        if (last) backlog += std::max(0.0, free_ns - now) / MS, samples++;
    }
    return {carried / rate, backlog / samples};
}
