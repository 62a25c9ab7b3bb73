"""One Valkey server: reconnecting within a deadline, waiting for room, refusing unfit servers."""

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import valkey
from valkey.backoff import NoBackoff
from valkey.credentials import CredentialProvider
from valkey.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ConnectionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    TimeoutError,
)
from valkey.retry import Retry

from tasks.experience import scripts
from tasks.experience.errors import BufferFull, BufferUnreachable, ServerUnfit
from tasks.experience.group_scripts import COMMAND_BYTES
from tasks.experience.packing import Packer

Call = tuple[str, Sequence[str | bytes], Sequence[Any]]
"""Of a script: its name, keys and arguments."""
_TRANSIENT = (ConnectionError, TimeoutError, ReadOnlyError)
# ConnectionErrors to the client, but waiting is no cure.
_PERMANENT = (AuthenticationError, AuthorizationError)
_OLDEST_VERSION = 7  # before: XCLAIM hands out deleted entries, and scripts fail half-way without memory


class _FilePassword(CredentialProvider):
    """Reads the password's file at each connection: changing it, as ``configs/cluster/README.md`` says,
    disturbs no process that runs."""

    def __init__(self, user: str, file: str) -> None:
        self._user, self._file = user, Path(file)

    @classmethod
    def taken_from(cls, url: str, file: str) -> tuple["_FilePassword | None", str]:
        """The account of ``scheme://USER@HOST``, and the URL without its user, which the client would take
        for another account."""
        if not file:
            return None, url
        scheme, _, rest = url.partition("://")
        user, _, host = rest.partition("@")
        return cls(user, file), f"{scheme}://{host}"

    def get_credentials(self) -> tuple[str, str]:
        return self._user, self._file.read_text().strip()


