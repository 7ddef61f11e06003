// Everything that Torchium offers to a C++ program.
#pragma once

#include <torchium/config.h>
#include <torchium/version.h>
