// Messages of one direction of a link: cut into chunks at one end, made whole again at the other.
#pragma once
#include <algorithm>
#include <atomic>
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

    static inline std::atomic<uint64_t> alive{0};
    Request() { alive++; }
    ~Request() { alive--; }
    Request(const Request &) = delete;
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

// A message that is arriving. Until its receive is posted, its chunks are stashed, and it takes
// memory for those only: how large it shall become is what the peer says.
struct Incoming {
    std::string tag;
    uint32_t turn;
    uint64_t total;
    uint64_t missing;
    std::unique_ptr<Receive> receive;
    std::vector<bool> here;                       // by chunk, once the receive is known
    std::map<uint64_t, std::vector<char>> stash;  // by offset, until then

    bool has(uint64_t offset, uint32_t chunk_bytes) const {
        return !missing || (receive ? here[offset / chunk_bytes] : stash.count(offset) > 0);
    }
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
    std::string disagreement;  // of the two ends on what may be sent: the link cannot go on
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
        std::string tag = receive->tag;
        by_tag_[tag].receives.push_back(std::move(receive));
        match(tag, completed);
    }

    // The message that a chunk belongs to; null where that chunk is here already.
    Incoming *arriving(const Frame &frame, uint32_t chunk_bytes, std::vector<Completed> &completed) {
        if (frame.message < done_below_ || done_.count(frame.message)) return nullptr;
        if (relay && frame.total > buffer_bytes)
            refuse("a relayed message of " + std::to_string(frame.total) + " bytes: at most " +
                   std::to_string(buffer_bytes) + " are passed on at once");
        if (early_ >= MAX_EARLY && !incoming_.count(frame.message))
            refuse("more than " + std::to_string(MAX_EARLY) + " messages came before their receives");
        if (!disagreement.empty()) return nullptr;
        auto [found, fresh] = incoming_.try_emplace(frame.message);
        Incoming &message = found->second;
        if (fresh) {
            message.tag = frame.tag_text();
            message.turn = frame.turn;
            message.total = frame.total;
            message.missing = num_chunks(frame.total, chunk_bytes);
            chunk_bytes_ = chunk_bytes;
            early_++;
            open_next(completed);
        }
        if (message.total != frame.total || message.tag != frame.tag_text())
            throw Broken("chunks of one message that do not agree");
        return message.has(frame.offset, chunk_bytes) ? nullptr : &message;
    }

    bool stash_has_room(uint32_t length) const {
        return stashed_bytes_ + length <= buffer_bytes + outstanding_bytes_;
    }

    // A chunk has arrived whole; `stashed` holds it, unless it lies in the receive's memory already.
    void arrived(const Frame &frame, uint32_t chunk_bytes, std::vector<char> &&stashed,
                 std::vector<Completed> &completed) {
        Incoming &message = incoming_.at(frame.message);
        message.missing--;
        if (message.receive) {
            message.here[frame.offset / chunk_bytes] = true;
            if (!stashed.empty()) memcpy(message.receive->data + frame.offset, stashed.data(), stashed.size());
        } else {
            stashed_bytes_ += stashed.size();
            message.stash[frame.offset] = std::move(stashed);
        }
        finish(frame.message, message, completed);
    }

    // Everything that is waited for here fails. What came whole and was acknowledged stays for
    // receives that are still to be posted: its sender believes it delivered.
    void fail(const std::string &why, std::vector<Completed> &completed) {
        for (auto &[_, same] : by_tag_) {
            for (auto &receive : same.receives) completed.push_back({receive->request, why});
            same.receives.clear();
        }
        for (auto &[_, message] : incoming_)
            if (message.receive) completed.push_back({message.receive->request, why});
    }

    // A receive posted after the link has failed: it gets its message, or fails at once.
    void post_late(std::unique_ptr<Receive> receive, const std::string &why, std::vector<Completed> &completed) {
        Request *request = receive->request;
        std::string tag = receive->tag;
        size_t before = completed.size();
        post(std::move(receive), completed);
        if (completed.size() > before) return;
        if (auto same = by_tag_.find(tag); same != by_tag_.end()) same->second.receives.clear();
        completed.push_back({request, why});
    }

