// Sockets of this process that a forked child must not keep.
//
// A child would keep every connection open: peers would not see that this process closed one, and
// epoll would continue to report it. So a fork waits until no descriptor is being opened or closed,
// and the child closes them all before `fork` returns in it. The child has no transport thread;
// `transport.py` raises an error if it uses an inherited endpoint.
#pragma once
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace weft {

class Descriptors {
public:
    static Descriptors &all() {
        static auto *only = new Descriptors;  // never destroyed: a thread may outlive `main`
        return *only;
    }

    // Opens a descriptor and registers it atomically with regard to forks.
    template <class Open>
    int keep(Open open) {
        std::lock_guard hold(mutex_);
        int fd = open();
        if (fd >= 0) kept_.insert(fd);
        return fd;
    }

    void close(int fd) {
        if (fd < 0) return;
        std::lock_guard hold(mutex_);
        kept_.erase(fd);
        ::close(fd);
    }

private:
    std::mutex mutex_;
    std::set<int> kept_;

    Descriptors() {
        pthread_atfork([] { all().mutex_.lock(); }, [] { all().mutex_.unlock(); }, [] { all().forked(); });
    }

    void forked() {
        for (int fd : kept_) ::close(fd);
        kept_.clear();
        mutex_.unlock();
    }
};

// A descriptor that other threads make readable.
class Wakeup {
public:
    const int fd = Descriptors::all().keep([] { return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); });

    Wakeup() = default;
    Wakeup(const Wakeup &) = delete;
    ~Wakeup() { Descriptors::all().close(fd); }

    void ask() const {
        uint64_t one = 1;
        if (write(fd, &one, sizeof one) < 0) {}  // a full counter is readable as well
    }
    void clear() const {
        uint64_t count;
        if (read(fd, &count, sizeof count) < 0) {}  // already reset
    }
};

}  // namespace weft
