#include "optim/core/step_graphs.h"

#include "support/stream_capture.h"

#ifdef TORCHIUM_WITH_CUDA
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>
#endif

namespace torchium::optim::detail {

GraphMode graph_mode(std::string_view graphs) {
  return graphs == "auto"     ? GraphMode::kAuto
         : graphs == "always" ? GraphMode::kAlways
                              : GraphMode::kNever;
}

#ifdef TORCHIUM_WITH_CUDA
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr size_t kMaxKinds = 4;
constexpr int64_t kWarmUp = 2;  // launched steps of a kind before it is captured
// Each capture beyond these waits for this many replays.
constexpr int64_t kFreeCaptures = 8, kReplaysPerCapture = 16;

int64_t reserved_bytes(c10::Device device) {
  return allocator::getDeviceStats(device.index()).reserved_bytes[0].current;  // of all pools
}

// Of a stream that only captures use: they lie in the pool of its graphs.
void release_cublas_workspaces(cudaStream_t stream) {
  for (auto* workspaces : {&at::cuda::cublas_handle_stream_to_workspace(),
                           &at::cuda::cublaslt_handle_stream_to_workspace()}) {
    const std::unique_lock lock(workspaces->mutex);
    std::erase_if(workspaces->map,
                  [stream](const auto& entry) { return std::get<1>(entry.first) == stream; });
  }
}

}  // namespace

struct StepGraphs::Graphs {
  // Steps that one graph can replay.
  struct Kind {
    GraphKey key;
    int64_t last_step;
    int64_t seen = 0;
    // Of the graph; null or empty: none.
    std::unique_ptr<GraphInputs> inputs = nullptr;
    std::vector<at::Tensor> results = {};
    cudaGraphExec_t exec = nullptr;
    bool is_refused = false;  // a capture failed, or took too much memory
  };

  explicit Graphs(c10::Device device) : device(device), pool(at::cuda::graph_pool_handle()) {}
  ~Graphs();
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  c10::Device device;
  at::cuda::MempoolId_t pool;
  cudaStream_t stream = nullptr;  // of the captures, which no other thread uses
  std::vector<Kind> kinds;
  int64_t pool_uses = 0;
  int64_t pool_bytes = 0;
  int64_t steps = 0, captures = 0, replays = 0;

  static void destroy(Kind& kind);
  Kind& kind_of(const Step& step);
  bool is_due(const Kind& kind) const;
  int64_t bytes() const;
  bool exceeds_limit(int64_t bytes, const Step& step, GraphMode mode) const;
  void capture(Kind& kind, const Step& step);
  void add_graph(Kind& kind, const Step& step, GraphMode mode);
  bool replay(Kind& kind);
  void drop_graphs();
};

StepGraphs::Graphs::Kind& StepGraphs::Graphs::kind_of(const Step& step) {
  GraphKey key = step.key;
  GraphInputs::add_layouts(key, step.inputs);
  auto kind = std::ranges::find(kinds, key, &Kind::key);
  if (kind == kinds.end()) {
    if (kinds.size() == kMaxKinds) {
      const auto oldest = std::ranges::min_element(kinds, {}, &Kind::last_step);
      destroy(*oldest);
      kinds.erase(oldest);
    }
    kind = kinds.insert(kinds.end(), {std::move(key), 0});
  }
  kind->last_step = ++steps;
  ++kind->seen;
  return *kind;
}

// Whether this step of the kind, which has no graph, is to be captured.
bool StepGraphs::Graphs::is_due(const Kind& kind) const {
  return !kind.is_refused && kind.seen > kWarmUp &&
         captures < kFreeCaptures + replays / kReplaysPerCapture;
}

int64_t StepGraphs::Graphs::bytes() const {
  int64_t bytes = pool_bytes;
  for (const Kind& kind : kinds) {
    bytes += kind.inputs == nullptr ? 0 : kind.inputs->bytes();
  }
  return bytes;
}

bool StepGraphs::Graphs::exceeds_limit(int64_t bytes, const Step& step, GraphMode mode) const {
  const auto of_device =
      static_cast<double>(at::cuda::getDeviceProperties(device.index())->totalGlobalMem);
  const double limit =
      std::max(kShareOfState * static_cast<double>(step.state_bytes), kShareOfDevice * of_device);
  return mode == GraphMode::kAuto && static_cast<double>(bytes) > limit;
}

