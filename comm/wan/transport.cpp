// The C interface for Python: functions over opaque pointers.
#include "endpoint.hpp"

using namespace weft;

struct WanOptions {
    uint32_t id, chunk_bytes, unsent_bytes, tls;
    uint32_t port, key_bytes, tls_key_bytes, port_key_bytes;
    double deadline_s, patience_s;
    const char *job, *host, *key, *tls_key, *port_key, *congestion, *crypto, *ssl;
};

struct WanCounters {
    uint64_t sent_bytes, received_bytes, resent_chunks, duplicate_chunks, broken, ready, queued_bytes, retransmissions;
    double rtt_s, busy_s;
};

static int64_t clamped(double seconds, double least, double most) {
    return static_cast<int64_t>(std::min(std::max(seconds, least), most) * SECOND);
}

extern "C" {

// Returns null on failure, with the reason in `error`.
Endpoint *weft_wan_open(const WanOptions *given, char *error, size_t capacity) {
    try {
        load_openssl(given->crypto, given->ssl);
        Options options{};
        options.id = given->id;
        memcpy(options.job.data(), given->job, options.job.size());
        fill_random(&options.session, sizeof options.session);
        options.session |= 1;  // 0 means unknown
        options.chunk_bytes = given->chunk_bytes;
        options.unsent_bytes = static_cast<int>(given->unsent_bytes);
        options.deadline_ns = clamped(given->deadline_s, 0.1, 1e6);
        options.patience_ns = clamped(given->patience_s, 0.1, 1e6);
        options.interval_ns = clamped(given->deadline_s / 10, 0.1, 1);
        options.stall_ns = clamped(given->deadline_s / 4, 0.5, 3);
        options.attempt_ns = 2 * SECOND;
        options.key.assign(given->key, given->key_bytes);
        options.tls_key.assign(given->tls_key, given->tls_key_bytes);
        options.port_key.assign(given->port_key, given->port_key_bytes);
        options.congestion = given->congestion;
        return new Endpoint(options, given->host, static_cast<uint16_t>(given->port), given->tls);
    } catch (const std::exception &failure) {
        snprintf(error, capacity, "%s", failure.what());
        return nullptr;
    }
}

uint32_t weft_wan_port(const Endpoint *endpoint) { return endpoint->port(); }

// Names a link; with a host, this side opens the connections. Returns 0, or -1 for an invalid address.
int weft_wan_link(Endpoint *endpoint, uint32_t peer, const char *name, const char *host, uint32_t port,
                  uint32_t connections) {
    try {
        Address address = *host ? Address::of(host, static_cast<uint16_t>(port)) : Address();
        endpoint->call([&] {
            Link &link = endpoint->link(peer);
            link.name = name;
            if (!*host) return;
            link.connects = true;
            link.address = address;
            link.grow(connections);
        });
        return 0;
    } catch (const std::exception &) {
        return -1;
    }
}

void weft_wan_lane(Endpoint *endpoint, uint32_t peer, uint32_t lane, uint64_t buffer_bytes) {
    endpoint->call([=] { endpoint->link(peer).open_lane(static_cast<uint16_t>(lane), buffer_bytes); });
}

// Sets how many of a link's connections carry chunks.
void weft_wan_use(Endpoint *endpoint, uint32_t peer, uint32_t connections) {
    endpoint->call([=] { endpoint->link(peer).active = connections; });
}

// Forwards messages that arrive from one peer on a lane to another peer.
void weft_wan_relay(Endpoint *endpoint, uint32_t from, uint32_t from_lane, uint32_t to, uint32_t to_lane,
                    uint64_t buffer_bytes) {
    endpoint->call([=] {
        endpoint->relay(from, static_cast<uint16_t>(from_lane), to, static_cast<uint16_t>(to_lane), buffer_bytes);
    });
}

Request *weft_wan_send(Endpoint *endpoint, uint32_t peer, uint32_t lane, const char *tag, uint32_t priority,
                       const char *data, uint64_t bytes) {
    auto *request = new Request;
    endpoint->post([=, tag = std::string(tag)] {
        auto message = std::make_unique<Outgoing>(Outgoing{request, data, bytes, tag, priority});
        endpoint->link(peer).send(static_cast<uint16_t>(lane), std::move(message));
    });
    return request;
}

Request *weft_wan_receive(Endpoint *endpoint, uint32_t peer, uint32_t lane, const char *tag, char *data,
                          uint64_t bytes) {
    auto *request = new Request;
    endpoint->post([=, tag = std::string(tag)] {
        auto receive = std::make_unique<Receive>(Receive{request, data, bytes, tag});
        endpoint->link(peer).receive(static_cast<uint16_t>(lane), std::move(receive));
    });
    return request;
}

// Returns 1 when done, -1 if failed, 0 if still pending after the time-out.
int weft_wan_wait(Endpoint *endpoint, Request *request, double timeout_s) {
    return endpoint->wait(*request, clamped(timeout_s, 0, 1e6));
}

const char *weft_wan_error(const Request *request) { return request->error.c_str(); }

void weft_wan_free(Request *request) { delete request; }

// Number of live requests in this process; the caller of `send` and `receive` frees them.
uint64_t weft_wan_requests() { return Request::alive; }

void weft_wan_counters(Endpoint *endpoint, uint32_t peer, WanCounters *counters) {
    endpoint->call([=] {
        const Link &link = endpoint->link(peer);
        const Counters &c = link.counters;
        *counters = {c.sent_bytes, c.received_bytes, c.resent_chunks, c.duplicate_chunks,
                     c.broken,     c.ready,          c.queued_bytes,  link.retransmissions(),
                     c.rtt_ns * 1e-9, c.busy_ns * 1e-9};
    });
}

uint64_t weft_wan_refused(const Endpoint *endpoint) { return endpoint->refused(); }

void weft_wan_close(Endpoint *endpoint, double linger_s) {
    endpoint->stop(clamped(linger_s, 0, 1e6));
    delete endpoint;
}

uint32_t weft_wan_checksum(const char *data, uint64_t bytes) { return checksum(data, bytes); }

}  // extern "C"
