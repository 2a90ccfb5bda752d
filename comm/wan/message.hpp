// Messages of one direction of a link: split into chunks by the sender, reassembled by the receiver.
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
#include "relay_memory.hpp"

namespace weft {

// A send or receive that the application waits for. The endpoint's `done` mutex guards `state` and `error`.
struct Request {
    enum State { PENDING = 0, DONE = 1, FAILED = -1 };
    State state = PENDING;
    std::string error;
    std::function<void(const std::string &error)> then;  // callback on the loop, instead of a waiting application

    static inline std::atomic<uint64_t> alive{0};
    Request() { alive++; }
    ~Request() { alive--; }
    Request(const Request &) = delete;
};

inline uint64_t num_chunks(uint64_t total, uint32_t chunk_bytes) {
    return std::max<uint64_t>(1, (total + chunk_bytes - 1) / chunk_bytes);
}

// A message that is being sent; complete when all chunks are acknowledged.
struct Outgoing {
    Request *request;
    const char *data;
    uint64_t total;
    std::string tag;
    uint32_t priority = 0;   // lower goes first; FIFO among equals
    uint16_t lane = 0;
    uint64_t ordinal = 0;
    uint64_t start = 0;  // offset in the lane's byte stream, in which credit is counted
    uint64_t next_chunk = 0, unacknowledged = 0;
};

struct Chunk {
    Outgoing *message;
    uint64_t offset;
    uint32_t length;
    int64_t sent_ns = 0;
    uint32_t burst = 0;
};

// A posted receive.
struct Receive {
    Request *request;
    char *data;
    uint64_t total;
    std::string tag;
};

// A message that is arriving. Until its receive is posted its chunks are stashed. Memory is allocated
// for arrived chunks only, because the total size is the peer's claim.
struct Incoming {
    std::string tag;
    uint32_t priority;
    uint64_t total;
    uint64_t missing;
    std::unique_ptr<Receive> receive;
    std::vector<bool> arrived;                       // by chunk, once the receive is posted
    std::map<uint64_t, std::vector<char>> stash;  // by offset, before that

    bool has(uint64_t offset, uint32_t chunk_bytes) const {
        return !missing || (receive ? arrived[offset / chunk_bytes] : stash.count(offset) > 0);
    }
};

struct Completed {
    Request *request;
    std::string error;  // empty on success
};

// A lane: one independent message sequence of a link, in both directions.
class Lane {
public:
    // ---- sending
    uint64_t next_ordinal = 0, stream_bytes = 0, credit = 0;
    // ---- receiving
    bool open = false;  // opened by the application
    uint64_t buffer_bytes = 0;
    bool credit_due = false;
    std::string disagreement;  // protocol error between the two ends, which is fatal for the link
    // ---- relaying: if set, messages are forwarded to another link, in order
    std::function<void(const std::string &tag, uint32_t priority, std::shared_ptr<char[]> data, uint64_t total)> relay;
    RelayMemory *relay_memory = nullptr;  // where they are meanwhile

    // The next link has sent a relayed message: grant as much credit again.
    void relayed(uint64_t total) {
        passing_--;
        posted_bytes_ += total;
        credit_due = true;
    }

    // Credit: how much of the lane's byte stream the peer may send, posted receives plus the stash.
    uint64_t granted() const { return posted_bytes_ + buffer_bytes; }

    void post(std::unique_ptr<Receive> receive, std::vector<Completed> &completed) {
        posted_bytes_ += receive->total;
        outstanding_bytes_ += receive->total;
        credit_due = true;
        std::string tag = receive->tag;
        by_tag_[tag].receives.push_back(std::move(receive));
        match(tag, completed);
    }

    // The message that a chunk belongs to; null for a duplicate.
    Incoming *arriving(const Frame &frame, uint32_t chunk_bytes, std::vector<Completed> &completed) {
        if (frame.message < done_below_ || done_.count(frame.message)) return nullptr;
        bool known = incoming_.count(frame.message);
        if (!known && relay) check_relayed(frame.total);
        if (!known && unexpected_ >= MAX_UNEXPECTED)
            refuse("more than " + std::to_string(MAX_UNEXPECTED) +
                   " messages arrived before their receives were posted");
        if (!disagreement.empty()) return nullptr;
        auto [found, fresh] = incoming_.try_emplace(frame.message);
        Incoming &message = found->second;
        if (fresh) {
            message.tag = frame.tag_text();
            message.priority = frame.priority;
            message.total = frame.total;
            message.missing = num_chunks(frame.total, chunk_bytes);
            chunk_bytes_ = chunk_bytes;
            unexpected_++;
            if (relay) take_for_relay(frame.message, message, completed);
            else open_next(completed);
        }
        if (message.total != frame.total || message.tag != frame.tag_text())
            throw Broken("received inconsistent chunks of one message");
        return message.has(frame.offset, chunk_bytes) ? nullptr : &message;
    }

    bool stash_has_room(uint32_t length) const {
        return stashed_bytes_ + length <= buffer_bytes + outstanding_bytes_;
    }

