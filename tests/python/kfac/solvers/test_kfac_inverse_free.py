"""torchium.KFAC with solver="inverse_free" (SINGD), against the float64 reference and its own fixed points."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torchium
from combinations import in_turn
from kfac_problems import (
    MODELS,
    TiedHead,
    assert_close_in_norm,
    assert_each_close_in_norm,
    batch_of,
    make_model,
    mlp,
    random,
    train_reference,
)
from optimizer_cases import ignore_fallback
from reference import ReferenceSINGD, layers_of
from torch import Tensor, nn
from torch.nn import functional as F

STRUCTURES = ["dense", "block_diagonal", "toeplitz", "diagonal"]
OPTIONS: dict[str, dict[str, Any]] = {
    "every_step": {"lr": 0.1, "TCov": 1, "stat_decay": 0.6, "damping": 0.1},
    "defaults": {"lr": 0.05, "weight_decay": 0.01, "alpha1": 0.5},
    "reduce": {"lr": 0.1, "TCov": 2, "stat_decay": 0.3, "alpha1": 0.0, "weight_sharing": "reduce"},
    "large": {"lr": 0.1, "TCov": 1, "stat_decay": 0.0, "damping": 10.0, "max_factor_size": 5},
}


def inverse_free(model: nn.Module, **options: Any) -> torchium.KFAC:
    return torchium.KFAC(model, solver="inverse_free", **options)


# ---- the update


def structures_of(model: nn.Module, structure: str) -> dict[int, tuple[str, str]]:
    """Of layers whose one factor is always diagonal; the reference calls that of a table the input's."""
    special = {}
    for i, layer in enumerate(layers_of(model)):
        if layer.table:
            special[i] = ("diagonal", structure)
        elif isinstance(model, TiedHead) and layer.weight is model.head.weight:
            special[i] = (structure, "diagonal")
    return special


@ignore_fallback
@pytest.mark.parametrize(
    ("name", "structure", "options"), in_turn(MODELS, STRUCTURES, list(OPTIONS))
)
def test_training_follows_the_reference(name, structure, options, device):
    model, shape = make_model(name)
    reference = copy.deepcopy(model)
    fisher = "ggn" if name in ("mlp", "tied") else "empirical"
    train_reference(
        reference,
        shape,
        6,
        kind=partial(ReferenceSINGD, block_size=3),
        fisher=fisher,
        structures=(structure, structure),
        structures_of_layers=structures_of(reference, structure),
        **OPTIONS[options],
    )
    model.to(device)
    optimizer = inverse_free(
        model, structures=(structure, structure), block_size=3, fisher=fisher, **OPTIONS[options]
    )
    for step in range(6):
        x, y = (t.to(device) for t in batch_of(shape, step))
        optimizer.zero_grad()
        outputs = model(x)
        if fisher == "ggn":
            optimizer.update_curvature(outputs, "cross_entropy")
        F.cross_entropy(outputs, y).backward()
        optimizer.step()
    assert_each_close_in_norm(model.parameters(), reference.parameters(), 1e-10)


def test_a_block_of_all_rows_is_dense(device):
    """INGD is the dense case."""
    results = []
    for structure in ("dense", "block_diagonal"):
        model = mlp(5, 6, 3).to(device)
        optimizer = inverse_free(model, structures=(structure, structure), TCov=1, lr=0.1)
        for step in range(4):
            x, y = (t.to(device) for t in batch_of((5,), step))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_micro_batches_under_a_scaler_equal_one_batch(structure, device):
    """K and C between two steps are those of both backward passes."""
    results = []
    for parts, scale in ((1, 1.0), (4, 1024.0)):
        model, shape = make_model("mlp")
        model.to(device)
        optimizer = inverse_free(
            model, structures=(structure, structure), block_size=3, TCov=1, stat_decay=0.5, lr=0.1
        )
        scaler = torch.amp.GradScaler(device, init_scale=scale, enabled=scale != 1.0)
        for step in range(4):
            x, y = (t.to(device) for t in batch_of(shape, step, size=8))
            optimizer.zero_grad()
            for part in range(parts):
                loss = F.cross_entropy(model(x[part::parts]), y[part::parts]) / parts
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([p.detach() for p in model.parameters()])
    assert_each_close_in_norm(*results, 1e-10)


