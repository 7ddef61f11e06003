// The warpgroups that compute the products of batched_product.h.
#pragma once

#include "cuda_kernels/common/wgmma.cuh"
#include "cuda_kernels/split_gemm/batched_product_block.cuh"
#include "cuda_kernels/split_gemm/split_fp16.cuh"

#include <cstdint>

namespace torchium::cuda_kernels::batched_product_detail {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// 16 rows of a tile of C and their mirror image. A warp updates 16 columns at a time; each thread
// has four consecutive elements of a row in C, and of a column in the mirror image.
class Strip {
 public:
  template <typename Tile>
  __device__ Strip(const Tile& tile, int first_row, int lane)
      : n_(tile.product.M),
        is_diagonal_(tile.is_diagonal()),
        across_(lane / 4),
        along_(lane % 4 * 4),
        row_(first_row),
        column_(tile.column),
        own_(tile.C() + int64_t{first_row + across_} * n_ + tile.column + along_),
        mirrored_(tile.C() + int64_t{tile.column + across_} * n_ + first_row + along_) {}

  __device__ void load(int chunk, float4 (&old)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      old[i] = {0, 0, 0, 0};
      if (row(i) < n_ && column(chunk) < n_) old[i] = *own(chunk, i);
    }
  }

  // C <- beta old + staged, also written to staged.
  __device__ void update(int chunk, float beta, const float4 (&old)[2], Staged& staged) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      auto& x = *reinterpret_cast<float4*>(&staged[across_ + 8 * i][along_]);
      x = {fmaf(beta, old[i].x, x.x), fmaf(beta, old[i].y, x.y), fmaf(beta, old[i].z, x.z),
           fmaf(beta, old[i].w, x.w)};
      if (row(i) >= n_ || column(chunk) >= n_) continue;
      store(own(chunk, i), x, 0, is_diagonal_ ? row(i) - column(chunk) + 1 : 4);
    }
  }

  __device__ void mirror(int chunk, const Staged& staged) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = across_ + 8 * i, r = along_;
      const float4 x = {staged[r][c], staged[r + 1][c], staged[r + 2][c], staged[r + 3][c]};
      const int mirrored_row = column_ + chunk * kStagedColumns + c;
      if (mirrored_row >= n_ || row_ + r >= n_) continue;
      auto* target =
          reinterpret_cast<float4*>(mirrored_ + int64_t{chunk * kStagedColumns + 8 * i} * n_);
      store(target, x, is_diagonal_ ? mirrored_row - (row_ + r) + 1 : 0, 4);
    }
  }

 private:
  __device__ int row(int i) const { return row_ + across_ + 8 * i; }
  __device__ int column(int chunk) const { return column_ + chunk * kStagedColumns + along_; }
  __device__ float4* own(int chunk, int i) const {
    return reinterpret_cast<float4*>(own_ + int64_t{8 * i} * n_ + chunk * kStagedColumns);
  }

  // Elements [begin, end).
  static __device__ void store(float4* target, const float4& x, int begin, int end) {
    if (begin <= 0 && end >= 4) {
      *target = x;
      return;
    }
    const float each[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= begin && i < end) reinterpret_cast<float*>(target)[i] = each[i];
    }
  }

  const int n_;
  const bool is_diagonal_;
  const int across_, along_, row_, column_;
  float* const own_;
  float* const mirrored_;
};

// One of the two consumer warpgroups.
template <ProductKind kind, bool single>
class Consumer {
 public:
  using L = Layout<kind, single>;

  __device__ explicit Consumer(const Shared<kind, single>& shared)
      : shared_(shared),
        group_(threadIdx.x / 128),
        thread_(threadIdx.x % 128),
        warp_(thread_ / 32),
        lane_(thread_ % 32) {}

  __device__ void run(const ProductTable& table) {
    for_each_tile<kind>(table, [&](const Tile<kind>& tile) {
      const Factors factors = factors_of(tile, table.update);
      float sum[64];
      if constexpr (is_gram(kind)) {
        const Strip strip(tile, tile.row + group_ * kBoxRows + 16 * warp_, lane_);
        float4 old[kChunks][2];
        if constexpr (single) load_old<kChunks>(strip, old);  // in flight during the product
        accumulate(tile, sum);
        update_symmetric(strip, factors, sum, old);
      } else {
        accumulate(tile, sum);
        store(tile, factors, sum);
      }
    });
  }

 protected:
  // C <- beta C + alpha x, where alpha includes the inverse of the scales. For tiny operands it is
  // no normal float, but both factors of it are.
  struct Factors {
    float first, second;
    float beta;

    __device__ Factors(double alpha, float beta) : beta(beta) {
      int exponent = 0;
      frexp(alpha, &exponent);
      const double power = ldexp(1.0, exponent / 2);
      first = static_cast<float>(power);
      second = static_cast<float>(alpha / power);
    }
    __device__ float scaled(float x) const { return x * first * second; }
  };
  static __device__ Factors factors_of(const Tile<kind>& tile, const GramUpdate* update) {
    const ProductEntry& product = tile.product;
    const double A = product.scale_A[product.has_scales_A ? tile.matrix : 0];
    if constexpr (is_gram(kind)) return Factors(update->alpha / (A * A), update->beta);
    const double B = product.scale_B[product.has_scales_B ? tile.matrix : 0];
    return Factors(1 / (A * B), 0);
  }

  // This warpgroup no longer reads the stage.
  __device__ void release(uint32_t slot) const {
    if (thread_ == 0) arrive(shared_.empty(slot));
  }

