#include "cuda_kernels/common/hopper.h"
#include "cuda_kernels/common/pipeline.cuh"
#include "cuda_kernels/common/shared_address.cuh"
#include "cuda_kernels/common/warp_sums.cuh"
#include "cuda_kernels/eigenproblem/tridiagonalise.h"

namespace torchium::cuda_kernels {
namespace {

constexpr int kChunk = 128;  // columns that a warp reads at once, four per lane

// How a cluster holds a matrix: its blocks own the rows in turn, `block_rows` each, and so do the
// warps of a block: row (s warps + w) blocks + b is slot s of warp w of block b. The first
// `registers` slots are in registers, the others in shared memory.
template <int blocks_, int warps_, int registers_, int block_rows_, int columns_>
struct Layout {
  static constexpr int blocks = blocks_;
  static constexpr int warps = warps_;
  static constexpr int threads = warps * 32;
  static constexpr int registers = registers_;
  static constexpr int block_rows = block_rows_;
  static constexpr int slots = (block_rows + warps - 1) / warps;
  static constexpr int shared_rows = block_rows - registers * warps;
  static constexpr int columns = columns_;
  static constexpr int chunks = (columns + kChunk - 1) / kChunk;
  static_assert(block_rows * blocks >= columns && shared_rows >= 0 && block_rows % 2 == 0 &&
                columns % 4 == 0);
  static_assert(warps % 4 == 0 && warps <= 32 && blocks <= 32 && slots <= 8 && chunks > 0);
};

// What a block sends to all blocks in a step.
template <typename L>
struct Message {
  float2 p_and_a[L::block_rows];  // of its rows
  float product;                  // of its rows of v and p
  float unused[3];                // the messages of all blocks in different banks
};

// What a thread block shares. Vectors have entries up to L::columns, zero beyond n.
template <typename L>
struct Shared {
  Message<L> received[2][L::blocks];  // in even and odd steps
  Message<L> sent;
  uint64_t barrier[2];
  float products[L::warps];
  float4 v[L::columns / 4], w[L::columns / 4];  // of the step before
  float4 x[L::columns / 4];                     // column k of the matrix, zero up to its diagonal
  float4 squares[L::warps / 4];                 // the parts of the sum after x[k + 1]
  float4 rows[L::shared_rows > 0 ? L::shared_rows : 1][L::columns / 4];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Sums of squares below this are taken for zero: A is of a moderate scale, and 1e-12 of that much
// less than its rounding errors.
constexpr float kSmallestSquare = 1e-24f;

// v = scale (x - e u), where u is the unit vector of entry `head`, and x is zero before it.
struct Reflector {
  float scale, e;
  int head;

  // The reflector that takes x to e u. `tail`: the sum of the squares of x after its head.
  __device__ Reflector(float x_head, float tail, int head) : scale(0), e(x_head), head(head) {
    if (tail >= kSmallestSquare) {
      // Each root of the hardware with one Newton step.
      const float square = fmaf(x_head, x_head, tail);
      const float inverse = rsqrtf(square);
      const float norm = square * inverse;
      e = -copysignf(fmaf(0.5f * inverse, fmaf(-norm, norm, square), norm), x_head);
      const float first = x_head - e;
      const float half = 0.5f * fmaf(first, first, tail);
      const float root = rsqrtf(half);
      scale = fmaf(0.5f * root, fmaf(-half * root, root, 1.0f), root);
    }
  }
  __device__ float operator()(float x, int i) const { return scale * (i == head ? x - e : x); }
};

// A rank-2 update of the step before and a product: for row r of the matrix,
//   a -= v_r w + w_r v, returned is a^T x.
struct RowStep {
  float v_r, w_r;