@ignore_fallback
@pytest.mark.filterwarnings("ignore:KFACPreconditioner preconditions")
def test_the_preconditioner_in_front_of_sgd_is_kfac(device):
    results = []
    for in_front in (False, True):
        model, shape = make_model("convolutions")
        model.to(device)
        options: dict[str, Any] = {"structures": ("toeplitz", "block_diagonal"), "block_size": 4}
        if in_front:
            preconditioner = torchium.KFACPreconditioner(
                model, lr=0.1, solver="inverse_free", factor_update_steps=2, **options
            )
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = inverse_free(model, lr=0.1, TCov=2, **options)
        for step in range(5):
            x, y = (t.to(device) for t in batch_of(shape, step))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if in_front:
                preconditioner.step()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    assert_each_close_in_norm(*results, 1e-10)


# ---- fixed points


def with_constant_factors(structures: tuple[str, str], **options: Any) -> dict[str, Tensor]:
    """The state of a layer after many updates with one batch and no steps; A and G of that batch."""
    layer = nn.Linear(6, 4, bias=False).double()
    x = random(40, 6, seed=1) * torch.logspace(0, -1, 6, dtype=torch.float64)
    g = random(40, 4, seed=2)
    optimizer = inverse_free(
        layer, lr=0.0, TCov=1, stat_decay=0.5, structures=structures, block_size=4, **options
    )
    for _ in range(120):
        optimizer.zero_grad()
        ((layer(x) * g).sum() / len(x)).backward()
        optimizer.step()
    return {**optimizer.state[layer.weight], "A": x.mT @ x / 40, "G": g.mT @ g / 40}


def trace(M: Tensor) -> Tensor:
    return M.diagonal().sum()


def test_dense_fixed_point_is_the_damped_inverse():
    """(K K^T)^-1 = (tr(G C C^T) A + damping tr(C C^T) I) / c, and the same for C."""
    damping = 0.1
    state = with_constant_factors(("dense", "dense"), damping=damping)
    P, Q = (state[key][0] @ state[key][0].mT for key in ("K", "C"))
    eye = {n: torch.eye(n, dtype=torch.float64) for n in (4, 6)}
    A, G = state["A"], state["G"]
    assert_close_in_norm(P.inverse(), (trace(G @ Q) * A + damping * trace(Q) * eye[6]) / 4, 1e-10)
    assert_close_in_norm(Q.inverse(), (trace(A @ P) * G + damping * trace(P) * eye[4]) / 6, 1e-10)


@pytest.mark.parametrize(
    ("K", "C"), list(zip(STRUCTURES, STRUCTURES[1:] + STRUCTURES[:1], strict=True))
)
def test_fixed_points_are_stationary_points_of_the_divergence(K, C):
    """tr((A (x) G + damping I)(K K^T (x) C C^T)) - logdet, along all matrices of the structures."""
    damping = 0.1
    state = with_constant_factors((K, C), damping=damping)
    stored = [state[key].clone().requires_grad_() for key in ("K", "C")]
    dense = [as_dense(M[0]) for M in stored]
    P, Q = (M @ M.mT for M in dense)
    fisher_term = trace(state["A"] @ P) * trace(state["G"] @ Q) + damping * trace(P) * trace(Q)
    divergence = fisher_term - 4 * P.logdet() - 6 * Q.logdet()
    divergence.backward()
    for M, root in zip(stored, dense, strict=True):
        # of the padding of a shorter last block, no entry moves
        assert M.grad.norm() <= 1e-8 * root.inverse().norm() * 24


