"""What users run with several processes around a torchium optimizer; test_recipes.py runs each on two ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import distributed_shampoo_configs as configs
import pytest
import torch
import torch.distributed as dist
import torchium
from ranks import case, shared_folder
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

PACKAGES = {
    "accelerate": ["accelerate"],
    "accelerate_fully_shard": ["accelerate"],
    "trainer": ["accelerate"],
    "lightning": ["lightning"],
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def inputs() -> Tensor:
    return torch.randn(64, 12, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3]).square().mean()


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    """Each rank takes its own part of a batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in steps:
        optimizer.zero_grad()
        x = inputs().roll(step * 8, 0)[:16]
        loss_of(model, x[rank::ranks]).backward()
        optimizer.step()


def values(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_same(model: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(values(model), values(other), rtol=0, atol=1e-6)


def distributed_shampoo_of(model: nn.Module, config: object) -> torch.optim.Optimizer:
    return torchium.compat.DistributedShampoo(
        model.parameters(),
        lr=0.1,
        epsilon=1e-4,
        max_preconditioner_dim=8,
        distributed_config=config,
        grafting_config=configs.AdamPreconditionerConfig(),
    )


@case(2)
def distributed_shampoo(ranks: int) -> None:
    """Distributed Shampoo's configuration for DDP shares the step, with all ranks or with some."""
    ends = []
    for distributed in (
        configs.SingleDeviceDistributedConfig(target_parameter_dimensionality=2),
        configs.DDPDistributedConfig(target_parameter_dimensionality=2),
        configs.DDPDistributedConfig(target_parameter_dimensionality=2, num_trainers_per_group=1),
        configs.DDPDistributedConfig(
            target_parameter_dimensionality=2, communication_dtype=torch.bfloat16
        ),
    ):
        model = DistributedDataParallel(net())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without a group the ranks repeat the step
            optimizer = distributed_shampoo_of(model, distributed)
            train(model, optimizer, range(5))
        ends.append(model)
    alone, world, pairs, rounded = ends
    assert_same(world, alone)
    assert_same(pairs, alone)
    assert not torch.allclose(values(rounded), values(alone), rtol=0, atol=1e-6)
    torch.testing.assert_close(values(rounded), values(alone), rtol=0, atol=2e-2)
    distributed = configs.DDPDistributedConfig(num_trainers_per_group=ranks + 1)
    with pytest.raises(ValueError, match="must be -1 or divide the number of processes"):
        torchium.compat.DistributedShampoo([torch.ones(40, 40)], distributed_config=distributed)


@case(2)
def distributed_shampoo_of_shards(ranks: int) -> None:
    """Its configurations for fully_shard, with whole parameters assigned to ranks."""
    strategy = configs.FSDPParamAssignmentStrategy
    shapes = {"target_parameter_dimensionality": 2}
    line = init_device_mesh("cpu", (ranks,))
    for distributed in (
        configs.FullyShardDistributedConfig(
            **shapes, param_assignment_strategy=strategy.ROUND_ROBIN
        ),
        configs.HybridShardDistributedConfig(
            **shapes, param_assignment_strategy=strategy.REPLICATE, device_mesh=line
        ),
    ):
        models = []
        for config in (distributed, configs.SingleDeviceDistributedConfig(**shapes)):
            model = net() if config is not distributed else fully_shard(net(), mesh=line)
            optimizer = distributed_shampoo_of(model, config)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, inputs().roll(step * 8, 0)[:16]).backward()
                optimizer.step()
            models.append(model)
        whole = torch.cat([p.full_tensor().detach().flatten() for p in models[0].parameters()])
        torch.testing.assert_close(whole, values(models[1]), rtol=0, atol=1e-5)


@case(2)
def zero_redundancy_optimizer(ranks: int) -> None:
    """Each rank steps its own parameters, as in one optimizer; consolidated state resumes on all."""
    for kind, options in (
        (torchium.ShampooW, {"lr": 1e-2, "update_freq": 2, "eps": 1e-4, "fused": True}),
        (torchium.Adagrad, {"lr": 0.1}),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alone = DistributedDataParallel(net())
            train(alone, kind(alone.parameters(), **options), range(8))

            model = DistributedDataParallel(net())
            optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, **options)
            train(model, optimizer, range(5))
            optimizer.consolidate_state_dict(to=0)
            saved = [optimizer.state_dict() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(saved, 0)
            optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, **options)
            optimizer.load_state_dict(saved[0])
            train(model, optimizer, range(5, 8))
        own = {p for group in optimizer.optim.param_groups for p in group["params"]}
        assert 0 < len(own) < len(list(model.parameters()))
        assert_same(model, alone)


@case(2)
def accelerate(ranks: int) -> None:
    from accelerate import Accelerator

    def batches() -> Any:
        return torch.utils.data.DataLoader(inputs(), batch_size=8)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = net()
    optimizer = torchium.ShampooW(model, lr=1e-2, update_freq=2, process_group=dist.group.WORLD)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, batches(), scheduler
    )

    def epoch() -> float:
        for x in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, x)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return float(loss)

    first, second = epoch(), epoch()
    assert second < first
    with optimizer.optimizer.consolidating():  # inside of Accelerate's
        accelerator.save_state(shared_folder() / "state")
    after = [values(model)] if epoch() else []
    accelerator.load_state(shared_folder() / "state")
    epoch()
    assert torch.equal(values(model), after[0])


