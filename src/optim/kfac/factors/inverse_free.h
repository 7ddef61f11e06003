// solver "inverse_free" of K-FAC: SINGD, structured inverse-free natural gradient descent (Lin,
// Dangel, Eschenhagen, Neklyudov, Kristiadi, Turner, Makhzani 2024, arXiv 2312.05705). Its dense
// case is INGD (Lin, Duruisseaux, Leok, Nielsen, Khan, Schmidt 2023, arXiv 2302.09738).
#pragma once

#include "optim/core/found_inf_guard.h"
#include "optim/kfac/kfac_direction.h"
#include "optim/kfac/kfac_layer.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace torchium::optim::detail {

// Corrects K and C of the layers with sums that this rank inverts. With A and G the factors of the
// sums, tr the mean of a diagonal, and P the projection to a structure
// (linalg/products/structured_matrix.h):
//
//   m_K <- alpha1 m_K + (1 - alpha1)/2 P(tr(C^T G C) K^T A K + damping tr(C^T C) K^T K - I)
//   m_C <- alpha1 m_C + (1 - alpha1)/2 P(tr(K^T A K) C^T G C + damping tr(K^T K) C^T C - I)
//   K <- K (I - b m_K),  C <- C (I - b m_C),  b = min(1 - stat_decay, 1 / (2 |m|))
//
// (section 3 of both papers; I - b m is exp(-b m) to first order). |m| is the largest row sum, a
// bound of the spectral norm: I - b m keeps its eigenvalues above 1/2, where the papers' constant b
// may make it singular. With m = 0, K K^T (x) C C^T is the inverse of the Kronecker product that is
// closest to A (x) G + damping I in the Kullback-Leibler divergence of Gaussians with these
// precisions.
//
// If K or C of a group is not finite, both and their momenta stay, and the failure is counted. Does
// not wait for the device. On a GPU, layers of one shape share their launches.
void update_inverse_free(std::vector<KfacLayer>& layers, const FoundInfGuard& guard);

// K K^T and C C^T, from which a direction takes half as many products as from K and C. They are
// kept from one update to the next as A_root and G_root, which are not part of the state.
bool has_squares(const KfacLayer& layer);
// For dense and diagonal K and C.
void make_room_for_squares(KfacLayer& layer);
void drop_squares(KfacLayer& layer);
// Those whose K or C has changed since the last time, with one product for all of one shape.
void renew_squares(std::vector<KfacLayer>& layers);

// C C^T V K K^T
LayerTensors inverse_free_direction(const KfacLayer& layer, const LayerTensors& V);

}  // namespace torchium::optim::detail
