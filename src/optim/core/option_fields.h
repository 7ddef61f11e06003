// The lists of options of all optimizers.
#pragma once

#include "optim/adagrad/adagrad_options.h"
#include "optim/kfac/kfac_options.h"
#include "optim/natural_gradient/natural_gradient_options.h"
#include "optim/shampoo/shampoo_options.h"
