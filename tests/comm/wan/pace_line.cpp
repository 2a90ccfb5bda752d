// A link with a pace on a line of one rate: what it carries, and what waits on the line.
#include <algorithm>
#include <cmath>
#include <deque>

#include "pacer.hpp"

struct Result {
    double carried;     // share of the line's rate, over the last second
    double backlog_ms;  // of the line's queue, on average over the last second
};

struct Sent {
    int64_t at, arrived, acknowledged;
    uint32_t burst;
};

// `busy_ms` of every `cycle_ms` there is something to send; the line is cut from `cut_ms` to `healed_ms`,
// and the way takes `later_rtt_ms` in the second half of the time.
extern "C" Result pace_on_line(double rate, double rtt_ms, double later_rtt_ms, double window_bytes, int seconds,
                               int busy_ms, int cycle_ms, int cut_ms, int healed_ms) {
    const int64_t MS = 1000000;
    const double chunk = 8192;
    weft::Pacer pace;
    std::deque<Sent> flying;  // chunks on their way
    double free_ns = 0, carried = 0, backlog = 0;
    int samples = 0;
    for (int64_t ms = 1; ms <= seconds * 1000; ms++) {
        int64_t now = ms * MS;
        bool cut = ms >= cut_ms && ms < healed_ms, last = ms > (seconds - 1) * 1000;
        if (ms == seconds * 500) rtt_ms = later_rtt_ms;
        while (!cut && !flying.empty() && flying.front().acknowledged <= now) {
            pace.delivered(static_cast<uint64_t>(chunk), flying.front().burst, flying.front().at, flying.front().arrived, now);
            flying.pop_front();
            carried += last ? chunk : 0;
        }
        pace.update(now, static_cast<int64_t>(rtt_ms * MS));
        while (ms % cycle_ms < busy_ms && pace.ready(now) && flying.size() * chunk < window_bytes) {
            uint32_t burst = pace.sent(static_cast<uint64_t>(chunk), now);
            free_ns = std::max(free_ns, static_cast<double>(now)) + chunk * 1e9 / rate;
            int64_t arrived = static_cast<int64_t>(free_ns + rtt_ms / 2 * MS);
            flying.push_back({now, arrived, static_cast<int64_t>(arrived + rtt_ms / 2 * MS), burst});
        }
        if (ms % cycle_ms >= busy_ms && pace.ready(now)) pace.idle();
        if (last) backlog += std::max(0.0, free_ns - now) / MS, samples++;
    }
    return {carried / rate, backlog / samples};
}

// The line is cut after 4 s for `cut_ms`; what was on it is lost, and new connections start slowly: their window
// doubles with every round trip. Carried and backlog are of the second that begins 8 round trips after healing.
extern "C" Result pace_after_cut(double rate, double rtt_ms, int cut_ms) {
    const int64_t MS = 1000000;
    const double chunk = 8192;
    const int healed_ms = 4000 + cut_ms, counted_ms = healed_ms + static_cast<int>(8 * rtt_ms);
    weft::Pacer pace;
    std::deque<Sent> flying;
    double free_ns = 0, carried = 0, backlog = 0;
    for (int64_t ms = 1; ms <= counted_ms + 1000; ms++) {
        int64_t now = ms * MS;
        bool cut = ms >= 4000 && ms < healed_ms, counts = ms > counted_ms;
        if (ms == healed_ms) {
            for (; !flying.empty(); flying.pop_front()) pace.lost(static_cast<uint64_t>(chunk));
            pace.resume(now, cut_ms * MS, static_cast<int64_t>(rtt_ms * MS));
            free_ns = now;
        }
        for (; !cut && !flying.empty() && flying.front().acknowledged <= now; flying.pop_front()) {
            pace.delivered(static_cast<uint64_t>(chunk), flying.front().burst, flying.front().at, flying.front().arrived, now);
            carried += counts ? chunk : 0;
        }
        pace.update(now, static_cast<int64_t>(rtt_ms * MS));
        double window = 2 * rate * rtt_ms / 1e3 + 3 * chunk;
        if (ms >= healed_ms) window = std::min(window, 10 * chunk * std::exp2((ms - healed_ms) / rtt_ms));
        while (pace.ready(now) && flying.size() * chunk < window) {
            uint32_t burst = pace.sent(static_cast<uint64_t>(chunk), now);
            free_ns = std::max(free_ns, static_cast<double>(now)) + chunk * 1e9 / rate;
            int64_t arrived = static_cast<int64_t>(free_ns + rtt_ms / 2 * MS);
            flying.push_back({now, arrived, static_cast<int64_t>(arrived + rtt_ms / 2 * MS), burst});
        }
        backlog += counts ? std::max(0.0, free_ns - now) / MS : 0;
    }
    return {carried / rate, backlog / 1000};
}

