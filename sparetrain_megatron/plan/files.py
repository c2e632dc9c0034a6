"""Reading and writing the JSON files of profiles and plans."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sparetrain_megatron.errors import UsageError


class Data(BaseModel):
    """Base of all plain, typed, immutable data in this package."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def write_json(path: str | os.PathLike[str], text: str) -> Path:
    """Writes a file in one step: a reader sees the old one or the new one, never a half.

    Args:
        path: Its folder is made when it doesn't exist.
        text: The whole content.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_kind(path: str | os.PathLike[str]) -> str | None:
    """What a file says it is: `plan`, `profile`; None when it doesn't say.

    Raises:
        UsageError: Unreadable, or not JSON.
    """
    content = _load(path)
    return content.get("kind") if isinstance(content, dict) else None


def _load(path: str | os.PathLike[str]) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path}: not readable as JSON: {error}") from error


def read_json(path: str | os.PathLike[str], kind: str, schema: int) -> dict[str, Any]:
    """Reads a file that must be of one kind and schema.

    Raises:
        UsageError: Unreadable, not JSON, or of another kind or schema; names the file.
    """
    content = _load(path)
    found = content.get("kind") if isinstance(content, dict) else None
    if found != kind:
        raise UsageError(f"{path}: not a {kind}" + (f" but a {found}" if found else ""))
    if content.get("schema") != schema:
        raise UsageError(
            f"{path}: {kind} of schema {content.get('schema')!r}, but this version reads {schema}"
        )
    return content


def validated[Model: BaseModel](
    model: type[Model], content: Any, path: str | os.PathLike[str]
) -> Model:
    """Builds a model from a file's content.

    Raises:
        UsageError: One line for the first problems, each with the place in the file.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        lines = [
            f"{path}: {'.'.join(map(str, problem['loc'])) or 'file'}: "
            + problem["msg"].removeprefix("Value error, ")
            for problem in error.errors()[:5]
        ]
        raise UsageError("\n".join(lines)) from None
