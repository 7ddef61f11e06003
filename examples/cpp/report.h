// A table and the loss curves of several runs.
#pragma once

#include "training.h"

#include <filesystem>
#include <ostream>
#include <vector>

// One row per run. "steps to TARGET" counts until the training loss first reaches `target`.
void print_table(std::ostream& out, const std::vector<Result>& results, double target);

// Columns optimizer, steps, seconds, loss. Throws std::runtime_error if it cannot be written.
void write_curves(const std::filesystem::path& path, const std::vector<Result>& results);
