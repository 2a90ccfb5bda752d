// One authenticated connection of a link: frames and chunks in both directions.
#pragma once
#include "handshake.hpp"
#include "message.hpp"
#include "stream.hpp"

namespace weft {

class Link;
struct PortHello;

enum class Stage { TCP, PORT_HELLO, HANDOVER, TLS, HELLO, CHALLENGE, PROOF, READY };

class Connection {
public:
    Stream stream;
    const uint64_t number;  // of the endpoint's connections
    uint64_t moved = 0;     // bytes, both ways
    Stage stage;
    const bool connects;    // this side opened it
    const Address remote;
    Link *link = nullptr;   // null until the peer is authenticated
    uint32_t slot = 0;
    const int64_t opened_ns;
    int64_t last_receive_ns, pinged_ns = 0;
    std::string dead;       // why it is broken; empty while it works

    Connection(int fd, uint64_t number, bool connects, const Address &remote, int64_t now)
        : stream(fd), number(number), stage(connects ? Stage::TCP : Stage::HELLO), connects(connects), remote(remote),
          opened_ns(now), last_receive_ns(now) {}

    // ---- handshake messages

    Handshake handshake;
    std::shared_ptr<PortHello> port_hello;  // while it waits to be handed over

    template <class Message>
    bool receive(Message &message) {  // false until it is complete
        while (greeting_.size() < sizeof message) {
            if (!stream.readable) return false;
            char bytes[sizeof message];
            iovec part{bytes, sizeof message - greeting_.size()};
            greeting_.append(bytes, stream.read(&part, 1));
        }
        memcpy(&message, greeting_.data(), sizeof message);
        greeting_.clear();
        return true;
    }

    template <class Message>
    void send(const Message &message) {
        if (control_.size() > (1 << 20)) throw Broken("the peer sends requests and does not read the answers");
        control_.append(reinterpret_cast<const char *>(&message), sizeof message);
    }

    // ---- writing

    std::deque<Chunk> unacknowledged;  // in sending order; the last may be partly sent
    uint64_t acknowledged = 0;         // number of acknowledged chunks
    bool ack_due = false;

    void send(Type type, uint16_t lane, uint64_t offset, uint64_t message = 0) {
        ShortFrame note{};
        note.type = type;
        note.lane = lane;
        note.offset = offset;
        note.message = message;
        seal(note);
        send(note);
    }

    void send_bye(const std::string &why) {
        Frame frame{};
        frame.type = BYE;
        memcpy(frame.tag, why.data(), std::min(why.size(), sizeof frame.tag));
        seal(frame);
        send(frame);
    }

    bool sending() const { return out_left_ > 0; }
    size_t sent_whole() const { return unacknowledged.size() - (sending() ? 1 : 0); }

    // True if a chunk sent before `sent_ns` is still unacknowledged after several TCP retransmissions.
    bool stuck(int64_t sent_ns) const {
        return !unacknowledged.empty() && unacknowledged.front().sent_ns < sent_ns && stream.backoffs() >= 2;
    }

    bool idle() const { return out_left_ == 0 && control_.empty() && !ack_due && !stream.holds_back(); }

    bool quiet() const { return idle() && stream.unacknowledged_bytes() == 0; }

    void begin(const Chunk &chunk) {
        out_ = Frame{};
        out_.type = DATA;
        out_.lane = chunk.message->lane;
        out_.priority = chunk.message->priority;
        out_.message = chunk.message->ordinal;
        out_.total = chunk.message->total;
        out_.offset = chunk.offset;
        out_.length = chunk.length;
        memcpy(out_.tag, chunk.message->tag.data(), chunk.message->tag.size());
        out_data_ = chunk.message->data + chunk.offset;
        // TLS authenticates the payload itself.
        if (!stream.has_tls()) out_.payload_sum = checksum(out_data_, chunk.length);
        seal(out_);
        out_left_ = sizeof out_ + chunk.length;
        unacknowledged.push_back(chunk);
    }