def as_dense(M: Tensor) -> Tensor:
    """From the storage of KFACParamState."""
    n = len(M)
    if M.dim() == 1:
        return torch.diag(M)
    if M.shape[1] == n:
        return M
    rows, columns = torch.meshgrid(torch.arange(n), torch.arange(n), indexing="ij")
    if M.shape[1] == 1:
        return torch.where(rows >= columns, M[(rows - columns).clamp_min(0), 0], 0)
    b = M.shape[1]
    return torch.where(rows // b == columns // b, M[rows, columns % b], 0)


# ---- stability


def ill_conditioned(seed: int) -> tuple[Tensor, Tensor]:
    """Linear regression with inputs of sizes 1 to 0.01 in a rotated basis; A has the condition number 1e4."""
    basis = torch.linalg.qr(random(24, 24, seed=5))[0].float()
    z = random(64, 24, seed=seed).float()
    return z * torch.logspace(0, -2, 24) @ basis, z @ random(24, 4, seed=1).float()


def loss_after(steps: int, factor_dtype: torch.dtype, **options: Any) -> float:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(24, 4, bias=False)
    optimizer = torchium.KFAC(
        model,
        momentum=0.0,
        kl_clip=None,
        TCov=1,
        fisher="ggn",
        factor_dtype=factor_dtype,
        **options,
    )
    for step in range(steps):
        x, y = ill_conditioned(seed=100 + step)
        optimizer.zero_grad()
        outputs = model(x)
        optimizer.update_curvature(outputs, "mse")
        F.mse_loss(outputs, y).backward()
        optimizer.step()
        if not model.weight.abs().max() < 1e6:
            return math.inf
    assert optimizer.state[model.weight]["root_failures"].tolist() == [0, 0]
    x, y = ill_conditioned(seed=0)
    return F.mse_loss(model(x), y).item()


def test_bfloat16_solves_what_inverses_of_bfloat16_factors_cannot():
    """Rounding to 8 bits changes A by more than its small eigenvalues and the damping."""
    options: dict[str, Any] = {"lr": 0.5, "damping": 1e-7}
    roots = {"solver": "inverse_free", "stat_decay": 0.8, **options}
    inverses = {"solver": "cholesky", "TInv": 1, **options}
    assert loss_after(300, torch.float32, **inverses) < 1e-9
    assert loss_after(300, torch.bfloat16, **inverses) > 1.0
    assert loss_after(300, torch.bfloat16, **roots) < 1e-9


@pytest.mark.parametrize("structure", STRUCTURES)
def test_bfloat16_is_as_good_as_float32(structure):
    options: dict[str, Any] = {
        "solver": "inverse_free",
        "structures": (structure, structure),
        "block_size": 10,
        "stat_decay": 0.8,
        "lr": 0.1,
        "damping": 1e-3,
    }
    short, whole = (loss_after(120, d, **options) for d in (torch.bfloat16, torch.float32))
    assert abs(short - whole) < 0.05 * whole
    assert whole < 0.5 * F.mse_loss(torch.zeros(64, 4), ill_conditioned(0)[1]).item()


def test_bfloat16_is_the_dtype_of_all_that_is_stored():
    model = nn.Linear(5, 4)
    optimizer = inverse_free(model, factor_dtype=torch.bfloat16)
    model(torch.ones(2, 5)).square().mean().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    assert all(state[key].dtype == torch.bfloat16 for key in ("K", "C", "m_K", "m_C"))


# ---- safeguards, state and options


def test_a_factor_that_is_not_finite_leaves_K_and_C(device):
    model = nn.Linear(5, 4).to(device)
    optimizer = inverse_free(model, TCov=1, lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(
            model(torch.ones(8, 5, device=device)), torch.zeros(8, device=device).long()
        ).backward()
        optimizer.step()

    step()
    state = optimizer.state[model.weight]
    state["m_C"].fill_(math.inf)
    before = {key: value.clone() for key, value in state.items()}
    step()
    for key in ("K", "C", "m_K", "m_C"):
        assert torch.equal(state[key], before[key])
    assert state["root_failures"].tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="3 times in a row"):
        step(), step(), optimizer.check_errors()


def test_the_rate_is_bounded_where_a_constant_one_would_diverge(device):
    """Inputs of 1e3: with b = 1/2, I - b m would have an eigenvalue of -1e5."""
    model = nn.Linear(5, 4).to(device)
    optimizer = inverse_free(model, TCov=1, lr=0.0, stat_decay=0.5, alpha1=0.0)
    for seed in range(30):
        optimizer.zero_grad()
        x = 1e3 * random(16, 5, seed=seed).float().to(device)
        F.cross_entropy(model(x), torch.arange(16, device=device) % 4).backward()
        optimizer.step()
    K = optimizer.state[model.weight]["K"][0]
    assert K.isfinite().all()
    assert torch.linalg.svdvals(K).min() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"TInv": 5}, "TInv=5 has no meaning with solver='inverse_free'.*leave it at 10"),
        ({"damping_split": "plain"}, "damping_split='plain' has no meaning.*leave it at 'pi'"),
        ({"damping_split": "exact", "ekfac": True}, "damping_split='exact' has no meaning"),
        ({"solver": "auto", "structures": ("dense", "toeplitz")}, "structures=.*only with"),
        ({"solver": "eigh", "block_size": 8}, "block_size=8 has no meaning with solver='eigh'"),
        ({"solver": "cholesky", "alpha1": 0.0}, "alpha1=0.0 has no meaning"),
    ],
)
def test_options_without_a_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        torchium.KFAC(nn.Linear(2, 2), **{"solver": "inverse_free", **options})


