// Messages of one direction of a link: cut into chunks at one end, made whole again at the other.
#pragma once
#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "frame.hpp"

namespace weft {

// What an application waits for. `state` and `error` are guarded by the endpoint's `done` mutex.
struct Request {
    enum State { PENDING = 0, DONE = 1, FAILED = -1 };
    State state = PENDING;
    std::string error;
    std::function<void(const std::string &error)> then;  // instead of a waiting application, on the loop
};

inline uint64_t num_chunks(uint64_t total, uint32_t chunk_bytes) {
    return std::max<uint64_t>(1, (total + chunk_bytes - 1) / chunk_bytes);
}

// A message that is being sent. It ends when every chunk has been acknowledged.
struct Outgoing {
    Request *request;
    const char *data;
    uint64_t total;
    std::string tag;
    uint32_t turn = 0;   // messages of less go first, those of the same in order
    uint16_t lane = 0;
    uint64_t ordinal = 0;
    uint64_t start = 0;  // in the lane's stream of bytes, which credit counts
    uint64_t next_chunk = 0, unacknowledged = 0;
};

struct Chunk {
    Outgoing *message;
    uint64_t offset;
    uint32_t length;
    int64_t sent_ns = 0;
};

// A receive that the application has posted.
struct Receive {
    Request *request;
    char *data;
    uint64_t total;
    std::string tag;
};

// A message that is arriving. Until its receive is posted, its chunks are stashed.
struct Incoming {
    std::string tag;
    uint32_t turn;
    uint64_t total;
    uint64_t missing;
    std::vector<bool> here;  // by chunk
    std::unique_ptr<Receive> receive;
    std::map<uint64_t, std::vector<char>> stash;  // by offset
};

struct Completed {
    Request *request;
    std::string error;  // empty: well
};

// One independent sequence of messages of a link, both halves.
class Lane {
public:
    // ---- sending
    uint64_t next_ordinal = 0, stream_bytes = 0, credit = 0;
    // ---- receiving
    bool open = false;  // the application knows it
    uint64_t buffer_bytes = 0;
    bool credit_due = false;
    std::string disagreement;  // of the two ends on a message's size: the link cannot go on
    // ---- relaying: where it is set, messages go on to another link, in their order
    std::function<void(const std::string &tag, uint32_t turn, std::shared_ptr<char[]> data, uint64_t total)> relay;

    // The next link has taken a message that was relayed: there is room for as much again.
    void relayed(uint64_t total) {
        posted_bytes_ += total;
        credit_due = true;
    }

    // What the sender may have sent: every posted byte, and what the stash can hold.
    uint64_t granted() const { return posted_bytes_ + buffer_bytes; }

    void post(std::unique_ptr<Receive> receive, std::vector<Completed> &completed) {
        posted_bytes_ += receive->total;
        outstanding_bytes_ += receive->total;
        credit_due = true;
        waiting_.push_back(std::move(receive));
        match(completed);
    }

    // The message that a chunk belongs to; null where that chunk is here already.
    Incoming *arriving(const Frame &frame, uint32_t chunk_bytes, std::vector<Completed> &completed) {
        if (frame.message < done_below_ || done_.count(frame.message)) return nullptr;
        auto [found, fresh] = incoming_.try_emplace(frame.message);
        Incoming &message = found->second;
        if (fresh) {
            message.tag = frame.tag_text();
            message.turn = frame.turn;
            message.total = frame.total;
            message.missing = num_chunks(frame.total, chunk_bytes);
            message.here.resize(message.missing);
            match(completed);
        }
        if (message.total != frame.total || message.tag != frame.tag_text())
            throw Broken("chunks of one message that do not agree");
        return message.here[frame.offset / chunk_bytes] ? nullptr : &message;
    }

    bool stash_has_room(uint32_t length) const {
        return stashed_bytes_ + length <= buffer_bytes + outstanding_bytes_;
    }

    // A chunk has arrived whole; `stashed` holds it, unless it lies in the receive's memory already.
    void arrived(const Frame &frame, uint32_t chunk_bytes, std::vector<char> &&stashed,
                 std::vector<Completed> &completed) {
        Incoming &message = incoming_.at(frame.message);
        message.here[frame.offset / chunk_bytes] = true;
        message.missing--;
        if (!stashed.empty()) {
            if (message.receive) {
                memcpy(message.receive->data + frame.offset, stashed.data(), stashed.size());
            } else {
                stashed_bytes_ += stashed.size();
                message.stash[frame.offset] = std::move(stashed);
            }
        }
        finish(frame.message, message, completed);
    }

