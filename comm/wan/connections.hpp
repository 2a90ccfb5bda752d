// All connections of an endpoint: opened or accepted, authenticated, attached to their links, and removed.
//
// All of it runs on the endpoint's loop.
#pragma once
#include <sys/epoll.h>

#include "shared_port.hpp"
#include "links.hpp"

namespace weft {

class Connections {
public:
    uint16_t port = 0;
    // Number of refused connections: unauthenticated, or not of this job.
    std::atomic<uint64_t> refused{0};

    // Without `host` it does not listen, and gets its connections from the endpoint that does (shared_port.hpp).
    // `wake` becomes readable when `wait` is to return.
    Connections(const Options &options, Links &links, const char *host, uint16_t wanted_port, bool tls, int wake)
        : options_(options), links_(links), shared_port_(options.port_key) {
        if (tls) tls_ = openssl().context(psk_client, psk_server);
        if (!options.port_key.empty()) mailbox_ = std::make_unique<Mailbox>(options.job, options.id);
        if (*host) listen_on(Address::of(host, wanted_port));
        epoll_ = Descriptors::all().keep([] { return epoll_create1(EPOLL_CLOEXEC); });
        if (listener_ >= 0) watch(listener_, EPOLLIN, LISTENER);
        if (mailbox_) watch(mailbox_->fd, EPOLLIN, MAILBOX);
        watch(wake, EPOLLIN, WAKE);
    }

    ~Connections() {
        all_.clear();
        for (int fd : {listener_, epoll_}) Descriptors::all().close(fd);
        if (tls_) openssl().SSL_CTX_free(tls_);
    }

    auto begin() { return all_.begin(); }
    auto end() { return all_.end(); }
    bool empty() const { return all_.empty(); }

    // Waits until something is ready, and takes note of it. Returns whether that is `wake`.
    bool wait(int timeout_ms) {
        epoll_event events[64];
        int count = epoll_wait(epoll_, events, 64, timeout_ms);
        bool woken = false;
        for (int i = 0; i < count; i++) {
            if (events[i].data.u64 == WAKE) woken = true;
            else on_event(events[i]);
        }
        return woken;
    }

    // True if a connection may carry frames, after a step of its handshake if there is one.
    bool ready(Connection &connection, int64_t now) {
        if (connection.stage != Stage::READY) advance_handshake(connection, now);
        if (connection.stage != Stage::READY) connection.flush();
        return connection.stage == Stage::READY;
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
            links_.of(connection.handshake.hello.to)
                .attempt_failed(connection.slot, "to " + connection.remote.text() + ": " + why, refused, now);
        } else {
            connection.dead = why;
            refused++;
        }
    }

    // Ends handshakes that take too long.
    void time_out(int64_t now) {
        for (auto &[_, connection] : all_) {
            if (!connection->dead.empty() || connection->link) continue;
            int64_t limit = connection->connects ? links_.of(connection->handshake.hello.to).attempt_limit()
                                                 : options_.attempt_ns;
            if (now - connection->opened_ns > limit) give_up(*connection, "the handshake timed out", now);
        }
    }

    // Opens the connections that a link lacks.
    void supply(Link &link, int64_t now) {
        if (link.failed() || link.left() || !link.connects || leaving_) return;
        if (link.silent(now)) return scout(link, now);
        for (uint32_t slot = 0; slot < link.slots.size(); slot++)
            if (!link.slots[slot] && now >= link.attempts[slot].due_ns) connect(link, slot, now);
    }

    // Opens and accepts no more, and sends nothing after what is sent.
    void leave() {
        leaving_ = true;
        for (auto &[_, connection] : all_) shutdown(connection->stream.fd, SHUT_WR);
    }

    void remove_closed() {
        for (auto at = all_.begin(); at != all_.end();) {
            auto &connection = *at->second;
            if (connection.dead.empty()) {
                ++at;
                continue;
            }
            // close() alone does not remove it from epoll if another process holds the socket as well.
            epoll_ctl(epoll_, EPOLL_CTL_DEL, connection.stream.fd, nullptr);
            at = all_.erase(at);
        }
    }

private:
    static constexpr char OTHER_JOB[] = "the peer belongs to another job, or to another attempt of this job";
    enum Source : uint64_t { LISTENER, WAKE, MAILBOX, FIRST };  // of an epoll event; from FIRST on: a connection's number
    static constexpr size_t MAX_UNAUTHENTICATED = 64;  // limit of connections that have not authenticated themselves
    static constexpr int64_t SCOUT_NS = SECOND / 10;