@case(2)
def accelerate_fully_shard(ranks: int) -> None:
    """Accelerate's FSDP2, which it offers for GPUs alone: its state is told that this is one of them."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState

    def end_of(is_sharded: bool) -> Tensor:
        AcceleratorState._reset_state()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if is_sharded else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        if is_sharded:
            accelerator.state.distributed_type = DistributedType.FSDP
            accelerator.state.fsdp_plugin = plugin
        model = net()
        group = None if is_sharded else dist.group.WORLD
        optimizer = torchium.ShampooW(model, lr=1e-2, update_freq=2, process_group=group)
        before = {*model.parameters()}
        model, optimizer = accelerator.prepare(model, optimizer)
        held = {p for group in optimizer.param_groups for p in group["params"]}
        assert held == {*model.parameters()}
        assert held.isdisjoint(before) == is_sharded
        rank = dist.get_rank()
        for step in range(5):
            loss = loss_of(model, inputs().roll(step * 8, 0)[rank:16:ranks])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        AcceleratorState._reset_state()
        whole = [p.full_tensor() if is_sharded else p for p in model.parameters()]
        return torch.cat([p.detach().flatten() for p in whole])

    with mock.patch.dict(os.environ):  # Accelerate notes there that it uses FSDP
        sharded = end_of(True)
    torch.testing.assert_close(sharded, end_of(False), rtol=0, atol=1e-5)


@case(2)
def trainer(ranks: int) -> None:
    """The page's Trainer, which saves state that the ranks share, and resumes from it."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class SharedTrainer(Trainer):
        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            with self.optimizer.optimizer.consolidating():  # inside of Accelerate's
                if not self.args.should_save:
                    self.optimizer.state_dict()  # all ranks gather the state that the first one saves
                super()._save_optimizer_and_scheduler(output_dir)

    def end_of(steps: int, checkpoint: Path | None = None) -> Tensor:
        arguments = TrainingArguments(
            str(shared_folder() / "trainer"),
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            save_steps=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            ddp_backend="gloo",
            ddp_find_unused_parameters=False,
        )
        torch.manual_seed(0)
        sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        options = {"lr": 1e-2, "update_freq": 2, "process_group": dist.group.WORLD}
        run = SharedTrainer(
            model,
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens()],
            optimizer_cls_and_kwargs=(torchium.ShampooW, options),
        )
        run.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        assert isinstance(run.optimizer.optimizer, torchium.ShampooW)
        assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.1, 0.0]
        return values(run.model)

    whole = end_of(6)
    resumed = end_of(6, shared_folder() / "trainer" / "checkpoint-4")
    torch.testing.assert_close(resumed, whole, rtol=0, atol=1e-6)


def tokens() -> Tensor:
    return torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(0))


@case(2)
def lightning(ranks: int) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, x: Tensor, index: int) -> Tensor:
            return loss_of(self.net, x)

        def configure_optimizers(self) -> Any:
            return torchium.ShampooW(
                self.net, lr=1e-2, update_freq=2, process_group=dist.group.WORLD
            )

    def end_of(steps: int, checkpoint: Path | None = None) -> tuple[Tensor, Any]:
        module = Module()
        run = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=ranks,
            strategy="ddp",
            use_distributed_sampler=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=shared_folder(),
            gradient_clip_val=1.0,
        )
        # Equal batches: a resumed run of Lightning may begin with another one.
        loader = torch.utils.data.DataLoader(inputs()[:8].repeat(8, 1), batch_size=8)
        run.fit(module, loader, ckpt_path=checkpoint)
        return values(module), run

    _, run = end_of(8)
    run.save_checkpoint(shared_folder() / "lightning.ckpt")
    whole, _ = end_of(16)
    resumed, _ = end_of(16, shared_folder() / "lightning.ckpt")
    torch.testing.assert_close(resumed, whole, rtol=0, atol=1e-6)
