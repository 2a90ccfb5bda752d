// A non-blocking TCP connection, with or without TLS.
#pragma once
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "descriptors.hpp"
#include "frame.hpp"
#include "openssl.hpp"

namespace weft {

inline std::string error_text(int code) { return strerror(code); }

struct Address {
    sockaddr_storage storage{};
    socklen_t length = 0;

    static Address of(const char *host, uint16_t port) {
        Address address;
        auto *four = reinterpret_cast<sockaddr_in *>(&address.storage);
        auto *six = reinterpret_cast<sockaddr_in6 *>(&address.storage);
        if (inet_pton(AF_INET, host, &four->sin_addr) == 1) {
            four->sin_family = AF_INET;
            four->sin_port = htons(port);
            address.length = sizeof *four;
        } else if (inet_pton(AF_INET6, host, &six->sin6_addr) == 1) {
            six->sin6_family = AF_INET6;
            six->sin6_port = htons(port);
            address.length = sizeof *six;
        } else {
            throw std::runtime_error(std::string(host) + " is no IP address");
        }
        return address;
    }

    // sin6_port is at the same offset
    uint16_t port() const { return ntohs(reinterpret_cast<const sockaddr_in *>(&storage)->sin_port); }

    std::string text() const {
        char host[INET6_ADDRSTRLEN] = "?";
        auto *four = reinterpret_cast<const sockaddr_in *>(&storage);
        auto *six = reinterpret_cast<const sockaddr_in6 *>(&storage);
        bool is_six = storage.ss_family == AF_INET6;
        inet_ntop(storage.ss_family, is_six ? (const void *)&six->sin6_addr : &four->sin_addr, host, sizeof host);
        return std::string(host) + ":" + std::to_string(port());
    }
};

class Stream {
public:
    const int fd;
    // Edge-triggered readiness: set by the loop, cleared when a call would block. With TLS there may be
    // more to read than the kernel has.
    bool readable = false, writable = false;
    bool ended = false;  // the peer has shut down its side: after the remaining data comes EOF

    explicit Stream(int fd) : fd(fd) {}
    void mark_readable() { readable = arrived_ = true; }
    ~Stream() {
        if (tls_) openssl().SSL_free(tls_);
        Descriptors::all().close(fd);
    }
    Stream(const Stream &) = delete;

