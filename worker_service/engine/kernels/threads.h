// How the threads of a parallel region share work out, and wait for each other. What they compute is not known here.
#pragma once
#include <omp.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include <atomic>
#include <cstdint>
#include <vector>

namespace {

// Where the threads of a parallel region wait for each other. OpenMP's own barriers spin for long: on a busy machine one
// thread then spins on the very core that another one needs, for a whole time slice at each of hundreds of barriers. Here a
// thread spins for some tens of microseconds, then sleeps (on Linux), and the system has its core for the one that is waited
// for.
class Barrier {
   public:
    void wait() {
        const int now = generation.load();
        if (arrived.fetch_add(1) + 1 == omp_get_num_threads()) {
            arrived.store(0);
            generation.store(now + 1);
            if (asleep.load()) wake();
            return;
        }
        for (int spins = 0; spins < SPINS; spins++)
            if (generation.load(std::memory_order_acquire) != now) return;
        asleep.fetch_add(1);
        while (generation.load() == now) sleep(now);
        asleep.fetch_sub(1);
    }

   private:
    static constexpr int SPINS = 100000;  // some tens of microseconds
    std::atomic<int> arrived{0}, generation{0}, asleep{0};

#ifdef __linux__
    void sleep(int while_it_is) { syscall(SYS_futex, &generation, FUTEX_WAIT_PRIVATE, while_it_is, nullptr); }
    void wake() { syscall(SYS_futex, &generation, FUTEX_WAKE_PRIVATE, INT32_MAX); }
#else
    void sleep(int) { sched_yield(); }
    void wake() {}
#endif
};

// The threads of one parallel region, made before that begins. They share work out fewer than 2^16 times.
class Team {
   public:
    Team() : shares(omp_get_max_threads()) {}

    // Calls work(task) for 0..tasks, fewer than 2^24; returns when all are done. All threads call it. Each begins with tasks
    // that lie beside each other, as what they read does: so a cache has asked for what this thread reads next. Who has none
    // left takes the last ones of others, for some may have lost their core.
    template <typename Work>
    void share(int tasks, const Work& work) {
        const int threads = omp_get_num_threads(), own = omp_get_thread_num();
        const uint64_t round = ++shares[own].rounds;
        const auto begin = [&](uint64_t thread) { return tasks * thread / threads; };
        for (int i = 0; i < threads; i++) {
            const int owner = (own + i) % threads;
            const uint64_t all = round << 48 | begin(owner) << 24 | begin(owner + 1);
            for (int task; (task = shares[owner].take(all, i > 0)) >= 0;) work(task);
        }
        barrier.wait();
    }

    void wait() { barrier.wait(); }

   private:
    struct alignas(64) Share {  // of one thread
        std::atomic<uint64_t> left{0};  // round << 48 | first task << 24 | end; of an earlier round, if nobody took any
        uint64_t rounds = 0;            // that the thread has begun

        // A task, the last one or the first, or -1. `all`: what there is in this round.
        int take(uint64_t all, bool last) {
            constexpr uint64_t TASK = (1 << 24) - 1;
            for (uint64_t old = left.load(std::memory_order_relaxed);;) {
                const uint64_t now = old >> 48 == all >> 48 ? old : all, first = now >> 24 & TASK, end = now & TASK;
                if (first == end) return -1;
                const uint64_t next = last ? now - 1 : now + (1 << 24);
                if (left.compare_exchange_weak(old, next, std::memory_order_relaxed)) return last ? end - 1 : first;
            }
        }
    };

    Barrier barrier;
    std::vector<Share> shares;
};

}  // namespace
