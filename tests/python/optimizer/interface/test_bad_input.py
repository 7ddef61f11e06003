"""Wrong options and parameters raise an error with their name, and change nothing."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch
import torchium
from optimizer_cases import (
    all_cases,
    assert_same,
    capturing_cases,
    give_gradients,
    ignore_fallback,
    mlp,
    plain_or_kfac_cases,
    run,
    set_gradients,
    snapshot,
    values,
)
from torch import nn

pytestmark = ignore_fallback

NOT_FINITE = [math.nan, math.inf, -math.inf]
NO_NUMBER = ["0.1", None, True, [0.1], 1j]
NON_NEGATIVE = [-0.1, *NOT_FINITE, *NO_NUMBER]
NO_FLAG = [None, 0, 1, "True"]
NO_COUNT = [0, -3, 1.0, 2.5, "2", None, True, math.nan]

BAD_OPTIONS = {
    torchium.Shampoo: {
        "lr": NON_NEGATIVE,
        "eps": NON_NEGATIVE,
        "update_freq": NO_COUNT,
        "weight_decay": NON_NEGATIVE,
        "betas": [
            (-0.1, 1.0),
            (1.0, 1.0),
            (0.9, 1.1),
            (0.9, -0.1),
            (math.nan, 1.0),
            (0.9, math.nan),
            (0.9,),
            (0.9, 0.9, 0.9),
            0.9,
            "ab",
            None,
        ],
        "momentum": [1.0, *NON_NEGATIVE],
        "nesterov": NO_FLAG,
        "decoupled_weight_decay": NO_FLAG,
        "relative_eps": NON_NEGATIVE,
        "block_size": NO_COUNT,
        "merge_dims": NO_FLAG,
        "target_order": [-1, 1.5, "1", True],
        "exponent": [0.0, 0.5, *NOT_FINITE, "-0.5", True],
        "exponent_warmup": [-1, 1.5, "100", True, None],
        "preconditioner_1d": ["Diagonal", "none", None, 1],
        "preconditioned": NO_FLAG,
        "max_preconditioned_dim": [n for n in NO_COUNT if n is not None],
        "grafting": ["SGD", "lamb", 1, False],
        "grafting_eps": NON_NEGATIVE,
        "grafting_beta2": [1.0, -0.1, *NOT_FINITE, "0.9", True],
        "start_preconditioning_step": NO_COUNT,
        "root_method": ["Newton", "svd", None, 1],
        "root_dtype": ["float16", torch.float16, torch.float32, 16],
        "matmul_precision": ["tf32", "medium", 1],
        "max_root_failures": NO_COUNT,
        "maximize": NO_FLAG,
        "capturable": NO_FLAG,
        "graphs": ["on", None, 1, 2.0],
    },
    torchium.Adagrad: {
        "lr": NON_NEGATIVE,
        "lr_decay": NON_NEGATIVE,
        "weight_decay": NON_NEGATIVE,
        "initial_accumulator_value": NON_NEGATIVE,
        "eps": NON_NEGATIVE,
        "full_matrix": NO_FLAG,
        "block_size": NO_COUNT,
        "update_freq": NO_COUNT,
        "root_method": ["Newton", "svd", None, 1],
        "maximize": NO_FLAG,
        "graphs": ["on", None, 1, 2.0],
    },
    torchium.KFAC: {
        "lr": NON_NEGATIVE,
        "momentum": [1.0, *NON_NEGATIVE],
        "weight_decay": NON_NEGATIVE,
        "damping": NON_NEGATIVE,
        "TCov": NO_COUNT,
        "TInv": NO_COUNT,
        "batch_averaged": NO_FLAG,
        "eps": NON_NEGATIVE,
        "stat_decay": [1.1, *NON_NEGATIVE],
        "kl_clip": [0.0, -0.1, *NOT_FINITE, "0.1", True],
        "factor_dtype": ["float16", torch.float16, "half", 16, True],
        "damping_split": ["Pi", "none", None, 1],
        "ekfac": [1, None, "yes"],
        "solver": ["Newton", "svd", "inverse", None, 1],
        "structures": ["dense", ("dense",), ("dense", "Toeplitz"), (1, "dense"), None],
        "block_size": [1, 0, -1, 2.5, True],
        "alpha1": [1.0, *NON_NEGATIVE],
        "fisher": ["GGN", "exact", None, 1],
        "weight_sharing": ["Expand", "none", None, 1],
        "max_factor_size": NO_COUNT,
        "adaptive_damping": NO_FLAG,
        "capturable": NO_FLAG,
        "maximize": NO_FLAG,
        "graphs": ["on", None, 1, 2.0],
    },
    torchium.NaturalGradient: {
        "lr": NON_NEGATIVE,
        "damping": [0.0, *NON_NEGATIVE],
        "update_freq": NO_COUNT,
        "eps": [0.0, *NON_NEGATIVE],
        "momentum": [1.0, *NON_NEGATIVE],
        "max_norm": [0.0, -0.1, *NOT_FINITE, "0.1", True],
        "solver": ["Gram", "svd", None, 1],
        "fisher": ["Empirical", None, 1],
        "nystrom_rank": [-1, 0.5, True],
        "max_workspace_bytes": [0, -1, 0.5, True],
        "graphs": ["on", None, 1, 2.0],
        "adaptive_damping": NO_FLAG,
        "capturable": NO_FLAG,
        "maximize": NO_FLAG,
    },
}
BAD = [
    (c, name, v) for c, options in BAD_OPTIONS.items() for name, vs in options.items() for v in vs
]


@pytest.mark.parametrize("cls", BAD_OPTIONS)
def test_every_option_has_wrong_values_here(cls):
    group = cls(mlp().parameters()).param_groups[0]
    assert BAD_OPTIONS[cls].keys() == group.keys() - {"params"}


@pytest.mark.parametrize(("cls", "name", "value"), BAD)
def test_wrong_option_is_refused_by_name_and_value(cls, name, value):
    shown = value[0] if name == "betas" and isinstance(value, tuple) else value
    with pytest.raises(ValueError, match=name) as error:
        cls(mlp().parameters(), **{name: value})
    assert repr(shown) in str(error.value) or repr(value[1]) in str(error.value)

    optimizer = cls(mlp().parameters())
    with pytest.raises(ValueError, match=name):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("cls", BAD_OPTIONS)
@pytest.mark.parametrize(
    "lr",
    [torch.tensor([0.1, 0.2]), torch.tensor(-0.1), torch.tensor(math.nan), torch.tensor(1)],
    ids=["two", "negative", "nan", "integer"],
)
def test_wrong_lr_tensor_is_refused(cls, lr):
    with pytest.raises(ValueError, match="lr"):
        cls(mlp().parameters(), lr=lr)


def test_nesterov_needs_momentum():
    with pytest.raises(ValueError, match=r"nesterov=True needs momentum"):
        torchium.Shampoo(mlp().parameters(), nesterov=True)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (torchium.Shampoo, {"nesterov": True}, "nesterov=True needs momentum"),
        (
            torchium.KFAC,
            {"solver": "newton", "damping_split": "exact"},
            "has no eigenvectors, which damping_split='exact' needs",
        ),
    ],
)
def test_options_that_are_wrong_together_are_refused_in_mid_run_too(cls, options, message):
    model = mlp()
    optimizer = cls(model.parameters())
    run(model, optimizer)
    group = optimizer.param_groups[0]
    good = dict(group)
    group.update(options)
    give_gradients(model, optimizer, 4)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    group.update(good)
    run(model, optimizer, 5, 1)


@pytest.mark.parametrize("cls", BAD_OPTIONS)
def test_unknown_option_is_refused(cls):
    with pytest.raises(TypeError, match="learning_rate"):
        cls(mlp().parameters(), learning_rate=0.1)


def test_numbers_of_other_libraries_become_plain_python():
    import numpy as np

    optimizer = torchium.Shampoo(
        mlp().parameters(), lr=np.float32(0.5), eps=1, update_freq=np.int64(7), betas=[0, 1]
    )
    group = optimizer.param_groups[0]
    for name, kind in {"lr": float, "eps": float, "update_freq": int, "betas": tuple}.items():
        assert type(group[name]) is kind, name
    assert group["betas"] == (0.0, 1.0)
    assert type(group["betas"][0]) is float


@all_cases
@pytest.mark.parametrize("kind", ["float32", "int64", "Fraction"])
def test_a_learning_rate_of_another_library_is_that_number_in_mid_run_too(make, kind):
    import fractions

    import numpy as np

    lr = {"float32": np.float32(0.5), "int64": np.int64(1), "Fraction": fractions.Fraction(1, 8)}
    results = []
    for value in (float(lr[kind]), lr[kind]):
        model = mlp()
        optimizer = make(model.parameters())
        run(model, optimizer, 0, 2)
        optimizer.param_groups[0]["lr"] = value
        results.append(run(model, optimizer, 2, 2))
        assert type(optimizer.param_groups[0]["lr"]) is float
    assert_same(*results)


@all_cases
@pytest.mark.parametrize(
    ("lr", "message"),
    [(None, "lr must be .*, got None"), (torch.tensor([1e-3, 1e-2]), "lr as a tensor must be")],
)
def test_a_learning_rate_that_is_no_number_is_refused_in_the_first_step_too(make, lr, message):
    model = mlp()
    optimizer = make(model.parameters())
    give_gradients(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = lr
    before = values(model)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert_same(values(model), before)


@all_cases
@pytest.mark.parametrize("lr", [-1e-3, math.inf, math.nan])
def test_a_wrong_value_that_is_written_into_a_learning_rate_is_refused(make, lr):
    """On a CPU: no step waits for another device."""
    model = mlp()
    optimizer = make(model.parameters())
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
    run(model, optimizer, 0, 2)
    rate.fill_(lr)
    give_gradients(model, optimizer, 2)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"lr must be a finite number in \[0, .*, got "):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    rate.fill_(1e-3)
    run(model, optimizer, 2, 1)


def of_step(step: int) -> float:
    return 1 / step


@pytest.mark.parametrize(
    ("cls", "name", "value", "message"),
    [
        (torchium.KFAC, "damping", "x", "in [0, inf), or a function of the step number, got 'x'"),
        (
            torchium.KFAC,
            "lr",
            of_step,
            "; take a scheduler of torch.optim.lr_scheduler to change it",
        ),
        (torchium.NaturalGradient, "damping", of_step, "; set it in param_groups to change it"),
    ],
)
def test_a_value_of_a_wrong_type_has_a_remedy(cls, name, value, message):
    with pytest.raises(ValueError, match=f"^{name} must be a finite number .*{re.escape(message)}"):
        cls(mlp().parameters(), **{name: value})


# ---- parameters

BAD_PARAMETERS = {
    "complex": lambda: torch.ones(2, 2, dtype=torch.complex64),
    "int64": lambda: torch.ones(2, 2, dtype=torch.int64),
    "bool": lambda: torch.ones(2, 2, dtype=torch.bool),
    "float8": lambda: torch.ones(2, 2).to(torch.float8_e4m3fn),
    "layout Sparse;": lambda: torch.eye(2).to_sparse(),
    "layout SparseCsr;": lambda: torch.eye(2).to_sparse_csr(),
}


@all_cases
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", BAD_PARAMETERS)
def test_wrong_parameter_is_refused_by_name(make, kind):
    bad = BAD_PARAMETERS[kind]()
    with pytest.raises(ValueError, match=f"'bad'.*{kind}"):
        make([("good", nn.Parameter(torch.ones(2))), ("bad", bad)])
    optimizer = make(mlp().parameters())
    with pytest.raises(ValueError, match=f"parameter 0 of group 1.*{kind}"):
        optimizer.add_param_group({"params": bad})
    assert len(optimizer.param_groups) == 1


@plain_or_kfac_cases
def test_a_parameter_without_values_is_refused_by_name_in_a_step(make):
    model = mlp("meta")
    optimizer = make(model.named_parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(ValueError, match=r"parameter '0.weight'.*meta device.*to_empty"):
        optimizer.step()


@pytest.fixture
def mesh(tmp_path):
    import torch.distributed as dist

    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@all_cases
def test_dtensor_is_refused_by_name(make, mesh):
    from torch.distributed.tensor import distribute_tensor

    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh))
    if issubclass(type(make(mlp().parameters())), torchium.Shampoo):
        pytest.skip("takes them")
    with pytest.raises(ValueError, match=r"'shard'.*DTensor"):
        make([("shard", parameter)])


@all_cases
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_shards_of_fsdp_are_refused_by_name(make, mesh, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        mlp(), device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )
    with pytest.raises(
        ValueError, match=r"flat shard of FullyShardedDataParallel.*DistributedData"
    ):
        make(model.parameters())
    optimizer = make(mlp().parameters())
    with pytest.raises(ValueError, match=r"parameter 0 of group 1.*FullyShardedDataParallel"):
        optimizer.add_param_group({"params": list(model.parameters())})
    assert len(optimizer.param_groups) == 1


@all_cases
@pytest.mark.parametrize(
    "expanded",
    [lambda: torch.ones(1, 3).expand(4, 3), lambda: torch.ones(()).expand(2)],
    ids=["rows", "scalar"],
)
def test_expanded_parameters_are_refused_before_anything_is_written(make, expanded):
    bad = expanded().requires_grad_()
    with pytest.raises(ValueError, match=r"'bad'.*expanded.*strides"):
        make([("good", nn.Parameter(torch.ones(2))), ("bad", bad)])
    make([nn.Parameter(torch.ones(1, 3).expand(1, 3)), nn.Parameter(torch.ones(4, 1)[:, :1])])


@all_cases
def test_usual_mistakes_raise_as_in_pytorch(make):
    p = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="empty parameter list"):
        make([])
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        make(p)
    with pytest.raises(ValueError, match="non-leaf"):
        make([p * 2])
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        make(["p"])
    with pytest.raises(ValueError, match="more than one parameter group"):
        make([{"params": [p]}, {"params": [p]}])


@all_cases
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_parameter_listed_twice_is_refused(make):
    p = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="more than once"):
        make([p, p])


def test_out_of_memory_says_what_was_asked_for_and_what_to_lower():
    """A petabyte, more than an address space."""
    small, huge = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2**24))
    optimizer = torchium.Adagrad([small, huge], full_matrix=True, block_size=2**24)
    set_gradients([small], 0)
    huge.grad = huge.detach()
    with pytest.raises(torch.OutOfMemoryError, match=r"2.1e\+06 GiB on cpu.*lower block_size"):
        optimizer.step()
    assert not optimizer.state


# ---- options of all groups together


SHARED = {
    torchium.KFAC: {
        "batch_averaged": False,
        "kl_clip": None,
        "damping_split": "exact",
        "solver": "newton",
    },
    torchium.NaturalGradient: {"update_freq": 2, "eps": 1e-3, "max_norm": 1.0, "solver": "cg"},
}


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [(c, name, v) for c, values in SHARED.items() for name, v in values.items()],
)
def test_options_of_all_groups_must_agree(cls, name, value):
    model = mlp()
    optimizer = cls(model[0].parameters())
    first = optimizer.param_groups[0][name]
    message = f"{name} must be the same in all parameter groups.*{first!r} in group 0.*{value!r}"
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": list(model[3].parameters()), name: value})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [*model[1].parameters(), *model[3].parameters()]})
    run(model, optimizer, steps=1)

    optimizer.param_groups[1][name] = value
    state_dict = optimizer.state_dict()
    before = snapshot(optimizer)
    give_gradients(model, optimizer, 1)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    optimizer.param_groups[1][name] = first
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    assert_same(snapshot(optimizer)[1], before[1])


@pytest.mark.cuda
@capturing_cases
def test_parameters_on_two_devices_are_refused(make):
    model = mlp()
    model[0].cuda()
    optimizer = make(model)
    inputs = torch.ones(4, 6, device="cuda")
    model[3](model[1](model[0](inputs).cpu())).sum().backward()
    with pytest.raises(ValueError, match=r"one device.*cpu and cuda:0"):
        optimizer.step()


# ---- numbers too large for the core, and groups that cannot be added


@pytest.mark.parametrize("option", ["update_freq", "block_size", "max_preconditioned_dim"])
@pytest.mark.parametrize("value", [2**63, 10**30])
def test_integers_beyond_int64_are_refused(option, value):
    with pytest.raises(ValueError, match=rf"{option} must be at most 2\*\*63 - 1"):
        torchium.Shampoo(mlp().parameters(), **{option: value})
    model = mlp()
    optimizer = torchium.Shampoo(model.parameters(), **{option: 2**63 - 1})
    run(model, optimizer, steps=1)


OPTIMIZERS = [*BAD_OPTIONS, torchium.ShampooW, torchium.KFACPreconditioner]


@pytest.mark.parametrize(
    ("cls", "option"),
    [
        (cls, name)
        for cls in OPTIMIZERS
        for name, parameter in inspect.signature(cls).parameters.items()
        if isinstance(parameter.default, (int, float, tuple))
    ],
)
@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["positive", "negative"])
def test_numbers_beyond_double_are_refused(cls, option, value):
    with pytest.raises(ValueError, match=option):
        cls(mlp().parameters(), **{option: value})


@pytest.mark.parametrize(
    "cls", [torchium.Shampoo, torchium.ShampooW, torchium.Adagrad, torchium.KFAC]
)
@pytest.mark.parametrize("lr", [1e39, 10**400, torch.tensor(1e39, dtype=torch.float64)])
def test_learning_rates_beyond_float32_are_refused(cls, lr):
    with pytest.raises(ValueError, match=r"lr must be a finite number in \[0, 3.40282e\+38\]"):
        cls(mlp().parameters(), lr=lr)


@pytest.mark.parametrize("cls", [torchium.Shampoo, torchium.ShampooW, torchium.NaturalGradient])
def test_lazy_parameters_are_refused_with_the_remedy(cls):
    lazy = list(nn.LazyLinear(3).parameters())
    message = r"parameter 0 of group {} is uninitialized, .* run a forward pass first"
    with pytest.raises(ValueError, match=message.format(0)):
        cls(lazy)
    optimizer = cls([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ValueError, match=message.format(1)):
        optimizer.add_param_group({"params": lazy})
    assert len(optimizer.param_groups) == 1


class Unreadable(float):
    def __float__(self) -> float:
        raise LookupError("of the number")


@pytest.mark.parametrize("cls", [torchium.Shampoo, torchium.KFAC])
def test_a_group_is_not_added_whatever_is_raised(cls):
    optimizer = cls([nn.Parameter(torch.ones(2, 2))])
    param = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(LookupError):
        optimizer.add_param_group({"params": [param], "weight_decay": Unreadable(0.1)})
    with pytest.raises(ValueError, match="weight_decay"):
        optimizer.add_param_group({"params": [param], "weight_decay": 10**400})
    assert len(optimizer.param_groups) == 1