    // `unsent_bytes` limits the unsent data in the socket buffer (TCP_NOTSENT_LOWAT): enough to keep the
    // connection busy, too little for a slow one to accumulate chunks.
    void tune(const std::string &congestion, int unsent_bytes) {
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent_bytes, sizeof unsent_bytes);
        if (!congestion.empty() &&
            setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion.data(), static_cast<socklen_t>(congestion.size())))
            throw Broken("congestion control " + congestion + ": " + error_text(errno));
    }

    // Number of consecutive TCP retransmissions without an acknowledgement.
    int backoffs() const { return tcp().tcpi_backoff; }

    // Number of segments that were sent again since the connection began.
    uint32_t retransmissions() const { return tcp().tcpi_total_retrans; }

    // What the kernel knows about the connection; all 0 if it knows nothing.
    tcp_info tcp() const {
        tcp_info info{};
        socklen_t length = sizeof info;
        return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) ? tcp_info{} : info;
    }

    // Bytes that the peer's kernel has not acknowledged.
    int unacknowledged_bytes() const {
        int bytes = 0;
        return ioctl(fd, SIOCOUTQ, &bytes) ? 0 : bytes;
    }

    void start_tls(SslCtx *context, void *owner, bool connects) {
        tls_ = openssl().SSL_new(context);
        if (!tls_) throw Broken("TLS cannot start");
        Bio *both = openssl().over(this);
        openssl().SSL_set_bio(tls_, both, both);
        openssl().SSL_set_ex_data(tls_, 0, owner);
        connects ? openssl().SSL_set_connect_state(tls_) : openssl().SSL_set_accept_state(tls_);
        mark_readable();  // start the TLS handshake
    }

    bool has_tls() const { return tls_; }

    // True if the TLS handshake is complete.
    bool secure() {
        if (!readable) return false;
        int done = openssl().SSL_do_handshake(tls_);
        if (done != 1) tls_waits(done, "TLS handshake failed");
        send_encrypted();
        return done == 1;
    }

    // The BIO callbacks of TLS: `write` queues for `send_encrypted`, `read` returns received bytes, 0 at
    // EOF, -1 if there are none now.
    void encrypted(const char *data, int length) { encrypted_.append(data, length); }
    int receive(char *data, int capacity) {
        if (!arrived_) return -1;
        ssize_t done = recv(fd, data, capacity, MSG_DONTWAIT);
        if (done < capacity && !(done > 0 && ended) && errno_of(done) != EINTR) arrived_ = false;
        failed_ = errno_of(done);
        return done >= 0 || failed_ == EAGAIN || failed_ == EINTR ? static_cast<int>(done) : 0;
    }

    // Returns true if accepted data is not in the socket buffer yet.
    bool holds_back() const { return encrypted_.length > 0; }

    // Writes non-empty `parts`; returns the number of bytes accepted, 0 if the call would block.
    size_t write(const iovec *parts, int count) {
        if (tls_) {
            if (!send_encrypted()) return 0;
            size_t taken = 0;
            for (const iovec *part = parts; part != parts + count; part++) {
                int length = static_cast<int>(std::min<size_t>(part->iov_len, MOST_ENCRYPTED));
                int done = openssl().SSL_write(tls_, part->iov_base, length);
                if (done <= 0) throw Broken("TLS write failed");
                taken += done;
                if (static_cast<size_t>(done) < part->iov_len) break;
            }
            send_encrypted();
            return taken;
        }
        msghdr message{};
        message.msg_iov = const_cast<iovec *>(parts);
        message.msg_iovlen = count;
        return sent(sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT));
    }

    // Sends encrypted data; returns whether all of it was sent.
    bool send_encrypted() {
        while (holds_back() && writable) {
            size_t left = encrypted_.length - sent_;
            sent_ += sent(send(fd, encrypted_.data.get() + sent_, left, MSG_NOSIGNAL | MSG_DONTWAIT));
            if (sent_ == encrypted_.length) sent_ = encrypted_.length = 0;
        }
        return !holds_back();
    }

    // Reads into `parts`; returns the number of bytes, 0 if the call would block.
    size_t read(const iovec *parts, int count) {
        if (tls_) {
            int part = parts[0].iov_len ? 0 : 1;
            int length = static_cast<int>(std::min<size_t>(parts[part].iov_len, 1 << 20));
            int done = openssl().SSL_read(tls_, parts[part].iov_base, length);
            return done > 0 ? done : tls_waits(done, "TLS read failed: a damaged or foreign stream");
        }
        size_t capacity = parts[0].iov_len + (count > 1 ? parts[1].iov_len : 0);
        ssize_t done = readv(fd, parts, count);
        if (done > 0) {
            if (static_cast<size_t>(done) < capacity && !ended) readable = false;  // the socket is drained
            return done;
        }
        if (done == 0) throw Broken("closed by the peer");
        if (errno != EAGAIN && errno != EINTR) throw Broken(error_text(errno));
        if (errno == EAGAIN) readable = false;
        return 0;
    }

private:
    static constexpr size_t MOST_ENCRYPTED = 1 << 20;  // per call

    Ssl *tls_ = nullptr;
    // TLS records hold 16 kB; sent one by one, each would cost a system call and a partial packet.
    struct Gathered {
        std::unique_ptr<char[]> data;
        size_t length = 0, capacity = 0;

        void append(const char *more, size_t count) {
            if (length + count > capacity) {
                std::unique_ptr<char[]> larger(new char[capacity = std::max(2 * capacity, length + count)]);
                if (length) memcpy(larger.get(), data.get(), length);
                data = std::move(larger);
            }
            memcpy(data.get() + length, more, count);
            length += count;
        }
    } encrypted_;
    size_t sent_ = 0;      // bytes of it that were sent
    bool arrived_ = false;  // whether the socket may have data that TLS has not read
    int failed_ = 0;        // errno of the last failed read; 0 at EOF

    static int errno_of(ssize_t done) { return done < 0 ? errno : 0; }

    size_t sent(ssize_t done) {
        if (done >= 0) return done;
        if (errno != EAGAIN && errno != EINTR) throw Broken(error_text(errno));
        if (errno == EAGAIN) writable = false;
        return 0;
    }

    size_t tls_waits(int done, const char *otherwise) {
        int error = openssl().SSL_get_error(tls_, done);
        openssl().ERR_clear_error();  // the error queue is per thread
        switch (error) {
            case OpenSsl::WANT_READ: readable = arrived_; return 0;
            case OpenSsl::ZERO_RETURN: throw Broken("closed by the peer");
            case 5: throw Broken(failed_ ? error_text(failed_) : "closed by the peer");  // SSL_ERROR_SYSCALL
            default: throw Broken(otherwise);
        }
    }
};

}  // namespace weft
