"""torchium.compat.DistributedShampoo follows Distributed Shampoo, and refuses what it cannot follow.

golden_compat_distributed_shampoo.json holds the parameters that its code, at the commit named there, reached
in the cases of distributed_shampoo_cases.py.
"""

from __future__ import annotations

import copy
import inspect
import json
import pickle

import distributed_shampoo_cases as cases
import distributed_shampoo_configs as configs
import pytest
import torch
import torchium
from optimizer_cases import mlp, set_gradients
from reference import preconditioned_shape
from torch import nn
from torchium.compat import DistributedShampoo

GOLDEN = json.loads(cases.GOLDEN.read_text())
KEEPS_MATRICES = configs.SingleDeviceDistributedConfig(target_parameter_dimensionality=2)
# Parameters are of order one; another processor or LAPACK rounds otherwise.
TOLERANCE = 1e-12


def largest_difference(ends: list[list[float]], expected: list[list[float]]) -> float:
    pairs = zip(ends, expected, strict=True)
    return max(abs(a - b) for p, q in pairs for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("name", cases.CASES)
def test_reaches_the_same_parameters(name):
    ends = cases.trajectory_end(DistributedShampoo, configs, cases.CASES[name])
    assert largest_difference(ends, GOLDEN["parameters"][name]) <= TOLERANCE


@pytest.mark.parametrize("name", cases.CASES)
def test_reaches_the_same_parameters_as_the_installed_package(name):
    pytest.importorskip("distributed_shampoo", reason="Distributed Shampoo is not installed")
    try:
        theirs = cases.distributed_shampoo()
        ends = [
            cases.trajectory_end(optimizer_class, theirs, cases.CASES[name])
            for optimizer_class in (DistributedShampoo, theirs.DistributedShampoo)
        ]
    finally:
        torch.set_default_dtype(torch.float32)
    assert largest_difference(*ends) <= TOLERANCE


# Arguments that a case holds because they must have no effect.
NO_EFFECT = {
    ("no bias correction", "use_bias_correction"),
    ("never, without bias correction", "use_bias_correction"),
    ("beta3", "beta3"),
    ("newton", "preconditioner_config"),
    ("perturbation afterwards", "preconditioner_config"),
    ("eigendecomposed", "preconditioner_config"),
    ("only rmsprop", "precondition_frequency"),
}


@pytest.mark.parametrize("name", cases.CASES)
def test_the_numbers_notice_each_argument(name):
    arguments = cases.CASES[name].arguments(configs)
    for left_out in arguments:
        others = {k: v for k, v in arguments.items() if k != left_out}
        case = cases.CASES[name]._replace(arguments=lambda _, others=others: others)
        try:
            ends = cases.trajectory_end(DistributedShampoo, configs, case)
        except ValueError:  # refused, as a decay with momentum is without its type
            continue
        difference = largest_difference(ends, GOLDEN["parameters"][name])
        assert (difference < 1e4 * TOLERANCE) == ((name, left_out) in NO_EFFECT), left_out


def test_has_their_constructor():
    ours = cases.constructor(DistributedShampoo)
    theirs = GOLDEN["constructor"]
    assert list(ours) == list(theirs)
    for name, default in theirs.items():
        if "Config(" not in default:
            assert ours[name] == default.removeprefix("WeightDecayType."), name
        else:
            assert ours[name] == "None", name


def test_default_configurations_are_theirs():
    """None stands for the objects that their constructor has as defaults."""
    params = [nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(64))]
    plain = DistributedShampoo(params)
    explicit = DistributedShampoo(
        params,
        weight_decay_type=configs.WeightDecayType.DECOUPLED,
        distributed_config=configs.SingleDeviceDistributedConfig(),
        preconditioner_config=configs.RootInvShampooPreconditionerConfig(),
        shampoo_runtime_config=configs.ShampooRuntimeConfig(),
    )
    assert plain.defaults == explicit.defaults
    group = {k: v for k, v in plain.param_groups[0].items() if k != "params"}
    assert group == {k: v for k, v in explicit.param_groups[0].items() if k != "params"}
    expected = torchium.Shampoo(params).defaults | {
        "lr": 1e-2,
        "betas": (0.9, 1.0),
        "eps": 1e-12,
        "update_freq": 1,
        "decoupled_weight_decay": True,
        "preconditioner_1d": "full",
        "target_order": 1,
        "max_preconditioned_dim": None,
        "max_root_failures": 4,
    }
    assert group == expected


def test_groups_have_their_options():
    model = mlp()
    named = list(model.named_parameters())
    optimizer = DistributedShampoo(
        [
            {
                "params": iter(named[:2]),
                "epsilon": 1e-3,
                "precondition_frequency": 5,
                "own_key": "kept",
            },
            {
                "params": named[2:],
                "lr": 0.5,
                "weight_decay": 0.5,
                "weight_decay_type": "INDEPENDENT",
                "peak_lr": 2.0,
                "preconditioner_config": configs.AdamPreconditionerConfig(),
            },
        ],
        lr=0.1,
        betas=(0.8, 0.9),
        distributed_config=KEEPS_MATRICES,
    )
    first, second = optimizer.param_groups
    assert first["param_names"] == [name for name, _ in named[:2]]
    assert first["own_key"] == "kept"
    assert (first["lr"], first["eps"], first["betas"]) == (0.1, 1e-3, (0.8, 0.9))
    assert (first["update_freq"], first["start_preconditioning_step"]) == (5, 5)
    assert (second["lr"], second["eps"], second["weight_decay"]) == (0.5, 1e-12, 0.25)
    assert (second["preconditioned"], second["grafting"]) == (False, "adam")
    assert (second["grafting_beta2"], second["grafting_eps"]) == (0.999, 1e-10)
    assert not first.keys() & {"epsilon", "precondition_frequency", "distributed_config"}
    assert not second.keys() & {"peak_lr", "weight_decay_type", "preconditioner_config"}


