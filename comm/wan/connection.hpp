// One authenticated connection of a link: frames and chunks in both directions.
#pragma once
#include "handshake.hpp"
#include "message.hpp"
#include "stream.hpp"

namespace weft {

class Link;

enum class Stage { TCP, TLS, HELLO, CHALLENGE, PROOF, READY };

class Connection {
public:
    Stream stream;
    uint64_t moved = 0;     // bytes, both ways
    Stage stage;
    const bool connects;    // this side opened it
    const Address remote;
    Link *link = nullptr;   // null until the peer has proven who it is
    uint32_t slot = 0;
    const int64_t opened_ns;
    int64_t heard_ns, pinged_ns = 0;
    std::string dead;       // why it is over; empty while it lives

    Connection(int fd, bool connects, const Address &remote, int64_t now)
        : stream(fd), stage(connects ? Stage::TCP : Stage::HELLO), connects(connects), remote(remote),
          opened_ns(now), heard_ns(now) {}

    // ---- before it is ready: messages of the handshake

    Handshake handshake;

    template <class Message>
    bool receive(Message &message) {  // whether it is here in full
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
    void say(const Message &message) {
        if (control_.size() > (1 << 20)) throw Broken("it asks and does not listen");
        control_.append(reinterpret_cast<const char *>(&message), sizeof message);
    }

    // ---- writing

    std::deque<Chunk> unacknowledged;  // in the order of sending; the last may be half sent
    uint64_t acknowledged = 0;         // chunks, of all that were sent
    bool ack_due = false;

    void say(Type type, uint16_t lane, uint64_t offset, const std::string &tag = "", uint64_t message = 0) {
        Frame frame{};
        frame.type = type;
        frame.lane = lane;
        frame.message = message;
        frame.offset = offset;
        memcpy(frame.tag, tag.data(), std::min(tag.size(), sizeof frame.tag));
        seal(frame);
        say(frame);
    }

    bool sending() const { return out_left_ > 0; }
    size_t sent_whole() const { return unacknowledged.size() - (sending() ? 1 : 0); }

    bool stuck() const { return !unacknowledged.empty() && stream.backoffs() >= 2; }

    bool idle() const { return out_left_ == 0 && control_.empty() && !ack_due; }

    bool quiet() const { return idle() && stream.unacknowledged_bytes() == 0; }

    void begin(const Chunk &chunk) {
        out_ = Frame{};
        out_.type = DATA;
        out_.lane = chunk.message->lane;
        out_.turn = chunk.message->turn;
        out_.message = chunk.message->ordinal;
        out_.total = chunk.message->total;
        out_.offset = chunk.offset;
        out_.length = chunk.length;
        memcpy(out_.tag, chunk.message->tag.data(), chunk.message->tag.size());
        out_data_ = chunk.message->data + chunk.offset;
        out_.payload_sum = checksum(out_data_, chunk.length);
        seal(out_);
        out_left_ = sizeof out_ + chunk.length;
        unacknowledged.push_back(chunk);
    }

    // Writes what there is to write, a begun chunk first; stops where the kernel takes no more.
    void flush() {
        while (stream.writable && !idle()) {
            if (out_left_ == 0 && ack_due) {
                ack_due = false;
                say(ACK, 0, chunks_received, "", arrived_ns);
            }
            iovec parts[2];
            int count = 0;
            if (out_left_ > out_.length) {
                size_t left = out_left_ - out_.length;
                parts[count++] = {reinterpret_cast<char *>(&out_) + sizeof out_ - left, left};
            }
            if (out_left_ && out_.length) {
                size_t left = std::min<size_t>(out_left_, out_.length);
                parts[count++] = {const_cast<char *>(out_data_) + out_.length - left, left};
            }
            if (!count) parts[count++] = {control_.data(), control_.size()};
            size_t done = stream.write(parts, count);
            moved += done;
            if (out_left_) out_left_ -= done;
            else control_.erase(0, done);
        }
    }

    // ---- reading: the frame at hand, and where its payload goes

    Frame in{};
    uint64_t chunks_received = 0, arrived_ns = 0;  // of the last of them
    enum Target { NOWHERE, STASH, RECEIVE } target = NOWHERE;
    std::vector<char> stash;

    // Reads on; true when a frame's header is here and its payload is still to come.
    // Then `aim` says where the payload goes; `payload_complete` turns true when it is there.
    bool header_complete() const { return in_got_ == sizeof in && !aimed_; }
    bool payload_complete() const { return aimed_ && in_left_ == 0; }
    bool reads(uint16_t lane, uint64_t message, uint64_t offset) const {
        return aimed_ && target != NOWHERE && in.lane == lane && in.message == message && in.offset == offset;
    }

    void aim(Target to, char *data) {
        aimed_ = true;
        target = to;
        in_left_ = in.length;
        in_data_ = data;
    }

    void aim_nowhere() {  // the payload is of no use: it came another way
        target = NOWHERE;
        stash.clear();
        if (aimed_) in_data_ = nullptr;
    }

    bool payload_intact() const { return checksum(in_data_ - in.length, in.length) == in.payload_sum; }

    void next_frame() {
        aimed_ = false;
        in_got_ = next_got_;
        next_got_ = 0;
        in = next_;
    }

    size_t pull() {  // one read; returns its bytes
        static thread_local char waste[64 << 10];
        iovec parts[2];
        int count = 0;
        if (!aimed_) {
            parts[count++] = {reinterpret_cast<char *>(&in) + in_got_, sizeof in - in_got_};
        } else {
            size_t room = in_data_ ? in_left_ : std::min<size_t>(in_left_, sizeof waste);
            parts[count++] = {in_data_ ? in_data_ : waste, room};
            if (room == in_left_) parts[count++] = {&next_, sizeof next_};
        }
        size_t got = stream.read(parts, count);
        moved += got;
        if (!aimed_) {
            in_got_ += got;
        } else {
            size_t payload = std::min(got, parts[0].iov_len);
            in_left_ -= payload;
            if (in_data_) in_data_ += payload;
            next_got_ = got - payload;
        }
        return got;
    }

private:
    std::string greeting_, control_;
    Frame out_{};
    const char *out_data_ = nullptr;
    size_t out_left_ = 0;  // of header and payload together
    size_t in_got_ = 0, in_left_ = 0;
    char *in_data_ = nullptr;
    bool aimed_ = false;
    Frame next_{};
    size_t next_got_ = 0;
};

}  // namespace weft
