// A link between two endpoints: its connections, its lanes, and the chunks in flight.
//
// Every chunk is in exactly one state: unsent, in flight on one connection, or to be resent because
// that connection broke. A connection takes the next chunk when its socket buffer has space, so faster
// connections carry more. The receiver acknowledges complete chunks and drops duplicates.
#pragma once
#include "connection.hpp"
#include "link_options.hpp"
#include "outbox.hpp"
#include "pacer.hpp"

namespace weft {

class Link {
public:
    const uint32_t peer;
    std::string name = "?";
    bool connects = false;  // this side opens the connections
    Address address;
    uint32_t active;        // number of connections that carry chunks; the others idle
    Counters counters;
    std::vector<Connection *> slots;

    struct Attempt {
        int64_t due_ns = 0;
        int failures = 0;
    };
    std::vector<Attempt> attempts;
    int64_t scouted_ns = 0;  // when a connection was last tried because the link is silent

    Link(uint32_t peer, const Options &options, std::vector<Completed> &completed, int64_t now)
        : peer(peer), active(~0u), options_(options), completed_(completed), last_receive_ns_(now) {
        open_lane(SINK, ~0ull);
    }

    bool failed() const { return !failure_.empty(); }
    const std::string &cause() const { return cause_; }
    std::string lost() const { return rank(options_.id) + " lost " + rank(peer); }
    bool left() const { return !farewell_.empty(); }  // the peer has sent BYE

    void grow(uint32_t connections) {
        if (slots.size() < connections) {
            slots.resize(connections, nullptr);
            attempts.resize(connections);
        }
    }

    // ---- requests of the application

    void open_lane(uint16_t lane, uint64_t buffer_bytes) {
        lanes_[lane].open = true;
        lanes_[lane].buffer_bytes = buffer_bytes;
        lanes_[lane].credit_due = true;
    }

    Lane &lane(uint16_t number) { return lanes_[number]; }

    void send(uint16_t number, std::unique_ptr<Outgoing> message) {
        if (failed()) return void(completed_.push_back({message->request, failure_}));
        Lane &lane = lanes_[number];
        message->lane = number;
        message->ordinal = lane.next_ordinal++;
        message->start = lane.stream_bytes;
        message->unacknowledged = num_chunks(message->total, options_.chunk_bytes);
        lane.stream_bytes += message->total;
        counters.queued_bytes += message->total;
        outbox_.add(std::move(message));
    }

    void receive(uint16_t number, std::unique_ptr<Receive> receive) {
        if (failed()) return lanes_[number].post_late(std::move(receive), failure_, completed_);
        lanes_[number].post(std::move(receive), completed_);
        check_sizes(lanes_[number]);
    }

    // True if the peer has acknowledged everything, and every acknowledgement of ours is sent.
    bool drained() const {
        auto quiet = [](const Connection *connection) { return !connection || connection->quiet(); };
        return failed() || (outbox_.empty() && std::all_of(slots.begin(), slots.end(), quiet));
    }

    // ---- connections

    // Why an authenticated peer is refused; empty if it is accepted.
    std::string refuses(uint64_t session, uint32_t chunk_bytes) const {
        if (failed()) return "the link has failed";
        if (chunk_bytes < MIN_CHUNK || chunk_bytes > MAX_CHUNK) return "its chunk size is out of bounds";
        if (session_ && session_ != session) return "its peer has restarted";
        if (session_ && chunk_bytes != peer_chunk_bytes_) return "its chunk size has changed";
        return "";
    }

    void attach(Connection &connection, uint64_t session, uint32_t chunk_bytes, int64_t now) {
        session_ = session;
        peer_chunk_bytes_ = chunk_bytes;
        if (silent(now)) {
            trusted_ns_ = last_receive_ns_ + 1;
            pacer_.resume(now, now - last_receive_ns_, counters.rtt_ns);
        }
        connection.link = this;
        connection.stage = Stage::READY;
        connection.last_receive_ns = last_receive_ns_ = now;
        refused_since_ns_ = 0;
        grow(connection.slot + 1);
        attempts[connection.slot].failures = 0;
        if (Connection *old = slots[connection.slot]) lose(*old, "replaced by a new connection");
        slots[connection.slot] = &connection;
        counters.ready++;
        for (auto &[number, lane] : lanes_)
            if (lane.open) connection.send(CREDIT, number, lane.granted());
    }

