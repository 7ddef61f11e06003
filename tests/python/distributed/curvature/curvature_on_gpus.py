"""What GPUs that share the steps of K-FAC and NaturalGradient have to do besides the cases of a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from group_tools import assert_same_on_all_ranks, is_last, message_of, out_of_memory_in
from kfac_tools import Batch, backward, network, shared, state_of, step_shared
from kfac_tools import assert_close as assert_states_close
from kfac_tools import trained as trained_kfac
from natural_gradient_tools import (
    SOLVERS,
    alone,
    assert_near,
    average_gradients,
    batches_of,
    flat,
    loss_fn,
    model_and_batch,
    natural_gradient,
    own,
    sizes_of,
    step,
    trained,
)
from ranks import case, device


def another_device(ranks: int) -> Any:
    """Is current, as where a training script never calls torch.cuda.set_device()."""
    return torch.cuda.device((dist.get_rank() + 1) % ranks)


@case(2)
def kfac_while_another_device_is_current(ranks: int) -> None:
    for options in ({}, {"damping_split": "exact"}, {"solver": "inverse_free"}):
        given = {"grad_worker_fraction": 0.5, "steps": range(4), **options}
        expected = state_of(*shared(**given))
        with another_device(ranks):
            model, optimizer = shared(**given)
            torch.cuda.synchronize()
        assert_states_close(state_of(model, optimizer), expected)


@case(2)
def natural_gradient_while_another_device_is_current(ranks: int) -> None:
    for solver in SOLVERS:
        models = []
        for elsewhere in (False, True):
            with another_device(ranks) if elsewhere else nullcontext():
                model, _ = model_and_batch("mlp")
                start = flat(model)
                optimizer = natural_gradient(model, **SOLVERS[solver])
                for seed in range(3):
                    step(optimizer, model, batches_of("mlp", sizes_of(ranks), seed)[own()])
                torch.cuda.synchronize()
            models.append(model)
        assert_near(flat(models[1]) - start, flat(models[0]) - start, 1e-9)
        assert_same_on_all_ranks(trained(models[1]))


@case(2)
def a_scaler_skips_the_step_that_renews_the_matrix(ranks: int) -> None:
    """The batch of the next step makes it, as in one process."""
    models = []
    for group in (None, alone()):
        model, _ = model_and_batch("mlp")
        start = flat(model)
        optimizer = natural_gradient(model, group, update_freq=3, momentum=0.0)
        for seed in range(4):
            batches = batches_of("mlp", sizes_of(ranks, equal=True), seed)
            optimizer.zero_grad()
            if group is None:
                loss_fn(model(batches[own()][0]), batches[own()][1]).backward()
                average_gradients(model)
            else:
                x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
                loss_fn(model(x), y).backward()
            optimizer.grad_scale = torch.ones((), device=device())
            optimizer.found_inf = torch.tensor(float(seed in (0, 2)), device=device())
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
        models.append(model)
    assert_near(flat(models[0]) - start, flat(models[1]) - start, 1e-9)
    assert_same_on_all_ranks(trained(models[0]))


@case(2)
def an_error_during_the_work_of_one_rank_raises_on_all_in_the_next_step(ranks: int) -> None:
    for fraction in (1.0, 0.5):
        model, optimizer = shared(
            steps=range(2), TInv=1, solver="cholesky", grad_worker_fraction=fraction
        )
        for attempt in range(2):
            optimizer.zero_grad()
            backward(model, 2 + attempt)
            fails = attempt == 0 and is_last()
            with out_of_memory_in("linalg_cholesky_ex") if fails else nullcontext():
                kind, message = message_of(optimizer.step)
            if attempt == 0:
                assert ("none left for linalg_cholesky" in message) == is_last(), (kind, message)
            elif is_last():
                assert "in the middle of its last step()" in message, (kind, message)
            else:
                text = f"rank {ranks - 1} of the process group raised an error in step()"
                assert text in message, (kind, message)


@case(2)
def kfac_kernels_equal_one_process(ranks: int) -> None:
    """In float32, which the kernels take."""
    options: list[dict[str, Any]] = [
        {"weight_decay": 0.1},
        {"damping_split": "exact"},
        {"weight_sharing": "reduce", "damping_split": "plain"},
        {"fisher": "ggn", "solver": "inverse_free", "momentum": 0.0},
        {"max_factor_size": 10, "kl_clip": None},
    ]
    for given in options:
        expected, _ = trained_kfac(dtype=torch.float32, **given)
        start = flat(network(dtype=torch.float32))
        for fraction in (1.0, 0.5):
            model, _ = shared(dtype=torch.float32, grad_worker_fraction=fraction, **given)
            assert_near(flat(model) - start, flat(expected) - start, 1e-3)
            assert_same_on_all_ranks([*model.parameters()])


@case(2)
def natural_gradient_of_float32_equals_one_process(ranks: int) -> None:
    for name in ("mlp", "convolutions", "embedding"):
        for solver in ("gram", "explicit", "cg"):
            models = []
            for group in (None, alone()):
                model, _ = model_and_batch(name, dtype=torch.float32)
                start = flat(model)
                options = {**SOLVERS[solver], **({"eps": 1e-6} if solver == "cg" else {})}
                optimizer = natural_gradient(model, group, damping=0.1, **options)
                for seed in range(3):
                    x, y = model_and_batch(name, 3 * ranks, dtype=torch.float32, seed=seed)[1]
                    part = slice(3 * own(), 3 * own() + 3) if group is None else slice(None)
                    optimizer.zero_grad()
                    loss_fn(model(x[part]), y[part]).backward()
                    if group is None:
                        average_gradients(model)
                    optimizer.step()
                models.append(model)
            assert_near(flat(models[0]) - start, flat(models[1]) - start, 1e-3)
            assert_same_on_all_ranks(trained(models[0]))


@case(2)
def natural_gradient_graphs_equal_launched_steps(ranks: int) -> None:
    """NCCL's kernels are in the graphs of "always"."""
    for name in ("mlp", "convolutions"):
        for options in ({}, {"update_freq": 3}, {"solver": "explicit"}, {"solver": "cg"}):
            models = []
            for graphs in ("auto", "always"):
                model, _ = model_and_batch(name, dtype=torch.float32)
                start = flat(model)
                given = {"solver": "gram", "damping": 0.1, "graphs": graphs, **options}
                optimizer = natural_gradient(model, **given)
                for seed in range(14):
                    optimizer.zero_grad()
                    # In some steps rank 1 has fewer samples, or as many in two backward passes.
                    x, y = batches_of(name, [4, 2 if seed % 5 == 4 else 4, 3, 4][:ranks], seed)[
                        own()
                    ]
                    x, y = x.float(), y.float() if y.is_floating_point() else y
                    part = 2 if own() == 1 and seed % 5 == 3 else len(x)
                    for inputs, targets in zip(x.split(part), y.split(part), strict=True):
                        loss = loss_fn(model(inputs), targets)
                        (loss * len(inputs) / len(x)).backward()
                    average_gradients(model)
                    if seed == 12:  # is skipped
                        trained(model)[0].grad.fill_(float("inf"))
                    optimizer.step()
                # Kept batches may lie elsewhere after each refresh.
                if "update_freq" not in options:
                    has_graphs = optimizer.report()["graph_bytes"] > 0
                    assert has_graphs == (graphs == "always"), (name, options)
                models.append(model)
            assert torch.equal(flat(models[1]), flat(models[0]))
            moved = flat(models[1]) - start
            assert moved.isfinite().all()
            assert moved.norm() > 0
            assert_same_on_all_ranks(trained(models[1]))


@case(2)
def bfloat16_models(ranks: int) -> None:
    """Ranks agree bit for bit, also after a model of float64 was converted."""
    for options in ({}, {"solver": "inverse_free"}):
        model, optimizer = shared(steps=range(1), grad_worker_fraction=0.5, **options)
        model.to(torch.bfloat16)
        for i in range(1, 5):
            step_shared(model, optimizer, Batch(i, dtype=torch.bfloat16))
        assert_same_on_all_ranks([*model.parameters()])
        assert all(p.isfinite().all() for p in model.parameters())
