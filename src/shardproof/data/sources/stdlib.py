"""Questions and answers made from the documentation inside Python's own standard library.

Real text, a few thousand rows, the same on every machine with the same Python, without a download:
`--dataset stdlib`. The text is the Python Software Foundation's (PSF licence).

[Note: a fresh interpreter] Libraries patch the standard library when they are imported (torch replaces functions of
`inspect`, transformers hangs methods on `logging.Logger`), so the rows are collected by this file run as a program,
which imports nothing else. That also keeps some 150 modules out of the caller's process. It takes half a second.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

# Modules that are safe to import anywhere: no window, no network, no output, no deprecation warning, in
# every supported Python. A list, not a search, so that the rows do not depend on what is installed.
MODULES = (
    "abc argparse array ast asyncio base64 bdb binascii bisect builtins bz2 calendar cmath cmd code codecs "
    "collections collections.abc colorsys compileall concurrent.futures configparser contextlib contextvars "
    "copy copyreg csv ctypes dataclasses datetime decimal difflib dis doctest email email.message email.utils "
    "enum errno faulthandler filecmp fileinput fnmatch fractions ftplib functools gc getopt getpass gettext "
    "glob graphlib gzip hashlib heapq hmac html html.parser http.client http.cookies http.server imaplib "
    "importlib importlib.metadata importlib.resources importlib.util inspect io ipaddress itertools json "
    "keyword linecache locale logging logging.config logging.handlers lzma mailbox marshal math mimetypes mmap "
    "multiprocessing netrc numbers operator optparse os os.path pathlib pdb pickle pickletools pkgutil platform "
    "plistlib poplib pprint profile pstats py_compile pyclbr pydoc queue quopri random re reprlib rlcompleter "
    "runpy sched secrets select selectors shelve shlex shutil signal site smtplib socket socketserver sqlite3 "
    "ssl stat statistics string stringprep struct subprocess symtable sys sysconfig tabnanny tarfile tempfile "
    "textwrap threading time timeit token tokenize trace traceback tracemalloc types typing unicodedata "
    "unittest unittest.mock urllib.error urllib.parse urllib.request urllib.robotparser uuid warnings wave "
    "weakref webbrowser wsgiref.util xml.dom.minidom xml.etree.ElementTree xml.sax zipapp zipfile zipimport "
    "zlib"
).split()

SHORTEST, LONGEST = 20, 600  # characters of an answer

_SIGNATURE = re.compile(r"^[\w.]+\(.*?\)(\s*(->|=>|--).*)?$")


def stdlib_rows(limit: int | None = None) -> list[dict[str, str]]:
    """Rows of `query` and `response` from the documentation of the standard library.

    Args:
        limit: the maximum number of rows, spread evenly over the library; all of them by default.

    Returns:
        A few thousand rows, in the order of the modules' names; each answer appears once.
    """
    # -I and -S: ignore the user's environment and installed packages. See [Note: a fresh interpreter].
    command = [sys.executable, "-I", "-S", "-W", "ignore", __file__]
    try:
        made = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout
        rows: list[dict[str, str]] = json.loads(made)
    except (OSError, ValueError, subprocess.CalledProcessError):  # no Python to run, as in a frozen program
        rows = collect()
    if limit is None or limit >= len(rows):
        return rows
    return [rows[i * len(rows) // limit] for i in range(limit)]


def collect() -> list[dict[str, str]]:
    """The rows, from the modules as they are in this process."""
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    for module in MODULES:
        for question, answer in _module_rows(module):
            if answer not in seen:
                seen.add(answer)
                rows.append({"query": question, "response": answer})
    return rows


def _module_rows(name: str) -> Iterator[tuple[str, str]]:
    try:
        module = importlib.import_module(name)
    except ImportError:  # Python was built without it (sqlite3, ssl, lzma ...)
        return
    if answer := first_paragraph(module.__doc__):
        yield f"What is the Python module {name} for?", answer
    for label, item in _public_members(module):
        path = label if name == "builtins" else f"{name}.{label}"
        if inspect.isclass(item):
            if answer := first_paragraph(_own_doc(item)):
                yield f"What is {path}?", answer
            yield from _method_rows(item, path)
        elif callable(item):
            if answer := first_paragraph(_own_doc(item)):
                yield f"What does {path} do?", answer
            if call := _call(item, path):
                yield f"How is {path} called?", call


def _method_rows(cls: type, path: str) -> Iterator[tuple[str, str]]:
    for label, item in sorted(vars(cls).items()):
        if label.startswith("_"):
            continue
        if isinstance(item, (staticmethod, classmethod)):
            item = item.__func__
        if isinstance(item, (property, types.GetSetDescriptorType, types.MemberDescriptorType)):
            if answer := first_paragraph(_own_doc(item)):
                yield f"What is the attribute {label} of {path}?", answer
        elif callable(item) and (answer := first_paragraph(_own_doc(item))):
            yield f"What does the method {label} of {path} do?", answer


def _public_members(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """Public classes and functions that belong to the module, by name."""
    names = getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
    for label in sorted(set(names)):
        item = getattr(module, label, None)
        if isinstance(item, types.ModuleType) or not callable(item):
            continue
        home = getattr(item, "__module__", None) or module.__name__
        # `os` exposes members of posix, `json` those of json.decoder; members from other modules are not its own.
        if home.lstrip("_").split(".")[0] in {module.__name__.split(".")[0], "posix", "posixpath", "genericpath"}:
            yield label, item


def _own_doc(item: Any) -> str | None:
    doc = getattr(item, "__doc__", None)
    return doc if isinstance(doc, str) else None


def _call(item: Any, path: str) -> str | None:
    try:
        signature = str(inspect.signature(item))
    except (TypeError, ValueError):
        return None
    # Defaults without a literal form show an address or a class, which differ between machines.
    if " at 0x" in signature or "<" in signature or len(signature) < 6:
        return None
    return f"{path}{signature}" if len(path) + len(signature) <= LONGEST else None


def first_paragraph(doc: str | None) -> str | None:
    """The first paragraph of a docstring on one line, without a leading call signature; None if it says nothing."""
    if not doc:
        return None
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        lines = [line.strip() for line in paragraph.splitlines() if line.strip()]
        while lines and _SIGNATURE.match(lines[0]):
            lines.pop(0)
        text = " ".join(lines)
        if text:
            useful = SHORTEST <= len(text) <= LONGEST and text.isprintable() and not text.startswith((">>>", "---"))
            return text if useful else None
    return None


if __name__ == "__main__":
    json.dump(collect(), sys.stdout)
