// Everything that Torchium offers to a C++ program.
#pragma once

#include <torchium/config.h>
#include <torchium/linalg.h>
#include <torchium/memory.h>
#include <torchium/optim/adagrad.h>
#include <torchium/optim/kfac.h>
#include <torchium/optim/shampoo.h>
#include <torchium/version.h>