def test_groups_take_nothing_from_a_configuration_that_they_replace():
    params = [nn.Parameter(torch.ones(6, 4)) for _ in range(2)]
    arguments = {
        "iterate_averaging_config": configs.ClassicMomentumConfig(use_nesterov=True),
        "grafting_config": configs.AdamPreconditionerConfig(),
        "distributed_config": KEEPS_MATRICES,
    }
    without = {"iterate_averaging_config": None, "grafting_config": None}
    groups = [{"params": params[:1]}, {"params": params[1:], **without}]
    first, second = DistributedShampoo(groups, **arguments).param_groups
    assert (first["momentum"], first["nesterov"], first["grafting"]) == (0.5, True, "adam")
    assert (second["momentum"], second["nesterov"], second["grafting"]) == (0.0, False, None)

    sgd = {"preconditioner_config": configs.SGDPreconditionerConfig()}
    matrices = {"preconditioner_config": configs.RootInvShampooPreconditionerConfig()}
    groups = [{"params": params[:1]}, {"params": params[1:], **matrices}]
    optimizer = DistributedShampoo(groups, **sgd, distributed_config=KEEPS_MATRICES)
    assert [p.rule for p in optimizer.report().parameters] == ["diagonal", "preconditioned"]


def test_options_of_matrices():
    p = nn.Parameter(torch.ones(8, 8))
    config = configs.RootInvShampooPreconditionerConfig(
        inv_factor_matrix_dtype=torch.bfloat16,
        num_tolerated_failed_amortized_computations=0,
        amortized_computation_config=configs.CoupledNewtonConfig(),
    )
    group = DistributedShampoo(
        [p], preconditioner_config=config, distributed_config=KEEPS_MATRICES
    ).param_groups[0]
    assert group["root_dtype"] == "bfloat16"
    assert group["max_root_failures"] == 1
    assert group["root_method"] == "newton"


def convnet() -> nn.Module:
    """Its convolutions become [120, 9] and [12, 120, 9]."""
    layers = nn.Conv2d(1, 120, 3), nn.ReLU(), nn.Conv2d(120, 12, 3), nn.BatchNorm2d(12)
    return nn.Sequential(
        nn.Unflatten(1, (1, 1, 6)), nn.ZeroPad2d(2), *layers, nn.Flatten(), nn.Linear(72, 3)
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, dim_feedforward=12, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), layer, nn.Flatten(), nn.Linear(6, 3))


@pytest.mark.parametrize("network", [mlp, convnet, transformer])
def test_trains_networks_with_the_defaults(network):
    torch.manual_seed(0)
    model = network()
    optimizer = DistributedShampoo(model.named_parameters(), lr=1e-2)
    for line, p in zip(optimizer.report().parameters, model.parameters(), strict=True):
        dims = preconditioned_shape(p.shape, 1024, True, 1)
        sizes = "x".join(str(min(dim, 1024)) for dim in dims)
        assert line.rule == "preconditioned"
        assert f" {sizes}, " in line.detail, line
    inputs, labels = torch.randn(32, 6), torch.randint(3, (32,))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_it_is_a_shampoo_in_checkpoints_and_copies():
    params = [nn.Parameter(torch.linspace(-1, 1, 24).view(6, 4).clone()) for _ in range(2)]
    optimizer = DistributedShampoo(params[:1], epsilon=1e-3, distributed_config=KEEPS_MATRICES)
    set_gradients(params[:1], 0)
    optimizer.step()
    assert isinstance(optimizer, torchium.Shampoo)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is DistributedShampoo
        assert copied.param_groups[0]["eps"] == 1e-3
    shampoo = torchium.Shampoo(params[1:])
    params[1].data.copy_(params[0].data)
    shampoo.load_state_dict(optimizer.state_dict())
    for each, own in ((optimizer, params[:1]), (shampoo, params[1:])):
        set_gradients(own, 1)
        each.step()
    assert torch.equal(params[0], params[1])


def test_refuses_their_checkpoints():
    p = nn.Parameter(torch.ones(6, 4))
    optimizer = DistributedShampoo([p], distributed_config=KEEPS_MATRICES)
    theirs = {
        "state": {0: {"step": torch.tensor(1), "block_0": {"shampoo": {}}}},
        "param_groups": [{"lr": 0.1, "epsilon": 1e-3, "params": [0]}],
    }
    with pytest.raises(ValueError, match="state_dict is one of Distributed Shampoo"):
        optimizer.load_state_dict(theirs)


def test_signature_is_documented():
    documented = inspect.getdoc(DistributedShampoo)
    for name in cases.constructor(DistributedShampoo):
        assert name in documented, name
