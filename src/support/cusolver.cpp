#include "support/cusolver.h"

#ifdef TORCHIUM_WITH_CUDA

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include <dlfcn.h>
#include <map>
#include <string>
#include <utility>

#define TORCHIUM_TEXT_OF(x) #x
#define TORCHIUM_TEXT(x) TORCHIUM_TEXT_OF(x)

namespace torchium::detail {
namespace {

constexpr const char* kLibrary = "libcusolver.so." TORCHIUM_TEXT(CUSOLVER_VER_MAJOR);

// The folder of cuSPARSE, which torch links against: cuSOLVER is in the same folder, or in that of
// a sister package.
std::string folder_of_cusparse() {
  Dl_info info{};
  void* symbol = dlsym(RTLD_DEFAULT, "cusparseCreate");
  if (symbol == nullptr || dladdr(symbol, &info) == 0) {
    return {};
  }
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
}

void* load_library() {
  if (void* loaded = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD)) {
    return loaded;
  }
  const std::string folder = folder_of_cusparse();
  for (const std::string& prefix : {folder, folder + "../../cusolver/lib/", std::string()}) {
    if (void* loaded = dlopen((prefix + kLibrary).c_str(), RTLD_NOW | RTLD_LOCAL)) {
      return loaded;
    }
  }
  TORCH_CHECK(false, "cannot load ", kLibrary,
              ", which eigenvalues on a CUDA device need: ", dlerror());
}

std::mutex& mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

template <typename Function>
void resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  TORCH_CHECK(function != nullptr, kLibrary, " has no ", name, ": it is older than CUDA 12.6");
}

}  // namespace

const CusolverFunctions& cusolver() {
  static const CusolverFunctions functions = [] {
    void* library = load_library();
    CusolverFunctions f{};
    resolve(library, "cusolverDnCreate", f.create);
    resolve(library, "cusolverDnSetStream", f.set_stream);
    resolve(library, "cusolverDnCreateParams", f.create_params);
    resolve(library, "cusolverDnXsyevBatched_bufferSize", f.syev_batched_buffer_size);
    resolve(library, "cusolverDnXsyevBatched", f.syev_batched);
    return f;
  }();
  return functions;
}

void check_cusolver(cusolverStatus_t status, const char* call) {
  TORCH_CHECK(status == CUSOLVER_STATUS_SUCCESS, call, " failed with cuSOLVER status ",
              static_cast<int>(status));
}

CusolverLease::CusolverLease(cudaStream_t stream) : lock_(mutex()) {
  static auto& entries = *new std::map<c10::DeviceIndex, std::map<cudaStream_t, Entry>>;
  auto& of_device = entries[c10::cuda::current_device()];
  const auto known = of_device.find(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
  if (known != of_device.end()) {
    entry_ = &known->second;
  } else if (capture != cudaStreamCaptureStatusNone) {
    TORCH_CHECK(
        !of_device.empty(),
        "eigenvalues cannot be captured in a CUDA graph yet: cuSOLVER has to be loaded. Run "
        "the same call once before the capture.");
    entry_ = &of_device.begin()->second;
  } else {
    Entry entry;
    check_cusolver(cusolver().create(&entry.handle), "cusolverDnCreate");
    check_cusolver(cusolver().create_params(&entry.params), "cusolverDnCreateParams");
    entry_ = &of_device.emplace(stream, std::move(entry)).first->second;
  }
  check_cusolver(cusolver().set_stream(entry_->handle, stream), "cusolverDnSetStream");
}

void* CusolverLease::host_workspace(std::size_t bytes) {
  if (entry_->host_workspace.size() < bytes) {
    entry_->host_workspace.resize(bytes);
  }
  return entry_->host_workspace.data();
}

}  // namespace torchium::detail

#endif
