"""A self-contained page: style, script and the data of runs in a single file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import string
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardproof.report.run_folder import load_run, version_of

SCRIPTS = ("base.js", "chart.js", "timeline.js", "page.js")


def data_of(folders: Sequence[Path], live: bool = False) -> dict[str, Any]:
    """The page's data about these runs, as plain JSON."""
    version = version_now(folders)  # before reading: later changes are found the next time
    runs = [load_run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]
    made = time.strftime("%Y-%m-%d %H:%M")
    return {"runs": runs, "made": made, "live": live, "version": version}


def version_now(folders: Sequence[Path]) -> str:
    """A string that changes whenever a file of these runs does."""
    return hashlib.sha256(version_of(folders).encode()).hexdigest()[:16]


def names_of(folders: Sequence[Path]) -> list[str]:
    """The last parts of paths, as many as are needed to distinguish them."""
    parts = [folder.absolute().parts[1:] or ("/",) for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{folder.name} ({number})" for number, folder in enumerate(folders, 1)]  # the same folder twice


def page_of(data: dict[str, Any]) -> str:
    """The page. It loads nothing: its content security policy allows only its own style and script, by their hashes,
    and requests to its server only if `data` is live."""
    room = files("shardproof.report") / "page"
    script = "\n".join((room / name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = (room / "page.css").read_text(encoding="utf-8")
    asks = "'self'" if data["live"] else "'none'"
    policy = (
        f"default-src 'none'; img-src data:; script-src {_hash(script)}; style-src {_hash(style)}; "
        f"connect-src {asks}; base-uri 'none'; form-action 'none'"
    )
    title = " · ".join(run["name"] for run in data["runs"])
    return string.Template((room / "page.html").read_text(encoding="utf-8")).substitute(
        POLICY=policy, TITLE=html.escape(title), STYLE=style, SCRIPT=script, DATA=in_script(data)
    )


def in_script(data: Any) -> str:
    """JSON that is safe inside a script element, where only `</script` and `<!--` are special."""
    text = json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _finite(value: Any) -> Any:
    """Replace inf and nan, which JSON cannot hold, and lone surrogates, which UTF-8 cannot."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_finite(str(key)): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
