// A pool of threads that lives as long as the process; see team.h.
#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <mutex>
#include <thread>

namespace octavo {

constexpr int PAUSES = 64;               // a few microseconds before the first yield
constexpr int64_t SLEEP_AFTER = 1000000;  // nanoseconds without work

static int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Waits until done() is true, politely; gives up after `limit` nanoseconds if that is not 0.
template <class F>
static bool wait_until(F done, int64_t limit) {
    for (int i = 0; i < PAUSES; i++) {
        if (done()) return true;
        _mm_pause();
    }
    const int64_t start = limit ? now() : 0;
    for (int64_t i = 0; !done(); i++) {
        if (limit && i % 64 == 63 && now() - start > limit) return false;
        sched_yield();
    }
    return true;
}

void Team::barrier() {
    if (size_ == 1) return;
    std::atomic<int64_t>& generation = state_.generation.value;
    const int64_t mine = generation.load(std::memory_order_relaxed);
    if (state_.arrived.value.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
        state_.arrived.value.store(0, std::memory_order_relaxed);
        generation.store(mine + 1, std::memory_order_release);
    } else {
        wait_until([&] { return generation.load(std::memory_order_acquire) != mine; }, 0);
    }
}

struct Pool {
    std::mutex in_use;
    int workers = 0;  // started threads
    alignas(64) std::atomic<int32_t> job{0};
    alignas(64) std::atomic<int32_t> sleeping{0};
    alignas(64) std::atomic<int32_t> running{0};
    TeamFunction function = nullptr;
    void* context = nullptr;
    int size = 0;
    TeamState state;
};

// Never destroyed: its threads run until the process ends. A forked child gets a new one, since threads are not copied.
// Made on first use: this file is compiled for AVX-512, so nothing of it may run while the library is opened.
static Pool*& pool() {
    static Pool* own = new Pool;
    return own;
}

static long futex(std::atomic<int32_t>& word, int operation, int32_t value) {
    return syscall(SYS_futex, (int32_t*)&word, operation, value, nullptr, nullptr, 0);
}

static void work(Pool* p, int thread, int32_t seen) {
    for (;;) {
        if (!wait_until([&] { return p->job.load(std::memory_order_acquire) != seen; }, SLEEP_AFTER)) {
            p->sleeping.fetch_add(1);
            while (p->job.load() == seen) futex(p->job, FUTEX_WAIT_PRIVATE, seen);
            p->sleeping.fetch_sub(1);
        }
        seen = p->job.load(std::memory_order_acquire);
        if (thread < p->size) {
            Team team(p->state, thread, p->size);
            p->function(p->context, team);
        }
        p->running.fetch_sub(1, std::memory_order_release);
    }
}

void run_team(int threads, TeamFunction function, void* context) {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { pool() = new Pool; });
    (void)registered;
    Pool* p = pool();
    std::unique_lock<std::mutex> lock(p->in_use, std::defer_lock);
    if (threads <= 1 || !lock.try_lock()) {
        TeamState none;
        Team team(none, 0, 1);
        function(context, team);
        return;
    }
    for (; p->workers < threads - 1; p->workers++) std::thread(work, p, p->workers + 1, p->job.load()).detach();
    p->function = function;
    p->context = context;
    p->size = threads;
    for (auto& loop : p->state.loops) loop.value.store(0, std::memory_order_relaxed);
    p->running.store(p->workers, std::memory_order_relaxed);
    p->job.fetch_add(1);
    if (p->sleeping.load()) futex(p->job, FUTEX_WAKE_PRIVATE, INT32_MAX);
    Team team(p->state, 0, threads);
    function(context, team);
    wait_until([&] { return p->running.load(std::memory_order_acquire) == 0; }, 0);
}

}  // namespace octavo
