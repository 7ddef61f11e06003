// Everything that Torchium offers to a C++ program.
#pragma once

#include <torchium/config.h>
#include <torchium/gradients.h>
#include <torchium/linalg.h>
#include <torchium/memory.h>
#include <torchium/optim/adagrad.h>
#include <torchium/optim/adahessian.h>
#include <torchium/optim/kfac.h>
#include <torchium/optim/kfac_preconditioner.h>
#include <torchium/optim/natural_gradient.h>
#include <torchium/optim/shampoo.h>
#include <torchium/version.h>
