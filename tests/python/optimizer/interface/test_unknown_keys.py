"""Keywords and keys of groups that an optimizer does not know: what torch ignores too, and what looks like a mistake."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torchium
from optimizer_cases import mlp

OPTIMIZERS = [
    torchium.Shampoo,
    torchium.ShampooW,
    torchium.Adagrad,
    torchium.KFAC,
    torchium.KFACPreconditioner,
    torchium.NaturalGradient,
]
every_optimizer = pytest.mark.parametrize("cls", OPTIMIZERS)


def warnings_of(make) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make()
    return caught


def group_of(**keys):
    return {"params": list(mlp().parameters()), **keys}


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (torchium.NaturalGradient, "weight_decay", 0.1),
        (torchium.NaturalGradient, "nesterov", True),
        (torchium.KFAC, "betas", (0.9, 0.999)),
        (torchium.KFAC, "amsgrad", True),
        (torchium.Adagrad, "momentum", 0.9),
        (torchium.Shampoo, "dampening", 0.5),
    ],
)
def test_a_hyperparameter_of_other_optimizers_in_a_group_is_named(cls, key, value):
    (caught,) = warnings_of(lambda: cls([group_of(), group_of(**{key: value})]))
    assert str(caught.message).startswith(
        f"{cls.__name__} ignores {key}={value} of group 1; remove"
    )
    assert caught.filename == __file__


@every_optimizer
def test_a_misspelt_option_in_a_group_is_named(cls):
    option = cls._OPTIONS.names[-1]
    key = option[:-2] + option[-1]
    (caught,) = warnings_of(lambda: cls([group_of(**{key: 1})]))
    assert f"ignores {key}=1 of group 0; did you mean {option!r}?" in str(caught.message)


def test_each_key_is_named_once():
    groups = [group_of(weight_decay=value) for value in (0.0, 0.1, 0.2)]
    (caught,) = warnings_of(lambda: torchium.NaturalGradient(groups))
    assert "weight_decay=0.1 of group 1" in str(caught.message)


@every_optimizer
def test_keys_of_frameworks_and_values_without_effect_are_ignored(cls):
    keys = {
        **dict(name="head", tag=["a"], initial_lr=0.1, max_lr=1.0, lr_scale=0.5),
        **dict(max_momentum=0.9, base_momentum=0.8, foreach=True, fused=None),
        **dict(nesterov=False, amsgrad=False, dampening=0, differentiable=False),
    }
    assert not warnings_of(lambda: cls([group_of(**keys)]))


def test_what_the_optimizer_behind_a_preconditioner_reads_is_no_mistake():
    groups = [group_of(weight_decay=0.1, momentum=0.9, nesterov=True)]
    torch.optim.SGD(groups, lr=0.1)
    assert not warnings_of(lambda: torchium.KFACPreconditioner(groups))


@pytest.mark.parametrize(
    ("caller", "make"),
    [("ShampooW", torchium.ShampooW), ("Shampoo.from_adamw", torchium.Shampoo.from_adamw)],
)
def test_a_misspelt_keyword_is_reported_under_the_name_of_the_callable(caller, make):
    message = rf"^{caller}\(\) got an unexpected keyword argument 'weight_decy'; did you mean 'weight_decay'\?$"
    with pytest.raises(TypeError, match=message):
        make(mlp().parameters(), weight_decy=0.1)


@pytest.mark.parametrize(
    ("cls", "keyword", "remedy"),
    [
        (torchium.Shampoo, "weight_decy", "did you mean 'weight_decay'?"),
        (torchium.Shampoo, "update_frequency", "did you mean 'update_freq'?"),
        (torchium.Shampoo, "foreach", "remove it: it chooses how PyTorch runs its own steps"),
        (torchium.Adagrad, "block_sise", "did you mean 'block_size'?"),
        (torchium.Adagrad, "learning_rate", "did you mean 'lr'?"),
        (torchium.KFAC, "Tcov", "did you mean 'TCov'?"),
        (torchium.NaturalGradient, "maximise", "did you mean 'maximize'?"),
        (torchium.AdaHessian, "beta", "did you mean 'betas'?"),
    ],
)
def test_a_misspelt_keyword_of_a_constructor_has_a_remedy(cls, keyword, remedy):
    message = f"{cls.__name__}() got an unexpected keyword argument {keyword!r}; {remedy}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        cls(mlp().parameters(), **{keyword: 1})


def test_a_subclass_may_take_other_keywords():
    class Mine(torchium.Shampoo):
        def __init__(self, params, *, rate):
            super().__init__(params, lr=rate)

    assert Mine(mlp().parameters(), rate=0.5).param_groups[0]["lr"] == 0.5
    with pytest.raises(TypeError, match=r"^Mine\(\) got .* 'rat'; did you mean 'rate'\?$"):
        Mine(mlp().parameters(), rat=0.5)


def test_a_keyword_beside_an_optimizer_is_reported_under_the_name_of_the_callable():
    adamw = torch.optim.AdamW(mlp().parameters())
    message = r"^Shampoo\.from_adamw\(\) got an unexpected keyword argument 'no_option'$"
    with pytest.raises(TypeError, match=message):
        torchium.Shampoo.from_adamw(adamw, no_option=1)


@pytest.mark.parametrize(
    ("keyword", "remedy"),
    [
        ("compute_method", 'damping_split="exact"'),
        ("accumulation_steps", "divide the loss"),
        ("inv_dtype", "inverses are float32"),
        ("assignment_strategy", "leave it out"),
        ("colocate_factors", "leave it out"),
        ("allreduce_bucket_cap_mb", "leave it out"),
        ("symmetry_aware", "leave it out"),
        ("compute_eigenvalue_outer_product", "leave it out"),
        ("update_factors_in_hook", "leave it out"),
        ("loglevel", "leave it out"),
        ("TCov", "factor_update_steps"),
        ("weight_decay", "optimizer that takes the step"),
        ("dampin", "did you mean 'damping'"),
    ],
)
def test_keywords_that_the_preconditioner_lacks_have_a_remedy(keyword, remedy):
    message = rf"^KFACPreconditioner\(\) got an unexpected keyword argument '{keyword}'; .*{remedy}"
    with pytest.raises(TypeError, match=message):
        torchium.KFACPreconditioner(mlp(), **{keyword: None})


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_the_name_of_a_comm_dtype_has_the_dtype_as_remedy(name):
    with pytest.raises(
        ValueError, match=rf"comm_dtype must be .*got '{name}'; pass torch\.{name}$"
    ):
        torchium.Shampoo(mlp().parameters(), comm_dtype=name)
    with pytest.raises(ValueError, match=r"comm_dtype must be .*got torch\.float64$"):
        torchium.Shampoo(mlp().parameters(), comm_dtype=torch.float64)
