// A rank's share of the state of a parameter, which is what the caller of an optimizer keeps. Keys
// are those of the whole state (docs/design.md):
//
// - statistics.J, roots.J, root_failures.J: [own blocks, ...], in the order of the whole state;
// - tensors of the parameter's shape: [own elements], block after block;
// - step and starts of averages: 0-dim, as in the whole state.
#pragma once

#include "distributed/communicator.h"
#include "optim/core/parameter_state.h"
#include "optim/sharing/shared_blocks.h"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torchium::optim::detail {

// The blocks of a rank, in order.
std::vector<size_t> blocks_of(const SharedBlocks& shared, int64_t rank);

// The share of a rank in a state, which may be the whole one or its share already. Throws
// c10::ValueError for any other. `name`: of the parameter.
ParameterState share_of(const ParameterState& state, const SharedBlocks& shared, int64_t rank,
                        const std::string& name);

// The states of the blocks of a share: views of it, each with a copy of the counts.
std::vector<ParameterState> states_of_blocks(const ParameterState& share,
                                             const SharedBlocks& shared,
                                             const std::vector<size_t>& own);

// The reverse. The states of the blocks become views of the share: of the memory where their
// matrices lie, and of one new tensor for each kind of elements unless they are neighbours already.
// True if a state has changed. `before`: the share so far, whose tensors are kept where they have
// the same memory; empty: none. `whole`: see whole_state().
bool join_states(std::vector<ParameterState*> states, const SharedBlocks& shared,
                 const std::vector<size_t>& own, const ParameterState& before,
                 const ParameterState& whole, ParameterState& share);

// kPresence numbers. Their maxima over the ranks show which tensors the whole state has.
constexpr size_t kPresence = 8;
std::vector<int64_t> presence_of(const ParameterState& share);

// The whole state without values: tensors on the device "meta", but for counts. Empty unless all
// ranks have a state. `whole`: of the shapes of the whole state; `presence`: of all ranks together.
ParameterState whole_frame(const ParameterState& share, const ParameterState& whole,
                           const SharedBlocks& shared, const std::vector<int64_t>& presence);

// The whole state, in new tensors, from the shares of all ranks, which all must call this. `frame`:
// see whole_frame().
ParameterState whole_state(const ParameterState& share, const ParameterState& frame,
                           const SharedBlocks& shared, const distributed::Communicator& ranks);

}  // namespace torchium::optim::detail
