#include "cuda_kernels/factors/patch_products.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

namespace torchium::cuda_kernels {
namespace {

using Shifts = std::vector<Shift>;
// Views from kWhole on are of the image, or of the part of it that x[q] and x[q + d] share.
enum ViewOf { kRow, kColumn, kPixel, kWhole };

// Along a dimension of `size` pixels, from `first` on for a view that covers only one.
struct Axis {
  bool is_covered;
  int first;
  int beyond;  // pixels past the end that are covered too
};

// Whether images shifted by a and by b give the sum of x[q] x[q + d] over all q along the axis. Of
// p = q - a = q + d - b no pixel may be missed where both are inside of the image.
bool gives(const Axis& axis, int a, int b, int d) {
  if (!axis.is_covered) return a == axis.first && b == axis.first && d == 0;
  const bool sees_all = (a >= 0 && b <= 0) || (a <= 0 && b >= 0) ||
                        (a < 0 && b < 0 && std::min(-a, -b) <= axis.beyond);
  return b - a == d && sees_all;
}

class Builder {
 public:
  explicit Builder(const Images& images) {
    MomentProduct& product = result_.product;
    product.images = images;
    product.stride = {1, 1};
    shifts_ = product.shifts = images.channels <= 64 ? 4 : images.channels <= 128 ? 2 : 1;
    bottom_ = static_cast<int>(images.height) - 1;
    right_ = static_cast<int>(images.width) - 1;
    beyond_ = shifts_ == 4 ? 1 : 0;
    product.view[kRow] = {1, images.width, false};
    product.view[kColumn] = {images.height, 1, false};
    product.view[kPixel] = {1, 1, false};
    product.views = kWhole;
  }

  PatchProducts build() {
    add_whole();
    add_borders();
    add_corners();
    find_terms();
    result_.is_of_shifts = true;
    return result_;
  }

 private:
  void add(int view, const Shifts& rows, const Shifts& columns) {
    MomentProduct& product = result_.product;
    product.product[product.products++] = {view, count_, count_ + shifts_};
    for (const Shifts& shifts : {rows, columns}) {
      std::copy(shifts.begin(), shifts.end(), product.shift + count_);
      count_ += shifts_;
    }
  }

  // Of d and -d one is enough: d_y > 0, or d_y = 0 and d_x >= 0. The shifts of tiles with several
  // were found by search: their differences are as many such d as possible.
  void add_whole() {
    if (shifts_ == 1) {
      add_each();
      return;
    }
    const int view = add_view(-beyond_, 0);
    if (shifts_ == 4) {
      add(view, {{0, -2}, {0, 0}, {-2, 1}, {1, 1}}, {{0, -1}, {-1, 0}, {0, 0}, {2, 0}});
    } else {
      add(view, {{-1, -1}, {0, 0}}, {{0, 0}, {1, 1}});
      add(view, {{-2, 0}, {-1, 0}}, {{0, -2}, {0, -1}});
      add(view, {{-2, 0}, {0, 0}}, {{0, 0}, {0, 1}});
      add(view, {{-1, 0}, {0, 0}}, {{0, 0}, {0, 2}});
    }
  }

  // A product for each d, over the pixels q from which q + d is in the image.
  void add_each() {
    constexpr int kReach = patch_terms::kReach;
    int views[kReach + 1][kReach + 1];
    for (int dy = 0; dy <= kReach; ++dy) {
      for (int dx = 0; dx <= kReach; ++dx) views[dy][dx] = add_view(dy, dx);
      for (int dx = dy == 0 ? 0 : -kReach; dx <= kReach; ++dx) {
        const int first = std::max(0, -dx);
        add(views[dy][std::abs(dx)], {{0, first}}, {{dy, first + dx}});
      }
    }
  }

  // Of images with so many rows and columns less.
  int add_view(int rows, int columns) {
    MomentProduct& product = result_.product;
    product.view[product.views] = {std::max<int64_t>(1, product.images.height - rows),
                                   std::max<int64_t>(1, product.images.width - columns), false};
    return product.views++;
  }

