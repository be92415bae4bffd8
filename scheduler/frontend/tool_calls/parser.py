"""What all forms of calls share: the output of a parser, and attempts to read a call."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from scheduler.frontend.tool_calls.json_text import object_in, read_text, read_value
from scheduler.frontend.tool_calls.source import MismatchError, Source, Steps

# Names of the field with a call's arguments.
_ARGUMENTS = ("arguments", "parameters")


@dataclass
class CallPiece:
    """A piece of a call. index: the call's index. name: empty in all pieces except the first."""

    index: int
    name: str
    arguments: str


class Calls:
    """Receives what a form of calls reads. White space next to a call is not content."""

    def __init__(self, names: Collection[str], *, single: bool = False) -> None:
        """names: the tools' names; text with any other name is no call. single: nothing follows the first call."""
        self.names = names
        self.num_begun = 0
        self.num_complete = 0
        self._single = single
        self._pieces: list[str | CallPiece] = []
        # Arguments of the last piece, if it belongs to a call.
        self._arguments: list[str] = []
        # White space that may be next to a call.
        self._space = ""
        self._is_behind_call = False

    @property
    def is_closed(self) -> bool:
        return self._single and self.num_complete > 0

    def write(self, content: str) -> None:
        """Adds content."""
        text = self._space + content
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept and not self.is_closed:
            self._join_arguments()
            self._pieces.append(kept)
            self._is_behind_call = False

    def begin(self, name: str) -> None:
        """Begins a call."""
        self._space = ""
        if not self.is_closed:
            self._join_arguments()
            self._pieces.append(CallPiece(self.num_begun, name, ""))
            self.num_begun += 1
            self._is_behind_call = True

    def write_arguments(self, text: str) -> None:
        """Adds to the arguments of the call that began last."""
        if self.is_closed:
            return
        if not self._pieces:
            self._pieces.append(CallPiece(self.num_begun - 1, "", ""))
        self._arguments.append(text)

    def complete(self) -> None:
        """Ends the call that began last."""
        self.num_complete += 1

    def _join_arguments(self) -> None:
        if self._arguments:
            last = self._pieces[-1]
            assert isinstance(last, CallPiece)
            last.arguments = "".join(self._arguments)
            self._arguments.clear()

    def take(self) -> list[str | CallPiece]:
        self._join_arguments()
        pieces, self._pieces = self._pieces, []
        return pieces

    def flush(self) -> list[str | CallPiece]:
        if self._space and not self._is_behind_call:
            self._pieces.append(self._space)
        self._space = ""
        return self.take()


Form = Callable[[Source, Calls], Steps[None]]


class FormParser:
    """Finds calls of a form in text that comes in pieces. However a text is split, content and calls are the same."""

    def __init__(self, form: Form, names: Collection[str], *, single: bool = False) -> None:
        """Arguments as for Calls."""
        self._source = Source()
        self._calls = Calls(names, single=single)
        self._steps = form(self._source, self._calls)

    @property
    def num_complete(self) -> int:
        """Calls that have ended."""
        return self._calls.num_complete

    def push(self, text: str) -> list[str | CallPiece]:
        """Returns content and pieces of calls, in order."""
        if self._calls.is_closed:
            return []
        self._source.push(text)
        next(self._steps, None)
        return self._calls.take()

    def flush(self) -> list[str | CallPiece]:
        """Returns what was held back, at the end of the text."""
        if not self._calls.is_closed:
            self._source.end()
            next(self._steps, None)
        return self._calls.flush()


def attempt(source: Source, calls: Calls, steps: Steps[None]) -> Steps[bool]:
    """Returns whether the steps succeed, or begin a call before they fail. Otherwise, the source is rewound."""
    begun = calls.num_begun
    source.mark()
    try:
        yield from steps
    except MismatchError:
        if calls.num_begun == begun:
            source.rewind()
            return False
    finally:
        source.release()
    return True


def read_call(source: Source, calls: Calls) -> Steps[None]:
    """Reads an object with name and arguments, in any order. Raises MismatchError."""
    name, has_arguments = "", False
    held: list[str] = []
    yield from source.expect("{")
    following = yield from source.skip_space()
    while following == '"':
        key = yield from read_text(source)
        yield from source.skip_space()
        yield from source.expect(":")
        yield from source.skip_space()
        if key == "name" and not name:
            name = yield from read_text(source)
            if name not in calls.names:
                raise MismatchError
            if has_arguments:
                _begin(source, calls, name)
                calls.write_arguments("".join(held))
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            yield from _read_field(source, calls, name, held)
        else:
            yield from read_value(source, _drop)
        following = yield from source.skip_space()
        if following == ",":
            yield from source.expect(",")
            following = yield from source.skip_space()
            if following != '"':
                raise MismatchError
    yield from source.expect("}")
    if not name:
        raise MismatchError
    if not has_arguments:
        _begin(source, calls, name)
        calls.write_arguments("{}")
    calls.complete()


def _read_field(source: Source, calls: Calls, name: str, held: list[str]) -> Steps[None]:
    """Reads the value of the field with the arguments. held: receives them while the name is not known."""
    whole = "" if (yield from source.peek()) == "{" else (yield from _unusual_arguments(source))
    if name:
        _begin(source, calls, name)
    write = calls.write_arguments if name else held.append
    if whole:
        write(whole)
    else:
        yield from read_value(source, write)


def _unusual_arguments(source: Source) -> Steps[str]:
    """Reads arguments that are null, or an object in a string, as some models write. Raises MismatchError."""
    if (yield from source.peek()) == '"':
        return object_in((yield from read_text(source)))
    yield from source.expect("null")
    return "{}"


def read_arguments(source: Source, calls: Calls, name: str) -> Steps[None]:
    """Reads a call's arguments, which must be an object. Raises MismatchError."""
    if (yield from source.skip_space()) != "{":
        raise MismatchError
    _begin(source, calls, name)
    yield from read_value(source, calls.write_arguments)
    calls.complete()


def read_listed(source: Source, calls: Calls, read: Callable[[Source, Calls], Steps[None]]) -> Steps[None]:
    """Reads the rest of a list after its first call. Text that does not belong to the list is not consumed."""
    while (yield from attempt(source, calls, _next(source, calls, read))):
        pass
    yield from attempt(source, calls, _close(source))


def _next(source: Source, calls: Calls, read: Callable[[Source, Calls], Steps[None]]) -> Steps[None]:
    yield from source.skip_space()
    yield from source.expect(",")
    yield from source.skip_space()
    yield from read(source, calls)


def _close(source: Source) -> Steps[None]:
    yield from source.skip_space()
    if (yield from source.take(",")):
        yield from source.skip_space()
    yield from source.expect("]")


def _begin(source: Source, calls: Calls, name: str) -> None:
    """Treats the text as a call from now on, whatever follows."""
    calls.begin(name)
    source.release()


def _drop(_text: str) -> None:
    pass