  __device__ __forceinline__ float operator()(float4& a, const float4& v, const float4& w,
                                              const float4& x, float sum) const {
    a.x = fmaf(-w_r, v.x, fmaf(-v_r, w.x, a.x));
    a.y = fmaf(-w_r, v.y, fmaf(-v_r, w.y, a.y));
    a.z = fmaf(-w_r, v.z, fmaf(-v_r, w.z, a.z));
    a.w = fmaf(-w_r, v.w, fmaf(-v_r, w.w, a.w));
    return fmaf(a.x, x.x, fmaf(a.y, x.y, fmaf(a.z, x.z, fmaf(a.w, x.w, sum))));
  }
};

// The work of a block on its matrix. Step k forms the vector p = A v of its reflector v; the update
// A - v w^T - w v^T, w = p - (v^T p / 2) v, waits for the next step, which needs just column k + 1
// of it beforehand. So the blocks exchange p and that column, and wait for each other once per
// step.
template <typename L>
class Tridiagonalisation {
 public:
  __device__ Tridiagonalisation(const Tridiagonalise& problem, Shared<L>& shared)
      : shared(shared),
        n(problem.n),
        block(rank_in_cluster()),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32) {
    const int64_t matrix = blockIdx.x / L::blocks;
    A = problem.A + matrix * n * n;
    reflectors = problem.reflectors + matrix * problem.reflector_rows * n;
    diagonal = problem.diagonal + matrix * n;
    off_diagonal = problem.off_diagonal + matrix * n;
  }

  __device__ void run() {
    load_rows();
    start();
    for (int k = 0; k < n - 1; ++k) {
      float tail = 0;
#pragma unroll
      for (int i = 0; i < L::warps / 4; ++i) {
        const float4 s = shared.squares[i];
        tail += (s.x + s.y) + (s.z + s.w);
      }
      const Reflector reflector(entry(shared.x, k + 1), tail, k + 1);
      const float v_head = reflector(entry(shared.x, k + 1), k + 1);
      multiply(reflector);
      send(k % 2);
      wait_for(shared_address(&shared.barrier[k % 2]), k / 2 % 2);
      if (threadIdx.x == 0) expect(k % 2);
      receive(k, reflector, v_head);
    }
  }

 private:
  // Of a warp at once.
  static constexpr int kSums = L::slots <= 2 ? 2 : L::slots <= 4 ? 4 : 8;
  static constexpr int kOwn = (L::columns + L::threads - 1) / L::threads;  // entries of vectors

  static __device__ float& entry(float4* vector, int i) {
    return reinterpret_cast<float*>(vector)[i];
  }
  __device__ int row_of(int slot) const { return (slot * L::warps + warp) * L::blocks + block; }
  // Of the slots in shared memory.
  __device__ float4* shared_row(int slot) {
    return shared.rows[(slot - L::registers) * L::warps + warp];
  }
  __device__ static int own(int i) { return i * L::threads + static_cast<int>(threadIdx.x); }
  __device__ void expect(int parity) {
    arrive_and_expect(shared_address(&shared.barrier[parity]), L::blocks * sizeof(Message<L>));
  }

  __device__ void load_rows() {
#pragma unroll
    for (int s = 0; s < L::slots; ++s) {
      const int r = row_of(s);
#pragma unroll
      for (int j = 0; j < L::chunks; ++j) {
        const int c = j * kChunk + lane * 4;
        const float* from = A + int64_t{r} * n + c;
        float4 a = {0, 0, 0, 0};
        if (r < n) {
          if (c < n) a.x = from[0];
          if (c + 1 < n) a.y = from[1];
          if (c + 2 < n) a.z = from[2];
          if (c + 3 < n) a.w = from[3];
        }
        if (s < L::registers) {
          held[s < L::registers ? s : 0][j] = a;
        } else if (r < n && c < L::columns) {
          shared_row(s)[c / 4] = a;
        }
      }
    }
  }

  __device__ void start() {
    if (threadIdx.x == 0) {
      for (int parity = 0; parity < 2; ++parity) {
        initialize_barrier(shared_address(&shared.barrier[parity]), 1);
        expect(parity);
      }
      publish_barriers();
      if (block == 0) diagonal[0] = A[0];
    }
    const float none[kOwn] = {};
#pragma unroll
    for (int i = 0; i < kOwn; ++i) x[i] = own(i) > 0 && own(i) < n ? A[own(i)] : 0;
    share(none, none, 1);
    cluster_sync();
  }