class Server:
    """Safe to share between threads and to inherit over ``fork``: the client's pool notices both."""

    def __init__(
        self,
        url: str,
        *,
        reconnect_seconds: float = 30.0,
        revive: Callable[[], object] = lambda: None,
        password_file: str = "",
    ) -> None:
        """``revive`` is called when a connection is lost, before it is tried again: it may restart a
        server. ``password_file`` has the password of the user that ``url`` names."""
        self._revive = revive
        self._reconnect_seconds = reconnect_seconds
        # The client's own retry nests (connect inside command), which squares the wait; ours has one
        # deadline.
        account, where = _FilePassword.taken_from(url, password_file)
        self.client: Any = valkey.Valkey.from_url(
            where,
            credential_provider=account,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=30.0,
            socket_connect_timeout=5.0,
            command_packer=Packer(),
        )
        options = self.client.connection_pool.connection_kwargs
        # Never the URL itself: it may hold the password.
        self.address = options.get("path") or f"{options.get('host')}:{options.get('port')}"
        self._scripts = {
            name: self.client.register_script(script.text) for name, script in scripts.ALL.items()
        }

    def call(self, command: Callable[[], Any]) -> Any:
        """Run ``command``, again after a lost connection, a restart or a failover, until one deadline.

        Only for commands that may run twice: the server may have done what it could not answer.
        """
        deadline = time.monotonic() + self._reconnect_seconds
        pause = 0.02
        while True:
            try:
                return command()
            except _TRANSIENT as error:
                if isinstance(error, _PERMANENT):
                    raise
                if time.monotonic() >= deadline:
                    raise BufferUnreachable(
                        f"the Valkey server at {self.address} must answer within "
                        f"{self._reconnect_seconds:g} s, got {type(error).__name__}: {error}. "
                        "Check that it runs and that this host may reach it."
                    ) from error
                if isinstance(error, ReadOnlyError):  # demoted: only a new connection finds the new primary
                    self.client.connection_pool.disconnect()
            time.sleep(pause)
            pause = min(pause * 2, 0.5)
            self._revive()

    def read(self, command: str, *arguments: Any) -> Any:
        return self.call(lambda: getattr(self.client, command)(*arguments))

    def run(self, script: str, keys: Sequence[str | bytes], argv: Sequence[Any]) -> Any:
        return self.call(lambda: self._scripts[script](keys=keys, args=argv))

    def run_all(self, calls: Sequence[Call]) -> list[Any]:
        """The replies of several scripts, one after the other in one round trip but not atomically."""
        if len(calls) == 1:
            return [self.run(*calls[0])]

        def attempt() -> list[Any]:
            pipe = self.client.pipeline(transaction=False)
            for script, keys, argv in calls:
                pipe.evalsha(self._scripts[script].sha, len(keys), *keys, *argv)
            replies = pipe.execute(raise_on_error=False)
            for n, (script, keys, argv) in enumerate(calls):
                if isinstance(replies[n], NoScriptError):  # a server that restarted
                    replies[n] = self._scripts[script](keys=keys, args=argv)
                elif isinstance(replies[n], Exception):
                    raise replies[n]
            return replies

        return self.call(attempt)

    def run_with_values(
        self, script: str, keys: Sequence[str | bytes], argv: Sequence[Any], key: str, values: Sequence[bytes]
    ) -> Any:
        """Put ``values`` into the hash at ``key``, then run the script, in one round trip but not atomically.

        The script's first argument is a token, and the nth value's field is "token/n". The script must look
        whether all are there and delete those that it does not adopt. Each try has its own token: a try whose
        answer was lost and the next one share no field. Whoever dies on the way leaves fields that nobody
        adopts.
        """

        def attempt() -> Any:
            token, size = secrets.token_hex(8), 0
            pipe, fields = self.client.pipeline(transaction=False), [{}]
            for n, value in enumerate(values, start=1):
                if size > COMMAND_BYTES:  # one command of many large values would hold all of them twice
                    fields.append({})
                    size = 0
                fields[-1][f"{token}/{n}"] = value
                size += len(value)
            for mapping in fields:
                pipe.hset(key, mapping=mapping)
            pipe.evalsha(self._scripts[script].sha, len(keys), *keys, token, *argv)
            replies = pipe.execute(raise_on_error=False)
            if not (failed := [reply for reply in replies if isinstance(reply, Exception)]):
                return replies[-1]
            self.client.hdel(key, *(name for mapping in fields for name in mapping))
            if isinstance(replies[-1], NoScriptError):  # a server that restarted
                self.client.script_load(self._scripts[script].script)
                return attempt()
            raise failed[0]

        return self.call(attempt)

    def when_room(self, what: str, attempt: Callable[[], Any], *, timeout_seconds: float) -> Any:
        """Call ``attempt`` until it gives a value. None, or a server out of memory, means "full, wait"."""
        deadline = time.monotonic() + timeout_seconds
        pause = 0.01
        while True:
            cause = "more than capacity_bytes waiting for a scorer"
            try:
                if (value := attempt()) is not None:
                    return value
            except OutOfMemoryError as error:
                cause = str(error)
            if time.monotonic() >= deadline:
                raise BufferFull(
                    f"{what} must find room within {timeout_seconds:g} s, got {cause}. Check that scorers "
                    "run beside the workers and that trained iterations are dropped, or raise "
                    "buffer.capacity_mb or the server's maxmemory."
                )
            time.sleep(pause)
            pause = min(pause * 2, 0.25)

    def check(self) -> None:
        """Refuse a server that may evict experience or that lacks the semantics the scripts rely on."""
        info = self.read("info")
        # valkey_version is its own; redis_version is the Redis that it imitates, 7.2.4 for ever.
        version = str(info.get("valkey_version") or info["redis_version"])
        if int(version.split(".")[0]) < _OLDEST_VERSION:
            raise ServerUnfit(
                f"the server at {self.address} must be version {_OLDEST_VERSION} or newer, got {version}. "
                "Upgrade it."
            )
        if (policy := info["maxmemory_policy"]) != "noeviction":
            raise ServerUnfit(
                f"maxmemory-policy of the server at {self.address} must be noeviction, got {policy}, which "
                "may drop samples silently. Set it in the server's configuration or parameter group."
            )