    // Marks a connection as broken and queues its chunks for resending. The loop closes it.
    void lose(Connection &connection, const std::string &why) {
        if (!connection.dead.empty()) return;
        connection.dead = why;
        if (connection.slot >= slots.size() || slots[connection.slot] != &connection) return;
        slots[connection.slot] = nullptr;
        counters.ready--;
        counters.broken += !left();
        last_trouble_ = why;
        counters.resent_chunks += connection.unacknowledged.size();
        lost_retransmissions_ += connection.stream.retransmissions();
        for (const Chunk &chunk : connection.unacknowledged) pacer_.lost(chunk.length);
        outbox_.resend(connection.unacknowledged);
        connection.unacknowledged.clear();
        for (auto &[_, lane] : lanes_) lane.credit_due |= lane.open;  // the last CREDIT may be lost
    }

    // TCP segments that the kernel has sent again, on connections of the past as well.
    uint64_t retransmissions() const {
        uint64_t sum = lost_retransmissions_;
        for (const Connection *connection : slots)
            if (connection) sum += connection->stream.retransmissions();
        return sum;
    }

    // True if the peer, which was pinged meanwhile, has been silent for longer than a lost packet explains.
    bool silent(int64_t now) const { return session_ && now - last_receive_ns_ > 2 * quiet_ns(); }

    // Returns true if `slot` can use a connection opened at `opened_ns`, because its current one is silent.
    bool needs(uint32_t slot, int64_t opened_ns) const {
        return slot >= slots.size() || !slots[slot] || slots[slot]->last_receive_ns < opened_ns;
    }

    // Time limit for connecting and the handshake: some round trips, once known.
    int64_t attempt_limit() const {
        int64_t rtt = counters.rtt_ns;
        return rtt ? std::clamp<int64_t>(10 * rtt, SECOND * 3 / 10, options_.attempt_ns) : options_.attempt_ns;
    }

    void attempt_failed(uint32_t slot, const std::string &why, bool refused, int64_t now) {
        last_trouble_ = why;
        Attempt &attempt = attempts[slot];
        attempt.due_ns = now + std::min<int64_t>(SECOND, (20 * SECOND / 1000) << std::min(attempt.failures++, 6));
        if (!refused) refused_since_ns_ = 0;
        else if (!refused_since_ns_) refused_since_ns_ = now;
    }

    // Sends queued chunks on connections that can take them. Returns whether there is more to do.
    bool pump(int64_t now) {
        now_ = now;
        if (!busy_since_ns_ && !outbox_.empty()) busy_since_ns_ = now;
        rotation_++;
        pacer_.update(now, counters.rtt_ns);
        send_credit();
        for (Connection *connection : slots)
            if (connection && connection->dead.empty()) flush(*connection);
        Chunk chunk;
        for (size_t left = 8 * slots.size(); left; left--) {
            Connection *connection = pacer_.ready(now_) ? least_loaded() : nullptr;
            if (!connection) return false;
            if (!outbox_.next(chunk, options_.chunk_bytes, lanes_)) return pacer_.idle(), false;
            chunk.sent_ns = now_;
            chunk.burst = pacer_.sent(chunk.length, now_);
            connection->begin(chunk);
            flush(*connection);
        }
        return !slots.empty();  // without a connection so far there is nothing to send on
    }

    // When `pump` can send more without any other event; 0 if unknown.
    int64_t due_ns() const { return pacer_.due_ns(now_); }

    // Several connections on a long route need not be served at every moment.
    Batching batching() const {
        Batching least;
        if (counters.ready < SHARED || !pacer_.far()) return least;
        return {std::max<uint64_t>(least.bytes, 2 * options_.chunk_bytes), 2 * least.ns};
    }

    // ---- frames

    void on_header(Connection &connection, int64_t now) {
        const Frame &frame = connection.in;
        connection.last_receive_ns = last_receive_ns_ = now;
        if (frame.type == DATA) return take_chunk(connection);
        if (frame.length) throw Broken("received a frame with an invalid length");
        switch (frame.type) {
            case ACK: acknowledge(connection, frame.offset, static_cast<double>(frame.message), now); break;
            case CREDIT: lanes_[frame.lane].credit = std::max(lanes_[frame.lane].credit, frame.offset); break;
            case PING: connection.send(PONG, 0, frame.offset); break;
            case PONG: {
                int64_t rtt = now - static_cast<int64_t>(frame.offset), least = counters.rtt_ns;
                if (rtt > 0 && (!least || rtt < least)) counters.rtt_ns = rtt;
                break;
            }
            case BYE:
                farewell_ = frame.tag_text();
                lose(connection, farewell_);
                break;
            default: throw Broken("received a frame of unknown type");
        }
        connection.next_frame();
    }

