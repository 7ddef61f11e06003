#include "optim/core/step_graphs.h"

#include "optim/core/seen_tensor.h"
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
#include <optional>
#include <vector>
#endif

namespace torchium::optim::detail {

#ifdef TORCHIUM_WITH_CUDA
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr size_t kMaxGraphs = 4;
constexpr int64_t kWarmUp = 2;            // steps with one list of addresses before it is captured
constexpr int64_t kReplaysACapture = 16;  // beyond the first kMaxGraphs captures

int64_t reserved_bytes(c10::Device device) {
  return allocator::getDeviceStats(device.index()).reserved_bytes[0].current;  // of all pools
}

}  // namespace

struct StepGraphs::Graphs {
  using SeenGradients = std::vector<SeenMemory>;

  static bool are_of(const SeenGradients& seen, at::TensorList grads) {
    return std::equal(seen.begin(), seen.end(), grads.begin(), grads.end(),
                      [](const SeenMemory& a, const at::Tensor& b) { return a.is_of(b); });
  }

  struct Graph {
    SeenGradients grads;
    int64_t key;
    cudaGraphExec_t exec;
    int64_t last_use;
  };

  explicit Graphs(c10::Device device) : device(device), pool(at::cuda::graph_pool_handle()) {}
  ~Graphs();
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  c10::Device device;
  at::cuda::MempoolId_t pool;
  cudaStream_t stream = nullptr;  // of the captures, which no other thread uses
  std::vector<Graph> kept;
  int64_t pool_uses = 0;
  int64_t scratch = 0;
  int64_t calls = 0, captures = 0, replays = 0;
  bool refused = false;  // a capture failed, or takes too much memory
  SeenGradients last;    // of the last step that was not replayed
  int64_t last_key = 0;
  int64_t repeated = 0;  // times in a row
  // Read by the graphs.
  at::Tensor lr;  // 0-dim float64
  std::optional<double> lr_value;
  at::Tensor found_inf;  // 0-dim float32
  bool found_inf_is_zero = true;

  Graph* find(const Step& step);
  bool is_due(const Step& step);
  void set_inputs(const Step& step);
  std::optional<cudaGraphExec_t> capture(const Step& step);
  Graph* add(const Step& step, GraphMode mode);
  bool replay(Graph& graph);
  void clear();
  void give_up();
};

StepGraphs::Graphs::Graph* StepGraphs::Graphs::find(const Step& step) {
  const auto found = std::find_if(kept.begin(), kept.end(), [&](const Graph& graph) {
    return graph.key == step.key && are_of(graph.grads, step.grads);
  });
  return found == kept.end() ? nullptr : &*found;
}

// Whether a step with these gradients is to be captured.
bool StepGraphs::Graphs::is_due(const Step& step) {
  if (last_key != step.key || !are_of(last, step.grads)) {
    last.clear();
    for (const at::Tensor& grad : step.grads) {
      last.emplace_back(grad);
    }
    last_key = step.key;
    repeated = 0;
  }
  const auto free_captures = static_cast<int64_t>(kMaxGraphs);
  return ++repeated > kWarmUp && captures < free_captures + replays / kReplaysACapture;
}

void StepGraphs::Graphs::set_inputs(const Step& step) {
  if (!lr.defined()) {
    lr = at::empty({}, at::TensorOptions(at::kDouble).device(device));
    found_inf = at::zeros({}, at::TensorOptions(at::kFloat).device(device));
  }
  if (!step.lr.is_cpu()) {
    lr.copy_(step.lr);
    lr_value.reset();
  } else if (const double value = step.lr.item<double>(); lr_value != value) {
    lr.fill_(value);
    lr_value = value;
  }
  if (step.found_inf.defined()) {
    found_inf.copy_(step.found_inf.view(at::IntArrayRef()));
    found_inf_is_zero = false;
  } else if (!found_inf_is_zero) {
    found_inf.zero_();
    found_inf_is_zero = true;
  }
}

// None if it fails: the step then runs as usual, and raises if the step itself is at fault.
// Exceptions that are not PyTorch's own, of Python code that a dispatch mode calls for one, are
// passed on.
std::optional<cudaGraphExec_t> StepGraphs::Graphs::capture(const Step& step) {
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
      step.launch(lr, found_inf);
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
  scratch += std::max<int64_t>(0, reserved_bytes(device) - reserved);
  ++captures;
  return error == cudaSuccess ? std::optional(exec) : std::nullopt;
}

