// What a link has to send: messages by priority, and chunks that broken connections have lost.
#pragma once
#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "message.hpp"

namespace weft {

class Outbox {
public:
    // True if every message is acknowledged.
    bool empty() const { return outgoing_.empty(); }

    // Behind messages of the same priority.
    void add(std::unique_ptr<Outgoing> message) {
        auto before = [](uint32_t priority, const Outgoing *other) { return priority < other->priority; };
        queue_.insert(std::upper_bound(queue_.begin(), queue_.end(), message->priority, before), message.get());
        outgoing_.push_back(std::move(message));
    }

    // Chunks that may not have arrived, in sending order: before anything else.
    void resend(const std::deque<Chunk> &lost) { resend_.insert(resend_.begin(), lost.begin(), lost.end()); }

    // Takes the next chunk for which its lane has credit; returns whether there is one.
    bool next(Chunk &chunk, uint32_t chunk_bytes, std::map<uint16_t, Lane> &lanes) {
        if (!resend_.empty()) {
            chunk = resend_.front();
            resend_.pop_front();
            return true;
        }
        for (auto candidate = queue_.begin(); candidate != queue_.end(); ++candidate) {
            Outgoing *message = *candidate;
            uint64_t offset = message->next_chunk * chunk_bytes;
            uint32_t length = std::min<uint64_t>(chunk_bytes, message->total - offset);
            if (message->start + offset + length > lanes[message->lane].credit) continue;
            chunk = {message, offset, length};
            if (++message->next_chunk == num_chunks(message->total, chunk_bytes)) queue_.erase(candidate);
            return true;
        }
        return false;
    }

    // The peer has a chunk: with its last one a message is complete.
    void acknowledged(const Chunk &chunk, std::vector<Completed> &completed) {
        if (--chunk.message->unacknowledged) return;
        completed.push_back({chunk.message->request, ""});
        outgoing_.erase(std::find_if(outgoing_.begin(), outgoing_.end(),
                                     [&](auto &message) { return message.get() == chunk.message; }));
    }

    // Fails all messages; they are kept until `clear`, because connections refer to them.
    void fail(const std::string &why, std::vector<Completed> &completed) {
        for (auto &message : outgoing_) completed.push_back({message->request, why});
        queue_.clear();
    }

    void clear() {
        queue_.clear();
        resend_.clear();
        outgoing_.clear();
    }

private:
    std::vector<std::unique_ptr<Outgoing>> outgoing_;
    std::deque<Outgoing *> queue_;  // messages with unsent chunks, by priority
    std::deque<Chunk> resend_;
};

}  // namespace weft