    // A chunk is complete: in `stashed`, or in the receive's memory already.
    void arrived(const Frame &frame, uint32_t chunk_bytes, std::vector<char> &&stashed,
                 std::vector<Completed> &completed) {
        Incoming &message = incoming_.at(frame.message);
        message.missing--;
        if (message.receive) {
            message.arrived[frame.offset / chunk_bytes] = true;
            if (!stashed.empty()) memcpy(message.receive->data + frame.offset, stashed.data(), stashed.size());
        } else {
            stashed_bytes_ += stashed.size();
            message.stash[frame.offset] = std::move(stashed);
        }
        finish(frame.message, message, completed);
    }

    // Fails all pending receives. Complete messages stay for receives posted later, because their
    // sender has received their acknowledgement.
    void fail(const std::string &why, std::vector<Completed> &completed) {
        for (auto &[_, same] : by_tag_) {
            for (auto &receive : same.receives) completed.push_back({receive->request, why});
            same.receives.clear();
        }
        for (auto &[_, message] : incoming_)
            if (message.receive) completed.push_back({message.receive->request, why});
    }

    // A receive posted after the link failed gets its message if that is complete, and fails otherwise.
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
    static constexpr size_t MAX_UNEXPECTED = 1 << 16;  // unexpected messages: those without a posted receive

    uint32_t chunk_bytes_ = 1;  // of the peer
    uint64_t posted_bytes_ = 0, outstanding_bytes_ = 0, stashed_bytes_ = 0;
    struct Same {  // of one tag, in order
        std::deque<std::unique_ptr<Receive>> receives;
        std::deque<uint64_t> messages;
    };
    std::map<std::string, Same> by_tag_;  // unmatched receives and messages
    std::map<uint64_t, Incoming> incoming_;
    size_t unexpected_ = 0;     // unexpected messages among them
    uint64_t opened_ = 0;  // the tags of all messages below it are known
    uint64_t done_below_ = 0;
    std::set<uint64_t> done_;

    // Matches messages in order: only once all earlier messages are known, since an earlier one might
    // have the same tag.
    void open_next(std::vector<Completed> &completed) {
        for (auto next = incoming_.find(opened_); next != incoming_.end(); next = incoming_.find(opened_)) {
            uint64_t ordinal = opened_++;
            std::string tag = next->second.tag;
            by_tag_[tag].messages.push_back(ordinal);
            match(tag, completed);
        }
    }

    // Matches the k-th receive of a tag with its k-th message.
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

    // Moves a message's stash into its receive's memory; later chunks go there directly.
    void adopt(Incoming &message, std::unique_ptr<Receive> receive) {
        message.arrived.resize(num_chunks(message.total, chunk_bytes_));
        for (auto &[offset, bytes] : message.stash) {
            message.arrived[offset / chunk_bytes_] = true;
            if (bytes.empty()) continue;
            memcpy(receive->data + offset, bytes.data(), bytes.size());
            stashed_bytes_ -= bytes.size();
        }
        message.stash.clear();
        message.receive = std::move(receive);
        unexpected_--;
    }

    void refuse(const std::string &why) {
        if (disagreement.empty()) disagreement = why;
    }

    struct Relayed {
        std::string tag;
        uint32_t priority;
        std::shared_ptr<char[]> data;
        uint64_t total;
        bool complete = false;
    };
    std::map<uint64_t, Relayed> relayed_;  // by number; forwarded in order
    uint64_t forwarded_ = 0;               // all below it are
    uint64_t begun_bytes_ = 0;             // of all so far
    size_t passing_ = 0;                   // messages that the next link has not sent yet

    // A peer sends a message once its first chunk is within its credit, so all that have begun exceed what was granted
    // by one message at most.
    void check_relayed(uint64_t total) {
        if (total > buffer_bytes)
            refuse("a relayed message of " + std::to_string(total) + " bytes: the limit is " +
                   std::to_string(buffer_bytes) + " bytes");
        else if (passing_ >= MAX_UNEXPECTED)
            refuse("more than " + std::to_string(MAX_UNEXPECTED) + " messages arrived that could not be passed on");
        else if (begun_bytes_ + total > granted() + buffer_bytes)
            throw Broken("the peer sent more than its credit");
    }

    // A relay needs no earlier message to know where one goes, so none of its chunks has to be stashed.
    void take_for_relay(uint64_t ordinal, Incoming &message, std::vector<Completed> &completed) {
        std::shared_ptr<char[]> data = relay_memory->take(message.total);
        passing_++;
        begun_bytes_ += message.total;
        relayed_[ordinal] = {message.tag, message.priority, data, message.total};
        auto *request = new Request;
        request->then = [this, ordinal](const std::string &error) {
            relayed_[ordinal].complete = error.empty();
            for (auto next = relayed_.find(forwarded_); next != relayed_.end() && next->second.complete;
                 next = relayed_.find(++forwarded_)) {
                relay(next->second.tag, next->second.priority, next->second.data, next->second.total);
                relayed_.erase(next);
            }
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
