"""CUDAGradientOps.per_sample_gradients: correct, pure, and an error where undefined."""

from __future__ import annotations

import copy

import pytest
import torch
import torchium
from reference import per_sample
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torchium.utils.cuda_kernels import CUDAGradientOps


class Tied(nn.Module):
    """A layer called twice, a frozen parameter and a counter in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return self.layer(torch.tanh(self.layer(x)) * self.scale)


def model_and_batch(kind: str, device: torch.device):
    torch.manual_seed(0)
    if kind == "mlp":
        model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 3))
        batch = torch.randn(7, 5), torch.randint(3, (7,))
    elif kind == "convolution":
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        )
        batch = torch.randn(4, 2, 4, 4), torch.randint(3, (4,))
    elif kind == "batch_norm_in_eval_mode":
        model = nn.Sequential(
            nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)
        ).eval()
        batch = torch.randn(3, 5), torch.randint(3, (3,))
    else:
        model = Tied()
        batch = torch.randn(3, 5), torch.randint(5, (3,))
    return model.to(device).double(), batch[0].to(device).double(), batch[1].to(device)


@pytest.mark.parametrize("kind", ["mlp", "convolution", "batch_norm_in_eval_mode", "tied"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_per_sample_gradients(kind, reduction, device):
    model, inputs, targets = model_and_batch(kind, device)
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    gradients = CUDAGradientOps.per_sample_gradients(model, loss_fn, inputs, targets)
    expected = per_sample.per_sample_gradients(copy.deepcopy(model), loss_fn, inputs, targets)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name])


def test_mean_of_per_sample_gradients_is_the_gradient(device):
    model, inputs, targets = model_and_batch("mlp", device)
    loss_fn = nn.CrossEntropyLoss()
    gradients = CUDAGradientOps.per_sample_gradients(model, loss_fn, inputs, targets)
    loss_fn(model(inputs), targets).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name].mean(0), parameter.grad)


@pytest.mark.parametrize("kind", ["mlp", "tied"])
def test_per_sample_gradients_are_pure(kind, device):
    model, inputs, targets = model_and_batch(kind, device)
    model.train()
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    before = copy.deepcopy(model)
    versions = [t._version for t in (*model.parameters(), *model.buffers(), inputs)]
    random_state = torch.get_rng_state()
    with torch.no_grad():
        gradients = CUDAGradientOps.per_sample_gradients(
            model, nn.CrossEntropyLoss(), inputs, targets
        )
    assert all(g.abs().sum() > 0 and not g.requires_grad for g in gradients.values())
    assert model.training
    assert versions == [t._version for t in (*model.parameters(), *model.buffers(), inputs)]
    assert torch.equal(torch.get_rng_state(), random_state)
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, q)
        assert (p.grad == 3.0).all()
        assert p.requires_grad == q.requires_grad
    torch.testing.assert_close(list(model.buffers()), list(before.buffers()), rtol=0, atol=0)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn(3, device=x.device, dtype=x.dtype)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            nn.BatchNorm1d(5),
            r"model\.0 \(BatchNorm1d\) normalises with the statistics of the batch",
        ),
        (
            nn.BatchNorm1d(5, track_running_stats=False).eval(),
            r"model\.0 \(BatchNorm1d\) normalises",
        ),
        (nn.InstanceNorm1d(5, track_running_stats=True), r"model\.0 \(InstanceNorm1d\) changes"),
        (nn.Dropout(0.1), r"model\.0 \(Dropout\) drops out at random"),
        (nn.LSTM(5, 5, 2, dropout=0.1), r"model\.0 \(LSTM\) drops out at random"),
        (Noisy(5, 3), "draws random numbers"),
        (nn.RReLU(), r"model\.0 \(RReLU\) draws random slopes"),
        (torch.jit.script(nn.Linear(5, 5)), r"model\.0 \(RecursiveScriptModule\) is scripted"),
    ],
)
def test_per_sample_gradients_refuse(layer, message):
    model = nn.Sequential(layer, nn.Linear(5, 3))
    if isinstance(layer, Noisy):
        model = layer
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        CUDAGradientOps.per_sample_gradients(
            model, nn.CrossEntropyLoss(), torch.ones(2, 5), torch.tensor([0, 1])
        )
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_of_zero_is_no_dropout():
    model = nn.Sequential(nn.Dropout(0.0), nn.Linear(5, 3))
    gradients = CUDAGradientOps.per_sample_gradients(
        model, nn.CrossEntropyLoss(), torch.ones(2, 5), torch.tensor([0, 1])
    )
    assert gradients["1.weight"].shape == (2, 3, 5)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (torch.ones(2, 5), torch.zeros(3).long(), "inputs holds 2 samples and targets 3"),
        (torch.ones(0, 5), torch.zeros(0).long(), "inputs holds 0 samples"),
        (torch.tensor(1.0), torch.zeros(1).long(), r"inputs must have a batch .* shape \(\)"),
        (torch.ones(2, 5), [0, 1], r"targets\[0\] must be a tensor .* of type int"),
        (pack_sequence([torch.ones(2, 5)]), torch.zeros(1).long(), "PackedSequence, which has no"),
        ([True], torch.zeros(2).long(), "inputs must hold a tensor"),
        (
            {"input": torch.ones(2, 5), "mask": {"left": torch.ones(1, 5)}},
            torch.zeros(2).long(),
            r"inputs\['input'\] holds 2 samples and inputs\['mask'\]\['left'\] 1",
        ),
        (
            {"input": torch.full((2, 5), 123.0), "mask": object()},
            torch.zeros(2).long(),
            r"inputs\['mask'\] must be a tensor with a batch dimension; it is of type object",
        ),
    ],
)
def test_per_sample_gradients_refuse_batches(inputs, targets, message):
    with pytest.raises(ValueError, match=message) as caught:
        CUDAGradientOps.per_sample_gradients(
            nn.Linear(5, 3), nn.CrossEntropyLoss(), inputs, targets
        )
    assert "123" not in str(caught.value)  # no contents


def test_per_sample_gradients_need_a_model_and_a_loss():
    x, y = torch.ones(2, 5), torch.zeros(2)
    with pytest.raises(ValueError, match=r"model is a Tensor; it must be a torch\.nn\.Module"):
        torchium.per_sample_gradients(x, nn.CrossEntropyLoss(), x, y)
    with pytest.raises(ValueError, match="loss_fn is a Tensor; it must be a function of output"):
        torchium.per_sample_gradients(nn.Linear(5, 3), y, x, y)


def test_per_sample_gradients_need_one_number():
    with pytest.raises(ValueError, match=r"loss_fn returned shape \(1, 3\)"):
        CUDAGradientOps.per_sample_gradients(
            nn.Linear(5, 3), lambda output, target: output, torch.ones(2, 5), torch.zeros(2)
        )
    with pytest.raises(ValueError, match="loss_fn returned a float; it must return a tensor"):
        CUDAGradientOps.per_sample_gradients(
            nn.Linear(5, 3), lambda output, target: 1.0, torch.ones(2, 5), torch.zeros(2)
        )


@pytest.mark.parametrize("cls", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("name", ["padding", "stride", "dilation"])
@pytest.mark.parametrize("value", [2, (2,)])
def test_one_number_stands_for_both_dimensions_of_a_convolution(cls, name, value):
    if (cls, name, value) == (nn.ConvTranspose2d, "padding", 2):
        pytest.skip("PyTorch refuses it")
    layer = cls(2, 3, 3, padding=1, dtype=torch.float64)
    setattr(layer, name, value)
    model = nn.Sequential(layer, nn.Flatten())
    x = torch.randn(4, 2, 6, 7, dtype=torch.float64)
    y = torch.randn_like(model(x))
    expected = per_sample.per_sample_gradients(model, F.mse_loss, x, y)
    rows = torchium.per_sample_gradients(model, F.mse_loss, x, y)
    for key, row in rows.items():
        torch.testing.assert_close(row, expected[key])
    with torchium.per_sample(model):
        F.mse_loss(model(x), y).backward()
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad_sample, expected[key])


def test_a_cycle_of_modules():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    x, y = torch.randn(5, 3), torch.randn(5, 4)
    expected = per_sample.per_sample_gradients(model, F.mse_loss, x, y)
    model[0].parent = model
    rows = torchium.per_sample_gradients(model, F.mse_loss, x, y)
    for key, row in expected.items():
        torch.testing.assert_close(rows[key], row)
    with torchium.per_sample(model):
        F.mse_loss(model(x), y).backward()
    torch.testing.assert_close(model[0].weight.grad_sample, expected["0.weight"])
