"""Processes that share the steps of K-FAC do what one does with the samples of all."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from group_tools import (
    assert_same,
    assert_same_on_all_ranks,
    copies_of,
    in_one_process,
    whole_state,
    world,
)
from kfac_tools import (
    FRACTIONS,
    Batch,
    Network,
    Small,
    Tied,
    assert_close,
    kfac,
    network,
    own_part,
    shared,
    state_of,
    step_alone,
    step_shared,
    trained,
)
from ranks import case, device
from torch import nn
from torch.nn.parallel import DistributedDataParallel

OPTIONS: dict[str, dict[str, Any]] = {
    "pi": {"weight_decay": 0.1},
    "reduce": {"weight_sharing": "reduce", "damping_split": "plain", "solver": "eigh"},
    "exact": {"damping_split": "exact", "kl_clip": None},
    "ggn": {"fisher": "ggn", "momentum": 0.0},
    "inverse_free": {"solver": "inverse_free", "stat_decay": 0.9},
    "structures": {
        "solver": "inverse_free",
        "structures": ("toeplitz", "block_diagonal"),
        "block_size": 3,
        "alpha1": 0.0,
    },
    "diagonal": {"max_factor_size": 10},
}


@case(2, 3)
def equals_one_process(ranks: int) -> None:
    for i, (name, options) in enumerate(OPTIONS.items()):
        expected = state_of(*trained(steps=range(5), **options))
        # All with the options whose inverses are the usual ones.
        for fraction in FRACTIONS if i == 0 else FRACTIONS[i % 3 :][:1]:
            model, optimizer = shared(steps=range(5), grad_worker_fraction=fraction, **options)
            try:
                assert_same_on_all_ranks([*model.parameters()])
                assert_close(state_of(model, optimizer), expected)
            except AssertionError as error:
                raise AssertionError(f"{name}, {fraction}") from error


@case(3)
def ekfac_equals_one_process(ranks: int) -> None:
    options = {"damping_split": "exact", "ekfac": True, "kind": Small}
    expected = state_of(*trained(**options))
    model, optimizer = shared(**options)
    assert_same_on_all_ranks([*model.parameters()])
    assert_close(state_of(model, optimizer), expected)


@case(3)
def a_tied_head(ranks: int) -> None:
    for options in ({}, {"solver": "inverse_free"}):
        expected = state_of(*trained(kind=Tied, **options))
        assert_close(state_of(*shared(kind=Tied, **options)), expected)


@case(2, 3)
def unequal_batches(ranks: int) -> None:
    for reduction, options in (
        ("mean", {}),
        ("sum", {"batch_averaged": False, "lr": 0.005}),
        ("mean", {"damping_split": "exact", "ekfac": True}),
    ):
        states = []
        for group in (None, world()):
            model = network(Small if "ekfac" in options else Network)
            optimizer = kfac(model, group, **options)
            for step in range(5):
                batch = Batch(step)
                if group is None:
                    step_alone(model, optimizer, batch, reduction=reduction)
                else:
                    step_shared(model, optimizer, batch, equal=False, reduction=reduction)
            states.append(state_of(model, optimizer))
        assert_close(states[1], states[0])


@case(3)
def data_parallel_training(ranks: int) -> None:
    """With micro-batches, of which the first does not synchronise gradients."""
    for name in ("KFAC", "KFACPreconditioner"):
        states = []
        for group in (None, world()):
            model = network()
            options = {"name": name, "grad_worker_fraction": 0.5, "lr": 0.05}
            optimizer = kfac(model, group, **options)
            sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            parallel = model if group is None else DistributedDataParallel(model)
            for step in range(5):
                optimizer.zero_grad()
                for half in range(2):
                    batch = Batch(2 * step + half)
                    if group is None:
                        (batch.loss(model)[1] / 2).backward()
                        continue
                    own = batch.of(own_part(len(batch), ranks))
                    if half == 0:
                        with parallel.no_sync():
                            (own.loss(parallel)[1] / 2).backward()
                    else:
                        (own.loss(parallel)[1] / 2).backward()
                with in_one_process():
                    optimizer.step()
                if name == "KFACPreconditioner":
                    sgd.step()
            states.append(state_of(model, optimizer))
        assert_same_on_all_ranks([*model.parameters()])
        assert_close(states[1], states[0])


@case(3)
def a_scaled_loss(ranks: int) -> None:
    expected = state_of(*trained(steps=range(4)))
    model = network()
    scaler = torch.amp.GradScaler(device().type, init_scale=256.0)
    optimizer = kfac(model, world(), grad_scaler=scaler, grad_worker_fraction=0.01)
    for step in range(4):
        optimizer.zero_grad()
        batch = Batch(step)
        own = batch.of(own_part(len(batch), ranks))
        scaler.scale(own.loss(model)[1]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(ranks)
        scaler.step(optimizer)
        scaler.update()
    assert_close(state_of(model, optimizer), expected)


@case(3)
def sampled_targets_of_each_rank(ranks: int) -> None:
    """The Fisher matrix has no equal in one process: each rank draws its own targets."""
    model = network()
    optimizer = kfac(model, world(), fisher="mc", grad_worker_fraction=0.01)
    for step in range(4):
        batch = Batch(step)
        own = batch.of(own_part(len(batch), ranks))
        optimizer.zero_grad()
        outputs, loss = own.loss(model)
        optimizer.update_curvature(outputs, "cross_entropy")
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    assert_same_on_all_ranks([*model.parameters()])
    state = state_of(model, optimizer)
    assert_same_on_all_ranks([state[key] for key in sorted(state)])


@case(3)
def one_rank_is_no_group(ranks: int) -> None:
    groups = [dist.new_group([rank]) for rank in range(ranks)]
    states = []
    for group in (None, groups[dist.get_rank()]):
        model = network()
        optimizer = kfac(model, group, grad_worker_fraction=0.5)
        for step in range(4):
            step_alone(model, optimizer, Batch(step))
        states.append(state_of(model, optimizer))
    assert_same(states[1], states[0])


@case(3)
def layers_come_and_go(ranks: int) -> None:
    for fraction in FRACTIONS:
        states = []
        for group in (None, world()):
            model = network()
            model.hidden.requires_grad_(False)
            late = [*model.out.parameters()]
            optimizer = kfac(
                [p for p in model.parameters() if p is not late[0]],
                group,
                grad_worker_fraction=fraction,
                TCov=1,
                TInv=2,
            )
            take = step_alone if group is None else step_shared
            for step in range(2):
                take(model, optimizer, Batch(step))
            optimizer.add_param_group({"params": late, "lr": 0.02})
            model.hidden.requires_grad_(True)
            take(model, optimizer, Batch(2))
            model.convolution.requires_grad_(False)
            for p in model.convolution.parameters():
                p.grad = None
            for step in range(3, 5):
                take(model, optimizer, Batch(step))
            model.convolution.requires_grad_(True)
            optimizer.param_groups[0].update(damping=0.1, weight_decay=0.01)
            for step in range(5, 8):
                take(model, optimizer, Batch(step))
            states.append({name: p.detach() for name, p in model.named_parameters()})
        assert_close(states[1], states[0])


@case(3)
def another_damping_split(ranks: int) -> None:
    for fraction in FRACTIONS:
        states = []
        for group in (None, world()):
            model = network()
            optimizer = kfac(model, group, grad_worker_fraction=fraction)
            take = step_alone if group is None else step_shared
            for step, split in enumerate(("pi", "exact", "exact", "plain", "plain", "pi")):
                optimizer.param_groups[0]["damping_split"] = split
                take(model, optimizer, Batch(step))
            states.append(state_of(model, optimizer))
        assert_close(states[1], states[0])


@case(2)
def another_damping_split_right_after_a_load(ranks: int) -> None:
    for fraction in FRACTIONS[::2]:
        model, optimizer = shared(steps=range(4), grad_worker_fraction=fraction)
        loaded_model = copy.deepcopy(model)
        loaded = kfac(loaded_model, world(), grad_worker_fraction=fraction)
        loaded.load_state_dict(whole_state(optimizer))
        pairs = [(loaded_model, loaded), *copies_of((model, optimizer))]
        results = []
        for each in [(model, optimizer), *pairs]:
            each[1].param_groups[0]["damping_split"] = "plain"
            step_shared(*each, Batch(4))
            results.append(state_of(*each))
        for actual in results[1:]:
            assert_close(actual, results[0])


@case(2, 3)
def update_preconditioners_of_all_ranks(ranks: int) -> None:
    """Also where one of them has got other tensors of state, and needs a step first."""
    for fraction in FRACTIONS:
        states = []
        for group in (None, world()):
            model = network()
            options = {} if group is None else {"grad_worker_fraction": fraction}
            optimizer = kfac(model, group, TInv=100, **options)
            for step in range(6):
                if group is None:
                    step_alone(model, optimizer, Batch(step))
                else:
                    step_shared(model, optimizer, Batch(step))
                if step == 4 and group is not None and dist.get_rank() == 1:
                    state = optimizer.state[model.hidden.weight]
                    state["A"] = state["A"].clone()
                if step in (2, 4):
                    optimizer.param_groups[0]["damping"] = 0.01 * step
                    optimizer.update_preconditioners()
            states.append(state_of(model, optimizer))
        assert_close(states[1], states[0])


@case(2, 3)
def workers_alone_keep_inverses(ranks: int) -> None:
    kept = {}
    for fraction in FRACTIONS:
        model, optimizer = shared(grad_worker_fraction=fraction, steps=range(2))
        own = [p for p in optimizer.state if "A_inverse" in optimizer.state[p]]
        count = torch.tensor([len(own)], device=device())
        dist.all_reduce(count)
        kept[fraction] = count.item()
    layers = 5  # besides the norm
    assert kept[1.0] == layers * ranks
    assert kept[0.01] == layers
    assert layers <= kept[0.5] <= layers * 2
    assert isinstance(model, Network)
    assert {*optimizer.report()["preconditioned"]} == {
        name for name, _ in model.named_parameters() if name != "scale"
    }


@case(3)
def the_step_of_a_preconditioner_leaves_the_rest(ranks: int) -> None:
    model = network()
    optimizer = kfac(model, world(), name="KFACPreconditioner", grad_worker_fraction=0.01)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step_shared(model, optimizer, Batch(0))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert_same_on_all_ranks([p.grad for p in model.parameters()])
    assert isinstance(model.scale, nn.Parameter)
