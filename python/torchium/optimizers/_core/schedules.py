"""Options that are functions of the step number.

A parameter group has the value in effect under the name of the option, and the function under ``"schedules"``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .options import OptionList

SCHEDULES = "schedules"

Schedule = Callable[[int], Any]
Group = dict[str, Any]


def schedules_in(options: OptionList, group: Group) -> dict[str, Schedule]:
    """The functions of a group, also those that were set in place of a value."""
    given = {name: group[name] for name in options.scheduled if callable(group.get(name))}
    return {**group.get(SCHEDULES, {}), **given}


def without_functions(options: OptionList, values: Group) -> Group:
    """The values for step 1 in place of functions, and these under ``"schedules"``."""
    functions = schedules_in(options, values)
    return {**values, **at_step(options, functions, 1)} if functions else values


def new_group(options: OptionList, group: Group, defaults: Group) -> Group:
    """The same for a new group. It has the functions of the defaults for options that it leaves out."""
    if not isinstance(group, dict):
        return group  # torch raises
    inherited = {n: f for n, f in defaults.get(SCHEDULES, {}).items() if n not in group}
    functions = {**inherited, **schedules_in(options, group)}
    if not functions and SCHEDULES not in defaults:
        return group
    return {**group, **at_step(options, functions, 1)}  # torch adds no default "schedules"


def at_step(
    options: OptionList, functions: dict[str, Schedule], step: int, last_step: int | None = None
) -> Group:
    """The checked values at this step of a group, and the functions under ``"schedules"``.

    Of options that are the same in all groups, the values at the last of their steps: a group may have
    joined later.
    """
    last = step if last_step is None else last_step
    values = {
        name: _value(options, name, f, last if name in options.shared else step)
        for name, f in functions.items()
    }
    return {**values, SCHEDULES: functions}


def beside(options: OptionList, group: Group, new: Group) -> Group:
    """A group to compare with a new one, before the next step evaluates the functions of both."""
    functions = schedules_in(options, group).keys() & new.get(SCHEDULES, {}).keys()
    return {**without_functions(options, group), **{name: new[name] for name in functions}}


def _value(options: OptionList, name: str, function: Schedule, step: int) -> Any:
    if name not in options.scheduled:
        raise ValueError(
            f"schedules has {name!r}; the options that may be functions are "
            f"{', '.join(options.scheduled)}"
        )
    value = function(step)
    try:
        return options.checked_lr(value) if name == "lr" else options.checked_one(name, value)
    except ValueError as error:
        raise ValueError(
            f"{error}, which its function returned for step {step}; change the function"
        ) from None


def without_schedules(group: Group) -> Group:
    return {key: value for key, value in group.items() if key != SCHEDULES}