    // Everything that is waited for here fails. What came whole and was acknowledged stays for
    // receives that are still to be posted: its sender believes it delivered.
    void fail(const std::string &why, std::vector<Completed> &completed) {
        for (auto &receive : waiting_) completed.push_back({receive->request, why});
        for (auto &[_, message] : incoming_)
            if (message.receive) completed.push_back({message.receive->request, why});
        waiting_.clear();
    }

    // A receive posted after the link has failed: it gets its message, or fails at once.
    void post_late(std::unique_ptr<Receive> receive, const std::string &why, std::vector<Completed> &completed) {
        Request *request = receive->request;
        size_t before = completed.size();
        post(std::move(receive), completed);
        if (completed.size() > before) return;
        waiting_.clear();
        completed.push_back({request, why});
    }

private:
    uint64_t posted_bytes_ = 0, outstanding_bytes_ = 0, stashed_bytes_ = 0;
    std::deque<std::unique_ptr<Receive>> waiting_;
    std::map<uint64_t, Incoming> incoming_;
    uint64_t opened_ = 0;  // every message below it is known by its tag
    uint64_t done_below_ = 0;
    std::set<uint64_t> done_;

    // Gives the k-th receive of a tag the k-th message of that tag. Only messages all of whose
    // predecessors are known take part: an unknown one might bear the same tag.
    void match(std::vector<Completed> &completed) {
        while (opened_ < done_below_ || incoming_.count(opened_) || done_.count(opened_)) opened_++;
        if (relay) return take_for_relay(completed);
        for (auto receive = waiting_.begin(); receive != waiting_.end();) {
            auto found = incoming_.begin();
            while (found != incoming_.end() && found->first < opened_ &&
                   (found->second.receive || found->second.tag != (*receive)->tag))
                ++found;
            if (found == incoming_.end() || found->first >= opened_) {
                ++receive;
                continue;
            }
            Incoming &message = found->second;
            uint64_t ordinal = found->first;
            if ((*receive)->total != message.total) {
                disagreement = message.tag + ": the sender's tensor has " + std::to_string(message.total) +
                               " bytes and the receiver expects " + std::to_string((*receive)->total);
                return;
            }
            adopt(message, std::move(*receive));
            receive = waiting_.erase(receive);
            finish(ordinal, message, completed);
        }
    }

    // A message has a place of its own from now on.
    void adopt(Incoming &message, std::unique_ptr<Receive> receive) {
        for (auto &[offset, bytes] : message.stash) {
            memcpy(receive->data + offset, bytes.data(), bytes.size());
            stashed_bytes_ -= bytes.size();
        }
        message.stash.clear();
        message.receive = std::move(receive);
    }

    struct Relayed {
        std::string tag;
        uint32_t turn;
        std::shared_ptr<char[]> data;
        uint64_t total;
        bool whole = false;
    };
    std::deque<std::shared_ptr<Relayed>> relayed_;

    void take_for_relay(std::vector<Completed> &completed) {
        for (auto at = incoming_.begin(); at != incoming_.end() && at->first < opened_;) {
            auto &[ordinal, message] = *at++;
            if (message.receive) continue;
            std::shared_ptr<char[]> data(new char[std::max<uint64_t>(1, message.total)]);
            relayed_.push_back(std::make_shared<Relayed>(Relayed{message.tag, message.turn, data, message.total}));
            auto *request = new Request;
            request->then = [this, entry = relayed_.back()](const std::string &error) {
                entry->whole = error.empty();
                for (; !relayed_.empty() && relayed_.front()->whole; relayed_.pop_front())
                    relay(relayed_.front()->tag, relayed_.front()->turn, relayed_.front()->data,
                          relayed_.front()->total);
            };
            outstanding_bytes_ += message.total;
            adopt(message, std::unique_ptr<Receive>(new Receive{request, data.get(), message.total, message.tag}));
            finish(ordinal, message, completed);
        }
    }

    void finish(uint64_t ordinal, Incoming &message, std::vector<Completed> &completed) {
        if (message.missing || !message.receive) return;
        completed.push_back({message.receive->request, ""});
        outstanding_bytes_ -= message.receive->total;
        incoming_.erase(ordinal);
        done_.insert(ordinal);
        for (; !done_.empty() && *done_.begin() == done_below_; done_below_++) done_.erase(done_.begin());
    }
};

}  // namespace weft
