// An endpoint's event loop: one thread owns all connections, so they need no locks.
//
// Other threads submit work with `post` and wait for requests with `wait`.
#pragma once
#include <poll.h>

#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "connections.hpp"

namespace weft {

class Endpoint {
public:
    const Options options;

    // Without `host` it does not listen, and gets its connections from the endpoint that does (shared_port.hpp).
    Endpoint(const Options &options, const char *host, uint16_t wanted_port, bool tls)
        : options(options), links_(this->options),
          connections_(this->options, links_, host, wanted_port, tls, wakeup_.fd) {
        thread_ = std::thread([this] { run(); });
        pthread_setname_np(thread_.native_handle(), "weft wan");
    }

    uint16_t port() const { return connections_.port; }
    uint64_t refused() const { return connections_.refused; }

    // Queues `work` for the loop.
    void post(std::function<void()> work) {
        std::lock_guard hold(inbox_mutex_);
        inbox_.push_back(std::move(work));
        if (inbox_.size() == 1) wakeup_.ask();
    }

    // Runs `work` on the loop and waits for it.
    void call(const std::function<void()> &work) {
        std::promise<void> done;
        post([&] { work(), done.set_value(); });
        done.get_future().wait();
    }

    Request::State wait(Request &request, int64_t timeout_ns) {
        std::unique_lock hold(done_mutex_);
        done_.wait_for(hold, std::chrono::nanoseconds(timeout_ns), [&] { return request.state != Request::PENDING; });
        return request.state;
    }

    // On the loop only.
    Link &link(uint32_t peer) { return links_.of(peer); }

    // Forwards messages that arrive from one peer on a lane to another peer (Atlas 4.3).
    void relay(uint32_t from, uint16_t from_lane, uint32_t to, uint16_t to_lane, uint64_t buffer_bytes) {
        link(from).lane(from_lane).relay_memory = &relay_memory_;
        link(from).lane(from_lane).relay = [=](const std::string &tag, uint32_t priority, std::shared_ptr<char[]> data,
                                               uint64_t total) {
            auto *request = new Request;
            request->then = [=](const std::string &error) {  // the capture keeps `data` alive until then
                (void)data;
                if (error.empty()) link(from).lane(from_lane).relayed(total);
            };
            link(to).send(to_lane, std::make_unique<Outgoing>(Outgoing{request, data.get(), total, tag, priority}));
        };
        link(from).open_lane(from_lane, buffer_bytes);
        relays_.insert({from, to});
    }

    // Sends what is queued, for at most `linger_ns`; sends BYE; stops the thread.
    void stop(int64_t linger_ns) {
        int64_t limit = now_ns() + linger_ns;
        for (bool drained = false; !drained && now_ns() < limit;) {
            call([&] {
                drained = true;
                for (auto &[_, link] : links_) drained &= link->drained();
            });
            if (!drained) usleep(1000);
        }
        post([this] {
            for (auto &[_, link] : links_) link->send_bye(CLOSED);
            leaving_ = now_ns() + SECOND / 2;
            connections_.leave();
        });
        thread_.join();
    }

private:
    static constexpr size_t READ_BUDGET = 1 << 20;
    static constexpr int64_t TICK_NS = SECOND / 20;

    Wakeup wakeup_;
    RelayMemory relay_memory_;
    Links links_;
    Connections connections_;
    std::set<std::pair<uint32_t, uint32_t>> relays_;  // pairs of peers whose links fail together
    int64_t leaving_ = 0;
    std::thread thread_;

    std::mutex inbox_mutex_;
    std::vector<std::function<void()>> inbox_;
    std::mutex done_mutex_;
    std::condition_variable done_;

    // ---- the loop