    void on_payload(Connection &connection, int64_t now) {
        if (connection.target == Connection::NOWHERE) {
            counters.duplicate_chunks += connection.in.lane != SINK;
        } else {
            if (!connection.payload_intact()) throw Broken("received a chunk with a wrong checksum");
            another_reads(connection, [](Connection &other) { other.aim_nowhere(); });
            Lane &lane = lanes_[connection.in.lane];
            counters.received_bytes += connection.in.length;
            lane.arrived(connection.in, peer_chunk_bytes_, std::move(connection.stash), completed_);
            connection.stash = {};
        }
        connection.chunks_received++;
        connection.arrived_ns = now;
        connection.ack_due = true;
        connection.next_frame();
    }

    // ---- time

    void tick(int64_t now) {
        if (failed()) return;
        if (left() && !counters.ready)
            return fail("closed by the peer: " + farewell_, farewell_ == CLOSED ? rank(peer) + " closed" : farewell_);
        Connection *pinged = nullptr;  // the longest time ago
        for (Connection *connection : slots) {
            if (!connection) continue;
            if (!pinged || connection->pinged_ns < pinged->pinged_ns) pinged = connection;
            if (now - connection->last_receive_ns > options_.stall_ns) {
                lose(*connection, "silent for " + seconds(options_.stall_ns));
            } else if (now - last_receive_ns_ < SECOND / 5 && connection->stuck(now - SECOND / 5)) {
                // The link works, and TCP's retransmission timeout would grow exponentially.
                lose(*connection, "stuck while others move");
            } else if (now - connection->pinged_ns > options_.interval_ns) {
                ping(*connection, now);
            }
        }
        if (pinged && pinged->dead.empty() && std::min(now - last_receive_ns_, now - last_ping_ns_) > quiet_ns())
            ping(*pinged, now);
        int64_t limit = session_ ? options_.deadline_ns : options_.patience_ns;
        std::string trouble = last_trouble_.empty() ? "" : "; last trouble: " + last_trouble_;
        if (now - last_receive_ns_ > limit)
            fail((session_ ? "silent for " : "no contact within ") + seconds(limit) + trouble, lost());
        else if (session_ && refused_since_ns_ && now - refused_since_ns_ > 2 * SECOND && !counters.ready)
            fail("the other process has exited" + trouble, lost());
    }

    // The machine or the process was suspended: the silence was on this side.
    void shift_deadlines(int64_t pause_ns) {
        last_receive_ns_ += pause_ns;
        for (Connection *connection : slots)
            if (connection) connection->last_receive_ns += pause_ns;
    }

    // `cause` is passed on to the peer, and to links that depend on this one.
    void fail(const std::string &why, const std::string &cause) {
        if (failed()) return;
        failure_ = "link " + name + ": " + why;
        cause_ = cause;
        outbox_.fail(failure_, completed_);
        for (auto &[_, lane] : lanes_) lane.fail(failure_, completed_);
        send_bye(cause);
        for (Connection *connection : slots)
            if (connection) lose(*connection, failure_);
        outbox_.clear();
        counters.queued_bytes = 0;
    }

    void send_bye(const std::string &why) {
        for (Connection *connection : slots) {
            if (!connection || !connection->dead.empty()) continue;
            try {
                connection->flush();
                if (connection->sending()) continue;
                connection->send_bye(why);
                connection->flush();
            } catch (const Broken &) {
                continue;
            }
        }
    }

private:
    static constexpr uint64_t SHARED = 4;  // connections

    const Options &options_;
    std::vector<Completed> &completed_;
    std::map<uint16_t, Lane> lanes_;
    Outbox outbox_;
    uint64_t session_ = 0;          // of the peer; 0 before the first connection
    uint32_t peer_chunk_bytes_ = 0;
    int64_t last_receive_ns_, last_ping_ns_ = 0, refused_since_ns_ = 0;
    uint64_t lost_retransmissions_ = 0;  // of connections that have ended
    int64_t busy_since_ns_ = 0;     // the outbox has not been empty since then; 0 while it is
    int64_t trusted_ns_ = 0;        // connections that received nothing since then predate a silence
    size_t rotation_ = 0;
    Pacer pacer_;
    int64_t now_ = 0;  // of the last `pump`
    std::string failure_, cause_, farewell_, last_trouble_;

    static std::string rank(uint32_t id) { return "rank " + std::to_string(id); }