  // sum = A B of this tile.
  __device__ void accumulate(const Tile<kind>& tile, float (&sum)[64]) {
    if constexpr (single) {
      accumulate_stages(tile, 0, tile.stages(), sum, sum);
    } else {
      // The tensor cores truncate as they accumulate, so sums over this many stages are added in
      // float32. The cross terms are too small for that to matter.
      constexpr int kStagesOfSum = 4;
      float main[64], cross[64];
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[i] = 0;
#pragma unroll 1
      for (int begin = 0; begin < tile.stages(); begin += kStagesOfSum) {
        const int end = min(tile.stages(), begin + kStagesOfSum);
        accumulate_stages(tile, begin, end, main, cross);
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[i] += main[i];
      }
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[i] = fmaf(cross[i], 1 / kLowScale, sum[i]);
    }
  }

  // main = the products of stages [begin, end); cross starts at stage 0.
  __device__ void accumulate_stages(const Tile<kind>& tile, int begin, int end, float (&main)[64],
                                    float (&cross)[64]) {
    const bool is_diagonal = tile.is_diagonal();
    int is_later = 0;
    // The wait at the end must be unconditional: otherwise the compiler cannot prove that no
    // product is in flight when registers are read, and serialises all products.
#pragma unroll 1
    for (int stage = begin; stage < end; ++stage) {
      const uint32_t slot = position_.slot(), previous = position_.previous_slot();
      wait_for(shared_.full(slot), position_.parity());
      position_.advance();
      const uint32_t A = shared_.A(slot), B = is_diagonal ? A : shared_.B(slot);
      multiply(A + group_ * kBoxBytes, B, is_later, stage > 0, main, cross);
      wgmma_wait<1>();
      if (is_later) release(previous);
      is_later = 1;
    }
    wgmma_wait<0>();
    release(position_.previous_slot());
  }

  __device__ void multiply(uint32_t A, uint32_t B, int add_main, int add_cross, float (&main)[64],
                           float (&cross)[64]) const {
    constexpr bool kAcrossA = across_A(kind), kAcrossB = across_B(kind);
    constexpr int kTerms = 16;  // of one product: 32 bytes of a row, or 16 rows of 128 bytes
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBoxElements; k += kTerms) {
      const auto a = [&](int part) {
        return tile_descriptor<kAcrossA>(A + part * kTileBytes + k * (kAcrossA ? 128 : 2));
      };
      const auto b = [&](int part) {
        return tile_descriptor<kAcrossB>(B + part * kTileBytes + k * (kAcrossB ? 128 : 2));
      };
      wgmma_64x128x16<kAcrossA, kAcrossB>(main, a(0), b(0), k > 0 || add_main);
      if constexpr (!single) {
        wgmma_64x128x16<kAcrossA, kAcrossB>(cross, a(0), b(1), k > 0 || add_cross);
        wgmma_64x128x16<kAcrossA, kAcrossB>(cross, a(1), b(0), 1);
      }
    }
    wgmma_commit();
  }

  // For j = 0 and h = e = 0, x[4 j + 2 h + e] is at this row and column of the matrix. h adds 8
  // rows; j and e add 8 j + e columns.
  __device__ int first_row(const Tile<kind>& tile) const {
    return tile.row + group_ * kBoxRows + 16 * warp_ + lane_ / 4;
  }
  __device__ int first_column(const Tile<kind>& tile) const { return tile.column + lane_ % 4 * 2; }

  __device__ void store(const Tile<kind>& tile, const Factors& factors,
                        const float (&x)[64]) const {
    const int M = tile.product.M, N = tile.product.N;
    unsigned most = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row(tile) + 8 * h;
      float* C = tile.C() + int64_t{row} * N;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int column = first_column(tile) + 8 * j;
        if (row >= M || column >= N) continue;
        const float first = factors.scaled(x[4 * j + 2 * h]);
        const float second = factors.scaled(x[4 * j + 2 * h + 1]);
        *reinterpret_cast<float2*>(C + column) = {first, second};
        most = max(most, max(magnitude_bits(first), magnitude_bits(second)));
      }
    }
    if (tile.product.largest != nullptr) record_largest(most, tile.product.largest);
  }

  template <int chunks>
  static __device__ void load_old(const Strip& strip, float4 (&old)[kChunks][2]) {
#pragma unroll
    for (int chunk = 0; chunk < chunks; ++chunk) strip.load(chunk, old[chunk]);
  }

  // C <- beta C + alpha x on and below the diagonal, and mirrored. Each warp passes its 16 rows
  // through shared memory, some columns at a time, so that accesses to C and to the mirror image
  // are coalesced.
  __device__ void update_symmetric(const Strip& strip, const Factors& factors, const float (&x)[64],
                                   float4 (&old)[kChunks][2]) const {
    constexpr int kAhead = 2;  // registers have no room for more with two parts
    if constexpr (!single) load_old<kAhead>(strip, old);
    Staged& staged = shared_.staged(threadIdx.x / 32);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      // x[4 j + 2 h + e] for two j is in rows lane / 4 + 8 h and columns 8 j + lane % 4 * 2 + e.
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        auto* pair = &staged[lane_ / 4 + i / 2 % 2 * 8][i / 4 * 8 + lane_ % 4 * 2];
        *reinterpret_cast<float2*>(pair) = {factors.scaled(x[8 * chunk + i]),
                                            factors.scaled(x[8 * chunk + i + 1])};
      }
      if (!single && chunk + kAhead < kChunks) strip.load(chunk + kAhead, old[chunk + kAhead]);
      __syncwarp();
      strip.update(chunk, factors.beta, old[chunk], staged);
      __syncwarp();
      strip.mirror(chunk, staged);
      __syncwarp();
    }
  }

  const Shared<kind, single>& shared_;
  const int group_, thread_, warp_, lane_;
  Position<L::kStages> position_;
};

#endif

}  // namespace torchium::cuda_kernels::batched_product_detail
