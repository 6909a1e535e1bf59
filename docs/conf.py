"""How Sphinx builds the site: `make docs` writes it to build/site, and it opens from disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tools

from tools.document.docstrings import completed

from fedtmle import __version__

project = "fedtmle"
author = "The fedtmle authors"
version = release = __version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
source_suffix = [".md", ".rst"]
exclude_patterns = ["gallery/GALLERY_HEADER.rst", "sg_execution_times.rst", "studies/sg_execution_times.rst"]
templates_path = ["templates"]
nitpicky = False  # annotations name types that have no page of their own
default_role = "py:obj"

myst_enable_extensions = ["attrs_inline", "colon_fence", "html_image"]
myst_heading_anchors = 4
suppress_warnings = ["config.cache"]  # the gallery's functions cannot be kept between builds

autosummary_generate = True
autodoc_typehints = "none"  # the parameters say them
autodoc_member_order = "bysource"
numpydoc_show_class_members = False

sphinx_gallery_conf: dict[str, Any] = {
    "examples_dirs": "gallery",
    "gallery_dirs": "studies",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 60,
    "abort_on_example_error": True,
    "remove_config_comments": True,
    "capture_repr": ("_repr_html_",),  # not "<Axes: ...>" below each figure
}

html_theme = "pydata_sphinx_theme"
html_title = "fedtmle"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "navigation_with_keys": False,
    "logo": {"text": "fedtmle"},
}
html_sidebars = {"index": []}
copyright = "the fedtmle authors, Apache-2.0"
copybutton_prompt_text = r">>> |\$ "
copybutton_prompt_is_regexp = True


def setup(app: Any) -> None:
    """Complete each docstring by the parameters of the bases, and by types and defaults."""

    def complete(_app: Any, what: str, _name: str, thing: object, _options: object, lines: list[str]) -> None:
        if what in ("class", "function", "exception"):
            lines[:] = completed(thing, lines)

    def escape(_app: Any, _what: str, _name: str, _thing: object, _options: object, lines: list[str]) -> None:
        lines[:] = [line.replace("|", "\\|") for line in lines]  # an absolute value, not a substitution

    app.connect("autodoc-process-docstring", complete, priority=100)
    app.connect("autodoc-process-docstring", escape, priority=1000)
