"""`shardproof export --push-to-hub`: upload the exported model to a hub, after checking permission.

Whether a token may write is checked before the export begins, by querying the hub: nothing is created there as a test.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shardproof.cli.hub import PATIENCE, endpoint, offline
from shardproof.data.sources import modelscope
from shardproof.data.sources.hub import silence_of
from shardproof.errors import ConfigError

# Files of a previous model in the repository, which a loader would mistake for files of this one.
OUTDATED = [
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "mtp.safetensors"),
    *("pytorch_model*.bin", "pytorch_model.bin.index.json", "adapter_model.*", "adapter_config.json"),
]
MESSAGE = "Upload the model that shardproof has exported"
T = TypeVar("T")


class Target(Protocol):
    """A repository that may be written to."""

    def push(self, folder: Path) -> str:
        """Put the files of a folder there. Returns its address.

        Raises:
            ConfigError: the hub refuses them.
        """
        ...


def target(named: str, private: bool, token: str | None) -> Target:
    """The repository `named`, once the hub has confirmed that this token may write there.

    Args:
        named: `OWNER/NAME` of Hugging Face's hub, or `MS::OWNER/NAME` of ModelScope's.
        private: whether the repository is to be private.
        token: None for the one that the hub's client knows, from its variable or a login.

    Raises:
        ConfigError: there is no token, it may not write there, or the hub does not answer.
    """
    there = modelscope.named(named)
    if (there or named).count("/") != 1:
        raise ConfigError(f"--push-to-hub {named}: a repository is named OWNER/NAME, or MS::OWNER/NAME on ModelScope.")
    if offline():
        raise ConfigError(f"--push-to-hub {named}: HF_HUB_OFFLINE forbids asking a hub. Unset it.")
    return OnHuggingFace(named, private, token) if there is None else OnModelScope(there, private, token)


class OnHuggingFace:
    """A repository on the Hugging Face hub, or on the hub at HF_ENDPOINT. Arguments and errors are those of
    `target`."""

    def __init__(self, name: str, private: bool, token: str | None) -> None:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import RepositoryNotFoundError

        self._name, self._private, self._address = name, private, f"{endpoint()}/{name}"
        token = token or get_token()
        if not token:
            raise ConfigError(
                f"--push-to-hub {name}: there is no token. Set HF_TOKEN, or log in with 'hf auth login'; create one "
                f"with write permission at {endpoint()}/settings/tokens."
            )
        _check_answers(name, endpoint())
        self._api = HfApi(endpoint=endpoint(), token=token)
        _check_role(name, _asked(name, "does not take this token", self._api.whoami))
        if not private:
            return
        try:
            if not _asked(
                name, "does not show the repository", lambda: self._api.model_info(name), RepositoryNotFoundError
            ).private:
                raise ConfigError(
                    f"--push-to-hub {name} --private: it already exists and is public. Make it private on"
                    f" {self._address}/settings, or choose another name."
                )
        except RepositoryNotFoundError:
            pass

    def push(self, folder: Path) -> str:
        """See `Target.push`."""

        def work() -> None:
            self._api.create_repo(self._name, private=self._private or None, exist_ok=True)
            self._api.upload_folder(
                repo_id=self._name, folder_path=folder, commit_message=MESSAGE, delete_patterns=OUTDATED
            )

        _pushed(self._name, folder, f"hf upload {self._name} {folder}", work)
        return self._address


class OnModelScope:
    """A repository on ModelScope's hub."""

    def __init__(self, name: str, private: bool, token: str | None) -> None:
        named, address = f"{modelscope.PREFIX}{name}", modelscope.endpoint()
        try:
            from modelscope_hub import HubApi
        except ImportError:
            raise ConfigError(
                f"--push-to-hub {named}: ModelScope's hub needs its client: pip install 'shardproof[modelscope]'."
            ) from None
        logging.getLogger("modelscope_hub").setLevel(logging.WARNING)
        self._name, self._named, self._address = name, named, f"{address}/models/{name}"
        _check_answers(named, address)
        self._api = HubApi(token=token)
        _asked(named, "does not take this token (MODELSCOPE_API_TOKEN, or --hub-token)", self._api.whoami)
        there = _asked(named, "does not show the repository", lambda: self._api.repo_exists(name, "model"))
        self._new = None if there else "private" if private else "public"
        if (
            there
            and private
            and not _asked(named, "does not show the repository", lambda: self._api.get_repo(name, "model")).private
        ):
            raise ConfigError(
                f"--push-to-hub {named} --private: it already exists and is public. Make it private on {self._address},"
                " or choose another name."
            )

    def push(self, folder: Path) -> str:
        """See `Target.push`."""

        def work() -> None:
            if self._new is not None:
                self._api.create_repo(self._name, "model", visibility=self._new)
            self._api.upload_folder(self._name, "model", folder, commit_message=MESSAGE)

        _pushed(self._named, folder, f"modelscope upload {self._name} {folder}", work)
        return self._address


def _check_answers(named: str, address: str) -> None:
    if reason := silence_of(address, PATIENCE):
        raise ConfigError(f"--push-to-hub {named}: the hub {address} cannot be reached ({reason}).")


def _check_role(name: str, said: dict[str, Any]) -> None:
    """Raise ConfigError for a token that may not write there, according to the hub."""
    owner, user = name.partition("/")[0], str(said.get("name"))
    token = (said.get("auth") or {}).get("accessToken") or {}
    orgs = {str(org.get("name")): org.get("roleInOrg") for org in said.get("orgs") or ()}
    if owner.casefold() not in {one.casefold() for one in (user, *orgs)}:
        member = f", who is a member of {', '.join(orgs)}" if orgs else ""
        raise ConfigError(f"--push-to-hub {name}: the token belongs to {user}{member}, not to {owner}.")
    role = token.get("role")
    if role == "read" or (role == "fineGrained" and not _grants(token.get("fineGrained") or {}, owner, name)):
        raise ConfigError(f"--push-to-hub {name}: the token may read but not write. Create one with write permission.")
    if any(org.casefold() == owner.casefold() and held in ("read", "no_access") for org, held in orgs.items()):
        raise ConfigError(f"--push-to-hub {name}: {user} may read but not write the repositories of {owner}.")


def _grants(fine: dict[str, Any], owner: str, name: str) -> bool:
    """Whether a fine-grained token may write to this repository, or to all of its owner's."""
    mine = {owner.casefold(), name.casefold()}
    scoped: Iterable[dict[str, Any]] = fine.get("scoped") or ()
    return any(
        str((scope.get("entity") or {}).get("name")).casefold() in mine
        and "repo.write" in (scope.get("permissions") or ())
        for scope in scoped
    )


def _asked(named: str, refused: str, ask: Callable[[], T], but: type[Exception] | tuple[()] = ()) -> T:
    """The hub's answer; `but`: an error that is an answer, too."""
    try:
        return ask()
    except but:
        raise
    except Exception as error:  # from its client, the network
        raise ConfigError(f"--push-to-hub {named}: the hub {refused}: {_first(error)}") from None


def _pushed(named: str, folder: Path, again: str, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:  # from its client, the network, the disk
        raise ConfigError(
            f"{folder} was written, but could not be pushed to {named}: {_first(error)}\nPush it with: {again}"
        ) from None


def _first(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