// Null: captures fail or take too much memory, and are given up.
StepGraphs::Graphs::Graph* StepGraphs::Graphs::add(const Step& step, GraphMode mode) {
  if (kept.size() == kMaxGraphs) {
    const auto oldest =
        std::min_element(kept.begin(), kept.end(),
                         [](const Graph& a, const Graph& b) { return a.last_use < b.last_use; });
    cudaGraphExecDestroy(oldest->exec);
    kept.erase(oldest);
  }
  std::optional<cudaGraphExec_t> exec;
  try {
    exec = capture(step);
  } catch (const c10::Error&) {  // of an allocator without memory pools
  }
  if (exec) {
    kept.push_back({last, last_key, *exec, 0});
  }
  const auto of_device =
      static_cast<double>(at::cuda::getDeviceProperties(device.index())->totalGlobalMem);
  const double limit =
      std::max(kShareOfState * static_cast<double>(step.state_bytes), kShareOfDevice * of_device);
  if (!exec || (mode == GraphMode::kAuto && static_cast<double>(scratch) > limit)) {
    give_up();
    return nullptr;
  }
  return &kept.back();
}

// False, and nothing is launched: the device has no memory for the graph itself.
bool StepGraphs::Graphs::replay(Graph& graph) {
  const cudaError_t error =
      cudaGraphLaunch(graph.exec, c10::cuda::getCurrentCUDAStream(device.index()));
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    give_up();
    return false;
  }
  C10_CUDA_CHECK(error);
  graph.last_use = ++calls;
  ++replays;
  return true;
}

void StepGraphs::Graphs::give_up() {
  clear();
  refused = true;
}

StepGraphs::Graphs::~Graphs() {
  try {
    clear();
  } catch (const std::exception&) {  // of an allocator that is gone at the end of the program
  }
  if (stream != nullptr) {
    cudaStreamDestroy(stream);
  }
}

void StepGraphs::Graphs::clear() {
  for (const Graph& graph : kept) {
    cudaGraphExecDestroy(graph.exec);
  }
  kept.clear();
  for (; pool_uses > 0; --pool_uses) {
    allocator::releasePool(device.index(), pool);
  }
  pool = at::cuda::graph_pool_handle();
  scratch = 0;
  last.clear();
  repeated = 0;
}

StepGraphs::StepGraphs(c10::Device device) {
  if (device.is_cuda()) {
    graphs_ = std::make_unique<Graphs>(device);
  }
}

StepGraphs::~StepGraphs() = default;

bool StepGraphs::run(GraphMode mode, const Step& step) {
  if (graphs_ == nullptr || mode == GraphMode::kNever || graphs_->refused ||
      torchium::detail::is_capturing(graphs_->device)) {
    return false;
  }
  Graphs& g = *graphs_;
  const c10::cuda::CUDAGuard device_guard(g.device);
  Graphs::Graph* graph = g.find(step);
  if (graph == nullptr) {
    if (!g.is_due(step)) {
      return false;
    }
    g.set_inputs(step);
    graph = g.add(step, mode);
    if (graph == nullptr) {
      return false;
    }
  } else {
    g.set_inputs(step);
  }
  return g.replay(*graph);
}

void StepGraphs::clear() {
  if (graphs_ != nullptr) {
    graphs_->clear();
    graphs_->refused = false;
  }
}

int64_t StepGraphs::count() const {
  return graphs_ == nullptr ? 0 : static_cast<int64_t>(graphs_->kept.size());
}
int64_t StepGraphs::scratch_bytes() const { return graphs_ == nullptr ? 0 : graphs_->scratch; }

#else

struct StepGraphs::Graphs {};

StepGraphs::StepGraphs(c10::Device) {}
StepGraphs::~StepGraphs() = default;
bool StepGraphs::run(GraphMode, const Step&) { return false; }
void StepGraphs::clear() {}
int64_t StepGraphs::count() const { return 0; }
int64_t StepGraphs::scratch_bytes() const { return 0; }

#endif

}  // namespace torchium::optim::detail
