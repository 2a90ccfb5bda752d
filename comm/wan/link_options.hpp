// Options and counters of a link.
#pragma once
#include <atomic>
#include <cstdint>
#include <string>

#include "handshake.hpp"

namespace weft {

constexpr int64_t SECOND = 1000000000;
constexpr char CLOSED[] = "closed";  // the reason in the BYE of an endpoint that was closed
constexpr uint16_t SINK = 0xffff;  // a lane whose messages are acknowledged and discarded, for probes

struct Options {
    uint32_t id;
    Job job;
    uint64_t session;
    uint32_t chunk_bytes;
    int unsent_bytes;
    int64_t deadline_ns;   // silence after which a link fails
    int64_t patience_ns;   // the same before the first contact
    int64_t interval_ns;   // between pings
    int64_t stall_ns;      // silence after which a connection is replaced
    int64_t attempt_ns;    // limit for connecting and the handshake
    std::string key, tls_key, congestion;
    std::string port_key;  // empty: connections begin without a `PortHello`, and this endpoint listens for itself
};

// If one iteration of the loop moves fewer than `bytes`, the loop sleeps `ns` to batch more packets.
struct Batching {
    uint64_t bytes = 32 << 10;
    int64_t ns = 1000000;
};

struct Counters {  // also read by other threads
    std::atomic<uint64_t> sent_bytes{0}, received_bytes{0}, resent_chunks{0}, duplicate_chunks{0}, broken{0}, ready{0};
    std::atomic<uint64_t> queued_bytes{0};  // of messages, not acknowledged yet
    std::atomic<int64_t> rtt_ns{0};  // the minimum so far
    std::atomic<int64_t> busy_ns{0};  // with unacknowledged payload, less one round trip for each such period
};

}  // namespace weft