  void add_borders() {
    for (const bool is_row : {true, false}) {
      const auto at = [&](int end, int along) {
        return is_row ? Shift{end, along} : Shift{along, end};
      };
      const ViewOf view = is_row ? kRow : kColumn;
      const int last = is_row ? bottom_ : right_;
      if (shifts_ == 4) {
        add(view, {at(0, -1), at(0, 0), at(last, -1), at(last, 0)},
            {at(0, 0), at(0, 1), at(last, 0), at(last, 1)});
        continue;
      }
      for (const int end : {0, last}) {
        if (shifts_ == 2) {
          add(view, {at(end, -1), at(end, 0)}, {at(end, 0), at(end, 1)});
          continue;
        }
        for (int d = 0; d <= patch_terms::kReach; ++d) add(view, {at(end, 0)}, {at(end, d)});
      }
    }
  }

  void add_corners() {
    const Shifts corners = {{0, 0}, {0, right_}, {bottom_, 0}, {bottom_, right_}};
    for (size_t i = 0; i < corners.size(); i += shifts_) {
      const Shifts some(corners.begin() + i, corners.begin() + i + shifts_);
      add(kPixel, some, some);
    }
  }

  void find_terms() {
    using namespace patch_terms;
    for (int dy = -kReach; dy <= kReach; ++dy) {
      for (int dx = -kReach; dx <= kReach; ++dx) {
        find(whole(dy, dx), kWhole, {true, 0, beyond_}, {true, 0, 0}, {dy, dx});
      }
    }
    for (const bool is_last : {false, true}) {
      const Axis y{false, is_last ? bottom_ : 0, 0}, x{false, is_last ? right_ : 0, 0};
      for (int d = -kReach; d <= kReach; ++d) {
        find(in_row(is_last, d), kRow, y, {true, 0, 0}, {0, d});
        find(in_column(is_last, d), kColumn, {true, 0, 0}, x, {d, 0});
      }
      for (const bool is_right : {false, true}) {
        find(in_corner(is_last, is_right), kPixel, y, {false, is_right ? right_ : 0, 0}, {0, 0});
      }
    }
  }

  // The sum of x[q] x[q + d], or of x[q] x[q - d] with the channels exchanged.
  void find(int term, ViewOf view, const Axis& y, const Axis& x, const Shift& d) {
    const MomentProduct& all = result_.product;
    const auto is_found = [&](int index, int i, int j, int sign) {
      const Shift& a = all.shift[all.product[index].rows + i];
      const Shift& b = all.shift[all.product[index].columns + j];
      return gives(y, a.y, b.y, sign * d.y) && gives(x, a.x, b.x, sign * d.x);
    };
    for (int index = 0; index < all.products; ++index) {
      if (std::min<int>(all.product[index].view, kWhole) != view) continue;
      for (int pair = 0; pair < shifts_ * shifts_; ++pair) {
        const int i = pair / shifts_, j = pair % shifts_;
        const bool is_same = is_found(index, i, j, 1);
        if (!is_same && !is_found(index, i, j, -1)) continue;
        const int step = MomentParts::kTile / shifts_;
        result_.terms[term] = {index, i * step, j * step, !is_same, d.y == 0 && d.x == 0};
        return;
      }
    }
  }

  PatchProducts result_{};
  int shifts_, bottom_, right_, beyond_;
  int count_ = 0;  // of shifts in the list
};

}  // namespace

PatchProducts patch_products(const Images& images) { return Builder(images).build(); }

PatchProducts products_of_patches(const MomentProduct& product) {
  PatchProducts result{};
  result.product = product;
  const int channels = product.images.channels;
  for (int k = 0; k < kPatchPixels; ++k) {
    for (int l = 0; l < kPatchPixels; ++l) {
      result.terms[k * kPatchPixels + l] = {0, std::max(k, l) * channels, std::min(k, l) * channels,
                                            k < l, k == l};
    }
  }
  return result;
}

}  // namespace torchium::cuda_kernels
