// Batched linear algebra: all of torchium::linalg.
#pragma once

#include <torchium/linalg/matrix_functions.h>
#include <torchium/linalg/products.h>