private:
    static constexpr size_t MAX_EARLY = 1 << 16;  // messages that wait for their receives

    uint32_t chunk_bytes_ = 1;  // of the peer
    uint64_t posted_bytes_ = 0, outstanding_bytes_ = 0, stashed_bytes_ = 0;
    struct Same {  // of one tag, in order
        std::deque<std::unique_ptr<Receive>> receives;
        std::deque<uint64_t> messages;
    };
    std::map<std::string, Same> by_tag_;  // what waits for its counterpart
    std::map<uint64_t, Incoming> incoming_;
    size_t early_ = 0;     // of those, without a receive
    uint64_t opened_ = 0;  // every message below it is known by its tag
    uint64_t done_below_ = 0;
    std::set<uint64_t> done_;

    // Messages whose predecessors are all known, by tag: only they take part, for an unknown one
    // might bear the same tag.
    void open_next(std::vector<Completed> &completed) {
        for (auto next = incoming_.find(opened_); next != incoming_.end(); next = incoming_.find(opened_)) {
            uint64_t ordinal = opened_++;
            if (relay) {
                take_for_relay(ordinal, next->second, completed);
                continue;
            }
            std::string tag = next->second.tag;
            by_tag_[tag].messages.push_back(ordinal);
            match(tag, completed);
        }
    }

    // Gives the k-th receive of a tag the k-th message of that tag.
    void match(const std::string &tag, std::vector<Completed> &completed) {
        auto found = by_tag_.find(tag);
        auto &[receives, messages] = found->second;
        while (!receives.empty() && !messages.empty()) {
            uint64_t ordinal = messages.front();
            Incoming &message = incoming_.at(ordinal);
            if (receives.front()->total != message.total)
                return refuse(tag + ": the sender's tensor has " + std::to_string(message.total) +
                              " bytes and the receiver expects " + std::to_string(receives.front()->total));
            adopt(message, std::move(receives.front()));
            receives.pop_front();
            messages.pop_front();
            finish(ordinal, message, completed);
        }
        if (receives.empty() && messages.empty()) by_tag_.erase(found);
    }

    // A message has a place of its own from now on.
    void adopt(Incoming &message, std::unique_ptr<Receive> receive) {
        message.here.resize(num_chunks(message.total, chunk_bytes_));
        for (auto &[offset, bytes] : message.stash) {
            message.here[offset / chunk_bytes_] = true;
            if (bytes.empty()) continue;
            memcpy(receive->data + offset, bytes.data(), bytes.size());
            stashed_bytes_ -= bytes.size();
        }
        message.stash.clear();
        message.receive = std::move(receive);
        early_--;
    }

    void refuse(const std::string &why) {
        if (disagreement.empty()) disagreement = why;
    }

    struct Relayed {
        std::string tag;
        uint32_t turn;
        std::shared_ptr<char[]> data;
        uint64_t total;
        bool whole = false;
    };
    std::deque<std::shared_ptr<Relayed>> relayed_;

    void take_for_relay(uint64_t ordinal, Incoming &message, std::vector<Completed> &completed) {
        std::shared_ptr<char[]> data(new char[std::max<uint64_t>(1, message.total)]);
        relayed_.push_back(std::make_shared<Relayed>(Relayed{message.tag, message.turn, data, message.total}));
        auto *request = new Request;
        request->then = [this, entry = relayed_.back()](const std::string &error) {
            entry->whole = error.empty();
            for (; !relayed_.empty() && relayed_.front()->whole; relayed_.pop_front())
                relay(relayed_.front()->tag, relayed_.front()->turn, relayed_.front()->data, relayed_.front()->total);
        };
        outstanding_bytes_ += message.total;
        adopt(message, std::unique_ptr<Receive>(new Receive{request, data.get(), message.total, message.tag}));
        finish(ordinal, message, completed);
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
