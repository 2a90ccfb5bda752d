// An endpoint's event loop: one thread owns all connections, so they need no locks.
//
// Other threads submit work with `post` and wait for requests with `wait`.
#pragma once
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "door.hpp"
#include "link.hpp"

namespace weft {

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND + t.tv_nsec;
}

class Endpoint {
public:
    const Options options;
    uint16_t port = 0;

    // Without `host` it does not listen, and gets its connections from the endpoint that does (door.hpp).
    Endpoint(const Options &options, const char *host, uint16_t wanted_port, bool tls)
        : options(options), door_(options.door_key) {
        if (tls) tls_ = openssl().context(psk_client, psk_server);
        if (!options.door_key.empty()) mailbox_ = std::make_unique<Mailbox>(options.job, options.id);
        if (*host) listen_on(Address::of(host, wanted_port));
        epoll_ = Descriptors::all().keep([] { return epoll_create1(EPOLL_CLOEXEC); });
        wake_ = Descriptors::all().keep([] { return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); });
        if (listener_ >= 0) watch(listener_, EPOLLIN, LISTENER);
        if (mailbox_) watch(mailbox_->fd, EPOLLIN, MAILBOX);
        watch(wake_, EPOLLIN, WAKE);
        thread_ = std::thread([this] { run(); });
        pthread_setname_np(thread_.native_handle(), "weft wan");
    }

    ~Endpoint() {
        connections_.clear();
        for (int fd : {listener_, epoll_, wake_}) Descriptors::all().close(fd);
        if (tls_) openssl().SSL_CTX_free(tls_);
    }

    // Queues `work` for the loop.
    void post(std::function<void()> work) {
        std::lock_guard hold(inbox_mutex_);
        inbox_.push_back(std::move(work));
        uint64_t one = 1;
        if (inbox_.size() == 1 && write(wake_, &one, sizeof one) < 0) {}  // a full counter wakes the loop as well
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
    Link &link(uint32_t peer) {
        auto &slot = links_[peer];
        if (!slot) slot = std::make_unique<Link>(peer, options, completed_, now_ns());
        return *slot;
    }

    // Forwards messages that arrive from one peer on a lane to another peer (Atlas 4.3).
    void relay(uint32_t from, uint16_t from_lane, uint32_t to, uint16_t to_lane, uint64_t buffer_bytes) {
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

    // Number of refused connections: unauthenticated, or not of this job.
    std::atomic<uint64_t> refused{0};

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
            for (auto &[_, connection] : connections_) shutdown(connection->stream.fd, SHUT_WR);
        });
        thread_.join();
    }

