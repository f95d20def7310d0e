"""Regular expressions of JSON schemas, for a converter that knows few escapes and may leave a JSON string."""

from __future__ import annotations

_CLASSES = {"d": "0-9", "w": "a-zA-Z0-9_", "s": " "}  # of white space, only the space is in a JSON string as it is
# What may not stand in a JSON string unescaped: quotes, backslashes, control characters.
_NO_JSON = "\\x22\\x5C\\x00-\\x1F\\x7F"


def supported_pattern(pattern: str) -> str:
    """The same pattern with classes in place of escapes, that matches nothing but what a JSON string may hold.

    Raises:
        ValueError: It has what cannot be converted.
    """
    if len(pattern) < 2 or pattern[0] != "^" or pattern[-1] != "$":
        raise _refused(pattern, "it must begin with ^ and end with $")
    out, inside, i, end = ["^"], False, 1, len(pattern) - 1
    while i < end:
        c = pattern[i]
        if c == "\\":
            text, n_read = _escape(pattern, i, end, inside)
            out.append(text)
            i += n_read
            continue
        if inside:
            inside = c != "]"
        elif c == "[":
            inside = True
            if pattern[i + 1] == "^":
                c, i = f"[^{_NO_JSON}", i + 1
        elif c == ".":
            c = f"[^{_NO_JSON}]"
        elif pattern.startswith("(?:", i):
            i += 2
        elif c in "^$":
            raise _refused(pattern, f"{c} inside")
        if c == '"':
            raise _refused(pattern, "a quote would end the JSON string")
        out.append(c)
        i += 1
    return "".join(out) + "$"


def _escape(pattern: str, i: int, end: int, inside: bool) -> tuple[str, int]:
    """An escape at i as a class, or as a part of one, and how many characters it has."""
    kind = pattern[i + 1] if i + 1 < end else ""
    n_read = 2
    if kind in _CLASSES:
        text = _CLASSES[kind]
    elif kind.lower() in _CLASSES and kind and not inside:
        text = f"^{_CLASSES[kind.lower()]}{_NO_JSON}"
    elif kind == "u" and len(code := pattern[i + 2 : i + 6]) == 4 and all(c in "0123456789abcdefABCDEF" for c in code):
        text, n_read = f"\\u{code}", 6
    elif kind.isascii() and kind.isprintable() and kind and not kind.isalnum() and kind not in '"\\':
        text = f"\\x{ord(kind):02X}"
    else:
        raise _refused(pattern, f"the escape \\{kind}")
    return (text if inside else f"[{text}]"), n_read


def _refused(pattern: str, why: str) -> ValueError:
    return ValueError(f"the JSON schema's pattern {pattern!r} is not supported: {why}")
