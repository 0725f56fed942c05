// Work shared out over threads that are kept between calls: a product of a small layer takes less time than a thread's start.
#pragma once
#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>

namespace tq {

size_t hardware_threads();

// Run work() here and on up to `helpers` other threads, and return when all that began have ended; at least here, so a thread that the system does not give,
// or that wakes up too late, is no loss but of time. work() must not throw. Safe to call from several threads, and in the child of a fork.
void run_together(size_t helpers, const std::function<void()> &work);

// Run body(begin, end) over [0, count) in pieces of `grain`, on `threads` threads (0: one per core). Each item is computed by exactly
// one call whatever the number of threads, so results never depend on it. The first exception is rethrown.
template <class Body> void parallel_for(size_t count, size_t grain, int threads, Body body) {
  size_t want = threads > 0 ? (size_t)threads : hardware_threads();
  const size_t pieces = (count + grain - 1) / grain;
  if (want > pieces) want = pieces;
  if (want < 1) want = 1;
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex guard;
  auto work = [&] {
    try {
      for (size_t i; (i = next.fetch_add(1)) < pieces;) body(i * grain, i * grain + grain < count ? i * grain + grain : count);
    } catch (...) {
      std::lock_guard<std::mutex> hold(guard);
      if (!failure) failure = std::current_exception();
      next = pieces;
    }
  };
  run_together(want - 1, work);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tq
