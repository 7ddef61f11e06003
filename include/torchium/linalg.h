// Linear algebra on stacks of matrices: everything of torchium::linalg.
#pragma once

#include <torchium/linalg/matrix_functions.h>
#include <torchium/linalg/products.h>
