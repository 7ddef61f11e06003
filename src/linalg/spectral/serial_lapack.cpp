#include "linalg/spectral/serial_lapack.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

// MKL's function, if torch uses MKL: sets the number of threads of LAPACK on the calling thread, 0
// for the global number. Returns the previous one.
extern "C" int MKL_Set_Num_Threads_Local(int threads) __attribute__((weak));

namespace torchium::linalg::detail {
namespace {

bool sets_threads() { return MKL_Set_Num_Threads_Local != nullptr; }

}  // namespace

SerialLapack::SerialLapack() {
  at::get_num_threads();  // otherwise torch sets MKL's number at a thread's first query
  before_ = sets_threads() ? MKL_Set_Num_Threads_Local(1) : 0;
}

SerialLapack::~SerialLapack() {
  if (sets_threads()) {
    MKL_Set_Num_Threads_Local(before_);
  }
}

bool SerialLapack::is_possible() { return sets_threads() || !at::hasMKL(); }

}  // namespace torchium::linalg::detail
