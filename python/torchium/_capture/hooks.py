"""Hooks of modules that do not keep the optimizer alive."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules import module as nn_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle


class ModuleHook:
    """Forward hook of a module, or of all modules, that does not keep the optimizer alive.

    A copy of it, in a model that was copied or pickled, belongs to no optimizer and removes itself
    when it is called. A copied optimizer makes its own hooks.

    Tools that rewrite models (``fuse_modules``, ``quantize_dynamic``) put the hooks of a module on
    another one, without what they were registered with, and so without keyword arguments.
    """

    def __init__(self, method: Callable[..., None] | None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    @_disable_dynamo
    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        kwargs, output = rest if len(rest) == 2 else ({}, rest[0])
        method = None if self._method is None else self._method()
        if method is not None:
            method(module, args, kwargs, output)
            return
        self._remove_from(
            module._forward_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_hooks_always_called,
        )

    def _remove_from(self, hooks: dict[int, Any], *options: dict[int, Any]) -> None:
        for key in [key for key, hook in hooks.items() if hook is self]:
            for each in (hooks, *options):
                each.pop(key, None)

    @property
    def __name__(self) -> str:
        # torch.jit.script asks for it, to compile the hook.
        raise AttributeError(
            "torch.jit.script cannot compile a model that an optimizer of torchium observes; script a "
            "new model that has loaded its state_dict(), or use torch.jit.trace or torch.export"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)


class ModulePreHook(ModuleHook):
    """The same, called before the forward pass of a module."""

    @_disable_dynamo
    def __call__(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(module, args, *(rest or ({},)))
            return
        self._remove_from(module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)


def runs_after_others(hook: ModuleHook, module: nn.Module) -> bool:
    """Whether hooks of other code run before this one and may replace the output of the module.

    Hooks of all modules run before those of one, and those registered with ``prepend=True`` before
    earlier ones.
    """
    hooks = itertools.chain(
        nn_module._global_forward_hooks.values(), module._forward_hooks.values()
    )
    for other in hooks:
        if other is hook:
            return False
        if not isinstance(other, ModuleHook):
            return True
    return False


def is_own_output(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> bool:
    """Whether the module itself has computed the output: runs it again.

    Not a batch norm, which would count the batch twice in its running statistics.
    """
    if isinstance(module, _BatchNorm):
        return output.grad_fn is None or "BatchNorm" in output.grad_fn.name()
    # Hooks of saved tensors, as those of a checkpoint, do not see this call.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
        own = type(module).forward(module, *args, **kwargs)
    is_same_node = type(own.grad_fn) is type(output.grad_fn)
    return is_same_node and torch.allclose(own.detach(), output.detach(), rtol=1e-2, equal_nan=True)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def register_any_forward_hook(hook: ModuleHook) -> RemovableHandle:
    """Hooks all modules that run."""
    handle = nn_module.register_module_forward_hook(hook, with_kwargs=True)
    # torch's handle leaves this entry behind, for which every compiled model warns.
    handle.extra_dict_ref += (weakref.ref(nn_module._global_forward_hooks_with_kwargs),)
    return handle


class _RegistrationHook:
    """The global hook that is called when a module gets a parameter; one per process.

    It is never removed, because the garbage collector may run while PyTorch iterates over such hooks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._methods: tuple[weakref.WeakMethod[Callable[..., None]], ...] = ()  # replaced whole

    def add(self, method: Callable[[nn.Module, Tensor], None]) -> None:
        with self._lock:
            if not self._methods:
                nn_module.register_module_parameter_registration_hook(self)
            alive = tuple(known for known in self._methods if known() is not None)
            self._methods = (*alive, weakref.WeakMethod(method))

    @_disable_dynamo
    def __call__(self, module: nn.Module, name: str, param: Tensor | None) -> None:
        if param is not None:
            for method in self._methods:
                weakly(method, module, param)


_registrations = _RegistrationHook()


def on_registration(method: Callable[[nn.Module, Tensor], None]) -> None:
    """Calls the method, as long as its object lives, for every parameter that a module gets."""
    _registrations.add(method)


def weakly(method: weakref.WeakMethod[Callable[..., None]], *args: Any) -> None:
    """Calls the method if its object is still alive."""
    target = method()
    if target is not None:
        target(*args)