    // Writes control frames and chunks until the socket buffer is full.
    void flush() {
        while (stream.writable && !idle()) {
            if (stream.holds_back() && !stream.send_encrypted()) return;
            bool between = !out_left_ || out_left_ == sizeof out_ + out_.length;
            if (between && ack_due) {
                ack_due = false;
                send(ACK, 0, chunks_received, arrived_ns);
            }
            iovec parts[3];
            int count = 0;
            size_t notes = between ? control_.size() : 0;
            if (notes) parts[count++] = {control_.data(), notes};
            if (out_left_ > out_.length) {
                size_t left = out_left_ - out_.length;
                parts[count++] = {reinterpret_cast<char *>(&out_) + sizeof out_ - left, left};
            }
            if (out_left_ && out_.length) {
                size_t left = std::min<size_t>(out_left_, out_.length);
                parts[count++] = {const_cast<char *>(out_data_) + out_.length - left, left};
            }
            if (!count) return;
            size_t done = stream.write(parts, count);
            moved += done;
            size_t sent = std::min(done, notes);
            control_.erase(0, sent);
            out_left_ -= done - sent;
        }
    }

    // ---- reading: the current frame, and where its payload goes

    Frame in{};
    uint64_t chunks_received = 0, arrived_ns = 0;  // arrival of the last one
    enum Target { NOWHERE, STASH, RECEIVE } target = NOWHERE;
    std::vector<char> stash;

    // True if the next frame's header is complete, in `in`. If it has a payload, `aim` sets where that
    // goes, and `payload_complete` becomes true when it has arrived.
    bool header_complete() {
        if (aimed_ || here_ - next_ < sizeof(ShortFrame)) return false;
        ShortFrame note;
        memcpy(&note, inbox_ + next_, sizeof note);
        if (is_short(note.type)) {
            if (!sealed(note)) throw Broken("received a frame with a wrong checksum");
            in = note.frame();
            next_ += sizeof note;
            return true;
        }
        if (here_ - next_ < sizeof in) return false;
        memcpy(&in, inbox_ + next_, sizeof in);
        if (!sealed(in)) throw Broken("received a frame with a wrong checksum");
        next_ += sizeof in;
        return true;
    }
    bool payload_complete() const { return aimed_ && in_left_ == 0; }
    bool reads(uint16_t lane, uint64_t message, uint64_t offset) const {
        return aimed_ && target != NOWHERE && in.lane == lane && in.message == message && in.offset == offset;
    }

    void aim(Target to, char *data) {
        aimed_ = true;
        target = to;
        in_left_ = in.length;
        in_data_ = data;
        size_t part = std::min(here_ - next_, in_left_);  // read together with the header
        if (in_data_ && part) {
            memcpy(in_data_, inbox_ + next_, part);
            in_data_ += part;
        }
        in_left_ -= part;
        next_ += part;
    }

    void aim_nowhere() {  // discard the payload: it arrived on another connection
        target = NOWHERE;
        stash.clear();
        if (aimed_) in_data_ = nullptr;
    }

    bool payload_intact() const {
        return stream.has_tls() || checksum(in_data_ - in.length, in.length) == in.payload_sum;
    }

    void next_frame() { aimed_ = false; }

    size_t pull() {  // one read; returns the number of bytes
        static thread_local char waste[64 << 10];
        if (next_) memmove(inbox_, inbox_ + next_, here_ -= next_);
        next_ = 0;
        iovec parts[2];
        int count = 0;
        size_t capacity = 0;
        if (aimed_) {
            capacity = in_data_ ? in_left_ : std::min<size_t>(in_left_, sizeof waste);
            parts[count++] = {in_data_ ? in_data_ : waste, capacity};
        }
        if (capacity == in_left_ || !aimed_) parts[count++] = {inbox_ + here_, sizeof inbox_ - here_};
        size_t got = stream.read(parts, count), payload = std::min(got, capacity);
        moved += got;
        in_left_ -= payload;
        if (in_data_) in_data_ += payload;
        here_ += got - payload;
        return got;
    }

private:
    std::string greeting_, control_;
    Frame out_{};
    const char *out_data_ = nullptr;
    size_t out_left_ = 0;  // of header and payload together
    // Bytes read beyond a payload: control frames, or the next header and the start of its payload.
    char inbox_[512];
    size_t next_ = 0, here_ = 0;  // begin and end of the unprocessed bytes
    size_t in_left_ = 0;
    char *in_data_ = nullptr;
    bool aimed_ = false;
};

}  // namespace weft