private:
    static constexpr char OTHER_JOB[] = "the peer belongs to another job, or to another attempt of this job";
    enum Source : uint64_t { LISTENER, WAKE, MAILBOX, FIRST };  // of an epoll event; from FIRST on: a connection's number
    static constexpr size_t MAX_UNAUTHENTICATED = 64;  // limit of connections that have not authenticated themselves
    static constexpr size_t READ_BUDGET = 1 << 20;
    static constexpr int64_t TICK_NS = SECOND / 20;
    static constexpr int64_t SCOUT_NS = SECOND / 10;

    SslCtx *tls_ = nullptr;
    int listener_ = -1, epoll_ = -1, wake_ = -1;
    Door door_;
    std::unique_ptr<Mailbox> mailbox_;
    // By number, oldest first. Numbers are never reused, so that a stale event cannot name another
    // connection.
    std::map<uint64_t, std::unique_ptr<Connection>> connections_;
    uint64_t next_number_ = FIRST;
    std::map<uint32_t, std::unique_ptr<Link>> links_;
    std::set<std::pair<uint32_t, uint32_t>> relays_;  // pairs of peers whose links fail together
    std::vector<Completed> completed_;
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
            epoll_event events[64];
            int64_t rest = due ? std::clamp<int64_t>(due - now_ns(), 0, TICK_NS) : TICK_NS;
            int count = epoll_wait(epoll_, events, 64, busy ? 0 : static_cast<int>((rest + 999999) / 1000000));
            for (int i = 0; i < count; i++) on_event(events[i]);
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
            remove_closed();
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
        pollfd posted{wake_, POLLIN, 0};
        timespec limit{0, ns};
        ppoll(&posted, 1, &limit, nullptr);
    }

    void on_event(const epoll_event &event) {
        if (event.data.u64 == LISTENER) return accept_all();
        if (event.data.u64 == WAKE) return take_inbox();
        if (event.data.u64 == MAILBOX) return take_mail();
        auto found = connections_.find(event.data.u64);
        if (found == connections_.end()) return;
        Stream &stream = found->second->stream;
        if (event.events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP)) stream.ended = true;
        if (event.events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) stream.mark_readable();
        if (event.events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) stream.writable = true;
    }

    void take_inbox() {
        uint64_t count;
        if (read(wake_, &count, sizeof count) < 0) {}  // woken twice for the same work
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
            if (connection.stage != Stage::READY) advance_handshake(connection, now);
            if (connection.stage != Stage::READY) {
                connection.flush();
                return false;
            }
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
            give_up(connection, broken.what(), now);
        } catch (const std::bad_alloc &) {
            if (connection.link) connection.link->fail("out of memory for incoming messages", connection.link->lost());
            else give_up(connection, "out of memory", now);
        }
        return false;
    }

    void give_up(Connection &connection, const std::string &why, int64_t now) {
        if (connection.link) {
            connection.link->lose(connection, why);
        } else if (connection.connects) {
            connection.dead = why;
            bool refused = connection.stage == Stage::TCP && why == error_text(ECONNREFUSED);
            // The host's port is there, and the endpoint behind it is not.
            if (mailbox_ && (connection.stage == Stage::TLS || connection.stage == Stage::CHALLENGE))
                refused = why == "closed by the peer" || why == error_text(ECONNRESET);
            links_.at(connection.handshake.hello.to)
                ->attempt_failed(connection.slot, "to " + connection.remote.text() + ": " + why, refused, now);
        } else {
            connection.dead = why;
            refused++;
        }
    }

    void tick(int64_t now) {
        for (auto &[_, connection] : connections_) {
            if (!connection->dead.empty() || connection->link) continue;
            int64_t limit = connection->connects ? links_.at(connection->handshake.hello.to)->attempt_limit()
                                                 : options.attempt_ns;
            if (now - connection->opened_ns > limit) give_up(*connection, "the handshake timed out", now);
        }
        for (auto [from, to] : relays_) {
            propagate_failure(link(from), link(to));
            propagate_failure(link(to), link(from));
        }
        for (auto &[_, link] : links_) {
            link->tick(now);
            if (link->failed() || link->left() || !link->connects || leaving_) continue;
            if (link->silent(now)) {
                scout(*link, now);
                continue;
            }
            for (uint32_t slot = 0; slot < link->slots.size(); slot++)
                if (!link->slots[slot] && now >= link->attempts[slot].due_ns) connect(*link, slot, now);
        }
    }

    // Fails the other link with the original cause, which may reach it from both sides of a DP-cell.
    static void propagate_failure(const Link &one, Link &other) {
        if (!one.failed()) return;
        other.fail("cannot relay without rank " + std::to_string(one.peer) + ": " + one.cause(), one.cause());
    }

    void remove_closed() {
        for (auto at = connections_.begin(); at != connections_.end();) {
            auto &connection = *at->second;
            if (connection.dead.empty()) {
                ++at;
                continue;
            }
            // close() alone does not remove it from epoll if another process holds the socket as well.
            epoll_ctl(epoll_, EPOLL_CTL_DEL, connection.stream.fd, nullptr);
            at = connections_.erase(at);
        }
    }

    // Wakes waiters and runs callbacks. Returns whether callbacks may have created work.
    bool deliver() {
        if (completed_.empty()) return false;
        std::vector<Completed> batch;
        batch.swap(completed_);
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

    // ---- opening connections

    void listen_on(const Address &address) {
        int on = 1;
        listener_ = open_socket(address);
        setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        auto *storage = reinterpret_cast<const sockaddr *>(&address.storage);
        if (listener_ < 0 || bind(listener_, storage, address.length) || listen(listener_, 128)) {
            std::string why = "cannot listen on " + address.text() + ": " + error_text(errno);
            Descriptors::all().close(listener_);
            throw std::runtime_error(why);
        }
        Address bound;
        bound.length = sizeof bound.storage;
        getsockname(listener_, reinterpret_cast<sockaddr *>(&bound.storage), &bound.length);
        port = ntohs(reinterpret_cast<sockaddr_in *>(&bound.storage)->sin_port);  // sin6_port is at the same offset
    }

    static int open_socket(const Address &address) {
        int kind = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
        return Descriptors::all().keep([&] { return socket(address.storage.ss_family, kind, 0); });
    }

    void watch(int fd, uint32_t events, uint64_t source) {
        epoll_event event{};
        event.events = events;
        event.data.u64 = source;
        epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event);
    }

    Connection &add(int fd, bool connects, const Address &remote, int64_t now) {
        uint64_t number = next_number_++;
        auto made = connections_.emplace(number, std::make_unique<Connection>(fd, number, connects, remote, now));
        return *made.first->second;
    }

    void watch(const Connection &connection) {
        watch(connection.stream.fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, connection.number);
    }

    void accept_all() {
        for (;;) {
            Address remote;
            remote.length = sizeof remote.storage;
            auto *storage = reinterpret_cast<sockaddr *>(&remote.storage);
            int fd = Descriptors::all().keep(
                [&] { return accept4(listener_, storage, &remote.length, SOCK_NONBLOCK | SOCK_CLOEXEC); });
            if (fd < 0) return;
            accept(fd, remote, mailbox_ ? Stage::KNOCK : Stage::HELLO);
        }
    }

    // Connections that the host's port has handed over: they have knocked.
    void take_mail() {
        for (int fd; (fd = mailbox_->take()) >= 0;) {
            Address remote;
            remote.length = sizeof remote.storage;
            bool there = !getpeername(fd, reinterpret_cast<sockaddr *>(&remote.storage), &remote.length);
            if (there && !fcntl(fd, F_SETFL, O_NONBLOCK)) accept(fd, remote, Stage::HELLO);
            else Descriptors::all().close(fd);
        }
    }

    void accept(int fd, const Address &remote, Stage stage) {
        if (leaving_) return Descriptors::all().close(fd);
        drop_oldest_unauthenticated();
        Connection &connection = add(fd, false, remote, now_ns());
        connection.stage = stage;
        try {
            connection.stream.tune(options.congestion, options.unsent_bytes);
            watch(connection);
            if (stage != Stage::KNOCK) begin(connection);
        } catch (const Broken &broken) {
            give_up(connection, broken.what(), now_ns());
        }
    }

    // Starts the handshake of a connection that was accepted.
    void begin(Connection &connection) {
        connection.stage = tls_ ? Stage::TLS : Stage::HELLO;
        if (tls_) connection.stream.start_tls(tls_, this, false);
    }

    // Nothing of a connection that does not prove the key reaches another process.
    void answer(Connection &connection, const Knock &knock) {
        if (!door_.opens(knock)) throw Broken("it did not knock as peers do");
        if (knock.job == options.job && knock.to == options.id) return begin(connection);
        if (!Mailbox::give(connection.stream.fd, knock.job, knock.to)) throw Broken("no such endpoint on this host");
        connection.dead = "handed over";
    }

    // At the limit, drop the oldest unauthenticated connection: real peers authenticate quickly.
    void drop_oldest_unauthenticated() {
        Connection *oldest = nullptr;
        size_t unauthenticated = 0;
        for (auto &[_, connection] : connections_) {
            if (connection->link || connection->connects || !connection->dead.empty()) continue;
            if (!oldest) oldest = connection.get();
            unauthenticated++;
        }
        if (unauthenticated >= MAX_UNAUTHENTICATED) give_up(*oldest, "too many unauthenticated connections", now_ns());
    }

    bool attempts(const Connection &connection, const Link &link) const {
        return connection.connects && !connection.link && connection.dead.empty() &&
               connection.handshake.hello.to == link.peer;
    }

    // Tries a silent link again and again, because TCP retransmits at ever longer intervals. What answers first
    // shows that the way is open.
    void scout(Link &link, int64_t now) {
        if (now - link.scouted_ns < SCOUT_NS) return;
        for (auto &[_, other] : connections_)
            if (attempts(*other, link) && other->stage != Stage::TCP) return;  // it has been answered
        link.scouted_ns = now;
        open(link, static_cast<uint32_t>(now / SCOUT_NS % link.slots.size()), now);
    }

    // A connection that `scout` opened has been answered: all others are opened anew as well.
    void follow(const Connection &scout, int64_t now) {
        Link &link = *links_.at(scout.handshake.hello.to);
        for (auto &[_, other] : connections_)
            if (attempts(*other, link) && other->stage == Stage::TCP) other->dead = "another was answered";
        for (uint32_t slot = 0; slot < link.slots.size(); slot++)
            if (slot != scout.slot) open(link, slot, now);
    }

    // Whether no other attempt has been answered.
    bool is_first(const Connection &one, const Link &link) const {
        for (auto &[_, other] : connections_)
            if (other.get() != &one && attempts(*other, link) && other->stage != Stage::TCP) return false;
        return true;
    }

    void connect(Link &link, uint32_t slot, int64_t now) {
        for (auto &[_, other] : connections_)
            if (attempts(*other, link) && other->slot == slot) return;  // one is in progress
        open(link, slot, now);
    }

    void open(Link &link, uint32_t slot, int64_t now) {
        int fd = open_socket(link.address);
        if (fd < 0) return link.attempt_failed(slot, error_text(errno), false, now);
        Connection &connection = add(fd, true, link.address, now);
        connection.slot = slot;
        connection.handshake.start(options.job, options.id, link.peer, options.session, slot,
                                   static_cast<uint32_t>(link.slots.size()), options.chunk_bytes);
        try {
            connection.stream.tune(options.congestion, options.unsent_bytes);
            auto *storage = reinterpret_cast<const sockaddr *>(&link.address.storage);
            if (::connect(fd, storage, link.address.length) && errno != EINPROGRESS) throw Broken(error_text(errno));
            watch(connection);
        } catch (const Broken &broken) {
            give_up(connection, broken.what(), now);
        }
    }

    // ---- the handshake, one step per message; see handshake.hpp

    void advance_handshake(Connection &connection, int64_t now) {
        Handshake &handshake = connection.handshake;
        if (connection.stage == Stage::TCP) {
            if (!connection.stream.writable) return;
            int error = 0;
            socklen_t length = sizeof error;
            getsockopt(connection.stream.fd, SOL_SOCKET, SO_ERROR, &error, &length);
            if (error) throw Broken(error_text(error));
            if (mailbox_) {
                Knock knock = door_.knock(options.job, handshake.hello.to);
                if (::send(connection.stream.fd, &knock, sizeof knock, MSG_NOSIGNAL) != sizeof knock)
                    throw Broken(error_text(errno));
            }
            connection.stage = Stage::TLS;
            if (Link &link = *links_.at(handshake.hello.to); link.silent(now) && is_first(connection, link))
                follow(connection, now);
            if (tls_) connection.stream.start_tls(tls_, this, true);
        }
        if (Knock knock; connection.stage == Stage::KNOCK && connection.receive(knock)) answer(connection, knock);
        if (!connection.dead.empty()) return;
        if (connection.stage == Stage::TLS) {
            if (tls_ && !connection.stream.secure()) return;
            if (connection.connects) connection.send(handshake.hello);
            connection.stage = connection.connects ? Stage::CHALLENGE : Stage::HELLO;
        }
        if (connection.stage == Stage::HELLO && connection.receive(handshake.hello)) {
            if (memcmp(handshake.hello.magic, HELLO_MAGIC, sizeof HELLO_MAGIC) || handshake.hello.to != options.id ||
                handshake.hello.connections > 1024 || handshake.hello.slot >= handshake.hello.connections)
                throw Broken("not a valid greeting");
            handshake.answer(options.job, options.id, options.session, options.chunk_bytes);
            connection.send(handshake.challenge);
            connection.stage = Stage::PROOF;
        }
        if (connection.stage == Stage::CHALLENGE && connection.receive(handshake.challenge)) {
            if (memcmp(handshake.challenge.magic, HELLO_MAGIC, sizeof HELLO_MAGIC) ||
                handshake.challenge.from != handshake.hello.to)
                throw Broken("not a valid answer to the greeting");
            if (!handshake.of_one_job()) throw Broken(OTHER_JOB);
            if (!links_.at(handshake.hello.to)->needs(connection.slot, connection.opened_ns))
                return void(connection.dead = "the connection that it was to replace works again");
            connection.send(handshake.prove(options.key, true));
            connection.stage = Stage::PROOF;
        }
        Proof proof;
        if (connection.stage == Stage::PROOF && connection.receive(proof)) {
            if (!handshake.proven(options.key, !connection.connects, proof))
                throw Broken("the peer has a different key");
            if (!handshake.of_one_job()) throw Broken(OTHER_JOB);
            admit(connection, now);
        }
    }

    void admit(Connection &connection, int64_t now) {
        const Handshake &handshake = connection.handshake;
        bool connects = connection.connects;
        Link &known = link(connects ? handshake.hello.to : handshake.hello.from);
        uint64_t session = connects ? handshake.challenge.session : handshake.hello.session;
        uint32_t chunk_bytes = connects ? handshake.challenge.chunk_bytes : handshake.hello.chunk_bytes;
        if (std::string why = known.refuses(session, chunk_bytes); !why.empty()) {
            if (why == "its peer has restarted") known.fail("the other process has restarted", known.lost());
            throw Broken(why);
        }
        if (!connects) {
            connection.slot = handshake.hello.slot;
            connection.send(handshake.prove(options.key, false));
        }
        known.attach(connection, session, chunk_bytes, now);
    }

    static unsigned give_key(Ssl *ssl, unsigned char *key, unsigned room) {
        const std::string &secret = static_cast<Endpoint *>(openssl().SSL_get_ex_data(ssl, 0))->options.tls_key;
        if (secret.size() > room) return 0;
        memcpy(key, secret.data(), secret.size());
        return static_cast<unsigned>(secret.size());
    }
    static unsigned psk_client(Ssl *ssl, const char *, char *identity, unsigned id_room, unsigned char *key,
                               unsigned room) {
        snprintf(identity, id_room, "weft");
        return give_key(ssl, key, room);
    }
    static unsigned psk_server(Ssl *ssl, const char *, unsigned char *key, unsigned room) {
        return give_key(ssl, key, room);
    }
};

}  // namespace weft
