"""Records what each layer call contributes to ``.grad``: its input and its output gradient.

Forward hooks on the layers hand each call to the core (``src/ops/module_capture.h``), before an
in-place activation can change the output. The core pairs it with its gradient. A call counts only
in a backward pass that accumulates the gradient of its parameters: passes for evaluation and
``torch.autograd.grad`` leave nothing behind.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from .arguments import gets_input_alone, layer_input
from .attention import (
    calls_functions,
    is_attention,
    projections,
    samples_of,
    time_first_layers,
)
from .compiled import forget_compiled
from .descriptions import describe, kept, layer_signature
from .hooks import (
    ModuleHook,
    ModulePreHook,
    is_own_output,
    on_registration,
    register_any_forward_hook,
    runs_after_others,
)
from .layers import (
    LayerCall,
    LayerKind,
    is_compiled_by_jit,
    may_mix_samples,
    mixes_samples,
    why_unsupported,
)

NO_TASK = -1  # what torch calls the backward pass outside of one
# Each call of a layer asks them.
_current_task = torch._C._current_graph_task_id
_is_functorch_active = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state

_capture_numbers = itertools.count()
_captures: weakref.WeakValueDictionary[int, Capture] = weakref.WeakValueDictionary()


class Capture:
    """Finds the layers that own the parameters of an optimizer, and records their calls.

    Args:
        kinds: the kinds of layers that are recorded.
        wants: a method of the optimizer, which is not kept alive: whether the next step needs layer
            calls.
    """

    _keeps_calls = False  # and hooks modules that mix samples too

    def __init__(self, kinds: frozenset[LayerKind], wants: Callable[[], bool]) -> None:
        # All modules that own a parameter or may mix samples, and attention around a projection that
        # owns one, with their names in the model, or in the module that ran.
        self.modules: dict[nn.Module, str] = {}
        self.owners: dict[Tensor, list[nn.Module]] = {}
        # Of modules that were given a parameter since they last ran.
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.ran = False  # whether one of the modules has run
        # What `wants` has returned since forget(); None: it was not asked.
        self._is_wanted: bool | None = None
        # Until forget() or a change of the modules, calls of hooked modules leave nothing behind.
        self._is_idle = False
        number = next(_capture_numbers)
        self.core = torch.classes.torchium.ModuleCapture(number, self._keeps_calls)
        self._add = self.core.add  # looked up once: each call of a layer runs it
        # Numbers of modules in the core, in their order; signature and number of those that ran
        # (-1: their calls are not recorded).
        self._numbers: dict[nn.Module, int] = {}
        self._known: dict[nn.Module, tuple[tuple[Any, ...], int]] = {}
        self._kinds = kinds
        self._wants = weakref.WeakMethod(wants)
        self._params: set[Tensor] = set()
        self._hooked_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.time_first: set[nn.Module] = set()  # each call of a layer asks it
        self._scanned: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []
        # While owners are unknown: of the hooks after and before the forward pass of all modules.
        self._global_handles: list[RemovableHandle] = []
        self._own_hook = ModuleHook(self._after_own_forward)  # of each hooked module
        self._any_hook = ModuleHook(self._after_any_forward)  # of all modules
        self._any_pre_hook = ModulePreHook(self._before_any_forward)
        # Of each attention: around its forward pass, whose products are recorded.
        self._attention_hooks = (
            ModulePreHook(self._before_attention),
            ModuleHook(self._after_attention),
        )
        # Per thread: the module whose call the global hook has just handled.
        self._seen = threading.local()
        # Per thread: each attention that runs, and whether its products are watched.
        self._running = threading.local()
        self._lock = threading.RLock()  # for everything, because threads share the hooks
        weakref.finalize(self, _remove_all, self._handles)
        on_registration(self._after_registration)
        _captures[number] = self

    @property
    def used_outside(self) -> set[Tensor]:
        """Parameters that backward passes have reached outside of layer calls."""
        return set(self.core.used_outside())

    # ---- parameters and their modules

    def watch(self, params: Iterable[Tensor]) -> None:
        """Adds parameters. Unknown owners are looked for among all modules that run.

        A model that is compiled already does not look for new hooks: see :func:`forget_compiled`.
        """
        with self._lock:
            new = list(params)
            self._is_wanted, self._is_idle = None, False
            self._params.update(new)
            self.core.watch(new)
            for module in list(self.modules):
                self.adopt(module, self.modules[module])
            if not self._global_handles and not self._params <= self.owners.keys():
                self._global_handles = [
                    register_any_forward_hook(self._any_hook),
                    register_module_forward_pre_hook(self._any_pre_hook),
                ]
                self._handles += self._global_handles
                self._scanned.clear()

    def watch_new(self, params: Iterable[Tensor]) -> None:
        """The same for those that are not watched yet."""
        if new := set(params) - self._params:
            forget_compiled()
            self.watch(new)

    def adopt(self, module: nn.Module, name: str) -> None:
        """Hooks the module if it owns a parameter, or may mix samples and that matters."""
        with self._lock:
            was_given = self._names.pop(module, None) is not None
            params = [p for p in module._parameters.values() if p is not None]
            owned = [p for p in params if p in self._params]
            for param in owned:
                owners = self.owners.setdefault(param, [])
                if was_given and not isinstance(module, ParametrizationList):
                    # remove_parametrizations() gives a layer its weight back.
                    owners[:] = [o for o in owners if not isinstance(o, ParametrizationList)]
                if module not in owners:
                    owners.append(module)
            sees_mixing = self._keeps_calls and may_mix_samples(module)
            is_projected = is_attention(module) and self._has_params_of(module)
            if owned or sees_mixing or is_projected:
                self.modules[module] = name
            if sees_mixing or is_projected or (owned and self._may_be_recorded(module)):
                self._hook(module)
            self._note_time_first(module)

    def _note_time_first(self, module: nn.Module) -> None:
        layers = time_first_layers(module)
        if layers and self._has_params_of(module):
            self.time_first.update(layers)

    def _has_params_of(self, module: nn.Module) -> bool:
        return not self._params.isdisjoint(module.parameters())

    def _hook(self, module: nn.Module) -> None:
        if module in self._hooked_modules:
            return
        self._hooked_modules.add(module)
        if is_attention(module):
            before, after = self._attention_hooks
            self._handles += (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True, always_call=True),
            )
        else:
            self._handles.append(
                module.register_forward_hook(self._own_hook, prepend=True, with_kwargs=True)
            )

    def _after_registration(self, module: nn.Module, param: Tensor) -> None:
        """Hooks a module that gets a known parameter; it counts as an owner once it runs."""
        with self._lock:
            if param in self._params:
                self._hook(module)
                self._names[module] = self.modules.pop(module, "")  # it is adopted again
                self._is_idle = False

    def settle(self) -> None:
        """Stops looking at all modules once the owners of all parameters are known.

        For a step, not for a forward pass, in which a second owner may follow.
        """
        with self._lock:
            if self._global_handles and self._params <= self.owners.keys():
                for handle in self._global_handles:
                    handle.remove()
                    self._handles.remove(handle)
                self._global_handles = []
                self._seen = threading.local()

    def _after_any_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        with self._lock:
            if module not in self._scanned:
                for name, child in module.named_modules():
                    self.adopt(child, name)
                    if child in self.modules:  # else it may get other parameters later
                        self._scanned.add(module)
            # Its own hook runs next, unless it was registered during this call.
            if module in self.modules and not is_compiled_by_jit(module):
                self._seen.module = module
                self._after_forward(self._any_hook, module, args, kwargs, output)

    # ---- forward

    def _after_own_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._is_idle and _current_task() == NO_TASK:
            return
        with self._lock:
            if self._global_handles and getattr(self._seen, "module", None) is module:
                self._seen.module = None
                return
            if module not in self.modules:
                self.adopt(module, self._names.get(module, ""))
            if module in self.modules:
                self._after_forward(self._own_hook, module, args, kwargs, output)

    def _after_forward(
        self,
        hook: ModuleHook,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        self.ran = True
        if _current_task() != NO_TASK:  # a checkpoint, with others in it perhaps
            self.core.enter_pass()
        if not isinstance(output, Tensor) or not output.requires_grad or _is_transformed():
            return
        if self._keeps_calls and mixes_samples(module):
            self.core.add_mixing(output, self._number(module))
        if not self._asks_for_calls():
            self._is_idle = not self._keeps_calls and not self._global_handles
            return
        number = self._layer(module)
        if number < 0 or output.is_nested:  # rows of a nested tensor are no samples
            return
        if not gets_input_alone(module, args, kwargs):
            return
        if runs_after_others(hook, module) and not is_own_output(module, args, kwargs, output):
            return
        input = layer_input(args, kwargs)
        inner = input.size(1) if module in self.time_first and input.dim() == 3 else 0
        self._add(output, input, number, self._is_needed(module), inner)

    def _asks_for_calls(self) -> bool:
        if self._is_wanted is None:
            wants = self._wants()
            self._is_wanted = wants is not None and wants()
        return self._is_wanted

    # ---- attention

    def _before_any_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        with self._lock:
            if module not in self._scanned:
                self._note_time_first(module)  # its children run before it is adopted
        if is_attention(module) and module not in self._hooked_modules:
            for layer in projections(module):
                self.adopt(layer, "")
            # Its own hook before the forward pass comes too late for this call.
            if module in self._hooked_modules:
                self._before_attention(module, args, kwargs)

    def _before_attention(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        running = self._running_attention()
        while any(module is other for other, _ in running):
            # No hook has seen an interrupt of its last call.
            self._end_attention(has_returned=False)
        running.append((module, False))
        if self._is_idle or not torch.is_grad_enabled() or _is_transformed():
            return
        with self._lock:
            if not calls_functions(module) or not self._asks_for_calls():
                return
            numbers = {self._layer(layer): self._is_needed(layer) for layer in projections(module)}
            numbers.pop(-1, None)
            needed = [number for number, is_needed in numbers.items() if is_needed]
            self.core.begin_products([*numbers], samples_of(module, args, kwargs), needed)
            running[-1] = module, True

    def _after_attention(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        running = self._running_attention()
        if running and running[-1][0] is module:  # else a hook before ours has raised
            self._end_attention(has_returned=output is not None)
        self._after_own_forward(module, args, kwargs, output)

    def _end_attention(self, *, has_returned: bool) -> None:
        if self._running_attention().pop()[1]:
            self.core.end_products(has_returned)

    def _running_attention(self) -> list[tuple[nn.Module, bool]]:
        running: list[tuple[nn.Module, bool]] = self._running.__dict__.setdefault("calls", [])
        return running

    def _number(self, module: nn.Module) -> int:
        return self._numbers.setdefault(module, len(self._numbers))

    def _layer(self, module: nn.Module) -> int:
        """The number of a layer, which the core knows as it is now; -1: it is not recorded."""
        signature = layer_signature(module)
        known = self._known.get(module)
        if known is not None and known[0] == signature:
            return known[1]
        number = -1
        if self._why_unsupported(module) is None:
            number = self._number(module)
            self.core.describe(number, *self._description(module))
        self._known[module] = kept(signature), number
        self._changed()
        return number

    def forget(self) -> None:
        """Forgets all calls, because their gradients are used up or gone."""
        self._is_wanted, self._is_idle = None, False
        self.core.forget()

    # ---- for subclasses

    def _why_unsupported(self, module: nn.Module) -> str | None:
        """Why calls of a module are not recorded."""
        return why_unsupported(module, self._kinds)

    def _description(self, module: nn.Module) -> tuple[Any, ...]:
        """What the core knows of a layer."""
        return describe(module)

    def _may_be_recorded(self, module: nn.Module) -> bool:
        """Whether a module of this class is ever recorded; else it gets no hook."""
        return not is_compiled_by_jit(module)

    def _is_needed(self, module: nn.Module) -> bool:
        """Whether the next step needs calls of this layer."""
        return True

    def _changed(self) -> None:
        """A layer is new, or has changed."""

    def started(self) -> None:
        """A backward pass, or a part of it, has reached its first call."""


class CallCapture(Capture):
    """Keeps the calls until :meth:`forget`."""

    _keeps_calls = True

    def calls(self) -> list[list[LayerCall]]:
        """The calls whose gradients ``.grad`` holds, one list per backward pass."""
        modules = list(self._numbers)
        passes: dict[int, list[LayerCall]] = {}
        for number, module, input, gradient, weight, bias, has_changed in self.core.calls():
            named = {"weight": weight, "bias": bias}
            params = {name: param for name, param in named.items() if param is not None}
            call = LayerCall(modules[module], params, input, gradient, has_changed)
            passes.setdefault(number, []).append(call)
        return list(passes.values())

    def mixing(self) -> nn.Module | str | None:
        """The module, or else the function, that mixed the samples of one of these passes."""
        number: int = self.core.mixing_module()
        if number >= 0:
            return list(self._numbers)[number]
        return "batch_norm" if self.core.is_mixed() else None


def check_inputs(passes: list[list[LayerCall]], until: str) -> None:
    """Raises ValueError if the input of a call was changed in place since its backward pass."""
    for call in itertools.chain(*passes):
        if call.has_changed:
            raise ValueError(
                f"the input {tuple(call.input.shape)} of a {type(call.module).__name__} layer was "
                "changed in place after the backward pass; fill another tensor with the next "
                f"batch until {until}"
            )


def _started(number: int) -> None:
    capture = _captures.get(number)
    if capture is not None:
        capture.started()


_library = torch.library.Library("torchium", "IMPL")
_library.impl("backward_started", _started, "CompositeExplicitAutograd")


def _is_transformed() -> bool:
    """Whether torch.func, tracing or export runs the model."""
    return _is_functorch_active() or _tracing_state() is not None or torch.compiler.is_exporting()


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
