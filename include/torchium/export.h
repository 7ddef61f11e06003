// TORCHIUM_API marks what libtorchium exports; everything else stays hidden.
#pragma once

#define TORCHIUM_API __attribute__((visibility("default")))