    const Options &options_;
    Links &links_;
    SslCtx *tls_ = nullptr;
    int listener_ = -1, epoll_ = -1;
    SharedPort shared_port_;
    std::unique_ptr<Mailbox> mailbox_;
    bool leaving_ = false;
    // By number, oldest first. Numbers are never reused, so that a stale event cannot name another
    // connection.
    std::map<uint64_t, std::unique_ptr<Connection>> all_;
    uint64_t next_number_ = FIRST;

    void on_event(const epoll_event &event) {
        if (event.data.u64 == LISTENER) return accept_all();
        if (event.data.u64 == MAILBOX) return take_mail();
        auto found = all_.find(event.data.u64);
        if (found == all_.end()) return;
        Stream &stream = found->second->stream;
        if (event.events & (EPOLLHUP | EPOLLERR | EPOLLRDHUP)) stream.ended = true;
        if (event.events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP)) stream.mark_readable();
        if (event.events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) stream.writable = true;
    }

    // ---- opening connections

    void listen_on(const Address &address) {
        int on = 1;
        listener_ = open_socket(address);
        setsockopt(listener_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (mailbox_ && address.port()) setsockopt(listener_, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);
        auto *storage = reinterpret_cast<const sockaddr *>(&address.storage);
        if (listener_ < 0 || bind(listener_, storage, address.length) || listen(listener_, 128)) {
            std::string why = "cannot listen on " + address.text() + ": " + error_text(errno);
            Descriptors::all().close(listener_);
            throw std::runtime_error(why);
        }
        Address bound;
        bound.length = sizeof bound.storage;
        getsockname(listener_, reinterpret_cast<sockaddr *>(&bound.storage), &bound.length);
        port = bound.port();
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
        auto made = all_.emplace(number, std::make_unique<Connection>(fd, number, connects, remote, now));
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
            accept(fd, remote, mailbox_ ? Stage::PORT_HELLO : Stage::HELLO);
        }
    }

    // Connections that the host's port has handed over: their hello is read.
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
            connection.stream.tune(options_.congestion, options_.unsent_bytes);
            watch(connection);
            if (stage != Stage::PORT_HELLO) begin(connection);
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
    void answer(Connection &connection, const PortHello &hello) {
        if (!shared_port_.admits(hello)) throw Broken("it sent no valid hello");
        if (hello.job == options_.job && hello.to == options_.id) return begin(connection);
        connection.port_hello = std::make_shared<PortHello>(hello);
        connection.stage = Stage::HANDOVER;
    }

    // A recipient whose mailbox is full gets the connection later, until the handshake times out.
    void hand_over(Connection &connection) {
        int error = Mailbox::give(connection.stream.fd, *connection.port_hello, port);
        if (error == EAGAIN) return;
        if (error) throw Broken("nobody of that name on this host");
        connection.dead = "handed over";
    }

    // At the limit, drop the oldest unauthenticated connection: real peers authenticate quickly.
    void drop_oldest_unauthenticated() {
        Connection *oldest = nullptr;
        size_t unauthenticated = 0;
        for (auto &[_, connection] : all_) {
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

    // Opens probe connections to a silent link, because TCP retransmits at ever longer intervals. The first
    // answer shows that the route is open.
    void scout(Link &link, int64_t now) {
        if (now - link.scouted_ns < SCOUT_NS) return;
        for (auto &[_, other] : all_)
            if (attempts(*other, link) && other->stage != Stage::TCP) return;  // it has been answered
        link.scouted_ns = now;
        open(link, static_cast<uint32_t>(now / SCOUT_NS % link.slots.size()), now);
    }

    // A connection that `scout` opened has been answered: all others are opened anew as well.
    void follow(const Connection &scout, int64_t now) {
        Link &link = links_.of(scout.handshake.hello.to);
        for (auto &[_, other] : all_)
            if (attempts(*other, link) && other->stage == Stage::TCP) other->dead = "another was answered";
        for (uint32_t slot = 0; slot < link.slots.size(); slot++)
            if (slot != scout.slot) open(link, slot, now);
    }

    // True if no other attempt has been answered.
    bool is_first(const Connection &one, const Link &link) const {
        for (auto &[_, other] : all_)
            if (other.get() != &one && attempts(*other, link) && other->stage != Stage::TCP) return false;
        return true;
    }

    void connect(Link &link, uint32_t slot, int64_t now) {
        for (auto &[_, other] : all_)
            if (attempts(*other, link) && other->slot == slot) return;  // one is in progress
        open(link, slot, now);
    }

    void open(Link &link, uint32_t slot, int64_t now) {
        int fd = open_socket(link.address);
        if (fd < 0) return link.attempt_failed(slot, error_text(errno), false, now);
        Connection &connection = add(fd, true, link.address, now);
        connection.slot = slot;
        connection.handshake.start(options_.job, options_.id, link.peer, options_.session, slot,
                                   static_cast<uint32_t>(link.slots.size()), options_.chunk_bytes);
        try {
            connection.stream.tune(options_.congestion, options_.unsent_bytes);
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
                PortHello hello = shared_port_.hello(options_.job, handshake.hello.to);
                if (::send(connection.stream.fd, &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello)
                    throw Broken(error_text(errno));
            }
            connection.stage = Stage::TLS;
            if (Link &link = links_.of(handshake.hello.to); link.silent(now) && is_first(connection, link))
                follow(connection, now);
            if (tls_) connection.stream.start_tls(tls_, this, true);
        }
        if (PortHello hello; connection.stage == Stage::PORT_HELLO && connection.receive(hello))
            answer(connection, hello);
        if (connection.stage == Stage::HANDOVER) hand_over(connection);
        if (!connection.dead.empty()) return;
        if (connection.stage == Stage::TLS) {
            if (tls_ && !connection.stream.secure()) return;
            if (connection.connects) connection.send(handshake.hello);
            connection.stage = connection.connects ? Stage::CHALLENGE : Stage::HELLO;
        }
        if (connection.stage == Stage::HELLO && connection.receive(handshake.hello)) {
            if (memcmp(handshake.hello.magic, HELLO_MAGIC, sizeof HELLO_MAGIC) || handshake.hello.to != options_.id ||
                handshake.hello.connections > 1024 || handshake.hello.slot >= handshake.hello.connections)
                throw Broken("not a valid greeting");
            handshake.answer(options_.job, options_.id, options_.session, options_.chunk_bytes);
            connection.send(handshake.challenge);
            connection.stage = Stage::PROOF;
        }
        if (connection.stage == Stage::CHALLENGE && connection.receive(handshake.challenge)) {
            if (memcmp(handshake.challenge.magic, HELLO_MAGIC, sizeof HELLO_MAGIC) ||
                handshake.challenge.from != handshake.hello.to)
                throw Broken("not a valid answer to the greeting");
            if (!handshake.of_one_job()) throw Broken(OTHER_JOB);
            if (!links_.of(handshake.hello.to).needs(connection.slot, connection.opened_ns))
                return void(connection.dead = "the connection that it was to replace works again");
            connection.send(handshake.prove(options_.key, true));
            connection.stage = Stage::PROOF;
        }
        Proof proof;
        if (connection.stage == Stage::PROOF && connection.receive(proof)) {
            if (!handshake.proven(options_.key, !connection.connects, proof))
                throw Broken("the peer has a different key");
            if (!handshake.of_one_job()) throw Broken(OTHER_JOB);
            admit(connection, now);
        }
    }

    void admit(Connection &connection, int64_t now) {
        const Handshake &handshake = connection.handshake;
        bool connects = connection.connects;
        Link &known = links_.of(connects ? handshake.hello.to : handshake.hello.from);
        uint64_t session = connects ? handshake.challenge.session : handshake.hello.session;
        uint32_t chunk_bytes = connects ? handshake.challenge.chunk_bytes : handshake.hello.chunk_bytes;
        if (std::string why = known.refuses(session, chunk_bytes); !why.empty()) {
            if (why == "its peer has restarted") known.fail("the other process has restarted", known.lost());
            throw Broken(why);
        }
        if (!connects) {
            connection.slot = handshake.hello.slot;
            connection.send(handshake.prove(options_.key, false));
        }
        known.attach(connection, session, chunk_bytes, now);
    }

    static unsigned give_key(Ssl *ssl, unsigned char *key, unsigned capacity) {
        const std::string &secret = static_cast<Connections *>(openssl().SSL_get_ex_data(ssl, 0))->options_.tls_key;
        if (secret.size() > capacity) return 0;
        memcpy(key, secret.data(), secret.size());
        return static_cast<unsigned>(secret.size());
    }
    static unsigned psk_client(Ssl *ssl, const char *, char *identity, unsigned id_room, unsigned char *key,
                               unsigned capacity) {
        snprintf(identity, id_room, "weft");
        return give_key(ssl, key, capacity);
    }
    static unsigned psk_server(Ssl *ssl, const char *, unsigned char *key, unsigned capacity) {
        return give_key(ssl, key, capacity);
    }
};

}  // namespace weft
