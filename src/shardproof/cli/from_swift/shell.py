"""ms-swift commands in a shell script: variables and options, without redirections, pipes and the like."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass, field

from shardproof.cli.elsewhere import COMMANDS
from shardproof.cli.from_swift import files
from shardproof.cli.from_swift.environment import OF_SWIFT
from shardproof.cli.from_swift.files import LITERAL
from shardproof.cli.from_swift.launchers import command_at, launched
from shardproof.errors import ConfigError
from shardproof.train.options.option import flag

# Whichever comes first: a comment may hold a lone quote, and a quoted text a line that starts with '#'.
_QUOTED_OR_COMMENT = re.compile(r"('[^']*'|\"(?:[^\"\\]|\\.)*\")|(?<!\S)#[^\n]*")
_REDIRECTION = re.compile(r"(?<![^\s;|&])(?:\d+|&)?(?:>>|>|<)(?:&\d|&-|\s*[^\s;|&]+)")
_SUM = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)|\$\(\s*expr\s([^()]*)\)|`\s*expr\s([^`]*)`")
# What replaces the ms-swift commands that are not read.
_OTHERS = {
    **{name: f"In place of 'swift {name}': {instead}." for name, instead in COMMANDS.items()},
}
_IN_FRONT = ("nohup", "env", "exec", "time", "then", "do", "else", "{", "(")  # words that may precede a command
READ = ("sft", "pt", "rlhf", "infer", "export")
_PRETRAINING = {"use_chat_template": "false", "loss_scale": "all"}  # the defaults of 'pt' that differ from 'sft'
_BLANK = "\x01"  # a space within a sum, which has to stay one word
_BARE = "\x02"  # the dollar of an unquoted variable
# After :- and the like comes the default of an empty variable, which may itself hold a variable in braces.
_VARIABLE = re.compile(
    rf"([{_BARE}$])(?:([A-Za-z_]\w*)|\{{([A-Za-z_]\w*)(?:(:?[-=])((?:[^{{}}]|\{{[^{{}}]*\}})*))?\}})"
)
_UNQUOTED = re.compile(r"\$(?=[A-Za-z_]|\{[A-Za-z_]\w*(?::?[-=](?:[^{}\s]|\{[^{}\s]*\})*)?\})")
_UNKNOWN = re.compile(r"\$\(.*\)|\$[\w{(@*]\S*")
_SEPARATOR = re.compile(r"\n|;|&&|\|\||\||&")


@dataclass
class Line:
    """A command in a script.

    Attributes:
        command: one of READ; 'pt' is 'sft' with other defaults, and appears as 'sft'.
        options: names with underscores and their values, in order; an option that is given twice appears twice.
        variables: those assigned before the command, on its line or above.
        exported: those of them that the command sees, and that the script does not use itself.
        dressed: whether a redirection, a pipe or an `&` was left out.
        missing: settings of its launcher without an equivalent here.
    """

    command: str
    options: list[tuple[str, list[str]]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    dressed: bool = False
    missing: list[str] = field(default_factory=list)


def read(text: str) -> list[Line]:
    """The ms-swift commands in a script, in order.

    Raises:
        ConfigError: there is none, or the text is not a shell command.
    """
    commands, dressed = _commands(text)
    variables: dict[str, str] = {}
    exported: set[str] = set()
    used = set(re.findall(r"\$\{?(\w+)", text))
    found: list[Line] = []
    for words in commands:
        words, before = _all_filled(words, variables), dict(variables)
        here = ((i, at) for i in range(len(words)) if (at := command_at(words, i)) and at[0] in READ)
        start, begins = next(here, (len(words), None))
        for word in words[:start]:
            name, is_assignment, value = word.partition("=")
            if is_assignment and name.isidentifier():
                variables[name] = value
                if begins is not None or words[0] == "export":
                    exported.add(name)
        if begins is not None:
            told = launched(words[:start])
            line = _line([begins[0], *words[begins[1] :]], variables | told.variables)
            line.options, line.missing = [*told.options, *line.options], told.missing
            line.dressed = dressed or "nohup" in words[:start]
            line.exported |= exported - used
            found.append(line)
            exported -= variables.keys() - before.keys()
            variables = before  # assignments before a command are for this command only
    if not found:
        hints = [hint for name, hint in _OTHERS.items() if re.search(rf"\bswift {name}\b", " ".join(text.split()))]
        none = "There is no 'swift sft', 'pt', 'rlhf', 'infer' or 'export' in this text."
        raise ConfigError("\n".join([none, *hints]))
    return found


def not_read(text: str) -> list[str]:
    """What replaces each other ms-swift command in a script, which `read` passes over."""
    found = []
    for words in _commands(text)[0]:
        at = next((i for i, word in enumerate(words) if "=" not in word and word not in _IN_FRONT), len(words))
        if words[at : at + 1] == ["swift"] and words[at + 1 : at + 2] not in ([], *([name] for name in READ)):
            name = words[at + 1]
            found.append(_OTHERS.get(name, f"'swift {name}': an ms-swift command without an equivalent here."))
    return list(dict.fromkeys(found))


def _commands(text: str) -> tuple[list[list[str]], bool]:
    """The words of each command in a script, and whether redirections, pipes or the like were left out."""
    text = _SUM.sub(lambda match: re.sub(r"\s", _BLANK, match[0]), text)
    quotes: list[str] = []

    def stash(match: re.Match[str]) -> str:
        if not match[1]:
            return ""
        quotes.append(match[1].replace("$" if match[1][0] == "'" else r"\$", LITERAL))
        return f"\x00{len(quotes) - 1}\x00"

    text = _QUOTED_OR_COMMENT.sub(stash, text).replace(r"\$", LITERAL)
    text = re.sub(r"\\[ \t]*\r?\n", " ", text)
    text = re.sub(r"\n\s*(?=--)", " ", text)
    bare = _REDIRECTION.sub(" ", text)
    parts = _SEPARATOR.split(bare)
    commands = []
    for part in parts:
        part = _UNQUOTED.sub(_BARE, part)
        whole = re.sub("\x00(\\d+)\x00", lambda match: quotes[int(match[1])], part)
        try:
            commands.append(shlex.split(whole))
        except ValueError as error:
            raise ConfigError(f"This is not a shell command: {error}.") from None
    return commands, bare != text or bool(re.search(r"[|&]", bare))


def _all_filled(words: list[str], variables: dict[str, str]) -> list[str]:
    """The words of a command with variables filled in; an assignment before it counts for later assignments, but not
    for its words."""
    found: list[str] = []
    ahead, in_front = dict(variables), True
    for word in words:
        in_front = in_front and re.match(r"[A-Za-z_]\w*=", word) is not None
        filled = _filled(word, ahead if in_front else variables)
        if in_front:
            name, _, ahead[name] = filled[0].partition("=")
        found += filled
    return found


def _filled(word: str, variables: dict[str, str]) -> list[str]:
    """A word with the script's variables and sums replaced by their values; other variables stay, as their values are
    not known. An unquoted value may become several words, or none, except in an assignment."""
    assigned = re.match(r"[A-Za-z_]\w*=", word)

    def value(match: re.Match[str]) -> str:
        name, how, otherwise = match[2] or match[3], match[4], match[5]
        found = variables.get(name)
        if how and (found is None or (how[0] == ":" and not found)):
            found = _VARIABLE.sub(value, otherwise)
            if how[-1] == "=":
                variables[name] = found
        if found is None:
            return f"${match[0][1:]}"
        return found if assigned or match[1] != _BARE else re.sub(r"\s+", _BARE, found)

    def summed(match: re.Match[str]) -> str:
        text = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1] or match[2] or match[3])
        try:
            return str(_worth(ast.parse(text.strip(), mode="eval").body))
        except (SyntaxError, ArithmeticError, ValueError):
            return match[0]

    filled = _VARIABLE.sub(value, word).replace(_BLANK, " ")
    words = _SUM.sub(summed, filled).split(_BARE)
    return [each for each in words if each] if _BARE in word else words


def _worth(node: ast.expr) -> int:
    """The value of an integer expression, as a shell computes it: division truncates towards 0.

    Raises:
        ArithmeticError, ValueError: it divides by 0, or is not such an expression.
    """
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_worth(operand)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _worth(left), _worth(right)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():
                    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
                case ast.Mod():
                    return abs(a) % abs(b) * (1 if a >= 0 else -1)
    raise ValueError("not an integer expression")


def _line(words: list[str], variables: dict[str, str]) -> Line:
    line = Line("sft" if words[0] == "pt" else words[0], variables=variables)
    for word in words[1:]:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            line.options.append((name.replace("-", "_"), [value] if value else []))
        elif line.options:
            line.options[-1][1].append(word)
        elif word.endswith(files.ENDS):
            line.options.append(("config", [word]))
        else:
            _check_known(word, word)
            raise ConfigError(
                f"{word} is not preceded by an option. Only a file of options may be, and it comes first."
            )
    _take_files(line)
    if words[0] == "pt":
        given = {name for name, _ in line.options}
        line.options += [(name, [value]) for name, value in _PRETRAINING.items() if name not in given]
    shown = [(f"{flag(name)} {' '.join(given)}", " ".join(given)) for name, given in line.options]
    shown += [(f"{name}={value}", value) for name, value in line.variables.items() if name in OF_SWIFT]
    for whole, value in shown:
        _check_known(whole, value)
    line.options = [(name, [value.replace(LITERAL, "$") for value in given]) for name, given in line.options]
    line.variables = {name: value.replace(LITERAL, "$") for name, value in line.variables.items()}
    return line


def _take_files(line: Line) -> None:
    """Insert the options of a file, and its variables, where it is named; the command line takes precedence."""
    for path in [" ".join(given) for name, given in line.options if name == "config"]:
        if not path:
            raise ConfigError("--config needs a file of options.")
        _check_known(path, path)
        said, variables = files.read(path)
        given = {name for name, _ in line.options}
        line.options = [
            *((name, values) for name, values in said if name not in given),
            *((name, values) for name, values in line.options if name != "config"),
        ]
        line.variables = variables | line.variables
        line.exported |= variables.keys()


def _check_known(whole: str, value: str) -> None:
    if unknown := _UNKNOWN.search(value):
        raise ConfigError(f"{whole}: the script does not define {unknown[0]}. Put its value there.")
