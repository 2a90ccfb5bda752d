// One TCP port for all endpoints of a host: the listener passes each connection to the endpoint that its hello names.
//
// A connection begins with a `PortHello`, in the clear, before TLS: it names the endpoint, and proves the job's key.
// A hello is valid once, so replaying it opens nothing. The other endpoints of the host receive their
// connections from a mailbox, a Unix socket; the kernel reports the sender's user.
#pragma once
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <unordered_set>

#include "descriptors.hpp"
#include "handshake.hpp"

namespace weft {

struct PortHello {
    char magic[8];
    Job job;
    uint32_t to, reserved;
    unsigned char random[32];
    unsigned char mac[32];
};
static_assert(sizeof(PortHello) == 96, "the wire format");

constexpr char PORT_MAGIC[8] = {'w', 'e', 'f', 't', 'd', 'o', 'o', 'r'};

class SharedPort {
public:
    explicit SharedPort(const std::string &key) : key_(key) {}

    PortHello hello(const Job &job, uint32_t to) const {
        PortHello hello{{}, job, to, 0, {}, {}};
        memcpy(hello.magic, PORT_MAGIC, sizeof PORT_MAGIC);
        fill_random(hello.random, sizeof hello.random);
        prove(hello, hello.mac);
        return hello;
    }

    // True if a process that has the key made this hello, and it is the first with these bytes.
    bool admits(const PortHello &hello) {
        unsigned char mac[sizeof hello.mac];
        if (memcmp(hello.magic, PORT_MAGIC, sizeof PORT_MAGIC)) return false;
        prove(hello, mac);
        if (openssl().CRYPTO_memcmp(mac, hello.mac, sizeof mac)) return false;
        return seen_.insert(std::string(reinterpret_cast<const char *>(hello.random), sizeof hello.random)).second;
    }

private:
    const std::string key_;
    std::unordered_set<std::string> seen_;  // only holders of the key can add entries

    void prove(const PortHello &hello, unsigned char *mac) const {
        unsigned length = sizeof hello.mac;
        if (!openssl().HMAC(openssl().EVP_sha256(), key_.data(), static_cast<int>(key_.size()),
                            reinterpret_cast<const unsigned char *>(&hello), offsetof(PortHello, mac), mac, &length))
            throw std::runtime_error("HMAC failed");
    }
};

class Mailbox {
public:
    const int fd;

    Mailbox(const Job &job, uint32_t id) : fd(open()) {
        Name name(job, id);
        int on = 1;
        if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) ||
            bind(fd, reinterpret_cast<sockaddr *>(&name.address), name.length)) {
            std::string why = strerror(errno);
            Descriptors::all().close(fd);
            throw std::runtime_error("cannot take connections from the host's port: " + why);
        }
    }
    ~Mailbox() { Descriptors::all().close(fd); }
    Mailbox(const Mailbox &) = delete;

    // Passes a connection on. Returns 0, or an error number: EAGAIN if the recipient's mailbox is full.
    static int give(int connection, const PortHello &hello, uint16_t port) {
        int sender = open();
        if (sender < 0) return errno;
        Name name = hello.job == Job{} ? Name(port, hello.to) : Name(hello.job, hello.to);
        char byte = 0;
        iovec part{&byte, 1};
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof connection)] = {};
        msghdr message{};
        message.msg_name = &name.address;
        message.msg_namelen = name.length;
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof connection);
        memcpy(CMSG_DATA(header), &connection, sizeof connection);
        int error = sendmsg(sender, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == 1 ? 0 : errno;
        Descriptors::all().close(sender);
        return error;
    }

    // The next connection, -1 if there is none now. What another user sent is dropped.
    int take() const {
        for (;;) {
            int user = -1, taken = -1;
            bool any = false;
            Descriptors::all().keep([&] {
                any = receive(user, taken);
                return taken;
            });
            if (!any) return -1;
            if (taken >= 0 && user == static_cast<int>(geteuid())) return taken;
            Descriptors::all().close(taken);
        }
    }

private:
    struct Name {
        sockaddr_un address{};
        socklen_t length;

        Name(const Job &job, uint32_t id) : Name("weft-wan-" + std::to_string(id) + "-" + hex(job)) {}

        // A service that listens at the host's port: the driver, or the ranks' rendezvous (comm/host_port.py).
        Name(uint16_t port, uint32_t service)
            : Name("weft-port-" + std::to_string(port) + "-" + std::to_string(service)) {}

    private:
        explicit Name(const std::string &text) {
            address.sun_family = AF_UNIX;
            memcpy(address.sun_path + 1, text.data(), text.size());  // abstract: gone with its process
            length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
        }

        static std::string hex(const Job &job) {
            std::string text;
            for (unsigned char byte : job) {
                char digits[3];
                snprintf(digits, sizeof digits, "%02x", byte);
                text += digits;
            }
            return text;
        }
    };

    static int open() {
        return Descriptors::all().keep([] { return socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
    }

    // The first descriptor of a message; others, which no endpoint of ours sends, are closed.
    static int only_one(cmsghdr *header) {
        int first = -1;
        for (size_t at = 0; CMSG_LEN(at + sizeof first) <= header->cmsg_len; at += sizeof first) {
            int found;
            memcpy(&found, CMSG_DATA(header) + at, sizeof found);
            if (first < 0) first = found;
            else ::close(found);
        }
        return first;
    }

    bool receive(int &user, int &taken) const {
        char byte;
        iovec part{&byte, 1};
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof taken) + CMSG_SPACE(sizeof(ucred))];
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        if (recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) < 0) return false;
        for (cmsghdr *header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
            if (header->cmsg_level != SOL_SOCKET) continue;
            if (header->cmsg_type == SCM_RIGHTS) taken = only_one(header);
            if (header->cmsg_type == SCM_CREDENTIALS)
                user = static_cast<int>(reinterpret_cast<const ucred *>(CMSG_DATA(header))->uid);
        }
        return true;
    }
};

}  // namespace weft
