"""One page that needs nothing else: style, program and the numbers of runs in a single file."""

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
    """What the page shows of these runs, as plain JSON."""
    version = version_now(folders)  # before they are read: what comes meanwhile is found the next time
    runs = [load_run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]
    made = time.strftime("%Y-%m-%d %H:%M")
    return {"runs": runs, "made": made, "live": live, "version": version}


def version_now(folders: Sequence[Path]) -> str:
    """Another word whenever a file of these runs has changed."""
    return hashlib.sha256(version_of(folders).encode()).hexdigest()[:16]


def names_of(folders: Sequence[Path]) -> list[str]:
    """The last parts of paths, as many as tell them apart."""
    parts = [folder.absolute().parts[1:] or ("/",) for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{folder.name} ({number})" for number, folder in enumerate(folders, 1)]  # the same one twice


def page_of(data: dict[str, Any]) -> str:
    """The page. It loads nothing: a content policy in it allows its own style and program by their hashes, and asking
    the server it came from only if `data` is live."""
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
    """JSON that nothing in it can end: inside of a script element only `</script` and `<!--` mean something."""
    text = json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _finite(value: Any) -> Any:
    """JSON has no word for inf and nan, and UTF-8 none for half of a character."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_finite(str(key)): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
