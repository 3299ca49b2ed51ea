"""What calls that fail say."""

import pytest


def refused(kind, call) -> str:
    """The text of the error of this kind that `call` raises."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def error_text(call, *args, **options) -> str:
    """The kind and the text of whatever error `call` raises."""
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