  // Shares the vectors of the next step, whose reflector begins at `head`.
  __device__ void share(const float (&v)[kOwn], const float (&w)[kOwn], int head) {
    float square = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int c = own(i);
      if (L::columns % L::threads != 0 && c >= L::columns) break;
      entry(shared.v, c) = v[i];
      entry(shared.w, c) = w[i];
      entry(shared.x, c) = x[i];
      if (c > head) square = fmaf(x[i], x[i], square);
    }
    square = warp_sum(square);
    if (lane == 0) entry(shared.squares, warp) = square;
    __syncthreads();
  }

  // Updates the rows, and leaves p and a = A[:, head] of them in the message to all.
  __device__ void multiply(const Reflector& reflector) {
    const int head = reflector.head;
    const int first = head / kChunk;
    RowStep step[L::slots];
    float p[kSums] = {}, a[L::slots] = {};
#pragma unroll
    for (int s = 0; s < L::slots; ++s) {
      const int r = min(row_of(s), L::columns - 1);
      step[s] = {entry(shared.v, r), entry(shared.w, r)};
    }
#pragma unroll
    for (int j = 0; j < L::chunks; ++j) {
      const int c = j * kChunk + lane * 4;
      if (j < first || (L::columns % kChunk != 0 && c >= L::columns)) continue;
      const float4 v = shared.v[c / 4];
      const float4 w = shared.w[c / 4];
      float4 u = shared.x[c / 4];
      if (c == head) u.x -= reflector.e;
      if (c + 1 == head) u.y -= reflector.e;
      if (c + 2 == head) u.z -= reflector.e;
      if (c + 3 == head) u.w -= reflector.e;
#pragma unroll
      for (int s = 0; s < L::slots; ++s) {
        if (row_of(s) < head || row_of(s) >= n) continue;
        float4 row;
        if (s < L::registers) {
          float4& here = held[s < L::registers ? s : 0][j];
          p[s] = step[s](here, v, w, u, p[s]);
          row = here;
        } else {
          float4& here = shared_row(s)[c / 4];
          row = here;
          p[s] = step[s](row, v, w, u, p[s]);
          here = row;
        }
        if (j == first) {
          const int i = head % 4;
          a[s] = i == 0 ? row.x : i == 1 ? row.y : i == 2 ? row.z : row.w;
        }
      }
    }
    // Lanes of equal `slot` have the p of that row.
    const int slot = lane / (32 / kSums);
    const float p_of_row = reflector.scale * warp_sums<kSums>(p, lane);
    const int r = row_of(slot);
    float product = r >= head && r < n ? reflector(entry(shared.x, r), r) * p_of_row : 0;
#pragma unroll
    for (int offset = 32 / kSums; offset < 32; offset *= 2) {
      product += __shfl_xor_sync(0xffffffffu, product, offset);
    }
    if (lane % (32 / kSums) == 0 && r < n) shared.sent.p_and_a[slot * L::warps + warp].x = p_of_row;
    if (lane == head % kChunk / 4) {
#pragma unroll
      for (int s = 0; s < L::slots; ++s) {
        if (row_of(s) < n) shared.sent.p_and_a[s * L::warps + warp].y = a[s];
      }
    }
    if (lane == 0) shared.products[warp] = product;
    __syncthreads();
  }

  // Each warp sends to other blocks.
  __device__ void send(int parity) {
    const float product = warp_sum(lane < L::warps ? shared.products[lane] : 0);
    constexpr int kWords = sizeof(Message<L>) / sizeof(float4);
    for (int i = lane; i < kWords; i += 32) {
      const float4 word = i == kWords - 1 ? make_float4(product, 0, 0, 0)
                                          : reinterpret_cast<const float4*>(&shared.sent)[i];
      const float4* to = reinterpret_cast<const float4*>(&shared.received[parity][block]) + i;
      for (int b = warp; b < L::blocks; b += L::warps) {
        store_at(shared_address(to), word, shared_address(&shared.barrier[parity]), b);
      }
    }
  }

