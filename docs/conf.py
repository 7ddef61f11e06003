"""Sphinx configuration. `make docs` builds the pages into docs/_build/html."""

import shutil
import subprocess
from pathlib import Path

import torchium
from sphinx.util import logging

HERE = Path(__file__).resolve().parent

project = "torchium"
author = "the torchium developers"
version = release = torchium.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
]
exclude_patterns = ["_build", "_doxygen"]
html_theme = "furo"
html_title = f"torchium {release}"

myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}

# Comments above a declaration or after a member document it. Doxygen needs three slashes; most headers
# have two.
COMMENT_FILTER = r"sed -E 's@^( *)//( |$)@\1///\2@; s@; +// @; ///< @'"

DOXYGEN_SETTINGS = f"""
PROJECT_NAME = torchium
INPUT = {HERE.parent / "include"}
STRIP_FROM_INC_PATH = {HERE.parent / "include"}
RECURSIVE = YES
FILE_PATTERNS = *.h
INPUT_FILTER = "{COMMENT_FILTER}"
OUTPUT_DIRECTORY = {HERE / "_doxygen"}
GENERATE_XML = YES
GENERATE_HTML = NO
GENERATE_LATEX = NO
QUIET = YES
WARN_IF_UNDOCUMENTED = NO
WARN_AS_ERROR = NO
JAVADOC_AUTOBRIEF = YES
MULTILINE_CPP_IS_BRIEF = YES
EXTRACT_ALL = YES
EXCLUDE_SYMBOLS = torchium::*::detail
ENABLE_PREPROCESSING = YES
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
PREDEFINED = TORCHIUM_API= "TORCH_ARG(T, name)=T name"
"""


def run_doxygen() -> bool:
    """Write the XML for Breathe; return False if Doxygen or Breathe is missing."""
    try:
        import breathe  # noqa: F401
    except ImportError:
        return False
    if shutil.which("doxygen") is None:
        return False
    (HERE / "_doxygen").mkdir(exist_ok=True)
    subprocess.run(["doxygen", "-"], input=DOXYGEN_SETTINGS, text=True, check=True)
    return True


# Only one of the two C++ API pages is built.
if run_doxygen():
    extensions.append("breathe")
    breathe_projects = {"torchium": str(HERE / "_doxygen" / "xml")}
    breathe_default_project = "torchium"
    breathe_default_members = ("members",)
    exclude_patterns.append("api/cpp_without_doxygen.md")
else:
    logging.getLogger(__name__).info(
        "The C++ API reference is left out: it needs doxygen and the Python package breathe."
    )
    exclude_patterns.append("api/cpp.md")