    void run() {
        int64_t last_tick = now_ns(), due = 0;
        bool busy = false;
        while (!leaving_ || (now_ns() < leaving_ && !connections_.empty())) {
            int64_t rest = due ? std::clamp<int64_t>(due - now_ns(), 0, TICK_NS) : TICK_NS;
            if (connections_.wait(busy ? 0 : static_cast<int>((rest + 999999) / 1000000))) take_inbox();
            int64_t now = now_ns();
            busy = false;
            for (auto &[_, connection] : connections_) busy |= serve(*connection, now);
            due = 0;
            if (!leaving_)
                for (auto &[_, link] : links_) {
                    busy |= link->pump(now);
                    if (int64_t next = link->due_ns(); next && (!due || next < due)) due = next;
                }
            if (now - last_tick > TICK_NS) {
                if (now - last_tick > SECOND)
                    for (auto &[_, link] : links_) link->shift_deadlines(now - last_tick);
                tick(now);
                last_tick = now;
            }
            busy |= deliver();
            Batching pause = batching();
            connections_.remove_closed();
            if (!busy) sleep(pause.ns);
        }
        for (auto &[_, link] : links_) link->fail("closed here", CLOSED);
        while (deliver()) {}
    }

    // How long to batch before the next iteration, because one iteration per packet would cost more than
    // the packet: the shortest time of the links that moved data, or 0 if they moved much.
    Batching batching() {
        Batching all{~0ull, TICK_NS};
        uint64_t moved = 0;
        for (auto &[_, connection] : connections_) {
            uint64_t here = std::exchange(connection->moved, 0);
            if (!here) continue;
            moved += here;
            Batching one = connection->link ? connection->link->batching() : Batching{};
            all = {std::min(all.bytes, one.bytes), std::min(all.ns, one.ns)};
        }
        return moved && moved < all.bytes ? all : Batching{0, 0};
    }

    // Returns early when work is posted.
    void sleep(int64_t ns) const {
        if (!ns) return;
        pollfd posted{wakeup_.fd, POLLIN, 0};
        timespec limit{0, ns};
        ppoll(&posted, 1, &limit, nullptr);
    }

    void take_inbox() {
        wakeup_.clear();
        std::vector<std::function<void()>> works;
        {
            std::lock_guard hold(inbox_mutex_);
            works.swap(inbox_);
        }
        for (auto &work : works) work();
    }

    // Reads and processes a connection's input. Returns whether there is more to read.
    bool serve(Connection &connection, int64_t now) {
        if (!connection.dead.empty()) return false;
        try {
            if (!connections_.ready(connection, now)) return false;
            size_t budget = READ_BUDGET;
            while (connection.dead.empty()) {
                if (connection.payload_complete()) connection.link->on_payload(connection, now);
                else if (connection.header_complete()) connection.link->on_header(connection, now);
                else if (!connection.stream.readable) return false;
                else if (size_t got = connection.pull(); got == 0) continue;
                else if (connection.last_receive_ns = now; got >= budget) return true;
                else budget -= got;
            }
        } catch (const Broken &broken) {
            connections_.give_up(connection, broken.what(), now);
        } catch (const std::bad_alloc &) {
            if (connection.link) connection.link->fail("out of memory for incoming messages", connection.link->lost());
            else connections_.give_up(connection, "out of memory", now);
        }
        return false;
    }

    void tick(int64_t now) {
        connections_.time_out(now);
        for (auto [from, to] : relays_) {
            propagate_failure(link(from), link(to));
            propagate_failure(link(to), link(from));
        }
        for (auto &[_, link] : links_) {
            link->tick(now);
            connections_.supply(*link, now);
        }
    }

    // Fails the other link with the original cause, which may reach it from both sides of a DP-cell.
    static void propagate_failure(const Link &one, Link &other) {
        if (!one.failed()) return;
        other.fail("cannot relay without rank " + std::to_string(one.peer) + ": " + one.cause(), one.cause());
    }

    // Wakes waiters and runs callbacks. Returns whether callbacks may have created work.
    bool deliver() {
        if (links_.completed.empty()) return false;
        std::vector<Completed> batch;
        batch.swap(links_.completed);
        std::vector<Completed> ours;
        {
            std::lock_guard hold(done_mutex_);
            for (auto &completed : batch) {
                if (completed.request->then) {
                    ours.push_back(completed);
                    continue;
                }
                completed.request->error = completed.error;
                completed.request->state = completed.error.empty() ? Request::DONE : Request::FAILED;
            }
        }
        done_.notify_all();
        for (auto &completed : ours) {
            std::unique_ptr<Request> request(completed.request);
            request->then(completed.error);
        }
        return !ours.empty();
    }
};

}  // namespace weft
