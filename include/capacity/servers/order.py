"""A server that is wanted, and what starting one has in common whatever its kind.

A kind's ``start`` reads like this::

    settings ─▶ handle ─▶ clear_accelerator ─▶ with bring_up: create it ─▶ wait ─▶ record its stack

``bring_up`` holds the promise of the protocol: the state file is written before anything is created and
says ``ready`` only at the end, and whatever goes wrong in between, the server is stopped again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from include.capacity.config import Model, Strict
from include.capacity.errors import ConfigError
from include.capacity.results.store import safe_name
from include.capacity.servers import stack as stacks
from include.capacity.servers.base import Handle, Owner, RunIsOver
from include.capacity.servers.command import command_line, endpoints_of, fill
from include.capacity.servers.key import api_key
from include.capacity.servers.logs import log_head, remove_old_logs
from include.capacity.servers.ready import wait_or_tell
from include.capacity.servers.stale import clear_accelerator
from include.capacity.servers.state import READY, ServerState, started_here, state_file, write_state

Settings = TypeVar("Settings", bound=Strict)


@dataclass(frozen=True, kw_only=True)
class Order:
    """One server that is wanted: of which model, for which run."""

    model_key: str
    model: Model
    owner: Owner
    folder: Path
    """Keeps its state file and log, and must be the same for all runs on this machine."""
    run_is_over: RunIsOver | None = None

    def settings(self, kind: type[Settings]) -> Settings:
        """The model's server settings; ConfigError if they are of another kind."""
        server = self.model.server
        if not isinstance(server, kind):
            (expected,) = get_args(kind.model_fields["kind"].annotation)
            raise ConfigError(
                f"models.{self.model_key}.server: expected kind {expected}, found {server.kind}"
            )
        return server

    def handle(self, kind: str, **known: Any) -> Handle:
        """A new server's handle, with an id, a log and a state file of its own; not reached yet."""
        server_id = uuid.uuid4().hex
        log = self.folder.resolve() / f"{safe_name(self.model_key)}.{server_id}.log"
        return Handle(
            **{
                "kind": kind,
                "model": self.model_key,
                "served_name": self.model.served_name,
                "server_id": server_id,
                "log": str(log),
                "state": str(state_file(self.folder, self.model_key)),
                **known,
            }
        )

    def command(self, configured: Sequence[str]) -> list[str]:
        """The command line with its placeholders; see :func:`.command.command_line`."""
        return command_line(self.model_key, self.model, configured)

    def filled(self, command: Sequence[str], host: str, port: int) -> list[str]:
        """The command line as it is run."""
        values = {
            "source": self.model.source,
            "served_name": self.model.served_name,
            "revision": self.model.revision or "",
            "host": host,
            "port": str(port),
        }
        return fill(command, values)

    def clear_accelerator(self) -> None:
        """Stop what is left of an earlier server there; ServerError if it is in use."""
        clear_accelerator(self.model_key, self.model.accelerator, self.owner, self.folder, self.run_is_over)

    @contextmanager
    def bring_up(self, handle: Handle, stop: Callable[[Handle], None]) -> Iterator[ServerState]:
        """Keep the server's state while it is created, awaited and recorded; stop it if that fails."""
        state = started_here(handle, self.owner, self.model.accelerator)
        remove_old_logs(self.folder, self.model_key)
        write_state(state)
        try:
            yield state
            handle.simulated = handle.stack["simulated"]
            handle.clock_scale = handle.stack["time_scale"] or 1.0
            state.status = READY
            write_state(state)
        except BaseException:  # also a cancelled task must leave nothing behind
            stop(handle)
            raise

    def wait(
        self,
        handle: Handle,
        *,
        timeout_s: float,
        check: Callable[[], None],
        last_lines: Callable[[int], str],
        where: str,
    ) -> None:
        """Wait until it has answered a real completion; see :func:`.ready.wait_or_tell`."""
        wait_or_tell(
            handle,
            endpoints=endpoints_of(self.model),
            api_key=api_key(handle.api_key_env),
            timeout_s=timeout_s,
            check=check,
            last_lines=last_lines,
            where=where,
        )

    def record(self, handle: Handle, *, args: Sequence[str], env: Mapping[str, str], **known: Any) -> None:
        """Note what limits will be measured on; ``known`` as :func:`.stack.launched_stack` takes it."""
        handle.stack = stacks.launched_stack(
            kind=handle.kind,
            url=handle.url,
            api_key=api_key(handle.api_key_env),
            source=self.model.source,
            revision=self.model.revision,
            args=args,
            env=env,
            log_head=log_head(Path(str(handle.log))),
            **known,
        )
