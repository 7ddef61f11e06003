// Batched linear algebra: all of torchium::linalg.
#pragma once

#include <torchium/linalg/decompositions.h>
#include <torchium/linalg/estimators.h>
#include <torchium/linalg/fisher.h>
#include <torchium/linalg/hessian.h>
#include <torchium/linalg/krylov.h>
#include <torchium/linalg/linear_operator.h>
#include <torchium/linalg/matrix_functions.h>
#include <torchium/linalg/products.h>
#include <torchium/linalg/solvers.h>
#include <torchium/linalg/structured_operators.h>