def test_the_preconditioner_names_its_own_option():
    with pytest.raises(ValueError, match="inv_update_steps=3 has no meaning"):
        torchium.KFACPreconditioner(nn.Linear(2, 2), solver="inverse_free", inv_update_steps=3)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            "inverse_free",
            "cholesky",
            "has the roots K and C, which solver='cholesky' does not keep",
        ),
        ("auto", "inverse_free", "has the factors A and G, which solver='inverse_free' does not"),
    ],
)
def test_state_of_another_solver_is_refused(first, second, message):
    model = nn.Linear(3, 2)
    optimizer = torchium.KFAC(model, solver=first)

    def step() -> None:
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()

    step()
    optimizer.param_groups[0]["solver"] = second
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    del optimizer.state[model.weight]
    step()


def test_momenta_follow_alpha1():
    model = nn.Linear(3, 2)
    optimizer = inverse_free(model, TCov=1)

    def keys_after_a_step() -> set[str]:
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        return {key for key in optimizer.state[model.weight] if key.startswith("m_")}

    assert keys_after_a_step() == {"m_K", "m_C"}
    optimizer.param_groups[0]["alpha1"] = 0.0
    assert keys_after_a_step() == set()
    optimizer.param_groups[0]["alpha1"] = 0.9
    assert keys_after_a_step() == {"m_K", "m_C"}


def test_report_names_the_structures():
    model = nn.Sequential(nn.Linear(7, 6), nn.Conv1d(1, 3, 2), nn.Flatten(), nn.Linear(15, 2))
    optimizer = inverse_free(
        model, structures=("block_diagonal", "dense"), block_size=4, max_factor_size=5, TCov=1
    )
    model(torch.ones(2, 1, 7)).square().mean().backward()
    with pytest.warns(UserWarning, match=r"factors above max_factor_size.*0.weight \(6\)"):
        optimizer.step()
    report = optimizer.report()
    assert report["parameters"]["0.weight"] == (
        "diagonal",
        "blocks of 4 of A 8, the diagonal of G 6",
    )
    assert report["parameters"]["1.weight"] == ("factors", "A 3, G 3")
    assert report["diagonal_G"] == ["0.weight"]
    assert report["diagonal_A"] == []


@pytest.mark.parametrize("structure", STRUCTURES)
def test_memory_is_that_of_the_structure(structure):
    model = nn.Linear(100, 60, bias=False)
    optimizer = inverse_free(model, structures=(structure, structure), block_size=16, TCov=1)
    model(torch.ones(4, 100)).square().mean().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    widths = {"dense": None, "block_diagonal": 16, "toeplitz": 1, "diagonal": 1}
    for key, n in (("K", 100), ("m_K", 100), ("C", 60), ("m_C", 60)):
        assert state[key].numel() == n * (widths[structure] or n)
    assert not {"A", "G", "A_inverse", "G_inverse"} & set(state)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_checkpoint_continues_bit_for_bit(structure):
    def run(optimizer: torch.optim.Optimizer, model: nn.Module, steps: range) -> None:
        for step in steps:
            x, y = batch_of((5,), step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    options: dict[str, Any] = {"structures": (structure, structure), "block_size": 4, "TCov": 2}
    model = mlp(5, 6, 3)
    optimizer = inverse_free(model, **options)
    run(optimizer, model, range(5))
    resumed_model = copy.deepcopy(model)
    resumed = torchium.KFAC(resumed_model)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, model, range(5, 12))
    run(resumed, resumed_model, range(5, 12))
    torch.testing.assert_close(
        list(model.parameters()), list(resumed_model.parameters()), rtol=0, atol=0
    )
    damaged = copy.deepcopy(optimizer.state_dict())
    damaged["state"][0]["m_K"] = torch.zeros(3)
    with pytest.raises(ValueError, match="m_K"):
        resumed.load_state_dict(damaged)


@ignore_fallback
def test_the_C_of_a_table_is_diagonal():
    model, shape = make_model("tied_head")
    optimizer = inverse_free(model, structures=("toeplitz", "toeplitz"))
    x, y = batch_of(shape, 0)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    parameters = optimizer.report()["parameters"]
    assert parameters["table.weight"] == ("diagonal", "Toeplitz A 5, the diagonal of G 7")
    assert parameters["mix.weight"] == ("factors", "Toeplitz A 5, Toeplitz G 4")