struct Direction {
    weft::Pacer pace;
    double free_ns = 0;           // when the line has sent what it holds
    std::deque<Sent> going;       // chunks on their way
    std::deque<Sent> returning;   // their acknowledgements, on the other direction's line
    double carried = 0, backlog = 0;
};

// Both directions send all they may; acknowledgements wait in the other direction's queue and take
// `ack_bytes` of its line. The clocks differ by a day. The lesser of what the directions carry, and the
// greater of their queues, over the second half of the time.
extern "C" Result pace_both_ways(double rate, double rtt_ms, double ack_bytes, int seconds) {
    const int64_t MS = 1000000, DAY = 86400000 * MS;
    const double chunk = 8192, window_bytes = std::max(8 * rate * rtt_ms / 1e3, 16 * chunk);
    Direction both[2];
    auto enter = [&](Direction &line, double bytes, int64_t now) {
        line.free_ns = std::max(line.free_ns, static_cast<double>(now)) + bytes * 1e9 / rate;
        return static_cast<int64_t>(line.free_ns + rtt_ms / 2 * MS);
    };
    for (int64_t ms = 1; ms <= seconds * 1000; ms++) {
        int64_t now = ms * MS;
        bool counts = ms > seconds * 500;
        for (int i = 0; i < 2; i++) {
            Direction &out = both[i], &back = both[1 - i];
            for (; !out.going.empty() && out.going.front().arrived <= now; out.going.pop_front())
                out.returning.push_back(
                    {out.going.front().at, now, enter(back, ack_bytes, now), out.going.front().burst});
            for (; !out.returning.empty() && out.returning.front().acknowledged <= now; out.returning.pop_front()) {
                const Sent &sent = out.returning.front();
                out.pace.delivered(static_cast<uint64_t>(chunk), sent.burst, sent.at,
                                   static_cast<double>(sent.arrived + DAY), now);
                out.carried += counts ? chunk : 0;
            }
            out.pace.update(now, static_cast<int64_t>(rtt_ms * MS));
            while (out.pace.ready(now) && (out.going.size() + out.returning.size()) * chunk < window_bytes) {
                uint32_t burst = out.pace.sent(static_cast<uint64_t>(chunk), now);
                out.going.push_back({now, enter(out, chunk, now), 0, burst});
            }
            out.backlog += counts ? std::max(0.0, out.free_ns - now) / MS : 0;
        }
    }
    return {std::min(both[0].carried, both[1].carried) / (rate * seconds / 2),
            std::max(both[0].backlog, both[1].backlog) / (seconds * 500)};
}

// Messages of a few bytes, `together` at once as in a conversation of several, for two seconds; then one of
// `large_bytes`. The peer takes `reading_ms` for each of the small ones. How long the large one takes to arrive, in
// milliseconds; -1 after ten seconds.
extern "C" double pace_after_small_talk(double rate, double rtt_ms, double small_bytes, int every_ms, int together,
                                        double reading_ms, double large_bytes) {
    const int64_t MS = 1000000, LARGE_AT = 2000;
    const double chunk = 8192;
    weft::Pacer pace;
    std::deque<std::pair<Sent, double>> flying;
    double free_ns = 0, left = 0, arrived = 0, queued = 0;
    auto send = [&](double bytes, int64_t now, double reading_ns = 0) {
        uint32_t burst = pace.sent(static_cast<uint64_t>(bytes), now);
        free_ns = std::max(free_ns, static_cast<double>(now)) + std::max(bytes * 1e9 / rate, reading_ns);
        int64_t there = static_cast<int64_t>(free_ns + rtt_ms / 2 * MS);
        flying.push_back({{now, there, static_cast<int64_t>(there + rtt_ms / 2 * MS), burst}, bytes});
    };
    for (int64_t ms = 1; ms <= LARGE_AT + 10000; ms++) {
        int64_t now = ms * MS;
        for (; !flying.empty() && flying.front().first.acknowledged <= now; flying.pop_front()) {
            const auto &[sent, bytes] = flying.front();
            pace.delivered(static_cast<uint64_t>(bytes), sent.burst, sent.at, static_cast<double>(sent.arrived), now);
            arrived += ms > LARGE_AT ? bytes : 0;
        }
        if (ms > LARGE_AT && arrived >= large_bytes) return static_cast<double>(ms - LARGE_AT) - rtt_ms / 2;
        pace.update(now, static_cast<int64_t>(rtt_ms * MS));
        if (ms == LARGE_AT) left = large_bytes;
        if (ms < LARGE_AT && ms % every_ms == 0) queued += together;
        for (; ms < LARGE_AT && queued > 0 && pace.ready(now); queued--) send(small_bytes, now, reading_ms * MS);
        for (; left > 0 && pace.ready(now); left -= chunk) send(std::min(left, chunk), now);
        if (left <= 0 && queued <= 0 && pace.ready(now)) pace.idle();
        if (ms == LARGE_AT) queued = 0;
    }
    return -1;
}
