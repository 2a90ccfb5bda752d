// Sockets of this process that no forked child keeps.
//
// A child would hold every connection open behind our back: peers would not hear that we closed
// one, and epoll would go on to report it. So a fork waits until no descriptor is being opened or
// closed, and the child closes them all before `fork` returns there. It runs no thread of ours:
// endpoints are of no use to it, which `transport.py` tells whoever tries.
#pragma once
#include <pthread.h>
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

    // What `open` returns is known from the moment it exists.
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

}  // namespace weft