// Leaves kind.exec null if it fails: the step then runs as usual, and raises if the step itself is
// at fault. Exceptions that are not PyTorch's own, of Python code that a dispatch mode calls for
// one, are passed on.
void StepGraphs::Graphs::capture(Kind& kind, const Step& step) {
  if (stream == nullptr) {
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  const cudaStream_t capturing = stream;
  const c10::cuda::CUDAStreamGuard device_guard(
      c10::cuda::getStreamFromExternal(capturing, device.index()));
  const int64_t reserved = reserved_bytes(device);
  allocator::beginAllocateToPool(device.index(), pool,
                                 [capturing](cudaStream_t other) { return other == capturing; });
  ++pool_uses;
  // Other threads may go on to use the device.
  cudaError_t error = cudaStreamBeginCapture(capturing, cudaStreamCaptureModeThreadLocal);
  cudaGraph_t graph = nullptr;
  std::exception_ptr of_others;
  if (error == cudaSuccess) {
    try {
      kind.results = step.launch(kind.inputs->copies(), kind.inputs->found_inf());
    } catch (const c10::Error&) {
      error = cudaErrorStreamCaptureInvalidated;
    } catch (...) {
      error = cudaErrorStreamCaptureInvalidated;
      of_others = std::current_exception();
    }
    const cudaError_t end = cudaStreamEndCapture(capturing, &graph);
    error = error == cudaSuccess ? end : error;
  }
  allocator::endAllocateToPool(device.index(), pool);
  cudaGraphExec_t exec = nullptr;
  if (error == cudaSuccess) {
    error = cudaGraphInstantiateWithFlags(&exec, graph, 0);
  }
  if (graph != nullptr) {
    cudaGraphDestroy(graph);
  }
  cudaGetLastError();  // none is left to later calls
  if (of_others) {
    std::rethrow_exception(of_others);
  }
  pool_bytes += std::max<int64_t>(0, reserved_bytes(device) - reserved);
  ++captures;
  kind.exec = error == cudaSuccess ? exec : nullptr;
}

// Leaves kind.exec null if the capture fails or takes too much memory.
void StepGraphs::Graphs::add_graph(Kind& kind, const Step& step, GraphMode mode) {
  if (!exceeds_limit(bytes() + GraphInputs::bytes_of(step.inputs), step, mode)) {
    try {
      kind.inputs = std::make_unique<GraphInputs>(step.inputs, device);
      capture(kind, step);
    } catch (const c10::Error&) {  // of an allocator without memory pools, or without memory
    }
  }
  if (kind.exec == nullptr || exceeds_limit(bytes(), step, mode)) {
    drop_graphs();  // other kinds are captured again, without its scratch memory
    kind.is_refused = true;
  }
}

// False, and nothing is launched: the device has no memory for the graph itself.
bool StepGraphs::Graphs::replay(Kind& kind) {
  const cudaError_t error =
      cudaGraphLaunch(kind.exec, c10::cuda::getCurrentCUDAStream(device.index()));
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    drop_graphs();
    kind.is_refused = true;
    return false;
  }
  C10_CUDA_CHECK(error);
  ++replays;
  return true;
}

StepGraphs::Graphs::~Graphs() {
  try {
    drop_graphs();
  } catch (const std::exception&) {  // of an allocator that is gone at the end of the program
  }
  if (stream != nullptr) {
    cudaStreamDestroy(stream);
  }
}

void StepGraphs::Graphs::destroy(Kind& kind) {
  kind.inputs = nullptr;
  kind.results.clear();
  if (kind.exec != nullptr) {
    cudaGraphExecDestroy(kind.exec);
    kind.exec = nullptr;
  }
}

void StepGraphs::Graphs::drop_graphs() {
  std::ranges::for_each(kinds, destroy);
  if (pool_uses > 0) {
    release_cublas_workspaces(stream);
  }
  for (; pool_uses > 0; --pool_uses) {
    allocator::releasePool(device.index(), pool);
  }
  pool = at::cuda::graph_pool_handle();
  pool_bytes = 0;
}

StepGraphs::StepGraphs(c10::Device device) {
  if (device.is_cuda()) {
    graphs_ = std::make_unique<Graphs>(device);
  }
}

StepGraphs::~StepGraphs() = default;
StepGraphs& StepGraphs::operator=(StepGraphs&&) noexcept = default;

std::optional<std::vector<at::Tensor>> StepGraphs::run(GraphMode mode, const Step& step) {
  if (graphs_ == nullptr || mode == GraphMode::kNever ||
      torchium::detail::is_capturing(graphs_->device)) {
    return std::nullopt;
  }
  const c10::cuda::CUDAGuard device_guard(graphs_->device);
  Graphs::Kind& kind = graphs_->kind_of(step);
  if (kind.exec == nullptr) {
    if (!graphs_->is_due(kind)) {
      return std::nullopt;
    }
    graphs_->add_graph(kind, step, mode);
    if (kind.exec == nullptr) {
      return std::nullopt;
    }
  }
  kind.inputs->set(step.inputs, step.found_inf,
                   c10::cuda::getCurrentCUDAStream(graphs_->device.index()));
  return graphs_->replay(kind) ? std::optional(kind.results) : std::nullopt;
}

void StepGraphs::clear() {
  if (graphs_ != nullptr) {
    graphs_->drop_graphs();
    graphs_->kinds.clear();
  }
}

int64_t StepGraphs::count() const {
  return graphs_ == nullptr ? 0
                            : std::ranges::count_if(graphs_->kinds, [](const Graphs::Kind& kind) {
                                return kind.exec != nullptr;
                              });
}
int64_t StepGraphs::scratch_bytes() const { return graphs_ == nullptr ? 0 : graphs_->bytes(); }

#else

struct StepGraphs::Graphs {};

StepGraphs::StepGraphs(c10::Device) {}
StepGraphs::~StepGraphs() = default;
StepGraphs& StepGraphs::operator=(StepGraphs&&) noexcept = default;
std::optional<std::vector<at::Tensor>> StepGraphs::run(GraphMode, const Step&) {
  return std::nullopt;
}
void StepGraphs::clear() {}
int64_t StepGraphs::count() const { return 0; }
int64_t StepGraphs::scratch_bytes() const { return 0; }

#endif

}  // namespace torchium::optim::detail
