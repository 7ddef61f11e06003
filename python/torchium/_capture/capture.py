"""Records what each layer call contributes to ``.grad``: its input and its output gradient.

A forward hook on the layer hooks the output tensor, before an in-place activation can change it. A
recorded call counts once its backward pass has reached the parameter. Passes for evaluation and
``torch.autograd.grad`` therefore leave nothing behind.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from .hooks import (
    ModuleHook,
    OutputHook,
    ParameterHook,
    Saved,
    on_registration,
    register_any_forward_hook,
    weakly,
)
from .layers import (
    LayerCall,
    LayerKind,
    computed_output,
    layer_input,
    may_mix_samples,
    mixes_samples,
    why_unsupported,
)

NO_TASK = -1  # what torch calls the backward pass outside of one


class Capture:
    """Finds the layers that own the parameters of an optimizer, and records their calls.

    Args:
        kinds: the kinds of layers that are recorded.
        wants: a method of the optimizer, which is not kept alive: whether the next step needs layer
            calls.
    """

    _sees_mixing = False  # whether to hook modules that mix samples too

    def __init__(self, kinds: frozenset[LayerKind], wants: Callable[[], bool]) -> None:
        # All modules that own a parameter or may mix samples, with their names in the model, or in
        # the module that ran.
        self.modules: dict[nn.Module, str] = {}
        self.owners: dict[Tensor, list[nn.Module]] = {}
        self.ran = False  # whether one of the modules has run
        # Parameters that backward passes have reached outside of layer calls
        # (src/gradients/capture/uncaptured_calls.h).
        self.used_outside: set[Tensor] = set()
        self._graph = torch.classes.torchium.CapturedGraph()
        self._add_to_graph = self._graph.add  # looked up once: each call of a layer runs it
        # Of the calls in the graph, by their numbers there.
        self._output_hooks: weakref.WeakValueDictionary[int, OutputHook] = (
            weakref.WeakValueDictionary()
        )
        self._searched: set[int] = set()  # tasks since forget()
        self._kinds = kinds
        self._wants = weakref.WeakMethod(wants)
        self._params: set[Tensor] = set()
        self._hooked_params: set[Tensor] = set()
        self._hooked_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._scanned: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []
        self._global_handle: RemovableHandle | None = None
        # Per thread: the module whose call the global hook has just handled.
        self._seen = threading.local()
        # Calls whose gradient has not reached the parameter yet.
        self._open: dict[Tensor, list[tuple[str, LayerCall]]] = {}
        # .grad of each parameter after its last backward pass, and its version.
        self._gradients: dict[Tensor, tuple[weakref.ref[Tensor], int]] = {}
        # The root of each running graph task; running tasks by thread, outermost first.
        self._roots: dict[int, int] = {}
        self._running: dict[int, list[int]] = {}
        self._lock = threading.RLock()  # for everything, because threads share the hooks
        weakref.finalize(self, _remove_all, self._handles)
        on_registration(self._after_registration)

    # ---- parameters and their modules

    def watch(self, params: Iterable[Tensor]) -> None:
        """Adds parameters. Unknown owners are looked for among all modules that run."""
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            dynamo.reset_code_caches()  # a compiled model does not look for new hooks
        with self._lock:
            self._params.update(params)
            for module in list(self.modules):
                self.adopt(module, self.modules[module])
            if self._global_handle is None and not self._params <= self.owners.keys():
                hook = ModuleHook(self._after_any_forward)
                self._global_handle = register_any_forward_hook(hook)
                self._handles.append(self._global_handle)
                self._scanned.clear()

    def watch_new(self, params: Iterable[Tensor]) -> None:
        """The same for those that are not watched yet."""
        if new := set(params) - self._params:
            self.watch(new)

    def adopt(self, module: nn.Module, name: str) -> None:
        """Hooks the module if it owns a parameter, or may mix samples and that matters."""
        with self._lock:
            params = [p for p in module._parameters.values() if p is not None]
            owned = [p for p in params if p in self._params]
            for param in owned:
                owners = self.owners.setdefault(param, [])
                if module not in owners:
                    owners.append(module)
            sees_mixing = self._sees_mixing and may_mix_samples(module)
            if owned or sees_mixing:
                self.modules[module] = name
            if sees_mixing or (owned and self._may_be_recorded(module)):
                self._hook(module)

    def _hook(self, module: nn.Module) -> None:
        if module not in self._hooked_modules:
            self._hooked_modules.add(module)
            hook = ModuleHook(self._after_own_forward)
            self._handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True))

    def _after_registration(self, module: nn.Module, param: Tensor) -> None:
        """Hooks a module that gets a known parameter; it counts as an owner once it runs."""
        with self._lock:
            if param in self._params:
                self._hook(module)

    def is_searching(self) -> bool:
        """Whether a module that runs next may turn out to own one of the parameters."""
        return self._global_handle is not None

    def settle(self) -> None:
        """Stops looking at all modules once the owners of all parameters are known.

        For a step, not for a forward pass, in which a second owner may follow.
        """
        with self._lock:
            if self._global_handle is not None and self._params <= self.owners.keys():
                self._global_handle.remove()
                self._handles.remove(self._global_handle)
                self._global_handle = None
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
            if module in self.modules:
                self._seen.module = module
                self._after_forward(module, args, kwargs, output)

    # ---- forward

    def _after_own_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        with self._lock:
            if getattr(self._seen, "module", None) is module:
                self._seen.module = None
                return
            if module not in self.modules:
                self.adopt(module, "")
            if module in self.modules:
                self._after_forward(module, args, kwargs, output)

    def _after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        self.ran = True
        outer = self._root(torch._C._current_graph_task_id())
        if outer == NO_TASK:  # tasks that are left on this thread have raised
            for task in self._running.pop(threading.get_ident(), ()):
                self._roots.pop(task, None)
        if not isinstance(output, Tensor) or not output.requires_grad or _is_transformed():
            return
        shape = output.shape
        if self._sees_mixing and mixes_samples(module):
            output.register_hook(partial(weakly, weakref.WeakMethod(self._mixed), module, outer))
        wants = self._wants()
        if wants is None or not wants() or self._why_unsupported(module):
            return
        params = self._trained(module)
        if not params:
            return
        input, output = layer_input(args, kwargs), computed_output(output)
        number = self._add_to_graph(output, input, params.get("weight"), params.get("bias"))
        if not self._is_needed(params):
            return
        for param in params.values():
            self._hook_parameter(param)
        anchor = next(iter(params.values()))
        saved = Saved.apply(anchor, input.detach())
        add = partial(weakly, weakref.WeakMethod(self._add), outer, number)
        hook = OutputHook(add, saved, module, params, shape, output.output_nr)
        output.grad_fn.register_prehook(hook)
        self._output_hooks[number] = hook

    def _trained(self, module: nn.Module) -> dict[str, Tensor]:
        own = module._parameters
        return {
            name: param
            for name in ("weight", "bias")
            if (param := own.get(name)) is not None
            and param.requires_grad
            and param in self._params
        }

    def _hook_parameter(self, param: Tensor) -> None:
        if param in self._hooked_params:
            return
        self._hooked_params.add(param)
        hook = ParameterHook(self._after_accumulation, param)
        self._handles.append(param.register_post_accumulate_grad_hook(hook))

    # ---- backward

    def _root(self, task: int) -> int:
        """The outermost backward pass of a graph task."""
        if task == NO_TASK:
            return NO_TASK
        root = self._roots.get(task)
        if root is None:
            running = self._running.setdefault(threading.get_ident(), [])
            root = self._roots[running[-1]] if running else task
            running.append(task)
            self._roots[task] = root
            end = partial(weakly, weakref.WeakMethod(self._end), task)
            Variable._execution_engine.queue_callback(end)
        return root

    def _end(self, task: int) -> None:
        """Called when a graph task is done."""
        with self._lock:
            root = self._roots.pop(task, NO_TASK)
            for running in self._running.values():
                if task in running:
                    running.remove(task)
            if root == task:
                self._drop(root)

    def _add(
        self,
        outer: int,
        number: int,
        module: nn.Module,
        params: dict[str, Tensor],
        input: Tensor,
        output_gradient: Tensor,
    ) -> None:
        """Records the gradient of an output.

        ``outer`` is the pass that ran the layer, ``number`` that of the call in the graph.
        """
        if output_gradient.numel() == 0:
            return
        with self._lock:
            task = torch._C._current_graph_task_id()
            root = self._root(task)
            if outer != NO_TASK:
                self._roots[task] = root = outer
            if task not in self._searched:
                self._searched.add(task)
                self.used_outside = self._params.intersection(self._graph.search(number))
                self._started(root)
            call = LayerCall(module, params, input, output_gradient, root, task)
            for param in params.values():
                if self._was_zeroed(param):  # this pass has not added to .grad yet
                    self._restart(param, root)
            for name, param in params.items():
                self._open.setdefault(param, []).append((name, call))
            self._added(call)

    def _was_zeroed(self, param: Tensor) -> bool:
        """Whether .grad was set to zero in place since the last backward pass.

        Waits for the device, but only if it was changed in place.
        """
        last, version = self._gradients.get(param, (None, 0))
        gradient = param.grad
        if last is None or gradient is None or last() is not gradient:
            return False
        if gradient._version == version:
            return False
        self._note_gradient(param)
        return not bool(gradient.any())

    def _note_gradient(self, param: Tensor) -> None:
        gradient = param.grad
        if gradient is not None and not gradient.is_inference():
            self._gradients[param] = weakref.ref(gradient), gradient._version

    def _after_accumulation(self, param: Tensor) -> None:
        """Called when a backward pass has added to ``.grad`` of a parameter."""
        with self._lock:
            if not self._open and not self._gradients:  # nothing was recorded
                return
            task = torch._C._current_graph_task_id()
            if self._started_anew(param):
                self._restart(param, self._root(task))
            entries = self._open.pop(param, [])
            waiting = [entry for entry in entries if entry[1].task != task]
            if waiting:
                self._open[param] = waiting
            reached = [entry for entry in entries if entry[1].task == task]
            for name, call in reached:
                call.reached.add(name)
                self._reached(name, call)

    def _started_anew(self, param: Tensor) -> bool:
        """Whether .grad was set to None since the last backward pass."""
        last, _ = self._gradients.get(param, (None, 0))
        self._note_gradient(param)
        # Under create_graph each pass makes a new tensor.
        return last is not None and last() is not param.grad and not torch.is_grad_enabled()

    def _drop(self, root: int) -> None:
        """Forgets the calls of a backward pass that did not reach their parameters."""
        for param, entries in list(self._open.items()):
            left = [entry for entry in entries if entry[1].root != root]
            if left:
                self._open[param] = left
            else:
                del self._open[param]

    def forget(self) -> None:
        """Forgets all calls, because their gradients are used up or gone."""
        with self._lock:
            self._open.clear()
            self._gradients.clear()
            self._roots.clear()
            self._running.clear()
            if self._searched:
                self._searched.clear()
                self._graph.forget()

    # ---- for subclasses

    def _why_unsupported(self, module: nn.Module) -> str | None:
        """Why calls of a module are not recorded."""
        return why_unsupported(module, self._kinds)

    def _may_be_recorded(self, module: nn.Module) -> bool:
        """Whether a module of this class is ever recorded; else it gets no hook."""
        return True

    def _is_needed(self, params: dict[str, Tensor]) -> bool:
        """Whether the next step needs calls of a layer with these parameters ("weight", "bias")."""
        return True

    def _started(self, root: int) -> None:
        """A backward pass, or a part of it, has reached its first call."""

    def _added(self, call: LayerCall) -> None:
        """The output gradient of a call is known."""

    def _reached(self, name: str, call: LayerCall) -> None:
        """The gradient of a parameter of the call has been added to ``.grad``."""

    def _restart(self, param: Tensor, root: int) -> None:
        """``.grad`` holds the gradient of ``root`` alone."""

    def _mixed(self, module: nn.Module, outer: int, gradient: Tensor) -> None:
        """A backward pass has gone through a module that mixed samples."""


class CallCapture(Capture):
    """Keeps the calls until :meth:`forget`."""

    _sees_mixing = True

    def __init__(self, kinds: frozenset[LayerKind], wants: Callable[[], bool]) -> None:
        super().__init__(kinds, wants)
        self._calls: dict[int, list[LayerCall]] = {}  # by root
        self._mixing: dict[int, nn.Module] = {}  # by root
        self._mixing_calls: set[int] = set()  # roots that went through a normalisation of a batch

    def calls(self) -> list[list[LayerCall]]:
        """The calls whose gradients ``.grad`` holds, one list per backward pass."""
        passes = ([call for call in calls if call.reached] for calls in self._calls.values())
        return [calls for calls in passes if calls]

    def check_inputs(self, until: str) -> None:
        """Raises ValueError if the input of a call was changed in place since its backward pass."""
        for call in (call for calls in self.calls() for call in calls):
            if call.has_changed():
                raise ValueError(
                    f"the input {tuple(call.input.shape)} of a {type(call.module).__name__} layer was "
                    "changed in place after the backward pass; fill another tensor with the next "
                    f"batch until {until}"
                )

    def mixing(self) -> nn.Module | str | None:
        """The module, or else the function, that mixed the samples of one of these passes."""
        roots = {call.root for calls in self.calls() for call in calls}
        modules = [module for root, module in self._mixing.items() if root in roots]
        return next(iter(modules), None if roots.isdisjoint(self._mixing_calls) else "batch_norm")

    def forget(self) -> None:
        super().forget()
        self._calls.clear()
        self._mixing.clear()
        self._mixing_calls.clear()

    def _started(self, root: int) -> None:
        if torch.ops.torchium.backward_pass_mixes_samples():
            self._mixing_calls.add(root)

    def _added(self, call: LayerCall) -> None:
        self._calls.setdefault(call.root, []).append(call)

    def _drop(self, root: int) -> None:
        super()._drop(root)
        reached = [call for call in self._calls.pop(root, []) if call.reached]
        if reached:
            self._calls[root] = reached
        else:
            self._mixing.pop(root, None)
            self._mixing_calls.discard(root)

    def _restart(self, param: Tensor, root: int) -> None:
        self._calls = {key: calls for key, calls in self._calls.items() if key == root}

    def _mixed(self, module: nn.Module, outer: int, gradient: Tensor) -> None:
        with self._lock:
            root = self._root(torch._C._current_graph_task_id()) if outer == NO_TASK else outer
            self._mixing.setdefault(root, module)


def _is_transformed() -> bool:
    """Whether torch.func, tracing or export runs the model."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.compiler.is_exporting()
    )


def _remove_all(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