  // v, w and column k + 1 from the messages of all.
  __device__ void receive(int k, const Reflector& reflector, float v_head) {
    const Message<L>(&received)[L::blocks] = shared.received[k % 2];
    const int head = k + 1;
    const float half = warp_sum(lane < L::blocks ? received[lane].product : 0) / 2;
    const auto of_row = [&](int r) { return received[r % L::blocks].p_and_a[r / L::blocks]; };
    const float w_head = fmaf(-half, v_head, of_row(head).x);
    float v[kOwn], w[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int c = own(i);
      v[i] = w[i] = 0;
      if (c >= n) continue;
      if (c >= head) {
        const float2 p_and_a = of_row(c);
        v[i] = reflector(x[i], c);
        w[i] = fmaf(-half, v[i], p_and_a.x);
        x[i] = fmaf(-w_head, v[i], fmaf(-v_head, w[i], p_and_a.y));
        if (c == head) {
          if (block == 0) {
            diagonal[head] = x[i];
            off_diagonal[k] = reflector.e;
          }
          x[i] = 0;
        }
      }
      if (k % L::blocks == block) reflectors[int64_t{k} * n + c] = v[i];
    }
    share(v, w, head + 1);
  }

  Shared<L>& shared;
  const int n, block, warp, lane;
  const float* A;
  float* reflectors;
  double *diagonal, *off_diagonal;
  float4 held[L::registers][L::chunks];
  float x[kOwn];  // own entries of shared.x
};
#endif

template <typename L>
__global__ void __launch_bounds__(L::threads, 1)
    tridiagonalise_kernel(const Tridiagonalise problem) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(16) unsigned char memory[];
  Tridiagonalisation<L>(problem, *reinterpret_cast<Shared<L>*>(memory)).run();
#endif
}

// The kernel for matrices of an order, and its launch.
struct Kernel {
  void (*function)(Tridiagonalise);
  int blocks, threads;
  size_t shared_bytes;
};

template <typename L>
Kernel kernel() {
  return {tridiagonalise_kernel<L>, L::blocks, L::threads, sizeof(Shared<L>)};
}

constexpr int kOrders[] = {128, 256, 512, 1024, kLargestTridiagonalised};

Kernel kernel_of(int n) {
  if (n <= kOrders[0]) return kernel<Layout<4, 16, 2, 32, 128>>();
  if (n <= kOrders[1]) return kernel<Layout<8, 16, 2, 32, 256>>();
  if (n <= kOrders[2]) return kernel<Layout<8, 16, 4, 64, 512>>();
  if (n <= kOrders[3]) return kernel<Layout<16, 16, 2, 64, 1024>>();
  return kernel<Layout<16, 16, 2, 74, kLargestTridiagonalised>>();
}

cudaError_t prepare(const Kernel& kernel, cudaLaunchConfig_t& config, cudaLaunchAttribute& cluster,
                    int64_t count, cudaStream_t stream) {
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(kernel.blocks), 1, 1};
  config = {};
  config.gridDim = dim3(static_cast<unsigned>(count * kernel.blocks));
  config.blockDim = dim3(kernel.threads);
  config.dynamicSmemBytes = kernel.shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(kernel.shared_bytes));
  return error != cudaSuccess
             ? error
             : cudaFuncSetAttribute(kernel.function, cudaFuncAttributeNonPortableClusterSizeAllowed,
                                    1);
}

}  // namespace

int largest_tridiagonalised(int major, int minor, int shared_bytes) {
  int largest = 0;
  for (const int n : kOrders) {
    const Kernel kernel = kernel_of(n);
    cudaLaunchConfig_t config;
    cudaLaunchAttribute cluster;
    int clusters = 0;
    if (!has_hopper_kernel(major, minor, shared_bytes, static_cast<int>(kernel.shared_bytes)) ||
        prepare(kernel, config, cluster, 1, nullptr) != cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&clusters, kernel.function, &config) != cudaSuccess ||
        clusters == 0) {
      cudaGetLastError();
      break;
    }
    largest = n;
  }
  return largest;
}

cudaError_t tridiagonalise(const Tridiagonalise& arguments, cudaStream_t stream) {
  const Kernel kernel = kernel_of(arguments.n);
  cudaLaunchConfig_t config;
  cudaLaunchAttribute cluster;
  const cudaError_t error = prepare(kernel, config, cluster, arguments.count, stream);
  return error != cudaSuccess ? error : cudaLaunchKernelEx(&config, kernel.function, arguments);
}

}  // namespace torchium::cuda_kernels
