// The transport with its system calls counted, by thread, and a thread that can be held before it waits.
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

struct Calls {
    std::atomic<uint64_t> reads{0}, writes{0}, waits{0}, written_bytes{0};
};

static std::atomic<int> held{0};  // the thread that may not go on
static std::atomic<bool> stands{false};
static std::mutex all_mutex;

static Calls &calls_of(int thread) {
    static auto &all = *new std::map<int, Calls>;
    std::lock_guard hold(all_mutex);
    return all[thread];
}

static int thread_id() {
    static thread_local const int id = static_cast<int>(syscall(SYS_gettid));
    return id;
}

static Calls &mine() {
    static thread_local Calls &calls = calls_of(thread_id());
    return calls;
}

static ssize_t written(ssize_t done) {
    mine().writes++;
    mine().written_bytes += done > 0 ? done : 0;
    return done;
}

// The linker hands these the calls of the library (`--wrap`).
extern "C" {
ssize_t __real_recv(int, void *, size_t, int);
ssize_t __real_readv(int, const iovec *, int);
ssize_t __real_send(int, const void *, size_t, int);
ssize_t __real_sendmsg(int, const msghdr *, int);
int __real_epoll_wait(int, epoll_event *, int, int);
int __real_ppoll(pollfd *, nfds_t, const timespec *, const sigset_t *);

ssize_t __wrap_recv(int fd, void *data, size_t room, int flags) {
    mine().reads++;
    return __real_recv(fd, data, room, flags);
}
ssize_t __wrap_readv(int fd, const iovec *parts, int count) {
    mine().reads++;
    return __real_readv(fd, parts, count);
}
ssize_t __wrap_send(int fd, const void *data, size_t length, int flags) {
    return written(__real_send(fd, data, length, flags));
}
ssize_t __wrap_sendmsg(int fd, const msghdr *message, int flags) {
    return written(__real_sendmsg(fd, message, flags));
}
int __wrap_epoll_wait(int fd, epoll_event *events, int room, int timeout_ms) {
    for (; held == thread_id(); usleep(200)) stands = true;
    mine().waits++;
    return __real_epoll_wait(fd, events, room, timeout_ms);
}
int __wrap_ppoll(pollfd *files, nfds_t count, const timespec *limit, const sigset_t *signals) {
    mine().waits++;
    return __real_ppoll(files, count, limit, signals);
}

// The loop of that thread stops before its next wait; 0 lets it go on.
void counted_hold(int thread) { stands = false, held = thread; }
int counted_stands() { return stands; }

// Reads, writes, waits and written bytes of a thread so far.
void counted_calls(int thread, uint64_t *into) {
    const Calls &calls = calls_of(thread);
    uint64_t counts[] = {calls.reads, calls.writes, calls.waits, calls.written_bytes};
    for (uint64_t count : counts) *into++ = count;
}
}

#include "transport.cpp"
