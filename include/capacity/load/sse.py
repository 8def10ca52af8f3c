"""Server-sent events, decoded incrementally by the WHATWG specification.

The decoder works on bytes: line ends (LF, CRLF, CR) and field names are ASCII, so a stream may be cut
anywhere, also inside a UTF-8 character or between CR and LF, and gives the same events. Only whole lines
are looked at; the pieces of an unfinished line wait in a list and are joined once, so a line of any length
costs linear time and there is no line limit. An event is dispatched by the blank line that ends it, and
carries the receipt time of the piece that held that line. What the stream ends without a blank line is
dropped, as the specification says.

A fast path takes the usual piece, whole ``data: {...}`` blocks ended by blank lines, without going line by
line. ``id`` and ``retry`` are for reconnecting and are ignored.
"""

from __future__ import annotations

BOM = b"\xef\xbb\xbf"

Event = tuple[float, str, bytes]
"""Receipt time (of the caller's clock), event name (``message`` unless the stream names it), data as sent
(UTF-8). A plain tuple: there is one for every token."""


class SSEDecoder:
    """Feed it pieces of a ``text/event-stream``; it returns the events they complete."""

    __slots__ = ("_data", "_head", "_line", "_name", "_skip_lf")

    def __init__(self) -> None:
        self._head: bytes | None = b""  # what may still be a byte order mark; None once decided
        self._line: list[bytes] = []  # pieces of the unfinished line
        self._skip_lf = False  # the last byte was CR: an LF right after it belongs to the same line end
        self._data: list[bytes] = []  # data lines of the event under way
        self._name = b""

    def feed(self, piece: bytes, at: float) -> list[Event]:
        """Events completed by ``piece``, which was received at ``at``."""
        if self._head is not None:
            piece = self._strip_bom(piece)
        if not piece:
            return []
        if (
            piece.startswith(b"data:")
            and piece.endswith(b"\n\n")
            and b"\r" not in piece
            and not (self._line or self._data or self._name or self._skip_lf)
        ):
            if piece.find(b"\n") == len(piece) - 2:
                return [(at, "message", piece[6 if piece.startswith(b" ", 5) else 5 : -2])]
            events: list[Event] = []
            for block in piece[:-2].split(b"\n\n"):
                if block.startswith(b"data:") and b"\n" not in block:
                    events.append((at, "message", block[6 if block.startswith(b" ", 5) else 5 :]))
                else:
                    self._lines(block + b"\n\n", at, events)
            return events
        events = []
        self._lines(piece, at, events)
        return events

    def _strip_bom(self, piece: bytes) -> bytes:
        assert self._head is not None
        head = self._head + piece
        if len(head) < len(BOM) and BOM.startswith(head):
            self._head = head
            return b""
        self._head = None
        return head.removeprefix(BOM)

    def _lines(self, piece: bytes, at: float, events: list[Event]) -> None:
        if self._skip_lf:
            self._skip_lf = False
            piece = piece.removeprefix(b"\n")
            if not piece:
                return
        # bytes.splitlines() knows exactly the three line ends of the specification.
        lines = piece.splitlines()
        if self._line and (len(lines) > 1 or piece[-1] in b"\r\n"):
            self._line.append(lines[0])
            lines[0] = b"".join(self._line)
            self._line = []
        if piece[-1] not in b"\r\n":
            self._line.append(lines.pop())
        self._skip_lf = piece.endswith(b"\r")
        for line in lines:
            if line:
                self._field(line)
            else:
                if self._data:
                    events.append(
                        (at, self._name.decode("utf-8", "replace") or "message", b"\n".join(self._data))
                    )
                    self._data = []
                self._name = b""

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")  # a comment has an empty name
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif name == b"event":
            self._name = value.removeprefix(b" ")