    static std::string seconds(int64_t ns) {
        char text[32];
        snprintf(text, sizeof text, "%g s", ns * 1e-9);
        return text;
    }

    // After which a link without traffic is pinged.
    int64_t quiet_ns() const { return std::max<int64_t>(3 * counters.rtt_ns, SECOND * 3 / 20); }

    void ping(Connection &connection, int64_t now) {
        connection.pinged_ns = last_ping_ns_ = now;
        connection.send(PING, 0, static_cast<uint64_t>(now));
    }

    void flush(Connection &connection) {
        try {
            connection.flush();
        } catch (const Broken &broken) {
            lose(connection, broken.what());
        }
    }

    // Of the connections that can take a chunk, the one with the fewest in flight: behind a full window
    // a chunk, and so its message, would wait for a round trip.
    Connection *least_loaded() const {
        Connection *best = nullptr;
        for (Connection *connection : slots) {
            if (!connection || !connection->dead.empty() || !connection->stream.writable) continue;
            if (connection->sending() || connection->slot >= active) continue;
            if (connection->last_receive_ns < trusted_ns_) continue;
            if (!best || connection->unacknowledged.size() < best->unacknowledged.size()) best = connection;
        }
        return best;
    }

    void send_credit() {
        for (auto &[number, lane] : lanes_) {
            if (!lane.credit_due) continue;
            for (size_t i = 0; i < slots.size() && lane.credit_due; i++) {
                Connection *connection = slots[(rotation_ + i) % slots.size()];
                if (!connection || !connection->dead.empty()) continue;
                connection->send(CREDIT, number, lane.granted());
                lane.credit_due = false;
            }
        }
    }

    void acknowledge(Connection &connection, uint64_t count, double arrived_ns, int64_t now) {
        if (count < connection.acknowledged || count - connection.acknowledged > connection.sent_whole())
            throw Broken("received an acknowledgement of unsent chunks");
        for (; connection.acknowledged < count; connection.acknowledged++) {
            Chunk chunk = connection.unacknowledged.front();
            connection.unacknowledged.pop_front();
            counters.sent_bytes += chunk.length;
            counters.queued_bytes -= chunk.length;
            pacer_.delivered(chunk.length, chunk.burst, chunk.sent_ns, arrived_ns, now);
            outbox_.acknowledged(chunk, completed_);
            if (busy_since_ns_ && outbox_.empty()) {
                counters.busy_ns += std::max<int64_t>(0, now - busy_since_ns_ - counters.rtt_ns);
                busy_since_ns_ = 0;
            }
        }
    }

    void take_chunk(Connection &connection) {
        const Frame &frame = connection.in;
        auto lane = lanes_.find(frame.lane);
        if (lane == lanes_.end() || !lane->second.open) throw Broken("received a chunk for a lane that is not open");
        if (frame.length > peer_chunk_bytes_ || frame.total > MAX_MESSAGE || frame.offset % peer_chunk_bytes_ ||
            (frame.offset >= frame.total && frame.offset) ||
            frame.length != std::min<uint64_t>(peer_chunk_bytes_, frame.total - frame.offset))
            throw Broken("received a chunk with an invalid length");
        if (frame.lane == SINK) return connection.aim(Connection::NOWHERE, nullptr);
        Incoming *message = lane->second.arriving(frame, peer_chunk_bytes_, completed_);
        check_sizes(lane->second);
        if (failed() || !message) return connection.aim(Connection::NOWHERE, nullptr);
        if (message->receive && !another_reads(connection))
            return connection.aim(Connection::RECEIVE, message->receive->data + frame.offset);
        if (!lane->second.stash_has_room(frame.length)) throw Broken("the peer sent more than its credit");
        connection.stash.resize(frame.length);
        connection.aim(Connection::STASH, connection.stash.data());
    }

    // True if another connection is receiving the same chunk, because the peer gave up one of the two
    // and resent it. Only the peer knows which, so both continue into separate memory until one is
    // complete: a chunk is acknowledged only once it is stored.
    bool another_reads(Connection &connection, void (*then)(Connection &) = [](Connection &) {}) {
        const Frame &frame = connection.in;
        bool found = false;
        for (Connection *other : slots) {
            if (!other || other == &connection || !other->reads(frame.lane, frame.message, frame.offset)) continue;
            then(*other);
            found = true;
        }
        return found;
    }

    void check_sizes(Lane &lane) {
        if (!lane.disagreement.empty()) fail(lane.disagreement, lane.disagreement);
    }
};

}  // namespace weft
