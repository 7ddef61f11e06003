"""Programs of the examples and benchmarks, in the process of the tests."""

from __future__ import annotations

import io
import runpy
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch


def run_script(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Like a process of its own, which would import for seconds. Random numbers go on as before."""
    output, errors = io.StringIO(), io.StringIO()
    code = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.random.fork_rng(),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", [script.name, *map(str, arguments)])
        patch.syspath_prepend(str(script.parent))
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=errors)
        except Exception:
            traceback.print_exc()
            code = 1
    return subprocess.CompletedProcess([script.name], code, output.getvalue(), errors.getvalue())
