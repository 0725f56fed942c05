// Work shared out over std::thread: no pool is kept, a call is long against the start of a thread.
#pragma once
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace tq {

// Run body(begin, end) over [0, count) in pieces of `grain`, on `threads` threads (0: one per core). Each item is computed by exactly
// one call whatever the number of threads, so results never depend on it. The first exception is rethrown. Where the system gives fewer
// threads (a limit, no memory for a stack), those there are do all the work, the caller's own at least.
template <class Body> void parallel_for(size_t count, size_t grain, int threads, Body body) {
  size_t want = threads > 0 ? (size_t)threads : std::thread::hardware_concurrency();
  const size_t pieces = (count + grain - 1) / grain;
  if (want < 1) want = 1;
  if (want > pieces) want = pieces;
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex guard;
  auto run = [&] {
    try {
      for (size_t i; (i = next.fetch_add(1)) < pieces;) body(i * grain, i * grain + grain < count ? i * grain + grain : count);
    } catch (...) {
      std::lock_guard<std::mutex> hold(guard);
      if (!failure) failure = std::current_exception();
      next = pieces;
    }
  };
  std::vector<std::thread> crew;
  try {
    crew.reserve(want - 1);
    while (crew.size() + 1 < want) crew.emplace_back(run);
  } catch (...) {  // a thread that did not start: leaving here would destroy joinable threads, which terminates
  }
  run();
  for (auto &member : crew) member.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tq
