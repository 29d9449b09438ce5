#include "team.h"

#include <dlfcn.h>

#include <thread>
#include <vector>

namespace tensorferry::python {

namespace {

struct Shares {
  std::size_t count;
  void (*work)(const void* data, std::size_t share);
  const void* data;
};

// The library of OpenMP that torch has loaded. GNU's, LLVM's and Intel's all have these functions.
class OpenMp {
 public:
  OpenMp() : parallel_(find<Parallel>("GOMP_parallel")) {
    number_ = find<Number>("omp_get_thread_num");
    count_ = find<Number>("omp_get_num_threads");
  }

  [[nodiscard]] bool is_loaded() const noexcept {
    return parallel_ != nullptr && number_ != nullptr && count_ != nullptr;
  }

  void share_out(const Shares& shares) const {
    const Region region{*this, shares};
    parallel_(&OpenMp::work, const_cast<Region*>(&region), static_cast<unsigned>(shares.count), 0);
  }

 private:
  using Parallel = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);
  using Number = int (*)();

  struct Region {
    const OpenMp& library;
    const Shares& shares;
  };

  template <class Function>
  static Function find(const char* name) noexcept {
    return reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, name));
  }

  // What each thread does. There may be fewer of them than was asked for.
  static void work(void* data) {
    const auto& [library, shares] = *static_cast<const Region*>(data);
    const auto threads = static_cast<std::size_t>(library.count_());
    for (auto i = static_cast<std::size_t>(library.number_()); i < shares.count; i += threads) {
      shares.work(shares.data, i);
    }
  }

  Parallel parallel_;
  Number number_ = nullptr;
  Number count_ = nullptr;
};

}  // namespace

void share_out(std::size_t shares, void (*work)(const void* data, std::size_t share),
               const void* data) {
  if (shares > 1) {
    const OpenMp library;  // each time: torch may have been imported since
    if (library.is_loaded()) {
      library.share_out({shares, work, data});
      return;
    }
  }
  std::vector<std::jthread> others;
  for (std::size_t i = 1; i < shares; ++i) others.emplace_back(work, data, i);
  work(data, 0);
}

}  // namespace tensorferry::python
