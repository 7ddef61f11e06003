// Shampoo's step, shared by the ranks of a process group.
#pragma once

#include "distributed/communicator.h"
#include "optim/blocked/blocked_plans.h"
#include "optim/sharing/shared_plans.h"

#include <c10/util/intrusive_ptr.h>

namespace torchium::optim::detail {

c10::intrusive_ptr<BlockedPlans> make_shared_shampoo_plans(distributed::Communicator ranks,
                                                           const SharingOptions& options);

}  // namespace torchium::optim::detail
