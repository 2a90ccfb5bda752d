// A link with a pace on a line of one rate: what it carries, and what waits on the line.
#include <deque>

#include "pace.hpp"

struct Result {
    double carried;     // share of the line's rate, over the last second
    double backlog_ms;  // of the line's queue, on average over the last second
};

// `busy_ms` of every `cycle_ms` there is something to send; the line is cut from `cut_ms` to `healed_ms`.
extern "C" Result pace_on_line(double rate, double rtt_ms, double window_bytes, int seconds, int busy_ms, int cycle_ms,
                               int cut_ms, int healed_ms) {
    const int64_t MS = 1000000;
    const double chunk = 8192;
    weft::Pace pace;
    std::deque<int64_t> acknowledged;  // when each chunk on its way will be
    double free_ns = 0, carried = 0, backlog = 0;
    int samples = 0;
    for (int64_t ms = 1; ms <= seconds * 1000; ms++) {
        int64_t now = ms * MS;
        bool cut = ms >= cut_ms && ms < healed_ms, last = ms > (seconds - 1) * 1000;
        while (!cut && !acknowledged.empty() && acknowledged.front() <= now) {
            acknowledged.pop_front();
            pace.delivered(static_cast<uint64_t>(chunk), now);
            carried += last ? chunk : 0;
        }
        pace.watch(now, static_cast<int64_t>(rtt_ms * MS));
        while (ms % cycle_ms < busy_ms && pace.ready(now) && acknowledged.size() * chunk < window_bytes) {
            pace.sent(static_cast<uint64_t>(chunk), now);
            free_ns = std::max(free_ns, static_cast<double>(now)) + chunk * 1e9 / rate;
            acknowledged.push_back(static_cast<int64_t>(free_ns + rtt_ms * MS));
        }
        if (last) backlog += std::max(0.0, free_ns - now) / MS, samples++;
    }
    return {carried / rate, backlog / samples};
}
